"""The embedded engine does what a plan says: it loads that, and no more, and computes the rest."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from test_embedded_nvme import place, reused
from test_embedded_split import SIZE, SMALL, Places, cold
from tiny_engines import TinyEngine, TinyModel, prompt, tiny, written

from kvstore.types import Choice, Hit

__all__ = ["place", "tiny", "written"]


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
