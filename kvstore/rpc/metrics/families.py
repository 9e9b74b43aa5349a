"""Every metric: its name, what it tells, and where its numbers are read.

Labels have bounded values: trust groups are configured, tenants are configured and at most
`meters.TENANTS_MAX` of them have a series, all others are constants of this code. An engine is no label: its
id is random, so every restart of one would leave series behind (`kvstore status` lists engines).
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvstore import __version__, _native
from kvstore.group import Group
from kvstore.log_limit import LogLimit
from kvstore.meters import Moved
from kvstore.rpc.metrics.lag import LoopLag
from kvstore.rpc.request_log import RequestLog
from kvstore.status import quarantined
from kvstore.store import Store
from kvstore.tiers.nvme import NvmeTier

__all__ = ["COUNTERS", "GAUGES", "Metric", "Row", "Sources"]


@dataclass(frozen=True, slots=True)
class Sources:
    """Where numbers come from.

    Attributes:
        started_s: wall clock at start, for people.
        logs: None where the program has its own logging.
    """

    store: Store
    requests: RequestLog
    lag: LoopLag
    started_s: float
    logs: LogLimit | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """One sample: its label values and its value."""

    labels: tuple[str, ...]
    value: float


@dataclass(frozen=True, slots=True)
class Metric:
    """A counter or gauge; a counter's name ends in _total on the page."""

    name: str
    help: str
    labels: tuple[str, ...]
    rows: Callable[[Sources], Iterator[Row]]


def _by_group(value: Callable[[Group], float]) -> Callable[[Sources], Iterator[Row]]:
    def rows(sources: Sources) -> Iterator[Row]:
        for name, group in sources.store.groups.items():
            yield Row((name,), value(group))

    return rows


def _moved(value: Callable[[Moved], float]) -> Callable[[Sources], Iterator[Row]]:
    def rows(sources: Sources) -> Iterator[Row]:
        for name, group in sources.store.groups.items():
            for kind, moved in group.meters.moved.items():
                yield Row((name, kind), value(moved))

    return rows


def _host_slots(sources: Sources) -> Iterator[Row]:
    for name, group in sources.store.groups.items():
        counts = group.host.counts()
        for state in ("free", "filling", "ready", "draining"):
            yield Row((name, state), counts[state])


def _device_blocks(sources: Sources) -> Iterator[Row]:
    for name, group in sources.store.groups.items():
        pools = [engine.device.counts() for engine in group.engines.values()]
        for state in ("mapped", "idle", "free", "draining"):
            yield Row((name, state), sum(pool.get(state, 0) for pool in pools))


def _evicted(sources: Sources) -> Iterator[Row]:
    for name, group in sources.store.groups.items():
        counters = group.counters
        yield Row((name, "HOST", "room"), group.host.dropped.get("evicted", 0))
        yield Row((name, "GPU", "room"), counters.device_removed_blocks)
        yield Row((name, "GPU", "engine_gone"), counters.device_closed_blocks)


def _corrupt(sources: Sources) -> Iterator[Row]:
    for name, group in sources.store.groups.items():
        yield Row((name, "HOST"), group.host.corrupt_blocks)
        if isinstance(group.nvme, NvmeTier):
            yield Row((name, "NVME"), group.nvme.counters.corrupt)


DROP_REASONS = ("no_room", "over_limit", "orphaned", "lost", "rot")


def _dropped(sources: Sources) -> Iterator[Row]:
    for name, group in sources.store.groups.items():
        reasons = dict.fromkeys(DROP_REASONS, 0) | group.host.dropped
        for reason, count in reasons.items():
            if reason not in ("evicted", "events_lost"):
                yield Row((name, reason), count)


def _slow(sources: Sources) -> Iterator[Row]:
    return (Row((message,), count) for message, count in sources.requests.slow.items())


def _suppressed(sources: Sources) -> Iterator[Row]:
    yield Row((), sources.logs.suppressed_lines if sources.logs is not None else 0)


def _build(sources: Sources) -> Iterator[Row]:
    path = _native.crc_path()
    yield Row((__version__, platform.python_version(), path, sources.store.epoch.hex()), 1)


def _started(sources: Sources) -> Iterator[Row]:
    yield Row((), sources.started_s)


GROUP = ("group",)

COUNTERS = (
    Metric(
        "kvstore_lookups",
        "Questions how much of a prompt is known.",
        GROUP,
        _by_group(lambda g: g.counters.lookups),
    ),
    Metric(
        "kvstore_matched_lookups",
        "Lookups that found at least one block.",
        GROUP,
        _by_group(lambda g: g.counters.matches),
    ),
    Metric(
        "kvstore_prefill_tokens",
        "Prompt tokens that engines computed in steps that were mostly prefill.",
        GROUP,
        _by_group(lambda g: g.meters.prefill_tokens),
    ),
    Metric(
        "kvstore_prefill_seconds",
        "Seconds that steps took which were mostly prefill.",
        GROUP,
        _by_group(lambda g: g.meters.prefill_seconds),
    ),
    Metric(
        "kvstore_transfers",
        "Copy jobs by kind: load (arena to device), store (device to arena), demote (a store that the daemon "
        "ordered), verify (sums recomputed by the daemon).",
        ("group", "kind"),
        _moved(lambda m: m.copies),
    ),
    Metric(
        "kvstore_transfer_bytes", "Bytes that copy jobs moved.", ("group", "kind"), _moved(lambda m: m.bytes)
    ),
    Metric(
        "kvstore_transfer_seconds",
        "Seconds that copy jobs took, summed, as the side that copies measured them.",
        ("group", "kind"),
        _moved(lambda m: m.seconds),
    ),
    Metric(
        "kvstore_saved_blocks",
        "Blocks that became readable on HOST.",
        GROUP,
        _by_group(lambda g: g.counters.saved_blocks),
    ),
    Metric(
        "kvstore_refused_save_blocks",
        "Blocks that a save asked room for and did not get.",
        GROUP,
        _by_group(lambda g: g.counters.refused_saves),
    ),
    Metric(
        "kvstore_evicted_blocks",
        "Blocks that left a tier: for room (on GPU also when the engine itself gave them up), or because "
        "their engine is gone.",
        ("group", "tier", "reason"),
        _evicted,
    ),
    Metric(
        "kvstore_demoted_blocks",
        "Blocks that were copied from a device to HOST before they left it.",
        GROUP,
        _by_group(lambda g: g.counters.demoted_blocks),
    ),
    Metric(
        "kvstore_lost_on_demote_blocks",
        "Blocks that had to leave a device and found no room on HOST either.",
        GROUP,
        _by_group(lambda g: g.counters.lost_on_demote),
    ),
    Metric(
        "kvstore_dropped_blocks",
        "Blocks not kept or taken away: no_room, over_limit (of their tenant), orphaned (parent not "
        "readable), lost (another writer was first), rot (bytes did not match their sums).",
        ("group", "reason"),
        _dropped,
    ),
    Metric(
        "kvstore_corrupt_blocks",
        "Blocks whose bytes no longer matched their sums, by the tier that held them; dropped, never served.",
        ("group", "tier"),
        _corrupt,
    ),
    Metric(
        "kvstore_revoked_leases",
        "Leases taken from silent sessions because memory was needed.",
        GROUP,
        _by_group(lambda g: g.counters.revoked_leases),
    ),
    Metric(
        "kvstore_events",
        "KV events (blocks stored or removed) so far.",
        GROUP,
        _by_group(lambda g: g.events.sequence),
    ),
    Metric(
        "kvstore_lost_event_keys",
        "Keys whose removal could not be told one by one: subscribers must take a snapshot.",
        GROUP,
        _by_group(lambda g: g.host.dropped.get("events_lost", 0)),
    ),
    Metric(
        "kvstore_lost_timings",
        "Timings that clients had to throw away: the TTFT histogram misses so many values.",
        GROUP,
        _by_group(lambda g: g.meters.lost_timings),
    ),
    Metric("kvstore_slow_messages", "Messages whose handling took longer than 5 ms.", ("message",), _slow),
    Metric("kvstore_suppressed_log_lines", "Log lines beyond the rate limit of their kind.", (), _suppressed),
)

GAUGES = (
    Metric(
        "kvstore_host_slots",
        "Arena slots by state; free ones of block sizes in use (see free slabs).",
        ("group", "state"),
        _host_slots,
    ),
    Metric(
        "kvstore_host_free_slabs",
        "Slabs of the arena that no block size has taken.",
        GROUP,
        _by_group(lambda g: g.host.counts()["free_slabs"]),
    ),
    Metric(
        "kvstore_host_used_bytes",
        "Bytes of slots that are not free.",
        GROUP,
        _by_group(lambda g: g.host.counts()["used_bytes"]),
    ),
    Metric(
        "kvstore_host_capacity_bytes",
        "Size of the arena (host.capacity_bytes).",
        GROUP,
        _by_group(lambda g: g.arena.capacity_bytes),
    ),
    Metric(
        "kvstore_quarantined_slots",
        "Slots that a process without a connection may still write; free when it is known to be gone.",
        GROUP,
        _by_group(quarantined),
    ),
    Metric(
        "kvstore_device_blocks",
        "Device blocks of all engines: mapped (L1), idle (L2), free, draining.",
        ("group", "state"),
        _device_blocks,
    ),
    Metric("kvstore_engines", "Engines that are attached.", GROUP, _by_group(lambda g: len(g.engines))),
    Metric("kvstore_sessions", "Attached processes.", GROUP, _by_group(lambda g: len(g.callers))),
    Metric("kvstore_leases", "Prefixes that engines hold.", GROUP, _by_group(lambda g: len(g.leases))),
    Metric("kvstore_fillings", "Saves under way.", GROUP, _by_group(lambda g: len(g.fillings))),
    Metric("kvstore_index_nodes", "Block keys known.", GROUP, _by_group(lambda g: len(g.index))),
    Metric(
        "kvstore_index_nodes_max",
        "Most block keys that may be known (index.nodes_max).",
        GROUP,
        _by_group(lambda g: g.index.nodes_max),
    ),
    Metric(
        "kvstore_event_lag",
        "Events that the slowest subscriber has not got yet.",
        GROUP,
        _by_group(lambda g: g.events.lag().events),
    ),
    Metric(
        "kvstore_event_lag_seconds",
        "Age of the oldest event that the slowest subscriber has not got yet.",
        GROUP,
        _by_group(lambda g: g.events.lag().seconds),
    ),
    Metric(
        "kvstore_prefill_tokens_per_second",
        "Prompt tokens per second over the latest prefill steps.",
        GROUP,
        _by_group(lambda g: g.meters.prefill_tokens_per_s),
    ),
    Metric(
        "kvstore_alarm",
        "1: look at `kvstore status`, e.g. blocks are saved and asked for, and none is ever found.",
        GROUP,
        _by_group(lambda g: float(bool(g.alarm))),
    ),
    Metric(
        "kvstore_build_info",
        "Always 1; what runs, and its boot epoch.",
        ("version", "python", "copy_path", "epoch"),
        _build,
    ),
    Metric("kvstore_start_time_seconds", "Unix time at which the daemon started.", (), _started),
)
