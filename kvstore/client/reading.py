"""Reading: lookup, report, release. Each operation once, as a generator (effects.py)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import astuple, dataclass

import numpy as np
from numpy.typing import NDArray

from kvstore.client.core import TIERS, Attachment, Core, Grant, ask, u32_bytes
from kvstore.client.effects import Op
from kvstore.client.writing import demote
from kvstore.errors import BadRequest, KVStoreError, LimitExceeded
from kvstore.intent import Intent
from kvstore.keys import KeyChain, probe_positions
from kvstore.rpc.messages import NO_INTENT, Done, Extend, Found, Lookup, Release, Released, Report
from kvstore.types import Busy, Choice, FetchPlan, Hit, LookupResult, Miss, Span, Tier

__all__ = ["lookup", "release", "report"]

U32 = NDArray[np.uint32]
# Two trips decide every chain up to keys_max; a third can only follow when keys_max cut the second short.
_TRIPS_MAX = 3
# The daemon reads every block that is reported: it is asked in bites, so that others get their turn.
_REPORT_MAX = 64
# Where blocks can be copied from, or are already.
_HERE = (Tier.GPU, Tier.HOST)
_CHOICES = frozenset(choice.value for choice in Choice)


def lookup(core: Core, chain: KeyChain, blocks: int | None, intent: Intent | None = None) -> Op[LookupResult]:
    """How much of the first `blocks` of `chain` is known? One trip, two if the answer leaves a gap."""
    n = len(chain) if blocks is None else blocks
    if not 0 <= n <= len(chain):
        raise BadRequest(f"blocks: need 0 to {len(chain)}, got {n}")
    core.counters.lookups += 1
    attachment = core.attachment
    if attachment is None:
        return _miss(core, "detached", "no daemon is attached")
    if n == 0:
        return _miss(core, "unknown", "the chain has no full block")
    deadline, asked_s = core.call_deadline(), core.setup.clock.now()
    lease = 0
    try:
        trip = _Trip(0, n, n, probe_positions(n))
        for _ in range(_TRIPS_MAX):
            found = yield from _ask(core, attachment, chain, trip, intent, deadline)
            lease = found.lease
            # What an earlier trip found unknown stays unknown: the gap only shrinks.
            gap_stop = min(found.gap_stop, trip.gap_stop)
            # Blocks beyond a hollow node (known > blocks) cannot lengthen the match.
            if found.busy or gap_stop <= found.known or found.known > found.blocks:
                break
            trip = _Trip(lease, n, gap_stop, np.arange(found.known, gap_stop, dtype=np.uint32))
        if found.busy:
            core.counters.busy += 1
            yield from _give_back(core, attachment, lease, deadline)
            return Busy(found.busy)
        if found.blocks and chain.digest(found.blocks) != found.digest:
            core.counters.digest_mismatches += 1
            yield from _give_back(core, attachment, lease, deadline)
            return _miss(core, "digest", "the daemon walked another chain than ours")
        if not found.blocks:
            yield from _give_back(core, attachment, lease, deadline)
            return _miss(core, "unknown", found.reason, found.plan)
        hit = _hit(core, attachment, chain, found, asked_s)
        core.counters.hits += 1
        return hit
    except LimitExceeded as error:
        core.counters.busy += 1
        yield from _give_back(core, attachment, lease, deadline)
        return Busy(str(error))
    except KVStoreError as error:
        yield from _give_back(core, attachment, lease, deadline)
        return _miss(core, "error", str(error))


@dataclass(frozen=True, slots=True)
class _Trip:
    """One question: under which lease (0 = none yet), up to where, and which keys go along."""

    lease: int
    blocks: int
    gap_stop: int
    positions: U32


def _ask(
    core: Core,
    attachment: Attachment,
    chain: KeyChain,
    trip: _Trip,
    intent: Intent | None,
    deadline: float,
) -> Op[Found]:
    """The keys of the first trip, or those of the gap that the one before left."""
    n, positions = trip.blocks, trip.positions
    if positions.size > attachment.keys_max:
        # Keep the first and the last, thin out between them: still ascending, still a probe.
        positions = positions[np.linspace(0, positions.size - 1, attachment.keys_max).astype(np.intp)]
    sent = chain.keys[:n] if positions.size == n else chain.keys.take(positions, 0)
    numbers, keys = u32_bytes(positions), sent.tobytes()
    row = astuple(intent) if intent is not None else NO_INTENT
    message = Extend(trip.lease, numbers, keys) if trip.lease else Lookup(chain.root, n, numbers, keys, row)
    found = yield from ask(core, attachment.link, message, Found, deadline)
    load_start, load_stop = found.load
    if not 0 <= found.blocks <= found.known <= found.gap_stop <= n:
        raise core.broken(attachment.link, f"Found is not 0 <= blocks <= known <= gap_stop <= {n}")
    if not 0 <= found.device <= found.blocks or not 0 <= load_start <= load_stop <= found.blocks:
        raise core.broken(attachment.link, f"Found.device or Found.load is outside its {found.blocks} blocks")
    if (found.blocks > 0) != (found.lease > 0):
        raise core.broken(attachment.link, "Found has a lease without blocks, or blocks without a lease")
    return found


def _hit(core: Core, attachment: Attachment, chain: KeyChain, found: Found, asked_s: float) -> Hit:
    start, stop = found.load
    spans = []
    for tier, span_start, span_stop in found.spans:
        if tier not in TIERS or not 0 <= span_start <= span_stop <= found.blocks:
            raise core.broken(attachment.link, f"span {tier!r:.20} [{span_start}, {span_stop})")
        spans.append(Span(Tier(tier), span_start, span_stop))
    below = [span.start for span in spans if span.tier not in _HERE and start < span.stop > span.start < stop]
    ready = max(start, min(below, default=stop))
    # None at all: HOST is limited, and lets them out as they are fetched.
    slots = core.slots_of(attachment, found.runs, ready - start if found.runs else 0)
    if found.choice not in _CHOICES or not all(0.0 <= seconds < math.inf for seconds in found.lag):
        raise core.broken(attachment.link, f"Found.choice {found.choice!r:.20} or Found.lag {found.lag}")
    plan = FetchPlan(
        start, stop, tuple(spans), found.reason, Choice(found.choice), max(0, found.plan), *found.lag
    )
    lease = core.grant(Grant(found.lease, attachment, chain, start, found.blocks, plan=plan, at_s=asked_s))
    return Hit(lease, found.blocks, found.device, plan, slots)


def _miss(core: Core, cause: str, reason: str, plan: int = 0) -> Miss:
    misses = core.counters.misses
    misses[cause] = misses.get(cause, 0) + 1
    return Miss(reason, max(0, plan))


def _give_back(core: Core, attachment: Attachment, daemon_id: int, deadline: float) -> Op[None]:
    """Release a lease that its caller will never see."""
    if not daemon_id or attachment.link.dead:
        return
    try:
        done = yield from ask(core, attachment.link, Release(daemon_id), Released, deadline)
        yield from demote(core, attachment, done.demote)
    except KVStoreError:
        return  # the connection is over, and its leases with it; or the lease has ended already


def release(core: Core, lease: int) -> Op[None]:
    """End a lease; a no-op for one that is not held, whatever the daemon would make of its number."""
    grant = core.end_lease(lease)
    if grant is not None:
        yield from _give_back(core, grant.attachment, grant.daemon_id, core.call_deadline())


def report(core: Core, lease: int, bad: Iterable[int]) -> Op[bool]:
    """Tell the daemon which blocks of a lease failed their check, each at most once."""
    with core.lock:
        grant = core.leases.get(lease)
        told = core.reported.setdefault(lease, set()) if grant else set()
        news = sorted(set(bad) - told)
        told.update(news)
    if grant is None or not news:
        return False
    link = grant.attachment.link
    deadline = core.call_deadline()
    try:
        for start in range(0, len(news), _REPORT_MAX):
            some = np.array(news[start : start + _REPORT_MAX], np.uint32)
            yield from ask(core, link, Report(grant.daemon_id, u32_bytes(some)), Done, deadline)
    except KVStoreError:
        return False
    return True
