"""Figures of a run in time: reuse and seconds to first token, warm-up apart from steady state."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvstore.simulate.queueing import Served
from kvstore.simulate.workload import Workload

__all__ = ["over", "run_figures"]


def run_figures(run: Served, workload: Workload, warm_up: int) -> dict[str, Any]:
    """JSON-ready.

    Args:
        warm_up: how many of the first requests are warm-up (`Workload.filled_at`).

    Returns:
        `all`, `warm_up`, `steady` and `second_half`, each with requests, input_tokens, reused_tokens, reuse
        (reused over all input tokens), predicted_tokens, ttft_mean_s, ttft_p50_s, ttft_p99_s, None where no
        request is in that part; and assigned, skew, skew_max, evictions.
    """
    count = len(workload)
    return {
        "all": _part(run, workload, slice(0, count)),
        "warm_up": _part(run, workload, slice(0, warm_up)),
        "steady": _part(run, workload, slice(warm_up, count)),
        "second_half": _part(run, workload, slice(count // 2, count)),
        "assigned": run.assigned.tolist(),
        "skew": int(run.assigned.max() - run.assigned.min()),
        "skew_max": run.skew_max,
        "evictions": int(run.evictions.sum()),
    }


def _part(run: Served, workload: Workload, part: slice) -> dict[str, Any] | None:
    tokens, ttft_s = workload.input_tokens[part], run.ttft_s[part]
    if not len(tokens):
        return None
    total, reused = int(tokens.sum()), int(run.reused_tokens[part].sum())
    p50, p99 = np.percentile(ttft_s, [50, 99])
    return {
        "requests": len(tokens),
        "input_tokens": total,
        "reused_tokens": reused,
        "reuse": reused / total,
        "predicted_tokens": int(run.predicted_tokens[part].sum()),
        "ttft_mean_s": float(ttft_s.mean()),
        "ttft_p50_s": float(p50),
        "ttft_p99_s": float(p99),
    }


def over(figures: dict[str, Any], base: dict[str, Any], part: str) -> dict[str, float] | None:
    """Seconds to first token over those of another policy; None where a part is empty or took no time."""
    mine, theirs = figures[part], base[part]
    names = ("ttft_p50_s", "ttft_p99_s")
    if mine is None or theirs is None or not all(theirs[name] for name in names):
        return None
    return {name.removesuffix("_s"): mine[name] / theirs[name] for name in names}
