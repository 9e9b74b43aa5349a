"""Reload or recompute, really run: bandwidth of the tier × length of the prompt × load of the engine.

    python -m bench.breakeven --quick --json      16 cells: a quarter of an hour on two cores
    python -m bench.breakeven --save              the whole grid, and the picture
    .venv-vllm/bin/python -m bench.breakeven --engine vllm --quick      the same in vLLM, which cannot split

In every cell the same prompt of SmolLM2-135M (float32, 45 KiB of KV a token) is answered in four ways, turn
and turn about (A B C D, then backwards), and each time it is on NVME and nowhere else:

    recompute   no reuse at all: an engine without a store
    load        all of it is loaded, whatever that takes
    split       a tail is loaded while the head is computed
    planner     what `kvstore` decides

The tier's bandwidth is `nvme.limit_bytes_per_s`. A loaded engine decodes four other sequences meanwhile.
What counts is the time to the first token; figures are medians over turns of its ratio within a turn. In
every fourth cell, so that each bandwidth, length and load has one, recompute runs a second time in each turn
as if it were something else: that control (`aa_p95`) says how far the machine's noise goes, and above 0.05
the run calls itself void.

    planner_over_best              planner over the fastest of the others, cell by cell
    planner_over_recompute         what asking the store may cost
    always_load_over_recompute     what a store costs that always loads
    split_over_best_pure           where load and recompute are within a factor of 2 of each other and the
                                   planner itself chose to split: planner over the better of those two
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.breakeven_daemon import Answer, Place
from bench.measure import finish, parser

__all__ = ["BARS", "Cell", "main", "verdict"]

MB = 1_000_000
BUSY = 4
_AGAIN = "recompute again"
_DECIDES, _SPLITS = "planner", "split"
AA_MAX = 0.05
BARS = {
    "planner_over_best_p95": 1.10,
    "planner_over_recompute_max": 1.05,
    "split_over_best_pure_median": 0.70,
}
"""At most; the first two plus `aa_p95`."""
_WITHIN = 2.0
_WARM_TOKENS = 256
_CHECK_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Grid:
    """What is run.

    Attributes:
        limits: of the disk in bytes/s, 0 = none.
        lengths: of prompts in tokens.
        turns: of each way in each cell.
    """

    limits: tuple[int, ...]
    lengths: tuple[int, ...]
    turns: int

    def json(self) -> dict[str, Any]:
        """As the result lists it."""
        return {
            "mb_per_s": [limit // MB or None for limit in self.limits],
            "tokens": list(self.lengths),
            "load": ["idle", "loaded"],
            "turns": self.turns,
        }


QUICK = Grid((5 * MB, 20 * MB, 80 * MB, 0), (512, 1536), 7)
WHOLE = Grid(
    (2 * MB, 5 * MB, 10 * MB, 20 * MB, 40 * MB, 80 * MB, 160 * MB, 0), (256, 512, 1024, 1536, 3072), 9
)


@dataclass(slots=True)
class Cell:
    """One bandwidth, one length, one load.

    Attributes:
        limit: bytes/s, 0 = none.
        tokens: of the prompt.
        loaded: whether others decode meanwhile.
        answers: by arm, one a turn; recompute, load and the planner are among them.
    """

    limit: int
    tokens: int
    loaded: bool
    answers: dict[str, list[Answer]]

    def ttft_s(self, arm: str) -> float:
        """Median."""
        return statistics.median(answer.ttft_s for answer in self.answers[arm])

    @property
    def aa(self) -> float | None:
        """By how much recompute is off from itself; None without the control."""
        if _AGAIN not in self.answers:
            return None
        return abs(self.over(_AGAIN, "recompute") - 1.0)

    def over(self, arm: str, other: str) -> float:
        """Median over the turns of one way over another."""
        pairs = zip(self.answers[arm], self.answers[other], strict=True)
        return statistics.median(one.ttft_s / than.ttft_s for one, than in pairs)

    @property
    def best(self) -> str:
        """The fastest of the ways that do not decide."""
        return min((arm for arm in self.answers if arm not in (_DECIDES, _AGAIN)), key=self.ttft_s)

    @property
    def pure(self) -> str:
        """The better of recompute and load."""
        return min(("recompute", "load"), key=self.ttft_s)

    @property
    def near_even(self) -> bool:
        """Load and recompute are within a factor of two of each other."""
        return 1 / _WITHIN <= self.over("load", "recompute") <= _WITHIN

    @property
    def choices(self) -> Counter[str]:
        """Of the planner."""
        return Counter(answer.choice for answer in self.answers[_DECIDES])

    @property
    def chose_split(self) -> bool:
        """The planner did, mostly."""
        return 2 * self.choices[_SPLITS] > len(self.answers[_DECIDES])

    def json(self) -> dict[str, Any]:
        """For the result."""
        return {
            "mb_per_s": self.limit // MB or None,
            "tokens": self.tokens,
            "load": "loaded" if self.loaded else "idle",
            "ttft_s": {arm: _short(self.ttft_s(arm)) for arm in self.answers},
            "spread_s": {arm: [_short(value) for value in _quartiles(self, arm)] for arm in self.answers},
            "planner_over_best": _short(self.over("planner", self.best)),
            "planner_over_recompute": _short(self.over("planner", "recompute")),
            "load_over_recompute": _short(self.over("load", "recompute")),
            "split_over_best_pure": _short(self.over(_SPLITS, self.pure))
            if _SPLITS in self.answers
            else None,
            "aa": None if self.aa is None else _short(self.aa),
            "planner_chose": dict(self.choices),
            "reason": self.answers["planner"][-1].plan.get("reason", ""),
        }


def run(place: Place, grid: Grid, note: Any) -> list[Cell]:
    """All cells. Within one bandwidth and one load they take turns; a change of either is learnt first."""
    cells: list[Cell] = []
    for row_number, limit in enumerate(grid.limits):
        place.daemon.set_limit(limit)
        for loaded in (False, True):
            with place.busy(BUSY) if loaded else nullcontext():
                for arm in ("load",) if cells else ("load", "recompute", "recompute"):
                    place.ask(arm, _WARM_TOKENS)
                arms = (*place.arms, _AGAIN)
                row = [Cell(limit, tokens, loaded, {arm: [] for arm in arms}) for tokens in grid.lengths]
                # Of each limit one idle or loaded row has it in one length.
                for column, cell in enumerate(row):
                    if (row_number + loaded) % 2 or (row_number // 2 + column + loaded) % 2:
                        del cell.answers[_AGAIN]
                for turn in range(grid.turns):
                    for cell in row:
                        _turn(place, cell, backwards=turn % 2 == 1)
                cells += row
            for cell in row:
                note(cell)
    return cells


def _turn(place: Place, cell: Cell, *, backwards: bool) -> None:
    for arm in reversed(cell.answers) if backwards else cell.answers:
        cell.answers[arm].append(place.ask("recompute" if arm == _AGAIN else arm, cell.tokens))


def long_answers(place: Place, length: int) -> bool:
    """Whether every way gives the same 64 tokens, on a disk near break-even."""
    place.daemon.set_limit(20 * MB)
    return len({place.ask(arm, length, _CHECK_TOKENS).tokens for arm in place.arms}) == 1


def verdict(cells: Sequence[Cell]) -> dict[str, Any]:
    """The figures that the bars are about."""
    best = [cell.over("planner", cell.best) for cell in cells]
    recompute = [cell.over("planner", "recompute") for cell in cells]
    always = [cell.over("load", "recompute") for cell in cells]
    split = [cell.over("planner", cell.pure) for cell in cells if cell.near_even and cell.chose_split]
    aa = float(np.quantile([cell.aa for cell in cells if cell.aa is not None], 0.95))
    return {
        "arms": [arm for arm in cells[0].answers if arm != _AGAIN],
        "aa_p95": _short(aa),
        "planner_over_best_p95": _short(float(np.quantile(best, 0.95))),
        "planner_over_best_median": _short(statistics.median(best)),
        "planner_over_recompute_max": _short(max(recompute)),
        "always_load_over_recompute_max": _short(max(always)),
        "split_over_best_pure_median": _short(statistics.median(split)) if split else None,
        "split_cells": len(split),
        "near_even_cells": sum(cell.near_even for cell in cells),
        "outputs_identical": all(
            len({answer.tokens for given in cell.answers.values() for answer in given}) == 1 for cell in cells
        ),
    }


def missed(figures: dict[str, Any]) -> list[str]:
    """Bars that were not reached."""
    slack = {"planner_over_best_p95": figures["aa_p95"], "planner_over_recompute_max": figures["aa_p95"]}
    out = [
        f"{name} {figures[name]} > {bar}"
        for name, bar in BARS.items()
        if (_SPLITS in figures["arms"] or not name.startswith(_SPLITS))
        and (figures[name] is None or figures[name] > bar + slack.get(name, 0.0))
    ]
    return out if figures["outputs_identical"] else [*out, "outputs_identical false"]


def main() -> int:
    """Exit status: 0, 1 where a bar was missed, 3 when void."""
    options = _options()
    grid = QUICK if options.quick else WHOLE
    began_s = time.monotonic()

    def note(cell: Cell) -> None:
        if not options.json:
            print(_line(cell), flush=True)

    with _stage(options.engine)((*grid.lengths, _WARM_TOKENS)) as place:
        cells = run(place, grid, note)
        same = long_answers(place, max(grid.lengths))
    figures = verdict(cells)
    figures["outputs_identical"] &= same
    figures |= {
        "missed": missed(figures),
        "grid": grid.json(),
        "engine": options.engine,
        "model": {**place.facts, "busy_sequences": BUSY},
        "seconds": round(time.monotonic() - began_s),
        "cells": [cell.json() for cell in cells],
    }
    void = (
        f"noise: recompute is off from itself by {figures['aa_p95']:.1%}"
        if figures["aa_p95"] > AA_MAX
        else ""
    )
    name = "_".join(["breakeven", *["vllm"] * (options.engine == "vllm"), *["quick"] * options.quick])
    status = finish("breakeven", options, figures, [void], keep_as=name)
    if options.save and not void:
        from bench.breakeven_picture import draw

        draw(figures, name)
    return status or int(bool(figures["missed"]))


def _options() -> argparse.Namespace:
    made = parser("breakeven", __doc__)
    made.add_argument("--quick", action="store_true", help="16 cells instead of 80")
    made.add_argument("--engine", choices=("embedded", "vllm"), default="embedded", help="which computes")
    return made.parse_args()


def _stage(engine: str) -> Any:
    """What makes a `Place`; vLLM is imported for itself only."""
    if engine == "vllm":
        from bench.breakeven_vllm import stage as of_vllm

        return of_vllm
    from bench.breakeven_stage import stage

    return stage


def _line(cell: Cell) -> str:
    arms = "  ".join(f"{arm} {cell.ttft_s(arm):6.3f}" for arm in cell.answers)
    limit = f"{cell.limit // MB:4} MB/s" if cell.limit else "no limit "
    chose = ", ".join(f"{name} {count}" for name, count in cell.choices.items())
    return f"{limit} {cell.tokens:5} tokens {'loaded' if cell.loaded else 'idle  '}  {arms}  ({chose})"


def _quartiles(cell: Cell, arm: str) -> list[float]:
    return list(np.quantile([answer.ttft_s for answer in cell.answers[arm]], (0.25, 0.75)))


def _short(value: float) -> float:
    return float(f"{value:.4g}")


if __name__ == "__main__":
    sys.exit(main())
