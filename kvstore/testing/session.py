"""One session without a socket: calls the store as a daemon would, and moves bytes as an engine would."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from kvstore import _native, block_tables, engines
from kvstore._native import FILLING, NONE
from kvstore.block_tables import Demotion, Table
from kvstore.callers import Caller, Engine
from kvstore.fetching import Fetching
from kvstore.keys import KeyChain, probe_positions
from kvstore.leases import Lease
from kvstore.store import Match, Published, Reservation, Store
from kvstore.testing.slots import slot_fault, write_slot
from kvstore.tiers.gpu import BorrowedPool, OwnedPool
from kvstore.transfers import Filling

__all__ = ["Found", "SessionDriver"]

# Short, so that models of small chains make second trips too.
_WHOLE_MAX = 16


@dataclass(frozen=True, slots=True)
class Found:
    """A match after its second trip, if it needed one.

    Attributes:
        match: the store's last answer.
        blocks: length of the match.
        trips: 1 or 2.
    """

    match: Match
    blocks: int
    trips: int

    @property
    def lease(self) -> Lease:
        """The lease of a hit."""
        assert self.match.lease is not None, "a miss has no lease"
        return self.match.lease


class SessionDriver:
    """What one attached process does.

    Attributes:
        caller: who it is for the store.
        roots: tenant → "own" / "group" → 32 bytes.
    """

    def __init__(
        self,
        store: Store,
        caller: Caller,
        roots: Mapping[str, Mapping[str, bytes]],
        on_closed: Callable[[SessionDriver], None],
    ) -> None:
        self.store = store
        self.caller = caller
        self.roots = roots
        self._on_closed = on_closed
        self.connected = True

    @property
    def engine(self) -> Engine:
        """The engine this process belongs to."""
        return self.caller.engine

    def chain(self, tokens: Iterable[int], *, tenant: str = "", reuse: str = "own") -> KeyChain:
        """Keys of the full blocks of `tokens` under one of this session's roots."""
        root = self.roots[tenant or next(iter(self.roots))][reuse]
        return KeyChain.of(root, np.fromiter(tokens, np.uint32), self.caller.layout.block_tokens)

    def heartbeat(self) -> None:
        """Any message does."""
        self.caller.heard_s = self.store.clock.now()

    # ---- reading -----------------------------------------------------------------------------------------

    def lookup(self, chain: KeyChain) -> Found:
        """Ask as a client does: all keys of a short chain, else √n first and then the gap.

        Raises:
            AssertionError: the store's digest is not that of this chain's keys.
        """
        self.heartbeat()
        positions = probe_positions(len(chain), _WHOLE_MAX)
        match = self.store.lookup(self.caller, chain.root, len(chain), positions, chain.keys[positions])
        trips = 1
        if match.lease is not None and match.gap_stop > match.known:
            gap = np.arange(match.known, match.gap_stop, dtype=np.uint32)
            match = self.store.extend(self.caller, match.lease.id, gap, chain.keys[gap])
            trips = 2
        if match.lease is None:
            return Found(match, 0, trips)
        blocks = len(match.lease.nodes)
        assert match.digest == chain.digest(blocks), "the store walked another chain"
        return Found(match, blocks, trips)

    def faults(self, lease: Lease, chain: KeyChain) -> list[str]:
        """Load every HOST block of a lease and compare; what is wrong, [] when nothing is."""
        packed = self.store.fetch(self.caller, lease.id, 0, lease.host).runs(0, lease.host)
        group, shape = self.caller.group, self.caller.shape
        pages = shape.slot_bytes // _native.PAGE_BYTES
        slots = _native.unpack_slots(packed, lease.host, pages, group.arena.pages).tolist()
        keys = [chain.keys[i].tobytes() for i in range(len(slots))]
        found = [
            slot_fault(group.arena, shape, slot, key) if slot != NONE else "a block without a slot"
            for slot, key in zip(slots, keys, strict=True)
        ]
        return [fault for fault in found if fault]

    def fetch(
        self,
        lease: Lease,
        start: int = 0,
        stop: int | None = None,
        on_progress: Callable[[Fetching], None] = lambda _: None,
    ) -> Fetching:
        """Bring blocks [start, stop) of a match (all of it) to HOST; a disk needs StoreDriver.pump."""
        self.heartbeat()
        last = len(lease.nodes) if stop is None else stop
        return self.store.fetch(self.caller, lease.id, start, last, on_progress)

    def fetch_tail(
        self,
        lease: Lease,
        start: int = 0,
        stop: int | None = None,
        on_progress: Callable[[Fetching], None] = lambda _: None,
    ) -> Fetching:
        """The same from the last block down."""
        self.heartbeat()
        last = len(lease.nodes) if stop is None else stop
        return self.store.fetch_tail(self.caller, lease.id, start, last, on_progress)

    def release(self, lease: Lease) -> tuple[Demotion, ...]:
        """End a lease; orders that an owned pool gives."""
        self.heartbeat()
        return block_tables.release(self.caller, lease.id)

    # ---- writing -----------------------------------------------------------------------------------------

    def reserve(self, chain: KeyChain, start: int = 0, stop: int | None = None) -> Reservation:
        """Slots for blocks [start, stop) of a chain."""
        self.heartbeat()
        return self.store.reserve(self.caller, chain.root, chain.parent(start), chain.keys[start:stop])

    def write(self, filling: Filling) -> None:
        """Copy this process's part of every block of a filling whose slot is still the filling's."""
        group, keys = self.caller.group, self.caller.group.index.keys(filling.nodes)
        slots, generations = filling.slots.tolist(), filling.generations.tolist()
        for key, slot, generation in zip(keys, slots, generations, strict=True):
            control = group.arena.control(slot)
            if (control.generation, control.state) == (generation, FILLING):
                write_slot(group.arena, self.caller.shape, slot, key.tobytes(), self.caller.part)

    def publish(self, filling: Filling, blocks: int | None = None) -> Published:
        """This process's part of the first `blocks` (all) slots is written."""
        self.heartbeat()
        count = len(filling.slots) if blocks is None else blocks
        return self.store.publish(self.caller, filling.token, count, checked=True)

    def save(self, chain: KeyChain, start: int = 0, stop: int | None = None) -> Published:
        """Reserve, write and publish; nothing to write counts as 0 ready."""
        got = self.reserve(chain, start, stop)
        if got.filling is None:
            return Published(0, got.dropped, pending=False)
        self.write(got.filling)
        return self.publish(got.filling)

    def abort(self, filling: Filling) -> None:
        """Give a filling up."""
        self.heartbeat()
        self.store.abort(self.caller, filling.token)

    # ---- the device pool ---------------------------------------------------------------------------------

    def own_pool(self, blocks: int, idle_max: int) -> OwnedPool:
        """Declare a pool that the store runs."""
        group = self.caller.group
        pool = OwnedPool(group.index, group.host.pool, blocks, idle_max)
        engines.set_pool(self.caller, pool)
        return pool

    def lend_pool(self, blocks: int) -> BorrowedPool:
        """Declare a pool that the engine runs."""
        pool = BorrowedPool(self.caller.group.index, blocks)
        engines.set_pool(self.caller, pool)
        return pool

    def acquire(self, lease_id: int, blocks: int) -> Table:
        """Make a lease's block table that long."""
        self.heartbeat()
        return block_tables.acquire(self.caller, lease_id, blocks)

    def commit(self, lease: Lease, chain: KeyChain, start: int, stop: int) -> int:
        """Blocks [start, stop) of the table hold that part of the chain."""
        self.heartbeat()
        return block_tables.commit(
            self.store, self.caller, lease.id, chain.root, start, chain.parent(start), chain.keys[start:stop]
        )

    def adopt(self, chain: KeyChain, table: Iterable[int]) -> Lease:
        """A table from before the store knew this engine."""
        self.heartbeat()
        blocks = np.fromiter(table, np.uint32)
        return block_tables.adopt(self.store, self.caller, chain.root, blocks, chain.keys[: len(blocks)])

    # ---- the end -----------------------------------------------------------------------------------------

    def quiesce(self) -> int:
        """Every copy is joined; how many fillings that freed."""
        return engines.writer_gone(self.caller.group, self.engine, self.caller.session)

    def disconnect(self) -> None:
        """The socket closes; the process may live on and write."""
        if self.connected:
            self.connected = False
            engines.detach(self.caller)
            self._on_closed(self)

    def die(self) -> int:
        """The process is gone: socket first, then its pidfd; how many fillings that freed."""
        self.disconnect()
        return engines.writer_gone(self.caller.group, self.engine, self.caller.session)
