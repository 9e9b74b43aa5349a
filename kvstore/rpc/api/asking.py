"""Lookup and Plan: how much of a chain is known, with a lease or without any effect."""

from __future__ import annotations

import numpy as np

from kvstore.errors import BadRequest
from kvstore.keys import probe_positions
from kvstore.policy import reload
from kvstore.rpc.api.chains import Asked
from kvstore.rpc.api.holding import Held
from kvstore.types import FetchPlan, Tier
from kvstore.v1 import store_pb2 as pb

__all__ = ["TIERS", "found", "missed", "planned"]

TIERS = {
    Tier.GPU: pb.TIER_GPU,
    Tier.HOST: pb.TIER_HOST,
    Tier.NVME: pb.TIER_NVME,
    Tier.PEER: pb.TIER_PEER,
    Tier.REMOTE: pb.TIER_REMOTE,
}


def found(epoch: bytes, asked: Asked, held: Held, lease_s: float) -> pb.LookupResponse:
    """Answer to a lookup that found something."""
    return pb.LookupResponse(
        epoch=epoch,
        lease=held.id,
        lease_s=lease_s,
        asked_blocks=len(asked),
        blocks=len(held.lease.nodes),
        block_bytes=asked.layout.block_bytes,
        plan=_plan(held.match.plan),
        root=asked.root,
    )


def missed(epoch: bytes, asked: Asked) -> pb.LookupResponse:
    """Answer to a lookup that found nothing."""
    return pb.LookupResponse(
        epoch=epoch,
        asked_blocks=len(asked),
        block_bytes=asked.layout.block_bytes,
        plan=_plan(FetchPlan(0, 0, (), _why(asked))),
        root=asked.root,
    )


def planned(epoch: bytes, asked: Asked) -> pb.PlanResponse:
    """Answer to a plan: walks the index and changes nothing at all."""
    blocks = _match(asked)
    plan = reload.plan(0, blocks) if blocks else FetchPlan(0, 0, (), _why(asked))
    return pb.PlanResponse(
        epoch=epoch,
        asked_blocks=len(asked),
        blocks=blocks,
        block_bytes=asked.layout.block_bytes,
        plan=_plan(plan),
        root=asked.root,
    )


def _match(asked: Asked) -> int:
    """Leading blocks that are readable on HOST.

    Raises:
        BadRequest: keys that are not one chain, or contradict what is known.
    """
    index, keys, blocks = asked.group.index, asked.chain.keys, len(asked)
    if not asked.root_is_known():
        return 0
    positions = probe_positions(blocks)
    try:
        walk = index.walk(asked.root, blocks, positions, keys[positions])
        if walk.depth and walk.gap_stop > walk.depth:
            gap = np.arange(walk.depth, walk.gap_stop, dtype=np.uint32)
            deeper = index.walk(asked.root, blocks, gap, keys[gap])
            walk = deeper if deeper.depth > walk.depth else walk
    except ValueError as error:
        raise BadRequest(f"keys: {error}") from None
    length = asked.group.host.match(walk)
    if index.digest(walk, length) != asked.chain.digest(length):
        raise BadRequest("keys.packed: not the keys of one chain in their order")
    return length


def _why(asked: Asked) -> str:
    if asked.origin is None:
        return f"tenant {asked.tenant} reuses nothing"
    return "nothing of this prompt is known" if len(asked) else "the prompt is shorter than one block"


def _plan(plan: FetchPlan) -> pb.LoadPlan:
    spans = [pb.Span(tier=TIERS[s.tier], start=s.start, stop=s.stop) for s in plan.spans]
    return pb.LoadPlan(load_start=plan.load_start, load_stop=plan.load_stop, spans=spans, reason=plan.reason)
