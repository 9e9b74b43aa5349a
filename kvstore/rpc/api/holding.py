"""Leases of callers that have no session: each lives `grpc.lease_s` from its last use.

A lease is one caller of the store of its own. Its id on the wire is 16 random bytes, so that nobody guesses
another's. Memory pressure takes it like any other lease whose owner has been silent for
`daemon.stale_after_s` (LAWS B8); a Fetch that also names its chain then looks up anew.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from kvstore.callers import Caller, Engine
from kvstore.config import GrpcConfig
from kvstore.errors import BadRequest, LimitExceeded, NotFound
from kvstore.intent import Intent
from kvstore.keys import probe_positions
from kvstore.leases import Lease, LeaseState
from kvstore.rpc.api.chains import Asked
from kvstore.store import Match, Store
from kvstore.types import BlockLayout, Choice, Part

__all__ = ["Held", "Holdings", "may_ask", "new_caller"]

LEASE_BYTES = 16
# Numbers of callers without a socket; sessions of engines count up from 1.
_numbers = itertools.count(1 << 48)


def new_caller(store: Store, asked: Asked) -> Caller:
    """A caller of its own for one lease or one save; not yet known to its group."""
    engine = Engine(os.urandom(16), asked.layout, asked.namespace)
    whole, now = Part.whole(asked.layout), store.clock.now()
    return Caller(
        session=next(_numbers),
        group=asked.group,
        engine=engine,
        layout=asked.layout,
        shape=asked.shape,
        part=whole,
        roots=frozenset({asked.root}),
        heard_s=now,
        tenants=(asked.tenant,),
    )


def may_ask(asked: Asked) -> None:
    """A question that needs no lease counts against the tenant's rate, too.

    Raises:
        LimitExceeded: it asks too often.
    """
    if enough := asked.group.quotas.lookup(asked.tenant, 0):
        raise LimitExceeded(enough)


@dataclass(slots=True)
class Held:
    """One granted lease.

    Attributes:
        id: 16 bytes, its name on the wire.
        tenant: who asked.
        caller: who holds it for the store.
        lease, match: what was granted.
        expires_s: when it ends unless it is used.
        streams: Fetch streams that use it now; it does not expire under them.
        sent: leading blocks whose bytes left whole: what counts as a hit.
    """

    id: bytes
    tenant: str
    caller: Caller
    lease: Lease
    match: Match
    expires_s: float
    streams: int = 0
    sent: int = 0

    @property
    def predicted_s(self) -> Mapping[Choice, float | None]:
        """Of its plan."""
        planned = self.lease.planned
        return planned.decision.predicted_s if planned is not None else {}

    @property
    def layout(self) -> BlockLayout:
        """Of its blocks."""
        return self.caller.layout


class Holdings:
    """All leases of one gRPC server."""

    def __init__(self, store: Store, limits: GrpcConfig) -> None:
        self._store = store
        self._limits = limits
        self._held: OrderedDict[bytes, Held] = OrderedDict()  # by last use, the oldest first
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._held)

    # ---- life --------------------------------------------------------------------------------------------

    def grant(self, asked: Asked, intent: Intent = Intent()) -> Held | None:  # noqa: B008 never changes
        """Look up and hold the longest known prefix; None when nothing is known.

        Raises:
            BadRequest: keys that are not one chain, or contradict what is known.
            LimitExceeded: grpc.leases_max are held, or the tenant asks too often or holds too much.
        """
        self.sweep()
        if not asked.root_is_known():
            # A miss needs no root, and makes none; it counts like any other.
            asked.group.count_lookup(asked.tenant, len(asked), asked.layout)
            may_ask(asked)
            return None
        if len(self._held) >= self._limits.leases_max:
            raise LimitExceeded(f"lease: grpc.leases_max = {self._limits.leases_max} are held; release some")
        caller = new_caller(self._store, asked)
        asked.group.callers[caller.session] = caller  # silent callers' leases are found there under pressure
        match = None
        try:
            match = self._look_up(caller, asked, intent)
        finally:
            if match is None or match.lease is None:
                self._leave(caller)
        if match.refused:
            raise LimitExceeded(match.refused)
        if match.lease is None:
            return None
        held = Held(os.urandom(LEASE_BYTES), asked.tenant, caller, match.lease, match, 0.0)
        self._held[held.id] = held
        self.renew(held)
        self._watch()
        return held

    def _look_up(self, caller: Caller, asked: Asked, intent: Intent) -> Match:
        """Both trips of a lookup (LAWS C13), then the proof that it is this chain that was found."""
        keys, blocks = asked.chain.keys, len(asked)
        positions = probe_positions(blocks)
        match = self._store.lookup(caller, asked.root, blocks, positions, keys[positions], intent)
        if match.lease is None:
            return match
        if match.gap_stop > match.known:
            gap = np.arange(match.known, match.gap_stop, dtype=np.uint32)
            match = self._store.extend(caller, match.lease.id, gap, keys[gap])
        assert match.lease is not None, "an extended lease stays"
        if match.digest != asked.chain.digest(len(match.lease.nodes)):
            raise BadRequest("keys.packed: not the keys of one chain in their order")
        return match

    def find(self, lease_id: bytes, may: Callable[[str], None]) -> Held:
        """The lease with this id, renewed.

        Args:
            may: asked first, with the tenant that holds it; raises for a stranger, who keeps nothing alive.

        Raises:
            NotFound: never granted, released, expired, or taken under memory pressure.
        """
        self.sweep()
        held = self._held.get(lease_id)
        if held is not None and not self.lives(held):
            self.end(held)
            held = None
        if held is None:
            raise NotFound("lease: not held (released, expired, or never granted); look up again")
        may(held.tenant)
        self.renew(held)
        return held

    def knows(self, lease_id: bytes) -> bool:
        """Whether find() would."""
        self.sweep()
        held = self._held.get(lease_id)
        return held is not None and self.lives(held)

    def lives(self, held: Held) -> bool:
        """Whether the store still keeps it."""
        return held.id in self._held and any(
            lease is held.lease for lease in held.caller.group.leases.of(held.caller.session)
        )

    def renew(self, held: Held) -> None:
        """It was used now."""
        if held.id in self._held:
            now = self._store.clock.now()
            held.expires_s, held.caller.heard_s = now + self._limits.lease_s, now
            self._held.move_to_end(held.id)

    def end(self, held: Held) -> None:
        """Unpin. What was not sent does not count as a hit."""
        if self._held.pop(held.id, None) is not None:
            self._leave(held.caller, held.sent)

    def _leave(self, caller: Caller, sent: int = 0) -> None:
        for lease in caller.group.leases.of(caller.session):
            lease.host = min(lease.host, sent)
            caller.group.end_lease(lease, LeaseState.RELEASED)
        caller.group.callers.pop(caller.session, None)

    # ---- expiry ------------------------------------------------------------------------------------------

    def sweep(self) -> int:
        """End what has expired; how many that were."""
        now, ended = self._store.clock.now(), 0
        for held in tuple(itertools.takewhile(lambda h: h.expires_s <= now, self._held.values())):
            if held.streams:
                self.renew(held)  # its stream has a limit of its own, grpc.stall_s
            else:
                self.end(held)
                ended += 1
        return ended

    def _watch(self) -> None:
        """Wake up for the next expiry, as long as anything is held."""
        if self._timer is None and self._held:
            self._timer = asyncio.get_running_loop().call_later(self._limits.lease_s / 4, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self.sweep()
        self._watch()

    def close(self) -> None:
        """End every lease."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for held in tuple(self._held.values()):
            self.end(held)
