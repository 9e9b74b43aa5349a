"""Reload or recompute: what to load of a match.

This version does not decide yet: it loads everything that is known and says so. The decision needs measured
rates per tier and a measured prefill curve; until both exist, a number here would be invented.
"""

from __future__ import annotations

from kvstore.types import FetchPlan, Span, Tier

__all__ = ["plan"]

_UNDECIDED = "loads every known block: this version does not compare with recompute yet"


def plan(device: int, host: int, disk: int = 0) -> FetchPlan:
    """Plan for a match by where its leading blocks are.

    Args:
        device: leading blocks in the engine's own pool.
        host: leading blocks readable in the arena.
        disk: leading blocks that are in the arena or on NVME.

    Returns:
        A plan that loads everything behind the device's blocks; its reason says that nothing was decided.
    """
    spans = []
    if device:
        spans.append(Span(Tier.GPU, 0, device))
    if host > device:
        spans.append(Span(Tier.HOST, device, host))
    reached = max(device, host)
    if disk > reached:
        spans.append(Span(Tier.NVME, reached, disk))
    return FetchPlan(device, max(reached, disk), tuple(spans), _UNDECIDED)
