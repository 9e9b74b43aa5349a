"""Reuse against what it costs, one point a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvstore.errors import BadRequest

__all__ = ["Point", "draw"]


@dataclass(frozen=True, slots=True)
class Point:
    """One run.

    Attributes:
        label: policy and settings.
        cost: skew, or seconds to first token.
        reuse: share of the input tokens.
    """

    label: str
    cost: float
    reuse: float


def draw(points: Sequence[Point], cost_label: str, path: Path) -> None:
    """Write a PNG.

    Raises:
        BadRequest: matplotlib is not installed, or the file cannot be written; says what to do.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise BadRequest(
            "--plot: matplotlib is not installed; pip install 'kvstored[bench]', or leave --plot away"
        ) from None
    figure = Figure(figsize=(8.0, 5.0), layout="constrained")
    axes = figure.subplots()
    for point in points:
        axes.scatter([point.cost], [point.reuse], s=36)
        axes.annotate(point.label, (point.cost, point.reuse), (5, 4), textcoords="offset points", fontsize=8)
    costs = [point.cost for point in points]
    if min(costs) > 0 and max(costs) > 20 * min(costs):
        axes.set_xscale("log")
    axes.set_xlabel(cost_label)
    axes.set_ylabel("reused / all input tokens")
    axes.grid(alpha=0.3)
    try:
        figure.savefig(path, dpi=110, format="png")
    except OSError as error:
        raise BadRequest(f"--plot: {path}: {error.strerror or error}") from None
