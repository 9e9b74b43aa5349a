"""GET /metrics of the router, in Prometheus' text form."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from kvstore.policy.routing.base import TIERS
from kvstore.policy.routing.hot import HotReplicas
from kvstore.router.deployments import Deployments
from kvstore.router.figures import BUCKETS_S

__all__ = ["RouteCollector", "page"]

_REPLICA = ("deployment", "replica")
# name, attribute of Figures, what it means
_COUNTERS = (
    ("requests", "requests", "Requests sent to a replica."),
    ("prompt_tokens", "prompt_tokens", "Prompt tokens sent there."),
    ("expected_tokens", "expected_tokens", "Prompt tokens that the index said were there."),
    (
        "best_tokens",
        "best_tokens",
        "Prompt tokens that some replica had: expected less of it is the price of balance.",
    ),
    ("cached_tokens", "cached_tokens", "Prompt tokens that the engine said it reused: saved prefill."),
    ("told_tokens", "told_tokens", "Prompt tokens of requests whose engine said how many it reused."),
    ("over_tokens", "over_tokens", "Expected and not reused: a stale or incompatible index."),
    ("under_tokens", "under_tokens", "Reused and not expected."),
)


class RouteCollector(Collector):
    """Everything that is counted, read when somebody asks."""

    def __init__(self, deployments: Deployments) -> None:
        self._deployments = deployments

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client."""
        for name, attribute, text in _COUNTERS:
            yield self._by_replica(
                CounterMetricFamily, name, text, lambda r, a=attribute: getattr(r.figures, a)
            )
        gauge, counter = GaugeMetricFamily, CounterMetricFamily
        yield self._by_replica(gauge, "in_flight", "Requests under way.", lambda r: r.loads.in_flight)
        yield self._by_replica(
            gauge, "queue_seconds", "Predicted wait of one more.", lambda r: r.loads.queue_s()
        )
        yield self._by_replica(
            gauge, "prefill_tokens_per_second", "As measured.", lambda r: r.loads.tokens_per_s
        )
        yield self._by_replica(gauge, "up", "1 = requests are sent there.", lambda r: r.loads.up())
        yield self._by_replica(
            counter, "failures", "Requests that a replica failed.", lambda r: r.loads.failed
        )
        yield self._by_replica(
            gauge,
            "stale",
            "1 = what is known of its blocks may be wrong.",
            lambda r: [bool(h.doubt) for h in r.holdings],
        )
        yield self._by_replica(
            counter,
            "lost_batches",
            "Batches of events never heard.",
            lambda r: [h.lost_batches for h in r.holdings],
        )
        yield self._by_replica(
            counter,
            "orphaned_blocks",
            "Stored blocks that cannot be found: nobody told of their parent.",
            lambda r: [h.orphaned_blocks for h in r.holdings],
        )
        yield self._by_replica(
            gauge,
            "alarm",
            "1 = the index and the replica talk of different blocks; the log says why.",
            lambda r: [bool(r.figures.alarm(place)) for place in range(len(r.members))],
        )
        yield self._index_blocks()
        yield self._first_bytes()
        yield from self._totals()

    def _by_replica(self, family: Any, name: str, text: str, values: Any) -> Metric:
        metric = family(f"kvstore_route_{name}", text, labels=_REPLICA)
        for each in self._deployments.all:
            for member, value in zip(each.router.members, values(each.router), strict=True):
                metric.add_metric((each.model, member.name), float(value))
        found: Metric = metric
        return found

    def _index_blocks(self) -> Metric:
        metric = GaugeMetricFamily(
            "kvstore_route_index_blocks", "Blocks known, by tier.", labels=(*_REPLICA, "tier")
        )
        for each in self._deployments.all:
            for member, holdings in zip(each.router.members, each.router.holdings, strict=True):
                for tier, blocks in zip(TIERS, holdings.blocks(), strict=True):
                    metric.add_metric((each.model, member.name, tier), float(blocks))
        return metric

    def _first_bytes(self) -> Metric:
        metric = HistogramMetricFamily(
            "kvstore_route_first_byte_seconds",
            "From sending a request to the first byte of its answer; warm = some of it was expected there.",
            labels=(*_REPLICA, "prompt"),
        )
        for each in self._deployments.all:
            figures = each.router.figures
            for place, member in enumerate(each.router.members):
                for warm, label in enumerate(("cold", "warm")):
                    counts = np.cumsum(figures.first_byte_s[place, warm])
                    metric.add_metric(
                        (each.model, member.name, label),
                        buckets=_buckets(counts),
                        sum_value=float(figures.first_byte_sum_s[place, warm]),
                    )
        return metric

    def _totals(self) -> Iterator[Metric]:
        for family, name, text, value in (
            (GaugeMetricFamily, "index_nodes", "Distinct blocks known.", lambda r: r.prefixes.index.nodes),
            (
                CounterMetricFamily,
                "index_evicted",
                "Blocks forgotten because of route.index_blocks_max.",
                lambda r: r.prefixes.index.evicted,
            ),
            (
                GaugeMetricFamily,
                "index_memory_bytes",
                "Of the index.",
                lambda r: r.prefixes.index.memory_bytes,
            ),
            (
                GaugeMetricFamily,
                "entropy",
                "Of the last minute's traffic over replicas: 1 even, 0 all to one.",
                lambda r: r.figures.entropy(),
            ),
            (
                GaugeMetricFamily,
                "skew",
                "Most less least requests of a replica.",
                lambda r: _skew(r.figures.requests),
            ),
            (GaugeMetricFamily, "skew_max", "The largest since start.", lambda r: r.figures.skew_max),
            (
                GaugeMetricFamily,
                "hot_leases",
                "Further replicas of hot prefixes, now.",
                lambda r: r.policy.live if isinstance(r.policy, HotReplicas) else 0,
            ),
        ):
            metric = family(f"kvstore_route_{name}", text, labels=("deployment",))
            for each in self._deployments.all:
                found = float(value(each.router))
                if not math.isnan(found):
                    metric.add_metric((each.model,), found)
            yield metric


def page(collector: RouteCollector) -> bytes:
    """The page. Some ms with many replicas."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    return generate_latest(registry)


def _buckets(counts: NDArray[np.int64]) -> list[tuple[str, float]]:
    names = ["+Inf" if math.isinf(edge) else str(edge) for edge in BUCKETS_S]
    return [(name, float(count)) for name, count in zip(names, counts, strict=True)]


def _skew(requests: NDArray[np.int64]) -> int:
    return int(requests.max() - requests.min())
