"""What a lease has brought its request, counted when it is released."""

from __future__ import annotations

from kvstore.callers import Counters
from kvstore.decisions import Decisions, Outcome
from kvstore.leases import Lease
from kvstore.meters import Meters
from kvstore.types import Tier

__all__ = ["count", "left"]


def count(lease: Lease, block_bytes: int, counters: Counters, meters: Meters, decisions: Decisions) -> None:
    """Blocks by the tier that they came from, and what became of the load that was planned.

    Args:
        block_bytes: of one block that was copied; 0 = nobody knows any more.
    """
    planned, host = lease.planned, lease.host
    if planned is not None:  # what was there and computed all the same is no hit
        made = planned.decision
        planned_stop = made.load_stop if made.load_stop > made.load_start else 0
        host = min(host, max(planned_stop, lease.wanted, lease.device))
    loaded = max(0, host - lease.device)
    brought = max(0, min(lease.brought[1], host) - max(lease.brought[0], lease.device))
    if (tail := lease.tail) is not None:  # between `lowest` and `start` it was computed
        loaded = max(0, min(lease.host, tail.lowest) - lease.device) + tail.stop - tail.start
        brought = tail.stop - tail.start - tail.on_host
    blocks = {Tier.GPU: lease.device, Tier.HOST: loaded - brought, Tier.NVME: brought}
    if lease.tenant:
        meters.count_hit(lease.tenant, {t: n * lease.block_tokens for t, n in blocks.items()})
    for tier, number in blocks.items():
        counters.hit_blocks_by_tier[tier] += number
    counters.loaded_bytes += loaded * block_bytes
    counters.hit_blocks += lease.device + loaded
    if planned is not None:
        start, stop = planned.decision.load_start, planned.decision.load_stop
        came = max(0, min(stop, host) - start) if lease.tail is None else loaded
        decisions.ended(planned.id, Outcome(None, came, lease.lagged_s, lease.short))


def left(lease: Lease, decisions: Decisions) -> None:
    """Its session has ended without a word on what became of it."""
    if lease.planned is not None:
        decisions.ended(lease.planned.id, Outcome(None, None, lease.lagged_s, "its session has ended"))
