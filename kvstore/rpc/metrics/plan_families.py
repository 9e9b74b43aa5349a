"""Metrics of the decision between reload and recompute: what was chosen, and what that was worth.

Regret is a histogram: what is promised is a bound on the worst, and one load that stalled for a second does
not show in a sum over a thousand that regret nothing. Its sum is there all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from kvstore.decisions import ERROR_BOUNDS, REGRET_BOUNDS_S, Decisions
from kvstore.meters import Histogram
from kvstore.policy.reload import Choice
from kvstore.rpc.metrics.families import Metric, Row, Sources

__all__ = ["PLAN_COUNTERS", "PLAN_HISTOGRAMS", "PlanHistogram"]


@dataclass(frozen=True, slots=True)
class PlanHistogram:
    """A histogram by choice, summed over trust groups."""

    name: str
    help: str
    bounds: tuple[float, ...]
    read: Callable[[Decisions], Mapping[Choice, Histogram]]

    def parts(self, sources: Sources) -> Iterator[tuple[Choice, list[Histogram]]]:
        """Each choice, with what its groups have."""
        memories = [group.decisions for group in sources.store.groups.values()]
        for choice in Choice:
            yield choice, [self.read(memory)[choice] for memory in memories]


def _plans(sources: Sources) -> Iterator[Row]:
    for name, group in sources.store.groups.items():
        for choice, count in group.decisions.plans.items():
            yield Row((name, choice.value), count)


PLAN_COUNTERS = (
    Metric(
        "kvstore_plan",
        "Requests by what was decided for them: recompute, load, or split (load the end while the beginning "
        "is computed).",
        ("group", "choice"),
        _plans,
    ),
)

PLAN_HISTOGRAMS = (
    PlanHistogram(
        "kvstore_plan_regret_seconds",
        "How much longer a request took until its KV was complete than the best other choice was predicted "
        "to take, 0 where it was faster; of requests whose engine told.",
        REGRET_BOUNDS_S,
        lambda memory: memory.regret,
    ),
    PlanHistogram(
        "kvstore_plan_error_ratio",
        "Seconds that a request took until its KV was complete, divided by what was predicted of it; of "
        "requests whose engine told.",
        ERROR_BOUNDS,
        lambda memory: memory.error,
    ),
)
