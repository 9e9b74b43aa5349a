"""What vLLM's logger prints and its /metrics exports about us.

Counters are summed where they happen, taken once a step, added up over ranks by vLLM, and become Prometheus
counters in the process that serves /metrics.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

__all__ = ["COUNTERS", "KVStoreStats", "PromMetrics", "Tally"]

COUNTERS = {
    "lookups": "Requests that asked the daemon what it holds.",
    "hits": "Requests for which it held more than the engine itself.",
    "late_lookups": "Requests computed because the answer took too long.",
    "unbindable": "Requests kept out of the store: something in them has no digest.",
    "fetches": "Lookups that found blocks on the disk, which had to be brought to HOST first.",
    "short_fetches": "Of those, ended before all of it had come; the rest was computed.",
    "fetched_tokens": "Prompt tokens whose KV was brought from the disk to HOST.",
    "fetch_seconds": "Seconds that requests waited for that.",
    "loaded_tokens": "Prompt tokens whose KV was loaded and verified.",
    "loaded_nvme_tokens": "Of those, tokens whose KV came from the disk.",
    "failed_load_tokens": "Prompt tokens offered and not loaded; they were computed.",
    "loaded_bytes": "Bytes copied from the arena, all ranks.",
    "load_seconds": "Seconds that those copies took, all ranks.",
    "saved_blocks": "Blocks that became readable for others.",
    "known_blocks": "Blocks that needed no save: the daemon held them, or another engine was at it.",
    "dropped_blocks": "Full blocks of finished requests that were not kept.",
    "unpinned_blocks": "Of those, dropped because too many blocks were waiting for their copy.",
}


class Tally:
    """Counts since they were last taken. Its methods run in one thread each; a lost race costs a count."""

    def __init__(self) -> None:
        self._counts: dict[str, float] = {}

    def add(self, name: str, amount: float = 1) -> None:
        """Count one of COUNTERS."""
        if amount:
            self._counts[name] = self._counts.get(name, 0) + amount

    def copied(self, kind: str, count: int, seconds: float) -> None:
        """A load copied so many bytes."""
        self.add(f"{kind}ed_bytes", count)
        self.add(f"{kind}_seconds", seconds)

    def take(self) -> KVStoreStats | None:
        """All of it, once; None if nothing happened."""
        if not self._counts:
            return None
        counts, self._counts = self._counts, {}
        return KVStoreStats(data=counts)


class KVStoreStats(KVConnectorStats):  # type: ignore[misc]
    """Sums by name of COUNTERS."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, amount in other.data.items():
            self.data[name] = self.data.get(name, 0) + amount
        return self

    def reduce(self) -> dict[str, int | float]:
        """What the log line shows: sums, and the bandwidth of loads."""
        shown = {name: self.data[name] for name in COUNTERS if self.data.get(name)}
        seconds, count = shown.pop("load_seconds", 0), shown.get("loaded_bytes", 0)
        if seconds:
            shown["load_GB_per_s"] = round(count / seconds / 1e9, 2)
        return shown

    def is_empty(self) -> bool:
        return not self.data


class PromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """`vllm:kvstore_*_total`, one series per engine."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {}
        for name, text in COUNTERS.items():
            metric = self._counter_cls(name=f"vllm:kvstore_{name}", documentation=text, labelnames=labelnames)
            self._counters[name] = {
                engine: metric.labels(*values) for engine, values in per_engine_labelvalues.items()
            }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, amount in transfer_stats_data.items():
            by_engine = self._counters.get(name)
            if by_engine is not None and engine_idx in by_engine:
                by_engine[engine_idx].inc(amount)
