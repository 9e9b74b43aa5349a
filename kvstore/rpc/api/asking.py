"""Lookup and Plan: how much of a chain is known, with a lease or without any effect."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from kvstore import planning
from kvstore.errors import BadRequest
from kvstore.intent import Intent
from kvstore.keys import probe_positions
from kvstore.rpc.api.chains import Asked
from kvstore.rpc.api.holding import Held
from kvstore.types import Choice, FetchPlan, Tier
from kvstore.v1 import store_pb2 as pb

__all__ = ["TIERS", "found", "intent_of", "missed", "planned"]

TIERS = {
    Tier.GPU: pb.TIER_GPU,
    Tier.HOST: pb.TIER_HOST,
    Tier.NVME: pb.TIER_NVME,
    Tier.PEER: pb.TIER_PEER,
    Tier.REMOTE: pb.TIER_REMOTE,
}
_CHOICES = {
    Choice.RECOMPUTE: pb.CHOICE_RECOMPUTE,
    Choice.LOAD: pb.CHOICE_LOAD,
    Choice.SPLIT: pb.CHOICE_SPLIT,
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
        plan=_plan(held.match.plan, held.predicted_s),
        root=asked.root,
    )


def missed(epoch: bytes, asked: Asked) -> pb.LookupResponse:
    """Answer to a lookup that found nothing."""
    return pb.LookupResponse(
        epoch=epoch,
        asked_blocks=len(asked),
        block_bytes=asked.layout.block_bytes,
        plan=_plan(FetchPlan(0, 0, (), _why(asked), Choice.RECOMPUTE), {}),
        root=asked.root,
    )


def planned(epoch: bytes, asked: Asked, intent: Intent) -> pb.PlanResponse:
    """Answer to a plan: walks the index and changes nothing at all."""
    held = _match(asked)
    blocks = max(held.host, held.disk)
    question = planning.question(asked.group, asked.namespace, asked.layout, intent, len(asked), held)
    made = planning.decided(question, asked.group.config.plan.mode)
    plan = FetchPlan(
        made.load_start, made.load_stop, made.spans, made.reason if blocks else _why(asked), made.choice
    )
    return pb.PlanResponse(
        epoch=epoch,
        asked_blocks=len(asked),
        blocks=blocks,
        block_bytes=asked.layout.block_bytes,
        plan=_plan(plan, made.predicted_s),
        root=asked.root,
    )


def _match(asked: Asked) -> planning.Held:
    """Leading blocks that are readable on HOST, and there or on NVME.

    Raises:
        BadRequest: keys that are not one chain, or contradict what is known.
    """
    index, keys, blocks = asked.group.index, asked.chain.keys, len(asked)
    if not asked.root_is_known():
        return planning.Held()
    positions = probe_positions(blocks)
    try:
        walk = index.walk(asked.root, blocks, positions, keys[positions])
        if walk.depth and walk.gap_stop > walk.depth:
            gap = np.arange(walk.depth, walk.gap_stop, dtype=np.uint32)
            deeper = index.walk(asked.root, blocks, gap, keys[gap])
            walk = deeper if deeper.depth > walk.depth else walk
    except ValueError as error:
        raise BadRequest(f"keys: {error}") from None
    held = planning.Held(0, asked.group.host.match(walk), asked.group.nvme.match(walk))
    length = max(held.host, held.disk)
    if index.digest(walk, length) != asked.chain.digest(length):
        raise BadRequest("keys.packed: not the keys of one chain in their order")
    return held


def intent_of(message: pb.Intent) -> Intent:
    """Raises BadRequest: names the field."""
    return Intent(
        message.prompt_tokens,
        message.request,
        message.queued_s,
        message.can_split,
        message.decodes,
        message.decode_context,
        message.chunk_tokens,
    )


def _why(asked: Asked) -> str:
    if asked.origin is None:
        return f"tenant {asked.tenant} reuses nothing"
    return "nothing of this prompt is known" if len(asked) else "the prompt is shorter than one block"


def _plan(plan: FetchPlan, predicted_s: Mapping[Choice, float | None]) -> pb.LoadPlan:
    return pb.LoadPlan(
        load_start=plan.load_start,
        load_stop=plan.load_stop,
        spans=[pb.Span(tier=TIERS[s.tier], start=s.start, stop=s.stop) for s in plan.spans],
        reason=plan.reason,
        choice=_CHOICES[plan.choice],
        predictions=[
            pb.Prediction(choice=_CHOICES[choice], seconds=seconds)
            for choice, seconds in predicted_s.items()
            if seconds is not None
        ],
    )
