"""A disk that gets slow, or stops, in the middle of a load: what does it cost, and is it noticed?

    python -m bench.surprises --json      some seven minutes

The stage of bench.breakeven: SmolLM2-135M on the embedded engine, a prompt of 1,536 tokens that is only on
NVME. The disk is as fast as it is, and known to be, until a load has begun; then it is slowed down in
mid-load, to 5 MB/s or to a stall. Twice: with an engine that may only load or compute, which is the lag
rule's case, and with one that may split. For the load in question the disk is held to 300 MB/s: else it would
be over before the daemon has read that the disk is slow. A run that met fewer than nine of ten loads in their
middle is void.

    surprise_over_recompute_max    of those requests, each over recompute before and after it: the median of
                                   each limit and engine, at most; `_worst` is that of a single request
    requests_until_doubted_max     asked while the disk stays slow, until one is no longer loaded
    requests_until_loaded_max      asked after it is fast again, until one is loaded again

Recompute runs twice in each turn; that control is `aa_p95`, and above 0.05 the run calls itself void.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from bench.breakeven_stage import BLOCK_TOKENS, Stage, stage
from bench.measure import finish, parser

__all__ = ["main"]

MB = 1_000_000
TOKENS, WARM_TOKENS = 1536, 256
TURNS = 7
# 70 MB take 0.23 s then: this is the middle, with what the daemon takes to read its configuration.
_HELD, _IN_MID_LOAD_S = 300 * MB, 0.05
_TOLD_S = 5.0
# A load was met in its middle when it brought less of what was planned; a split ends a block or two off.
_MET = 0.8
_NEW = 16
_LIMITS = {"5 MB/s": 5 * MB, "stall": 1}
_REQUESTS_MAX = 20
_SURPRISE_MAX, _AA_MAX = 1.10, 0.05


def main() -> int:
    """Exit status: 0, 1 where a bar was missed, 3 when void."""
    options = parser("surprises", __doc__).parse_args()
    rows: list[dict[str, Any]] = []
    recompute: list[float] = []
    again: list[float] = []
    answers: set[str] = set()
    with stage((TOKENS, WARM_TOKENS)) as place:
        for can_split in (False, True):
            place.tables.can_split = can_split
            for name, limit in _LIMITS.items():
                for _ in range(TURNS):
                    computed = place.ask("recompute", TOKENS, _NEW)
                    recompute.append(computed.ttft_s)
                    rows.append(_surprise(place, name, limit) | {"can_split": can_split})
                    answers |= {str(computed.tokens), rows[-1]["tokens"]}
                    again.append(place.ask("recompute", TOKENS).ttft_s)
                    if not options.json:
                        print(_line(rows[-1], recompute[-1]), flush=True)
    base_s = statistics.median(recompute + again)
    aa = float(np.quantile(_off(recompute, again), 0.95))
    beside = zip(rows, recompute, again, strict=True)
    for row, before_s, after_s in beside:
        row["over_recompute"] = _short(row["ttft_s"] / (0.5 * (before_s + after_s)))
    over = [row["over_recompute"] for row in rows]
    figures: dict[str, Any] = {
        "aa_p95": _short(aa),
        "recompute_s": _short(base_s),
        "surprise_over_recompute_max": _short(max(_medians(over))),
        "surprise_over_recompute_worst": _short(max(over)),
        "surprise_over_recompute_median": _short(statistics.median(over)),
        "surprised": sum(row["met"] for row in rows),
        "requests_until_doubted_max": max(row["requests_until_doubted"] for row in rows),
        "requests_until_loaded_max": max(row["requests_until_loaded"] for row in rows),
        "outputs_identical": len(answers) == 1,
        "rows": rows,
    }
    figures["missed"] = _missed(figures)
    noisy = f"noise: recompute is off from itself by {aa:.1%}" if aa > _AA_MAX else ""
    missed = len(rows) - figures["surprised"]
    late = (
        f"{missed} of {len(rows)} loads were over before the disk was slow" if 10 * missed > len(rows) else ""
    )
    status = finish("surprises", options, figures, [noisy, late])
    return status or int(bool(figures["missed"]))


def _surprise(place: Stage, name: str, limit: int) -> dict[str, Any]:
    """One load that is slowed down in its middle, then what the planner makes of it."""
    place.daemon.set_limit(0)
    loaded = _until(place, lambda answer: answer.choice in ("load", "split") and answer.loaded_tokens > 0)
    place.daemon.set_limit(_HELD)
    with _after(_IN_MID_LOAD_S, lambda: place.daemon.slow_down(limit)):
        hit = place.ask("planner", TOKENS, _NEW)
    start, stop = hit.plan.get("load", (0, 0))
    planned = (stop - start) * BLOCK_TOKENS
    words = _told(place, str(hit.plan.get("request", "")))
    doubted = _until(place, lambda answer: answer.choice == "recompute" or answer.choice == "split")
    place.daemon.set_limit(0)
    back = _until(place, lambda answer: answer.choice in ("load", "split") and answer.loaded_tokens > 0)
    return {
        "limit": name,
        "choice": hit.choice,
        "met": 0 < planned and hit.loaded_tokens < _MET * planned,
        "ttft_s": _short(hit.ttft_s),
        "loaded_tokens": hit.loaded_tokens,
        "tokens": str(hit.tokens),
        "requests_until_doubted": doubted,
        "requests_until_loaded": max(loaded, back),
        "explained": "\n".join(words),
    }


def _told(place: Stage, request: str) -> list[str]:
    """The request's story, once its engine has told how long it took."""
    until_s = time.monotonic() + _TOLD_S
    while True:
        story = place.client.explain(request)
        if (story.get("outcome") or {}).get("seconds") is not None or time.monotonic() > until_s:
            words: list[str] = story.get("words", [])
            return words
        time.sleep(0.05)


def _until(place: Stage, done: Any) -> int:
    """Requests that the planner was asked for until one is what was waited for; _REQUESTS_MAX + 1 = none."""
    for number in range(1, _REQUESTS_MAX + 1):
        if done(place.ask("planner", WARM_TOKENS)):
            return number
    return _REQUESTS_MAX + 1


@contextmanager
def _after(seconds: float, act: Any) -> Iterator[None]:
    timer = threading.Timer(seconds, act)
    timer.start()
    try:
        yield
    finally:
        timer.join()


def _off(recompute: list[float], again: list[float]) -> list[float]:
    """By how much recompute is off from itself within a turn, for each limit and engine."""
    pairs = zip(recompute, again, strict=True)
    return [abs(ratio - 1.0) for ratio in _medians([after_s / before_s for before_s, after_s in pairs])]


def _medians(ratios: list[float]) -> list[float]:
    """Of each limit and engine."""
    return [statistics.median(ratios[at : at + TURNS]) for at in range(0, len(ratios), TURNS)]


def _missed(figures: dict[str, Any]) -> list[str]:
    out = []
    if figures["surprise_over_recompute_max"] > _SURPRISE_MAX + figures["aa_p95"]:
        out.append(f"surprise_over_recompute_max {figures['surprise_over_recompute_max']} > {_SURPRISE_MAX}")
    slow = ("requests_until_doubted_max", "requests_until_loaded_max")
    out += [f"{name} > {_REQUESTS_MAX}" for name in slow if figures[name] > _REQUESTS_MAX]
    if not figures["outputs_identical"]:
        out.append("outputs_identical false")
    return out


def _line(row: dict[str, Any], recompute_s: float) -> str:
    return (
        f"{row['limit']:7} {row['choice']:9} {row['ttft_s']:.3f} s, recompute {recompute_s:.3f} s; "
        f"doubted after {row['requests_until_doubted']}, loaded again after {row['requests_until_loaded']}"
    )


def _short(value: float) -> float:
    return float(f"{value:.4g}")


if __name__ == "__main__":
    sys.exit(main())
