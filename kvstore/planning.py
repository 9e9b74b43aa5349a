"""From a match to its plan: what is known of the ways to have its KV, put before the policy, and remembered.

    held      leading blocks by tier           the pools
    ways      latency, bandwidth, queue, trust kvstore/pricing.py, and what is under way at the disk
    prefill   seconds to compute               the curve of the caller's namespace, with the load it tells
    ─→ kvstore/policy/reload.py ─→ a plan, an entry in kvstore/decisions.py, and terms for the lag rule

`plan.mode` other than "decide" fixes the choice; predictions are made and remembered all the same.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.callers import Caller
from kvstore.decisions import Asked
from kvstore.group import Group
from kvstore.intent import Intent
from kvstore.policy.planned import Planned
from kvstore.policy.prefill import Load, PrefillCurve
from kvstore.policy.reload import Decision, decide, fixed
from kvstore.policy.ways import Prefill, ReloadQuestion, Terms, Way
from kvstore.pricing import Source
from kvstore.tiers.nvme import NvmeTier
from kvstore.types import BlockLayout, Choice, Namespace, Span, Tier

__all__ = ["Held", "decided", "plan", "question"]

_HOST, _NVME = Source(Tier.HOST), Source(Tier.NVME)
_FIXED = {"load": Choice.LOAD, "recompute": Choice.RECOMPUTE}


@dataclass(frozen=True, slots=True)
class Held:
    """A match by where its leading blocks are.

    Attributes:
        device: in the engine's own pool.
        host: readable in the arena.
        disk: in the arena or on NVME.
    """

    device: int = 0
    host: int = 0
    disk: int = 0

    @property
    def above(self) -> int:
        """Leading blocks that need no disk."""
        return max(self.device, self.host)

    def by_tier(self) -> tuple[tuple[Tier, int], ...]:
        """Blocks by the tier that they would come from."""
        return (
            (Tier.GPU, self.device),
            (Tier.HOST, max(0, self.host - self.device)),
            (Tier.NVME, max(0, self.disk - self.above)),
        )


def plan(caller: Caller, intent: Intent, blocks: int, held: Held, lease: int, tenant: str) -> Planned:
    """Decide for a match, and remember it. Some 0.3 ms where there is something to compare.

    Args:
        blocks: that were asked about.
        held: what was found of them.
        lease: id of the lease on the match, 0 = none.
        tenant: whose request it is.
    """
    group = caller.group
    asked = question(group, caller.engine.namespace, caller.layout, intent, blocks, held)
    mode = intent.mode or group.config.plan.mode
    decision = decided(asked, mode)
    at_s = group.clock.now()
    entry = Asked(
        at_s,
        lease,
        tenant,
        caller.engine.namespace.model,
        asked.prompt_tokens,
        held.by_tier(),
        intent.request,
        caller.engine.id,
    )
    terms = Terms(asked) if mode not in _FIXED and decision.load_stop > decision.load_start else None
    return Planned(group.decisions.planned(entry, decision), at_s, decision, terms)


def decided(asked: ReloadQuestion, mode: str) -> Decision:
    """What the policy answers in a mode of `plan.mode`."""
    choice = _FIXED.get(mode)
    return decide(asked) if choice is None else fixed(asked, choice)


def question(
    group: Group, namespace: Namespace, layout: BlockLayout, intent: Intent, blocks: int, held: Held
) -> ReloadQuestion:
    """What the policy is asked about a match: see `plan`."""
    size_tokens, size_bytes = layout.block_tokens, layout.block_bytes
    return ReloadQuestion(
        max(intent.prompt_tokens, size_tokens * max(blocks, held.above, held.disk)),
        size_tokens,
        size_bytes,
        held.device,
        _ways(group, held, size_bytes),
        _prefill(group, namespace, intent),
        intent.queued_s,
        intent.can_split,
    )


def _ways(group: Group, held: Held, size_bytes: int) -> tuple[Way, ...]:
    above = held.above
    if max(held.host, held.disk) <= held.device:
        return ()
    rates, ways = group.pricing.rates, []
    size = (max(above, held.disk) - held.device) * size_bytes
    speed = rates.hopeful(_HOST, size, group.clock.now())  # nobody probes HOST
    ways.append(Way(Span(Tier.HOST, held.device, above), speed.latency_s, speed.bytes_per_s))
    if held.disk > above and isinstance(group.nvme, NvmeTier):
        size = (held.disk - above) * size_bytes
        ahead = group.nvme.ahead_bytes(size)
        speed = rates.speed(_NVME, size + ahead)
        queued_s = ahead / speed.bytes_per_s
        doubt = group.pricing.trust(_NVME).doubt
        span = Span(Tier.NVME, above, held.disk)
        ways.append(Way(span, speed.latency_s, speed.bytes_per_s, queued_s, doubt))
    return tuple(ways)


def _prefill(group: Group, namespace: Namespace, intent: Intent) -> Prefill:
    curve = group.pricing.curves.of(namespace.digest.hex())
    load = Load(intent.decodes, intent.decode_context, intent.chunk_tokens)
    return _unknown if curve is None else _Loaded(curve, load)


def _unknown(_start: int, _stop: int, /) -> None:
    """No step of this namespace was ever seen."""


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A curve, with the load of now."""

    curve: PrefillCurve
    load: Load

    def __call__(self, start: int, stop: int, /) -> float | None:
        return self.curve.seconds(start, stop, self.load)
