"""The exporter: reads the store when somebody scrapes, and keeps nothing between two scrapes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from kvstore.meters import TTFT_BOUNDS_S, Histogram
from kvstore.rpc.metrics.families import COUNTERS, GAUGES, Row, Sources
from kvstore.rpc.metrics.nvme_families import NVME_COUNTERS, NVME_GAUGES
from kvstore.rpc.metrics.plan_families import PLAN_COUNTERS, PLAN_HISTOGRAMS
from kvstore.rpc.metrics.tenant_families import TENANT_COUNTERS, TENANT_GAUGES

__all__ = ["Page", "StoreCollector"]

_OPEN_METRICS_END = b"# EOF\n"


class StoreCollector(Collector):
    """Every metric of a daemon. Runs on the event loop, like everything that reads the store."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources

    def collect(self) -> Iterator[Metric]:
        """Families with their samples, counters first."""
        for counter in (*TENANT_COUNTERS, *COUNTERS, *NVME_COUNTERS, *PLAN_COUNTERS):
            family = CounterMetricFamily(counter.name, counter.help, labels=counter.labels)
            yield _filled(family, counter.rows(self._sources))
        for gauge in (*GAUGES, *NVME_GAUGES, *TENANT_GAUGES):
            yield _filled(
                GaugeMetricFamily(gauge.name, gauge.help, labels=gauge.labels), gauge.rows(self._sources)
            )
        ttft = HistogramMetricFamily(
            "kvstore_ttft_seconds",
            "From a request's arrival to its first token; warm: a part of its prompt was reused.",
            labels=["temperature"],
        )
        for warm, temperature in ((False, "cold"), (True, "warm")):
            parts = [group.meters.ttft[warm] for group in self._sources.store.groups.values()]
            _add_histogram(ttft, [temperature], _summed(parts, TTFT_BOUNDS_S))
        yield ttft
        for plan in PLAN_HISTOGRAMS:
            by_choice = HistogramMetricFamily(plan.name, plan.help, labels=["choice"])
            for choice, memories in plan.parts(self._sources):
                _add_histogram(by_choice, [choice.value], _summed(memories, plan.bounds))
            yield by_choice
        lag = HistogramMetricFamily(
            "kvstore_loop_lag_seconds", "How late the daemon's event loop ran a timer."
        )
        _add_histogram(lag, [], self._sources.lag.histogram)
        yield lag


def _filled(family: CounterMetricFamily | GaugeMetricFamily, rows: Iterator[Row]) -> Metric:
    for row in rows:
        family.add_metric(row.labels, row.value)
    return family


def _summed(parts: Sequence[Histogram], bounds: Sequence[float]) -> Histogram:
    total = Histogram(bounds)
    for part in parts:
        total.counts = [a + b for a, b in zip(total.counts, part.counts, strict=True)]
        total.sum += part.sum
    return total


def _add_histogram(family: HistogramMetricFamily, labels: Sequence[str], histogram: Histogram) -> None:
    buckets = [("+Inf" if bound == float("inf") else repr(bound), n) for bound, n in histogram.cumulative()]
    family.add_metric(labels, buckets, histogram.sum)


@dataclass(frozen=True, slots=True)
class _One:
    """A registry of one family that was collected before."""

    family: Metric

    def collect(self) -> Iterable[Metric]:
        return (self.family,)


class Page:
    """A scrape in pieces, one family each, so that others get their turn between two.

    Args:
        accept: the request's Accept header; OpenMetrics for those who ask for it.
    """

    def __init__(self, collector: Collector, accept: str) -> None:
        self._encode, self.content_type = choose_encoder(accept)
        # All numbers are of this moment; only turning them into text is spread out.
        self._families = list(collector.collect())

    def pieces(self) -> Iterator[bytes]:
        """Bytes of the page, in order."""
        ends = False
        for family in self._families:
            text = self._encode(_One(family))
            ends = text.endswith(_OPEN_METRICS_END)
            yield text.removesuffix(_OPEN_METRICS_END)
        if ends:
            yield _OPEN_METRICS_END
