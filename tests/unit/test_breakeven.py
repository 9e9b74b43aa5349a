"""What bench.breakeven makes of its answers: figures, missed bars, README's text and the picture."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import breakeven, breakeven_picture
from bench.breakeven import MB, Cell, missed, verdict
from bench.breakeven_daemon import Answer
from bench.breakeven_stage import ARMS
from bench.numbers_plan import breakeven_text

AGAIN = "recompute again"


def cell(
    limit: int, tokens: int, ttft_s: dict[str, float], choice: str, again_s: float | None = None
) -> Cell:
    made = Cell(limit, tokens, False, {})
    for arm, seconds in {**ttft_s, AGAIN: again_s or ttft_s["recompute"]}.items():
        chose = choice if arm == "planner" else ""
        # Medians: one answer is far off.
        made.answers[arm] = [Answer(s, (1, 2), chose, 0, {}) for s in (seconds, seconds, 9 * seconds)]
    return made


def seconds(recompute: float, load: float, split: float, planner: float) -> dict[str, float]:
    return dict(zip(ARMS, (recompute, load, split, planner), strict=True))


GOOD = [
    cell(5 * MB, 512, seconds(1.0, 4.0, 0.9, 0.92), "split"),
    cell(20 * MB, 512, seconds(1.0, 1.2, 0.6, 0.62), "split"),
    cell(5 * MB, 1536, seconds(3.0, 14.0, 2.7, 2.7), "split"),
    cell(20 * MB, 1536, seconds(3.0, 4.0, 1.8, 1.9), "split", again_s=3.03),
]


def test_good_cells_reach_the_bars() -> None:
    figures = verdict(GOOD)
    assert figures["planner_over_best_p95"] == pytest.approx(1.9 / 1.8, rel=0.01)
    assert figures["planner_over_recompute_max"] == pytest.approx(0.92)
    assert figures["always_load_over_recompute_max"] == pytest.approx(14 / 3, rel=1e-3)
    assert (figures["split_cells"], figures["near_even_cells"]) == (2, 2)
    assert figures["split_over_best_pure_median"] == pytest.approx((0.62 + 1.9 / 3) / 2, rel=1e-3)
    assert 0 < figures["aa_p95"] <= 0.01
    assert figures["outputs_identical"] and missed(figures) == []


def test_cells_without_the_control_say_nothing_of_noise() -> None:
    bare = cell(20 * MB, 512, seconds(1.0, 1.2, 0.6, 0.62), "split")
    del bare.answers[AGAIN]
    assert bare.aa is None and bare.json()["aa"] is None
    assert verdict([*GOOD, bare])["aa_p95"] == verdict(GOOD)["aa_p95"]


def test_an_engine_that_cannot_split_is_not_asked_to() -> None:
    two = cell(20 * MB, 512, seconds(1.0, 0.8, 0.1, 0.85), "load")
    del two.answers["split"]
    figures = verdict([two])
    assert two.best == "load" and two.json()["split_over_best_pure"] is None
    assert figures["arms"] == ["recompute", "load", "planner"]
    assert figures["split_over_best_pure_median"] is None and missed(figures) == []


def test_each_bar_can_be_missed() -> None:
    slow = cell(20 * MB, 512, seconds(1.0, 1.2, 0.6, 1.3), "split")
    names = " ".join(missed(verdict([slow])))
    for name in breakeven.BARS:
        assert name in names
    never_split = cell(20 * MB, 512, seconds(1.0, 1.2, 0.6, 0.6), "load")
    assert missed(verdict([never_split])) == ["split_over_best_pure_median None > 0.7"]
    other = cell(20 * MB, 512, seconds(1.0, 1.2, 0.6, 0.62), "split")
    other.answers["split"][1] = Answer(0.6, (1, 3), "", 0, {})
    assert missed(verdict([other])) == ["outputs_identical false"]


def test_text_and_picture_show_the_cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = [Cell(c.limit, c.tokens, True, c.answers) for c in GOOD]
    grid = breakeven.Grid((5 * MB, 20 * MB), (512, 1536), 3).json()
    result = {
        **verdict([*GOOD, *loaded]),
        "grid": grid,
        "model": {"busy_sequences": 4},
        "cells": [one.json() for one in (*GOOD, *loaded)],
    }
    text = breakeven_text(result, "breakeven_quick")
    assert "| 20 MB/s | 1,536 tokens | 3.00 s | 4.00 s | 1.80 s | 1.90 s | split 3 |" in text
    assert "Over all 8 cells" in text
    monkeypatch.setattr(breakeven_picture, "RESULTS", tmp_path)
    breakeven_picture.draw(result, "drawn")
    assert (tmp_path / "drawn.png").stat().st_size > 10_000
