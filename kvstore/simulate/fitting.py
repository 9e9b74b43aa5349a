"""The weight of `scored`, fixed on one part of a trace so that it can be judged on another."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.errors import BadRequest
from kvstore.policy.routing.scored import Scored
from kvstore.simulate.queueing import QueueSettings, prefill_rate, serve
from kvstore.simulate.views import ExactView
from kvstore.simulate.workload import Workload

__all__ = ["WEIGHTS", "fit_weight"]

WEIGHTS = (1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 8.0)
# Mean times to first token that differ by less are the same: ties by lot move them by as much.
_SAME = 0.02


def fit_weight(
    workload: Workload, requests: int, settings: QueueSettings, weights: Sequence[float] = WEIGHTS
) -> float:
    """Of the weights whose mean time to first token is within 2 % of the best, the one that reuses most.

    Args:
        workload: the whole trace; the prefill rate is that of the whole, because the fleet is the same.
        requests: how many of the first ones may be looked at.

    Returns:
        One of `weights`.

    Cost: one run each, about half a second on 6,000 requests.

    Raises:
        BadRequest: no request may be looked at.
    """
    if not 1 <= requests <= len(workload):
        raise BadRequest(f"fit: need 1 to {len(workload)} requests, got {requests}")
    rate, part = prefill_rate(workload, settings), workload.first(requests)
    found = []
    for weight in weights:
        view = ExactView(settings.replicas)
        run = serve(part, Scored(weight, weight), view, settings, rate)
        found.append((float(run.ttft_s.mean()), int(run.reused_tokens.sum()), weight))
    near_s = min(mean_s for mean_s, _, _ in found) * (1 + _SAME)
    return max((reused, weight) for mean_s, reused, weight in found if mean_s <= near_s)[1]
