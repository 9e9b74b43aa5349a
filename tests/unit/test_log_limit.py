"""The bound on log lines, and what is said about requests."""

from __future__ import annotations

from typing import Any

import pytest
import structlog
from structlog.testing import capture_logs

from kvstore.log_limit import KINDS_MAX, LogLimit
from kvstore.rpc import messages as m
from kvstore.rpc.request_log import SLOW_S, RequestLog
from kvstore.testing import SimClock


def passed(limit: LogLimit, event: str, level: str = "warning", times: int = 1) -> list[dict[str, Any]]:
    lines = []
    for _ in range(times):
        try:
            lines.append(dict(limit(None, level, {"event": event})))
        except structlog.DropEvent:
            continue
    return lines


def test_a_storm_of_one_kind_is_cut_and_the_next_line_says_how_much() -> None:
    clock = SimClock()
    limit = LogLimit(clock, burst_lines=5, lines_per_s=2.0)
    assert len(passed(limit, "session refused", times=1000)) == 5
    assert limit.suppressed_lines == 995
    assert len(passed(limit, "kvstore stops")) == 1, "another kind has its own budget"
    assert len(passed(limit, "session refused", "error")) == 1
    clock.advance(1.0)
    lines = passed(limit, "session refused", times=100)
    assert [line.get("suppressed") for line in lines] == [995, None]
    clock.advance(3600.0)
    assert len(passed(limit, "session refused", times=1000)) == 5, "an hour of quiet earns one burst"


def test_debug_lines_pass() -> None:
    limit = LogLimit(SimClock(), burst_lines=1, lines_per_s=0.001)
    assert len(passed(limit, "request", "debug", times=500)) == 500
    assert limit.suppressed_lines == 0


def test_kinds_are_bounded() -> None:
    limit = LogLimit(SimClock(), burst_lines=1, lines_per_s=0.001)
    for number in range(10 * KINDS_MAX):
        passed(limit, f"kind {number}")
    assert len(limit._buckets) == KINDS_MAX + 1


@pytest.mark.parametrize("every", [False, True])
def test_requests_are_told_at_debug_and_slow_ones_always(every: bool) -> None:
    clock = SimClock()
    requests = RequestLog(clock, every=every)
    who = {"session": 7, "engine": "ab", "tenant": "alice"}
    began_s = clock.now()
    with capture_logs() as lines:
        requests.ended(who, 41, m.Release(9), m.Released([]), began_s)
        clock.advance(2 * SLOW_S)
        requests.ended(who, 42, m.Lookup(b"k" * 32, 1, b"", b""), m.Failed("NOT_FOUND", "why"), began_s)
    slow = {
        **who,
        "event": "slow message",
        "log_level": "warning",
        "request": 42,
        "message": "lookup",
        "lease": 0,
        "answer": "failed",
        "status": "NOT_FOUND",
        "reason": "why",
        "ms": 10.0,
    }
    assert lines[-1] == slow
    assert [line["event"] for line in lines] == (["request"] if every else []) + ["slow message"]
    if every:
        assert (lines[0]["request"], lines[0]["lease"], lines[0]["session"]) == (41, 9, 7)
    assert requests.slow == {"lookup": 1}
