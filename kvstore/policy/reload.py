"""Reload or recompute: what to load of a match.

This version does not decide yet: it loads everything that is known and says so. The decision needs measured
rates per tier and a measured prefill curve; until both exist, a number here would be invented.
"""

from __future__ import annotations

from kvstore.types import FetchPlan, Span, Tier

__all__ = ["plan"]

_UNDECIDED = "loads every known block: this version does not compare with recompute yet"


def plan(device: int, host: int) -> FetchPlan:
    """Plan for a match whose first `device` blocks are on the engine's device and first `host` on HOST.

    Args:
        device: leading blocks in the engine's own pool.
        host: leading blocks readable in the arena.

    Returns:
        A plan that loads `[device, host)`; its reason says that nothing was decided.
    """
    spans = []
    if device:
        spans.append(Span(Tier.GPU, 0, device))
    if host > device:
        spans.append(Span(Tier.HOST, device, host))
    return FetchPlan(device, max(device, host), tuple(spans), _UNDECIDED)
