"""The picture of bench.breakeven: where loading wins, what the planner chose, and what its choice cost."""

from __future__ import annotations

from typing import Any

import numpy as np

from bench.machine import RESULTS

__all__ = ["draw"]

# Beyond so much of the colours from their middle black cannot be read.
_DARK = 0.3
_MARKS = {"recompute": "C", "load": "L", "split": "S"}


def draw(result: dict[str, Any], name: str) -> None:
    """Write bench/results/NAME.png: a column for each load of the engine.

    Above: load over recompute as colours, the break-even line, and the planner's choice (C compute, L load,
    S split). Below: the planner over the fastest way there was.
    """
    from matplotlib.colors import TwoSlopeNorm
    from matplotlib.figure import Figure

    cells, grid = result["cells"], result["grid"]
    limits, lengths, loads = grid["mb_per_s"], grid["tokens"], grid["load"]
    figure = Figure(figsize=(5.2 * len(loads), 6.4), layout="constrained")
    axes = figure.subplots(2, len(loads), squeeze=False)
    for column, load in enumerate(loads):
        ratio, regret, marks = _tables(cells, limits, lengths, load)
        upper, lower = axes[0][column], axes[1][column]
        norm = TwoSlopeNorm(
            0.0, min(-0.5, float(np.log2(ratio).min())), max(0.5, float(np.log2(ratio).max()))
        )
        image = upper.imshow(np.log2(ratio), norm=norm, cmap="RdBu_r", aspect="auto", origin="lower")
        if min(ratio.shape) > 1 and ratio.min() < 1 < ratio.max():
            upper.contour(np.log2(ratio), levels=[0.0], colors="black", linewidths=1.5)
        upper.set_title(f"{load} engine: load / recompute (black: break-even)")
        figure.colorbar(image, ax=upper, label="log2; blue: loading wins")
        worst = max(1.3, float(regret.max()))
        image = lower.imshow(regret, vmin=1.0, vmax=worst, cmap="Oranges", aspect="auto", origin="lower")
        lower.set_title("planner / fastest way")
        figure.colorbar(image, ax=lower)
        for (y, x), text in np.ndenumerate(marks):
            ink = "white" if abs(norm(np.log2(ratio[y, x])) - 0.5) > _DARK else "black"
            upper.text(x, y, f"{text}\n{ratio[y, x]:.2g}", ha="center", va="center", color=ink)
            lower.text(x, y, f"{regret[y, x]:.2f}", ha="center", va="center")
        for plot in (upper, lower):
            plot.set_xticks(range(len(limits)), [str(limit or "none") for limit in limits])
            plot.set_yticks(range(len(lengths)), [str(length) for length in lengths])
            plot.set_xlabel("limit of the disk, MB/s")
            plot.set_ylabel("tokens of the prompt")
    figure.suptitle("SmolLM2-135M; planner's choice: C compute, L load, S split")
    figure.savefig(RESULTS / f"{name}.png", dpi=110)


def _tables(
    cells: list[dict[str, Any]], limits: list[int | None], lengths: list[int], load: str
) -> tuple[Any, Any, Any]:
    shape = (len(lengths), len(limits))
    ratio, regret, marks = np.ones(shape), np.ones(shape), np.full(shape, "", object)
    for cell in cells:
        if cell["load"] == load:
            at = lengths.index(cell["tokens"]), limits.index(cell["mb_per_s"])
            ratio[at], regret[at] = cell["load_over_recompute"], cell["planner_over_best"]
            chose = cell["planner_chose"]
            marks[at] = _MARKS.get(max(chose, key=chose.__getitem__), "?")
    return ratio, regret, marks
