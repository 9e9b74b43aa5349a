"""State of one trust group: its memory, its roots, its engines, and who is asking.

A trust group is one arena and one fault domain. Everything here is owned by the daemon's event loop.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvstore._native import NONE, SlotFormat
from kvstore.clock import Clock
from kvstore.config import Config
from kvstore.errors import BadRequest, LimitExceeded
from kvstore.events import EventKind, EventLog
from kvstore.leases import Lease, Leases, LeaseState
from kvstore.memory import GroupMemory
from kvstore.tiers.gpu import BorrowedPool, OwnedPool
from kvstore.tiers.host import HostTier
from kvstore.tiers.noop import NoTier
from kvstore.transfers import Filling, Fillings
from kvstore.types import BlockLayout, Part, Reuse, Tier

__all__ = ["Caller", "Counters", "Engine", "Group", "Root"]

# A root is made per namespace and tenant at attach; far more than models × tenants on one node.
ROOTS_MAX = 65_536
# Reserve calls of one engine that wait for their publish; each holds at least one slot.
FILLINGS_MAX = 4096


@dataclass(frozen=True, slots=True)
class Root:
    """One chain origin: a namespace under a tenant's (or a group's) salt."""

    key: bytes
    tenant: str
    reuse: Reuse
    node: int


@dataclass(slots=True)
class Engine:
    """One inference engine and its processes.

    Attributes:
        id: 16 bytes.
        device: its device pool.
        pool_session: session that declared the pool (the pool dies with it).
        sessions: open sessions.
        writers: sessions whose process may be writing to a slot: it was there when slots were reserved, and
            is neither quiesced nor known to be gone since.
    """

    id: bytes
    device: OwnedPool | BorrowedPool | NoTier = field(default_factory=lambda: NoTier(Tier.GPU))
    pool_session: int = 0
    sessions: set[int] = field(default_factory=set)
    writers: set[int] = field(default_factory=set)


@dataclass(slots=True)
class Caller:
    """Who is asking: one attached session.

    Attributes:
        session: number.
        engine: the engine it belongs to.
        layout, shape: the block, and its form in a slot.
        part: cells that this process holds.
        roots: keys of the roots it may use.
        heard_s: when it last sent something.
    """

    session: int
    group: Group
    engine: Engine
    layout: BlockLayout
    shape: SlotFormat
    part: Part
    roots: frozenset[bytes]
    heard_s: float


@dataclass(slots=True)
class Counters:
    """Totals since start, in blocks unless the name says otherwise."""

    lookups: int = 0
    lookup_blocks: int = 0
    hit_blocks: int = 0
    hit_blocks_by_tier: dict[str, int] = field(default_factory=lambda: {Tier.GPU: 0, Tier.HOST: 0})
    saved_blocks: int = 0
    refused_saves: int = 0
    revoked_leases: int = 0
    demoted_blocks: int = 0
    lost_on_demote: int = 0


class Group:
    """One trust group."""

    def __init__(self, name: str, memory: GroupMemory, config: Config, clock: Clock, epoch: bytes) -> None:
        self.name = name
        self.arena = memory.arena
        self.index = memory.index
        self.huge = memory.huge
        self.host = HostTier(memory)
        self.leases = Leases(memory.index, config.daemon.leases_max)
        self.fillings = Fillings()
        self.events = EventLog(epoch, config.events.log_max)
        self.engines: dict[bytes, Engine] = {}
        self.callers: dict[int, Caller] = {}
        self.roots: dict[bytes, Root] = {}
        self.counters = Counters()
        self.config = config
        self.clock = clock

    def add_root(self, key: bytes, tenant: str, reuse: Reuse) -> Root:
        """The root for `key`, made on first use.

        Raises:
            LimitExceeded: too many namespaces × tenants.
        """
        root = self.roots.get(key)
        if root is None:
            if len(self.roots) >= ROOTS_MAX:
                raise LimitExceeded(
                    f"roots_max = {ROOTS_MAX} namespaces × tenants are known; restart the daemon"
                )
            root = self.roots[key] = Root(key, tenant, reuse, self.index.root(key))
        return root

    def root_of(self, caller: Caller, key: bytes) -> Root:
        """The root that a caller names.

        Raises:
            BadRequest: not one that was given to this session at attach.
        """
        if key not in caller.roots:
            raise BadRequest("root: not one of the roots given to this session at attach")
        return self.roots[key]

    def record_changes(self, engine: Engine | None = None) -> None:
        """Move what the native pools report into the event log."""
        self.events.append(EventKind.REMOVED, Tier.HOST, self.host.take_removed())
        if engine is not None:
            device = engine.device
            self.events.append(EventKind.STORED, Tier.GPU, device.take_stored(), engine=engine.id)
            self.events.append(EventKind.REMOVED, Tier.GPU, device.take_removed(), engine=engine.id)

    def check_room_for_filling(self, caller: Caller) -> None:
        """Raises LimitExceeded when the engine has FILLINGS_MAX fillings open."""
        if self.fillings.count(caller.engine.id) >= FILLINGS_MAX:
            raise LimitExceeded(f"fillings_max = {FILLINGS_MAX}: publish or abort some before reserving more")

    def begin_filling(self, caller: Caller, nodes: NDArray[np.uint32], slots: NDArray[np.uint32]) -> Filling:
        """Record slots that were reserved for this caller's engine: every process of it may write now."""
        caller.engine.writers |= caller.engine.sessions
        return self.fillings.begin(caller.engine.id, caller.session, caller.shape, nodes, slots)

    def end_filling(self, filling: Filling) -> None:
        """A filling was published or aborted: whatever waited for its copy goes on."""
        self.fillings.end(filling)
        engine = self.engines.get(filling.engine)
        if engine is not None and isinstance(engine.device, OwnedPool):
            if len(filling.drain):
                engine.device.drained(filling.drain)
            if len(filling.copied):
                engine.device.unpin(filling.copied)

    def abort_fillings(self, engine: Engine) -> int:
        """Free what the engine was filling; only when nothing of it can write any more."""
        fillings = self.fillings.of_engine(engine.id)
        for filling in fillings:
            self.host.abort(filling.nodes, filling.slots)
            self.end_filling(filling)
        return len(fillings)

    def end_lease(self, lease: Lease, state: LeaseState = LeaseState.RELEASED) -> None:
        """Unpin a lease's node and its block table."""
        table, lease.table = lease.table, np.empty(0, np.uint32)
        caller = self.callers.get(lease.session)
        if len(table) and caller is not None and isinstance(caller.engine.device, OwnedPool):
            caller.engine.device.unpin(table)
        if state is LeaseState.RELEASED:
            self._count_hits(lease)
        self.leases.end(lease, state)

    def _count_hits(self, lease: Lease) -> None:
        by_tier = self.counters.hit_blocks_by_tier
        by_tier[Tier.GPU] += lease.device
        by_tier[Tier.HOST] += max(0, lease.host - lease.device)
        self.counters.hit_blocks += max(lease.device, lease.host)

    def revoke_stale(self) -> int:
        """Take the pins of sessions that have been silent too long; called under memory pressure only."""
        now, limit = self.clock.now(), self.config.daemon.stale_after_s
        revoked = 0
        for caller in self.callers.values():
            if now - caller.heard_s <= limit:
                continue
            for lease in self.leases.of(caller.session):
                if not len(lease.table):  # a block table is the engine's own memory, not ours to take
                    self.end_lease(lease, LeaseState.REVOKED)
                    revoked += 1
        self.counters.revoked_leases += revoked
        return revoked

    def check(self) -> None:
        """Every conservation law of the group.

        Raises:
            RuntimeError: names the first that is broken.
        """
        self.index.check()
        self.host.check()
        for engine in self.engines.values():
            engine.device.check()
        if self.index.pins() != self.leases.pins():
            raise RuntimeError(f"{self.index.pins()} pins in the index, {self.leases.pins()} held by leases")
        filling = self.host.counts()["filling"]
        if filling != self.fillings.slots():
            raise RuntimeError(f"{filling} slots are FILLING, {self.fillings.slots()} belong to fillings")
        if any(lease.pinned == NONE and len(lease.nodes) for lease in self.leases):
            raise RuntimeError("a lease on blocks pins nothing")
