"""State of the store's model test: sessions, leases and fillings as a test sees them, and the oracle's sets.

The oracle is fed by the store's own events, but believes them only within bounds that it computes itself:
what may have appeared, what may have left, what was protected.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st

from kvstore._native import NONE
from kvstore.config import TenantConfig
from kvstore.events import EventKind
from kvstore.keys import KeyChain
from kvstore.leases import Lease
from kvstore.testing import ModelStore, SessionDriver, StoreDriver, slot_fault, small_config, small_layout
from kvstore.transfers import Filling
from kvstore.types import Part, Reuse, Tier

TENANTS = (
    TenantConfig(name="alice", group="red", reuse=Reuse.GROUP),
    TenantConfig(name="bob", group="red", reuse=Reuse.GROUP),
)
LAYOUTS = (small_layout(), small_layout(head_dim=2048))  # 15 and 7 slots to a slab
HEADS = {0, 1}
WHOLE, LEFT, RIGHT = Part(0, 2, 0, 2), Part(0, 2, 0, 1), Part(0, 2, 1, 1)

# A chain: which family of prompts, how many blocks, and from which block on it goes its own way.
CHAINS = st.tuples(st.integers(0, 1), st.integers(1, 18), st.integers(0, 18))
PICK = st.integers(0, 1 << 16)


def tokens_of(spec: tuple[int, int, int]) -> list[int]:
    family, length, branch = spec
    starts = [1000 * family + 10 * i + (0 if i < branch else 500) for i in range(length)]
    return [start + j for start in starts for j in range(4)]


def heads_of(part: Part) -> set[int]:
    return set(range(part.head_start, part.head_start + part.heads))


def rows(chain: KeyChain, start: int = 0, stop: int | None = None) -> list[bytes]:
    return [key.tobytes() for key in chain.keys[start:stop]]


@dataclass(eq=False)
class Held:
    """A lease that a session holds."""

    session: SessionDriver
    chain: KeyChain
    lease: Lease
    blocks: int = 0  # of the match


@dataclass(eq=False)
class Open:
    """A filling that was reserved and is not over.

    `members`: sessions that may write it, and which heads; `waiting`: those that have not had their say.
    """

    session: SessionDriver
    chain: KeyChain
    filling: Filling
    positions: list[int]
    since_s: float
    members: dict[int, set[int]]
    blocks: int = field(init=False)
    waiting: set[int] = field(init=False)
    covered: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.blocks, self.waiting = len(self.positions), set(self.members)

    @property
    def over(self) -> bool:
        return not self.waiting or self.covered == HEADS

    def speak(self, session: int, blocks: int) -> None:
        """A member wrote that many blocks, or gave its part up (0)."""
        self.covered |= self.members[session]
        self.waiting.discard(session)
        self.blocks = min(self.blocks, blocks)

    def leave(self, session: int) -> None:
        """A process cannot write any more; heads that only it would have written are lost."""
        self.members.pop(session, None)
        if session in self.waiting:
            self.waiting.remove(session)
            lost = HEADS - self.covered.union(*(self.members[s] for s in self.waiting))
            self.covered |= lost
            self.blocks = 0 if lost else self.blocks

    def wanted(self) -> list[bytes]:
        return [self.chain.keys[i].tobytes() for i in self.positions]


class World:
    """One store and everything that is going on in it."""

    def __init__(self, slabs: int) -> None:
        self.driver = StoreDriver(small_config(capacity_bytes=slabs << 21, tenants=TENANTS))
        self.store = self.driver.store
        self.group = self.driver.group("red")
        self.sessions: list[SessionDriver] = []
        self.living: list[SessionDriver] = []  # disconnected, but the process may still write
        self.held: list[Held] = []
        self.open: list[Open] = []
        self.ever = ModelStore()
        self.host = ModelStore()
        self.parent: dict[bytes, bytes] = {}
        self.layout_of: dict[bytes, int] = {}  # root → number of the layout
        self.rotten: set[bytes] = set()  # bytes were flipped, nobody noticed yet
        self.hollow: set[bytes] = set()  # dropped as rotten and not saved again
        self.sequence = 0

    # ---- knowledge ---------------------------------------------------------------------------------------

    def learn(self, chain: KeyChain, layout: int) -> None:
        """Remember where each key of a chain belongs."""
        self.layout_of[chain.root] = layout
        self.ever.add_root(chain.root)
        self.host.add_root(chain.root)
        for i, key in enumerate(rows(chain)):
            self.parent[key] = chain.parent(i)

    def above(self, key: bytes) -> set[bytes]:
        """The key and its ancestors, the root not included."""
        out = set()
        while key in self.parent:
            out.add(key)
            key = self.parent[key]
        return out

    def protected(self) -> set[bytes]:
        """Keys whose bytes must not be evicted now."""
        out: set[bytes] = set()
        for held in self.held:
            out |= self.kept_by(held)
        for filling in self.open:
            out |= {k for key in filling.wanted() for k in self.above(key)}
        return out

    def kept_by(self, held: Held) -> set[bytes]:
        """What a lease's pin keeps: at least its match, more once its table was committed."""
        match = set(rows(held.chain, 0, held.blocks))
        if held.lease.pinned == NONE:
            return match
        pinned = np.array([held.lease.pinned], np.uint32)
        return match | self.above(self.group.index.keys(pinned).tobytes())

    def filled_since(self, key: bytes) -> float | None:
        """When the newest open filling of a key was handed out."""
        times = [o.since_s for o in self.open if key in o.wanted()]
        return max(times, default=None)

    def readable(self, key: bytes) -> bool:
        return key in self.host

    def leading(self, chain: KeyChain) -> int:
        return self.host.match(chain.root, rows(chain))

    def would_be_ready(self, keys: list[bytes]) -> set[bytes]:
        """Keys that publishing makes readable: not so before, and their parent is."""
        fresh: set[bytes] = set()
        for key in keys:
            parent = self.parent[key]
            above = parent not in self.parent or self.readable(parent) or parent in fresh
            if above and not self.readable(key):
                fresh.add(key)
        return fresh

    def silent(self) -> int:
        """Leases without a table whose session has been silent for too long."""
        now, limit = self.driver.clock.now(), self.driver.config.daemon.stale_after_s
        loose = [h for h in self.held if not len(h.lease.table)]
        return sum(now - h.session.caller.heard_s > limit for h in loose)

    # ---- events ------------------------------------------------------------------------------------------

    def sync(self, stored: set[bytes], may_leave: set[bytes]) -> set[bytes]:
        """Apply the store's HOST events; exactly `stored` is new, and only `may_leave` may have left."""
        before = self.host.keys()
        replay = self.group.events.since(self.store.epoch, self.sequence)
        assert not replay.gap
        told: set[bytes] = set()
        left: set[bytes] = set()
        for event in replay.events:
            self.sequence = event.sequence
            if event.tier is Tier.HOST:
                keys = {key.tobytes() for key in event.keys}
                if event.kind is EventKind.STORED:
                    told |= keys
                else:
                    left |= keys
        assert told - before == stored, "not what was published"
        assert left <= before, "something left that was not there"
        assert left <= may_leave, "protected bytes left"
        for key in sorted(told, key=lambda k: len(self.above(k))):
            for model in (self.ever, self.host):
                model.publish(self.parent[key], [key])
        self.host.remove(left)
        self.hollow -= told
        self.rotten -= left
        truth = self.group.host.keys()
        assert self.host.keys() == {key.tobytes() for key in truth}, "events are not the truth"
        return left

    def all_but(self, protected: set[bytes]) -> set[bytes]:
        return self.host.keys() - protected

    # ---- the end of things -------------------------------------------------------------------------------

    def ended(self, session: SessionDriver) -> None:
        """A connection closed: its leases are gone, its fillings wait."""
        self.held = [h for h in self.held if h.session is not session]
        self.sessions.remove(session)

    def left(self, session: SessionDriver) -> None:
        """A process writes no more: what waited for it alone is free, and nothing else."""
        for filling in self.of_engine(session):
            filling.leave(session.caller.session)
        self.open = [o for o in self.open if not o.over]
        self.check_open()

    def of_engine(self, session: SessionDriver) -> list[Open]:
        return [o for o in self.open if o.session.engine.id == session.engine.id]

    def check_open(self) -> None:
        """The store's fillings are ours, and nobody freed a slot that may be written."""
        assert {f.token for f in self.group.fillings} == {o.filling.token for o in self.open}

    def parts_of(self, session: SessionDriver) -> dict[int, set[int]]:
        """The connected processes of an engine that copy, and their heads."""
        mine = [s for s in self.sessions if s.engine is session.engine and s.caller.copies]
        return {s.caller.session: heads_of(s.caller.part) for s in mine}

    def drop_revoked(self) -> int:
        """Forget leases that were taken; only silent sessions lose theirs."""
        alive = {lease.id for lease in self.group.leases}
        gone = [h for h in self.held if h.lease.id not in alive]
        limit = self.driver.config.daemon.stale_after_s
        for held in gone:
            silent_s = self.driver.clock.now() - held.session.caller.heard_s
            assert silent_s > limit, "a session that speaks lost its lease"
            assert not len(held.lease.table), "a block table was taken"
        self.held = [h for h in self.held if h.lease.id in alive]
        return len(gone)

    # ---- what must always hold ---------------------------------------------------------------------------

    def check(self) -> None:
        self.store.check()
        self.check_tokens()
        self.check_bytes()
        self.check_prefixes()
        for held in self.held:
            # A table's first blocks are its device hits; HOST may lack those.
            first = held.lease.device if len(held.lease.table) else 0
            host = rows(held.chain, first, held.lease.host)
            if held.blocks:
                pinned = np.array([held.lease.pinned], np.uint32)
                above = self.above(self.group.index.keys(pinned).tobytes())
                assert above >= set(rows(held.chain, 0, held.blocks)), "a pin above the match"
            assert all(self.readable(key) or key in self.hollow for key in host), "a lease lost its bytes"

    def check_tokens(self) -> None:
        """Tokens asked >= hit >= saved for each tenant, and all of them are the blocks that were counted."""
        counters, tenants = self.group.counters, self.group.meters.tenants
        assert set(tenants) <= {
            "alice",
            "bob",
            "red",
        }  # red: two tenants in one session, under the shared root
        size = LAYOUTS[0].block_tokens
        for tokens in tenants.values():
            assert tokens.lookup >= sum(tokens.hit.values()) >= tokens.saved >= 0
        assert sum(tokens.lookup for tokens in tenants.values()) == size * counters.lookup_blocks
        by_tier = {
            tier: sum(t.hit[tier] for t in tenants.values()) for tier in (Tier.GPU, Tier.HOST, Tier.NVME)
        }
        assert by_tier == {tier: size * blocks for tier, blocks in counters.hit_blocks_by_tier.items()}
        assert sum(by_tier.values()) == size * counters.hit_blocks

    def check_bytes(self) -> None:
        """Every READY block holds the bytes of its key."""
        nodes = self.group.host.pool.ready_nodes()
        slots = self.group.host.pool.slots(nodes).tolist()
        shapes = [s.caller.shape for s in self.driver.sessions.values()]
        by_length = {shape.length: shape for shape in shapes}
        for key, slot in zip(self.group.index.keys(nodes), slots, strict=True):
            shape = by_length.get(self.group.arena.control(slot).length)
            if shape is not None and key.tobytes() not in self.rotten:
                assert slot_fault(self.group.arena, shape, slot, key.tobytes()) == ""

    def check_prefixes(self) -> None:
        """Leaves leave first: what is readable can be reached, unless rot made a hole above it."""
        for key in self.host.stranded():
            missing = {k for k in self.above(key) if not self.readable(k)}
            assert missing <= self.hollow, "bytes are stranded behind a hole that no rot made"
