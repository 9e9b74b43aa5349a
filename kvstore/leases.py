"""Leases: who may rely on which blocks, and until when.

    GRANTED → FETCHING → DONE | RELEASED | ABANDONED | REVOKED

A lease has no timer of its own: it lives while its session's heartbeat does (LAWS B8). It pins one node,
the deepest of its match, which keeps the whole prefix because leaves leave first. Ids are opaque and never
reused.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvstore._native import NONE, Index
from kvstore.errors import LimitExceeded, NotFound
from kvstore.intent import Intent
from kvstore.policy.planned import Planned

__all__ = ["Lease", "LeaseState", "Leases", "Tail"]

_NO_TABLE: NDArray[np.uint32] = np.empty(0, np.uint32)


class LeaseState(enum.Enum):
    """Where a lease is in its life."""

    GRANTED = "granted"
    FETCHING = "fetching"
    DONE = "done"
    RELEASED = "released"
    ABANDONED = "abandoned"
    REVOKED = "revoked"


# Every allowed move; anything else is a bug (tests try all pairs).
_MOVES = frozenset(
    {
        (LeaseState.GRANTED, LeaseState.FETCHING),
        (LeaseState.GRANTED, LeaseState.RELEASED),
        (LeaseState.GRANTED, LeaseState.REVOKED),
        (LeaseState.FETCHING, LeaseState.DONE),
        (LeaseState.FETCHING, LeaseState.ABANDONED),
        (LeaseState.FETCHING, LeaseState.REVOKED),
        (LeaseState.FETCHING, LeaseState.RELEASED),
        (LeaseState.DONE, LeaseState.RELEASED),
        (LeaseState.DONE, LeaseState.FETCHING),
        (LeaseState.DONE, LeaseState.REVOKED),
        (LeaseState.ABANDONED, LeaseState.RELEASED),
        (LeaseState.ABANDONED, LeaseState.REVOKED),
    }
)


@dataclass(slots=True)
class Tail:
    """Blocks of a match that were loaded from their end downwards, while those before them were computed.

    Attributes:
        start, stop: [start, stop) can be copied, and is, as far as its engine does not say otherwise.
        lowest: first block that was asked for; what lies before it counts as ever.
        host: leading blocks of the match that were on HOST when it began.
    """

    start: int
    stop: int
    lowest: int
    host: int

    def used_from(self, start: int) -> None:
        """What lies before `start` is not used after all."""
        self.start = min(max(self.start, start), self.stop)

    @property
    def on_host(self) -> int:
        """Those of [start, stop) that needed no other tier."""
        return max(0, min(self.host, self.stop) - self.start)


@dataclass(slots=True)
class Lease:
    """One granted prefix, and the block table that grew from it.

    Attributes:
        id: opaque.
        session: number of the session that owns it.
        payer: tenant that it counts for, "" = nobody's.
        root: key of the chain's root, b"" for a table without reuse.
        blocks_max: length of the chain that was asked about.
        nodes: (length,) index nodes of the match, in chain order.
        pinned: node that this lease pins, or NONE.
        table: device blocks of the request, in order (owned pools).
        device, host: leading blocks of the match on the device and on HOST, for accounting at its end.
        disk: leading blocks that were on HOST or NVME when it was granted.
        brought: [start, stop) of the match that a fetch brought from NVME; part of `host` since then.
        tail: what was loaded from its end down, None = nothing was asked for in that order.
        state: life cycle.
        tenant, block_tokens: whose hit it will be, in tokens.
        intent: what its engine told of the request.
        planned: what was decided for it, once its match is final.
        wanted: blocks before this one were fetched, or asked for, whatever the plan said.
        short, lagged_s: why the last fetch brought less than was asked for, and after how many seconds the
            lag rule gave it up; "" and None = neither happened.
    """

    id: int
    session: int
    root: bytes
    blocks_max: int
    nodes: NDArray[np.uint32]
    pinned: int = NONE
    table: NDArray[np.uint32] = field(default_factory=lambda: _NO_TABLE)
    device: int = 0
    host: int = 0
    disk: int = 0
    brought: tuple[int, int] = (0, 0)
    tail: Tail | None = None
    state: LeaseState = LeaseState.GRANTED
    tenant: str = ""
    block_tokens: int = 0
    intent: Intent = field(default_factory=Intent)
    planned: Planned | None = None
    wanted: int = 0
    payer: str = ""
    short: str = ""
    lagged_s: float | None = None

    def move(self, to: LeaseState) -> None:
        """Change state.

        Raises:
            RuntimeError: the life cycle does not allow it (a bug of ours).
        """
        if (self.state, to) not in _MOVES:
            raise RuntimeError(f"lease {self.id}: {self.state.value} → {to.value} is not a move")
        self.state = to


class Leases:
    """All leases of one trust group. Every pin of an index that is not a filling's is counted here."""

    def __init__(self, index: Index, per_session_max: int) -> None:
        self._index = index
        self.per_session_max = per_session_max
        self._by_id: dict[int, Lease] = {}
        self._by_session: dict[int, dict[int, Lease]] = {}
        self._of: Counter[str] = Counter()
        self._last_id = 0
        self._pins = 0

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._by_id.values())

    def pins(self) -> int:
        """Pins held in the index by leases."""
        return self._pins

    def check(self, session: int) -> None:
        """The laws of one session's leases: at most `daemon.leases_max`, so one slice of a check.

        Raises:
            RuntimeError: a lease on blocks pins nothing.
        """
        for lease in self._by_session.get(session, {}).values():
            if lease.pinned == NONE and len(lease.nodes):
                raise RuntimeError(f"lease {lease.id}: on {len(lease.nodes)} blocks, but pins nothing")

    def count_of(self, payer: str) -> int:
        """How many leases count for a tenant."""
        return self._of[payer]

    def grant(
        self, session: int, root: bytes, blocks_max: int, nodes: NDArray[np.uint32], payer: str = ""
    ) -> Lease:
        """Make a lease on `nodes` and pin the deepest.

        Raises:
            LimitExceeded: the session holds `daemon.leases_max` leases.
        """
        mine = self._by_session.setdefault(session, {})
        if len(mine) >= self.per_session_max:
            raise LimitExceeded(f"leases_max = {self.per_session_max} leases are held; release some")
        self._last_id += 1
        lease = Lease(self._last_id, session, root, blocks_max, nodes, payer=payer)
        if payer:
            self._of[payer] += 1
        self._by_id[lease.id] = mine[lease.id] = lease
        if len(nodes):
            self.repin(lease, int(nodes[-1]))
        return lease

    def repin(self, lease: Lease, node: int) -> None:
        """Move a lease's pin to `node` (new pin first, so that nothing in between can leave)."""
        if node != NONE:
            self._index.pin(node)
        if lease.pinned != NONE:
            self._index.unpin(lease.pinned)
        self._pins += (node != NONE) - (lease.pinned != NONE)
        lease.pinned = node

    def get(self, session: int, lease_id: int) -> Lease:
        """The lease, if it is this session's.

        Raises:
            NotFound: unknown, ended, revoked, or another session's.
        """
        lease = self._by_session.get(session, {}).get(lease_id)
        if lease is None:
            raise NotFound(
                f"lease {lease_id}: not held by this session (released, revoked, or never granted)"
            )
        return lease

    def end(self, lease: Lease, state: LeaseState = LeaseState.RELEASED) -> None:
        """Unpin and forget."""
        lease.move(state)
        self.repin(lease, NONE)
        del self._by_id[lease.id]
        if lease.payer:
            self._of[lease.payer] -= 1
            if not self._of[lease.payer]:
                del self._of[lease.payer]
        mine = self._by_session[lease.session]
        del mine[lease.id]
        if not mine:
            del self._by_session[lease.session]

    def newest(self, session: int) -> Lease | None:
        """The session's last lease; None when it has none. O(1), however many there are."""
        mine = self._by_session.get(session)
        return next(reversed(mine.values())) if mine else None

    def of(self, session: int) -> list[Lease]:
        """The leases of one session."""
        return list(self._by_session.get(session, {}).values())
