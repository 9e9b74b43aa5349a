"""Decisions to remember and explain, as `decide` makes them."""

from __future__ import annotations

from kvstore.decisions import Asked
from kvstore.policy.reload import Choice, Decision
from kvstore.types import Span, Tier

__all__ = ["AT_S", "asked", "computed", "loaded"]

AT_S = 5000.0


def asked(lease: int = 12, at_s: float = AT_S, tenant: str = "default", request: str = "") -> Asked:
    blocks = ((Tier.GPU, 0), (Tier.HOST, 20), (Tier.NVME, 76))
    return Asked(at_s, lease, tenant, "SmolLM2-135M", 1536, blocks, request)


def loaded(load_s: float = 0.3123, recompute_s: float | None = 1.7345, blocks: int = 96) -> Decision:
    """Loads all that is known."""
    spans = (Span(Tier.HOST, 0, 20), Span(Tier.NVME, 20, blocks))
    return Decision(
        Choice.LOAD,
        0,
        blocks,
        spans,
        {Choice.RECOMPUTE: recompute_s, Choice.LOAD: load_s, Choice.SPLIT: None},
        0.0,
        load_s,
        recompute_s or 1.0,
        f"loads blocks 0 to {blocks} from HOST and NVME: 312 ms against 1.73 s for computing all",
    )


def computed(doubt: str = "") -> Decision:
    """Loads nothing, although it was predicted to be a little faster."""
    return Decision(
        Choice.RECOMPUTE,
        0,
        0,
        (),
        {Choice.RECOMPUTE: 1.7345, Choice.LOAD: 1.69, Choice.SPLIT: None},
        0.0,
        0.0,
        0.0,
        "computes everything: 1.73 s against 1.69 s for loading from NVME, which saves too little to risk it"
        + doubt,
    )
