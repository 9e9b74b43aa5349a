"""The store with owned device pools: block tables, commits, demotions and adoption, with real bytes.

Device memory is a list per engine: what the engine last wrote into each block. A table entry that the store
calls valid must hold the bytes of its key; a demotion copies what the block holds, not what the store thinks.
"""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule
from test_store_model import StoreMachine
from world import CHAINS, PICK, Held, rows

from kvstore import _native
from kvstore._native import NONE
from kvstore.block_tables import Demotion, Table
from kvstore.events import EventKind
from kvstore.rpc.messages import Timings
from kvstore.rpc.timings import record
from kvstore.testing import SessionDriver, write_slot
from kvstore.tiers.gpu import OwnedPool
from kvstore.types import Part, Tier

BLOCKS, IDLE_MAX = 16, 6


class DeviceMachine(StoreMachine):
    """Rules for owned pools on top of everything else."""

    def __init__(self) -> None:
        super().__init__()
        self.memory: dict[int, list[bytes]] = {}  # id of the pool → key whose bytes each block holds
        self.indexed: dict[bytes, set[bytes]] = {}  # engine → keys on its device, by events
        self.device_sequence = 0

    @precondition(lambda self: self.world.sessions)
    @rule(pick=PICK, prompt=st.integers(0, 400), reused=st.integers(0, 400))
    def timings(self, pick, prompt, reused) -> None:
        """A connector says what a request reused, truly or not."""
        caller = self.session(pick).caller
        said = [(caller.tenants[pick % len(caller.tenants)], 0.5, max(prompt, reused), reused)]
        steps = [(prompt, prompt * prompt / 2, 0, 0, 0.25)]
        plans = [(pick, 0.5)]  # of others, or of nobody
        record(caller, Timings(said, steps, [("load", 1, 4096, 0.001)], 0, plans))

    # ---- what the engine does ----------------------------------------------------------------------------

    def memory_of(self, session: SessionDriver) -> list[bytes]:
        return self.memory[id(session.engine.device)]

    def pooled(self) -> list[SessionDriver]:
        return [s for s in self.world.sessions if isinstance(s.engine.device, OwnedPool)]

    def sync_device(self) -> None:
        replay = self.world.group.events.since(self.world.store.epoch, self.device_sequence)
        assert not replay.gap
        for event in replay.events:
            self.device_sequence = event.sequence
            if event.tier is Tier.GPU:
                held = self.indexed.setdefault(event.engine, set())
                keys = held.copy() if event.kind is EventKind.CLEARED else {k.tobytes() for k in event.keys}
                held.update(keys) if event.kind is EventKind.STORED else held.difference_update(keys)
        for engine in self.world.group.engines.values():
            truth = engine.device.keys()
            told = self.indexed.get(engine.id, set())
            assert told == {key.tobytes() for key in truth}, "device events are not the truth"

    def expected_match(self, session: SessionDriver, chain) -> int:
        self.sync_device()
        held, count = self.indexed.get(session.engine.id, set()), 0
        for key in rows(chain):
            if key not in held:
                break
            count += 1
        return max(count, super().expected_match(session, chain))

    def obey(self, session: SessionDriver, orders: tuple[Demotion, ...], refuse: bool) -> None:
        """Copy what an order says from device memory to the arena, or give it up."""
        if not orders:
            return
        world, memory = self.world, self.memory_of(session)
        for order in orders:
            filling = order.filling
            keys = [key.tobytes() for key in world.group.index.keys(filling.nodes)]
            assert len(order.blocks) == len(filling.slots) == len(keys)
            assert NONE not in order.blocks, "an order names no block"
            assert [memory[b] for b in order.blocks.tolist()] == keys, "the device holds other bytes"
            if refuse or not session.caller.copies:
                session.abort(filling)
                world.sync(set(), set())
                continue
            for key, slot in zip(keys, filling.slots.tolist(), strict=True):
                write_slot(world.group.arena, session.caller.shape, slot, key)
            # An order goes to one process; one that holds a part of a block only cannot make it readable.
            whole = session.caller.part == Part.whole(session.caller.layout)
            fresh = world.would_be_ready(keys) if whole else set()
            done = session.publish(filling)
            assert done.ready == len(fresh)
            world.sync(fresh, set())

    # ---- rules -------------------------------------------------------------------------------------------

    @precondition(lambda self: self.world.sessions)
    @rule(pick=PICK, spec=CHAINS, adopted=st.integers(0, 4), shared=st.integers(0, 4))
    def own_pool(self, pick, spec, adopted, shared) -> None:
        """Of an engine that was there before this daemon: it may bring tables that share a prefix."""
        session = self.session(pick)
        if isinstance(session.engine.device, OwnedPool) or session.caller.part.heads == 1:
            return
        pool = session.own_pool(BLOCKS, IDLE_MAX)
        memory = self.memory[id(pool)] = [b""] * BLOCKS
        if not adopted:
            return
        chain = self.chain_for(session, pick, spec)
        table = [(pick + 3 * i) % BLOCKS for i in range(adopted)]
        for block, key in zip(table, rows(chain), strict=False):
            memory[block] = key
        self.adopt(session, chain, table)
        # A second request of the same prompt: `shared` blocks of the first, then blocks of its own.
        head = table[: min(shared, len(chain))]
        fork = head + [(pick + 3 * (adopted + i)) % BLOCKS for i in range(adopted - len(head))]
        for block, key in zip(fork[len(head) :], rows(chain)[len(head) :], strict=False):
            memory[block] = key
        self.sync_device()
        indexed = self.indexed.get(session.engine.id, set())
        if set(rows(chain, 0, len(head))) <= indexed:  # a full index leaves blocks private, so not shared
            self.adopt(session, chain, fork)

    def adopt(self, session: SessionDriver, chain, table: list[int]) -> None:
        lease = session.adopt(chain, table)
        self.world.held.append(Held(session, chain, lease))
        self.world.sync(set(), self.world.all_but(self.world.protected()))

    @precondition(lambda self: self.pooled())
    @rule(pick=PICK, spec=CHAINS, extra=st.integers(0, 4), refuse=st.booleans())
    def serve(self, pick, spec, extra, refuse) -> None:
        """One request: look up, make the table, load, compute, commit."""
        world, pooled = self.world, self.pooled()
        session = pooled[pick % len(pooled)]
        chain = self.chain_for(session, pick, spec)
        found = session.lookup(chain)
        lease_id = found.lease.id if found.blocks else 0
        if found.blocks:
            world.held.append(Held(session, chain, found.lease, found.blocks))
        wanted = min(BLOCKS, len(chain) + extra)
        for _ in range(BLOCKS + 1):
            session.heartbeat()
            table = session.acquire(lease_id, wanted)
            world.drop_revoked()
            world.sync(set(), world.all_but(world.protected()))
            if not table.demotions:
                break
            self.obey(session, table.demotions, refuse)
        assert not table.demotions, "demotions never end"
        if table.busy:
            assert not len(table.added)
            return
        if not lease_id:
            world.held.append(Held(session, chain, table.lease))
        self.compute(session, chain, table)

    def compute(self, session: SessionDriver, chain, table: Table) -> None:
        memory, blocks = self.memory_of(session), table.lease.table.tolist()
        keys = rows(chain)
        for i in range(table.device):
            assert memory[blocks[i]] == keys[i], "a device hit holds other bytes"
        pages = session.caller.shape.slot_bytes // _native.PAGE_BYTES
        count = table.load_stop - table.load_start
        slots = _native.unpack_slots(table.runs, count, pages, session.caller.group.arena.pages).tolist()
        assert NONE not in slots
        for i in range(table.device, len(blocks)):  # loaded or computed: the bytes are the key's
            memory[blocks[i]] = keys[i] if i < len(keys) else b"unfinished"
        stop = min(len(keys), len(blocks))
        session.commit(table.lease, chain, table.device, stop)
        self.world.sync(set(), self.world.all_but(self.world.protected()))

    @precondition(lambda self: [h for h in self.world.held if len(h.lease.table)])
    @rule(pick=PICK, refuse=st.booleans())
    def finish(self, pick, refuse) -> None:
        """A request ends: its table becomes idle, what is too much leaves."""
        tables = [h for h in self.world.held if len(h.lease.table)]
        held = tables[pick % len(tables)]
        self.world.held.remove(held)
        orders = held.session.release(held.lease)
        self.world.sync(set(), self.world.all_but(self.world.protected()))
        self.obey(held.session, orders, refuse)
        counts = held.session.engine.device.counts()
        assert counts["draining"] == 0

    @precondition(lambda self: [h for h in self.world.held if len(h.lease.table)])
    @rule(pick=PICK, more=st.integers(1, 3))
    def grow(self, pick, more) -> None:
        """Decoding needs more blocks."""
        tables = [h for h in self.world.held if len(h.lease.table)]
        held = tables[pick % len(tables)]
        before = held.lease.table.tolist()
        wanted = min(BLOCKS, len(before) + more)
        table = held.session.acquire(held.lease.id, wanted)
        self.world.drop_revoked()
        self.world.sync(set(), self.world.all_but(self.world.protected()))
        self.obey(held.session, table.demotions, refuse=True)
        assert held.lease.table.tolist()[: len(before)] == before
        for block in table.added.tolist():
            self.memory_of(held.session)[block] = b"decoded"

    # ---- always ------------------------------------------------------------------------------------------

    @invariant()
    def tables_are_private(self) -> None:
        """An indexed block holds its key's bytes; any other belongs to one table only."""
        group = self.world.group
        for session in self.pooled():
            pool, memory = session.engine.device, self.memory_of(session)
            keys = pool.keys()
            nodes = np.array([group.index.find(key.tobytes()) for key in keys], np.uint32)
            blocks = pool.blocks_of(nodes).tolist()
            assert [memory[b] for b in blocks] == [key.tobytes() for key in keys]
            engine = session.engine
            users = [
                b for h in self.world.held if h.session.engine is engine for b in set(h.lease.table.tolist())
            ]
            shared = {b for b in users if users.count(b) > 1}
            assert shared <= set(blocks), "a private block lies in two tables"
            assert pool.counts()["mapped"] == len(set(users)), "a block is pinned for nobody"
        self.sync_device()


DeviceMachine.TestCase.settings = settings(StoreMachine.TestCase.settings, max_examples=100)
TestDevice = DeviceMachine.TestCase
