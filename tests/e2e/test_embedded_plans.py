"""The embedded engine does what a plan says: it loads that, and no more, and computes the rest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from kvstore.connectors.embedded.engine import EngineLimits
from scene import Scene
from test_embedded_nvme import place, reused
from test_embedded_split import SIZE, SMALL, Places, cold
from tiny_engines import TinyEngine, TinyModel, prompt, tiny, tiny_engine, written

from kvstore.intent import Intent
from kvstore.types import Choice, Hit, Tier

__all__ = ["place", "tiny", "tiny_engine", "written"]


def planned(
    engine: TinyEngine, monkeypatch: pytest.MonkeyPatch, choice: Choice, start: int, stop: int
) -> None:
    """Lookups that say so, as those of a daemon that decides."""
    lookup = engine.client.lookup

    def decided(*asked: Any) -> Any:
        found = lookup(*asked)
        if not isinstance(found, Hit):
            return found
        plan = replace(found.plan, choice=choice, load_start=start, load_stop=stop)
        ready = max(start, min(found.ready, stop))
        return replace(found, plan=plan, slots=found.slots[start : max(start, ready)])

    monkeypatch.setattr(engine.client, "lookup", decided)


@pytest.mark.parametrize("warm", [False, True], ids=["NVME", "HOST"])
@pytest.mark.parametrize(
    ("choice", "start", "stop", "loaded"),
    [
        (Choice.RECOMPUTE, 0, 0, range(1)),
        (Choice.LOAD, 0, 10, range(10, 11)),
        (Choice.SPLIT, 20, 30, range(1, 31)),
    ],
)
def test_a_plan_is_followed(
    place: Places,
    tiny: TinyModel,
    monkeypatch: pytest.MonkeyPatch,
    warm: bool,
    choice: Choice,
    start: int,
    stop: int,
    loaded: range,
) -> None:
    asked = prompt(SIZE, 16)
    at = cold(place, asked)
    if warm:
        first = at.engine()
        first.ask(asked, 4)
        first.close()
    engine = at.engine(engine_limits=SMALL)
    planned(engine, monkeypatch, choice, start, stop)
    report = engine.ask(asked)
    assert report.tokens == tiny.uncached(asked)
    assert sum(reused(report).values()) // 16 in loaded
    assert set(reused(report)) <= {"HOST" if warm else "NVME"}
    engine.close()


def test_prompts_that_are_computed_before_are_told(
    tiny_engine: Callable[..., TinyEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = tiny_engine(engine_limits=EngineLimits(batched_tokens_max=32))
    queued_s: list[float] = []
    lookup = engine.client.lookup

    def listening(chain: Any, blocks: int, intent: Intent) -> Any:
        queued_s.append(intent.queued_s)
        return lookup(chain, blocks, intent)

    monkeypatch.setattr(engine.client, "lookup", listening)
    engine.ask(prompt(100, 78), 2)
    assert queued_s == [0.0], "nothing is before the first, and no step was seen"
    engine.engine.generate([engine.request(prompt(200, 79 + number), 2) for number in range(3)])
    alone_s, second_s, third_s = queued_s[1:]
    assert alone_s == 0.0 < second_s
    assert third_s == pytest.approx(2 * second_s)


def test_a_host_that_is_made_slow_is_loaded_slowly_and_right(stage: Scene, tiny: TinyModel) -> None:
    asked = prompt(10 * 16 + 1, 77)
    stage.start_daemon(host__limit_bytes_per_s='"1MB"', host__added_latency_s="0.02")
    reports = []
    for _ in range(2):
        engine = stage.keep(TinyEngine(tiny, stage.daemon.socket)).attached()
        reports.append(engine.ask(asked, 8))
        engine.settle()
        (facts,) = stage.daemon.group()["engines"].values()
        engine.close()
    first, second = reports
    assert first.tokens == second.tokens == tiny.uncached(asked, 8)
    assert second.reused[Tier.HOST] == 160
    assert second.ttft_s >= 0.9 * (0.02 + 10 * facts["block_bytes"] / 1e6)
