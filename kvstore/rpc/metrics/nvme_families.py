"""Metrics of the NVME tier: nothing where none is configured."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvstore.rpc.metrics.families import GROUP, Metric, Row, Sources
from kvstore.tiers.nvme import NvmeTier

__all__ = ["NVME_COUNTERS", "NVME_GAUGES"]

SEGMENT_STATES = ("creating", "free", "opening", "filling", "sealing", "sealed", "evacuating", "broken")
GIVEN_UP = ("evicted", "over_budget", "over_limit", "rot", "lost", "namespace")


def _tiers(sources: Sources) -> Iterator[tuple[str, NvmeTier]]:
    for name, group in sources.store.groups.items():
        if isinstance(group.nvme, NvmeTier):
            yield name, group.nvme


def _by_tier(value: Callable[[NvmeTier], float]) -> Callable[[Sources], Iterator[Row]]:
    def rows(sources: Sources) -> Iterator[Row]:
        return (Row((name,), value(nvme)) for name, nvme in _tiers(sources))

    return rows


def _blocks(sources: Sources) -> Iterator[Row]:
    for name, nvme in _tiers(sources):
        counters = nvme.counters
        for what in ("written", "write_failed", "read", "read_failed"):
            yield Row((name, what), getattr(counters, what))


def _bytes(sources: Sources) -> Iterator[Row]:
    for name, nvme in _tiers(sources):
        yield Row((name, "read"), nvme.counters.read_bytes)
        yield Row((name, "write"), nvme.counters.written_bytes)


def _given_up(sources: Sources) -> Iterator[Row]:
    for name, nvme in _tiers(sources):
        for reason in GIVEN_UP:
            yield Row((name, reason), nvme.counters.dropped[reason])


def _refused(sources: Sources) -> Iterator[Row]:
    for name, nvme in _tiers(sources):
        for reason, blocks in nvme.admission.refused_by_reason().items():
            yield Row((name, reason), blocks)


def _segments(sources: Sources) -> Iterator[Row]:
    for name, nvme in _tiers(sources):
        counts = nvme.counts()
        for state in SEGMENT_STATES:
            yield Row((name, state), counts[state])


NVME_COUNTERS = (
    Metric(
        "kvstore_nvme_blocks",
        "Blocks that the disk has written or read, or failed to.",
        ("group", "what"),
        _blocks,
    ),
    Metric(
        "kvstore_nvme_bytes", "Block bytes read from and written to the disk.", ("group", "direction"), _bytes
    ),
    Metric(
        "kvstore_nvme_errors",
        "Times that the disk refused something.",
        GROUP,
        _by_tier(lambda nvme: nvme.counters.errors.total()),
    ),
    Metric(
        "kvstore_nvme_given_up_blocks",
        "Blocks that left the disk: evicted, over_budget (worth keeping, but beyond the share that may be "
        "written again), over_limit (made room for others of their tenant), rot (bytes did not match their "
        "sums), lost (their write failed), namespace.",
        ("group", "reason"),
        _given_up,
    ),
    Metric(
        "kvstore_nvme_reinserted_blocks",
        "Blocks that were written again because they are still in use.",
        GROUP,
        _by_tier(lambda nvme: nvme.counters.dropped["reinserted"]),
    ),
    Metric(
        "kvstore_nvme_admitted_blocks",
        "Blocks that admission let onto the disk.",
        GROUP,
        _by_tier(lambda nvme: nvme.admission.admitted_blocks),
    ),
    Metric(
        "kvstore_nvme_refused_blocks",
        "Blocks that were not written: budget or value (admission), queue (too many wait), disk (it is left "
        "alone after errors), size (no segment holds one), quota (of their tenant).",
        ("group", "reason"),
        _refused,
    ),
)

NVME_GAUGES = (
    Metric("kvstore_nvme_segments", "Segment files by state.", ("group", "state"), _segments),
    Metric(
        "kvstore_nvme_records",
        "Blocks readable on the disk.",
        GROUP,
        _by_tier(lambda nvme: nvme.counts()["records"]),
    ),
    Metric(
        "kvstore_nvme_live_bytes",
        "Bytes of readable blocks on the disk.",
        GROUP,
        _by_tier(lambda nvme: nvme.counts()["live_bytes"]),
    ),
    Metric(
        "kvstore_nvme_file_bytes",
        "Bytes of all segment files; more than the capacity for a while after it was lowered.",
        GROUP,
        _by_tier(lambda nvme: nvme.counts()["file_bytes"]),
    ),
    Metric(
        "kvstore_nvme_capacity_bytes",
        "Most bytes of all segment files (nvme.capacity_bytes).",
        GROUP,
        _by_tier(lambda nvme: nvme.counts()["capacity_bytes"]),
    ),
    Metric(
        "kvstore_nvme_queued_bytes",
        "Bytes that admission let in and that are not written yet.",
        GROUP,
        _by_tier(lambda nvme: nvme.queued_bytes),
    ),
    Metric(
        "kvstore_nvme_promotions",
        "Fetches that wait for the disk.",
        GROUP,
        _by_tier(lambda nvme: nvme.promotions),
    ),
    Metric(
        "kvstore_nvme_trouble",
        "1: the disk is left alone for a while after an error.",
        GROUP,
        _by_tier(lambda nvme: float(bool(nvme.trouble))),
    ),
)
