"""The whole store under any order of saves, lookups, deaths, silence and rot, against a dictionary."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from world import CHAINS, HEADS, LAYOUTS, LEFT, PICK, RIGHT, WHOLE, Held, Open, World, rows, tokens_of

from kvstore._native import NONE, SlotFormat
from kvstore.errors import BadRequest, NotFound, Refused
from kvstore.testing import Found, SessionDriver

SESSIONS_MAX = 6


class StoreMachine(RuleBasedStateMachine):
    """Rules for everything but device pools."""

    world: World

    # ---- picking -----------------------------------------------------------------------------------------

    def session(self, pick: int) -> SessionDriver:
        return self.world.sessions[pick % len(self.world.sessions)]

    def chain_for(self, session: SessionDriver, pick: int, spec: tuple[int, int, int]):
        tenants = sorted(session.roots)
        tenant = tenants[pick % len(tenants)]
        reuse = ("own", "group")[pick // 2 % 2]
        chain = session.chain(tokens_of(spec), tenant=tenant, reuse=reuse)
        self.world.learn(chain, LAYOUTS.index(session.caller.layout))
        return chain

    # ---- sessions ----------------------------------------------------------------------------------------

    @initialize(halves=st.booleans(), slabs=st.integers(1, 2))
    def begin(self, halves, slabs) -> None:
        self.world = World(slabs)
        self.attach(("alice", "bob"), LAYOUTS[0], halves)
        self.attach(("alice",), LAYOUTS[0], False)

    @precondition(lambda self: len(self.world.sessions) < SESSIONS_MAX)
    @rule(
        tenants=st.sampled_from([("alice",), ("bob",), ("alice", "bob")]),
        layout=st.sampled_from(LAYOUTS),
        halves=st.booleans(),
    )
    def attach(self, tenants, layout, halves) -> None:
        parts = (LEFT, RIGHT) if halves else (WHOLE,)
        engine = b""
        for part in parts:
            session = self.world.driver.attach(tenants, engine=engine, layout=layout, part=part)
            engine = session.engine.id
            self.world.sessions.append(session)

    @precondition(lambda self: 0 < len(self.world.sessions) < SESSIONS_MAX)
    @rule(
        pick=PICK,
        tenants=st.sampled_from([("alice",), ("bob",)]),
        part=st.sampled_from([WHOLE, LEFT, RIGHT]),
        role=st.sampled_from(["both", "scheduler"]),
    )
    def join(self, pick, tenants, part, role) -> None:
        """One more process of an engine: a replica, a rank that comes back, or one that copies nothing."""
        member = self.session(pick)
        layout, engine = member.caller.layout, member.engine
        attach = partial(self.world.driver.attach, engine=engine.id)
        if set(tenants) != engine.tenants:
            with pytest.raises(Refused, match=r"^engine: "):
                attach(tenants, layout=layout, part=part, role=role)
            tenants = tuple(sorted(engine.tenants))
        joined = attach(tenants, layout=layout, part=part, role=role)
        assert joined.engine is engine
        self.world.sessions.append(joined)
        other = LAYOUTS[1 - LAYOUTS.index(layout)]
        for different in ({"layout": other}, {"layout": layout, "model": "another"}):
            with pytest.raises(Refused, match=r"^engine: "):
                attach(tenants, **different)

    @precondition(lambda self: self.world.sessions)
    @rule(pick=PICK, process_lives=st.booleans())
    def close(self, pick, process_lives) -> None:
        session = self.session(pick)
        session.disconnect()
        self.world.ended(session)
        assert self.world.group.leases.of(session.caller.session) == []
        if process_lives:
            self.world.living.append(session)
            self.world.check_open()
        else:
            session.die()
            self.world.left(session)
        self.world.sync(set(), set())

    @precondition(lambda self: self.world.living)
    @rule(pick=PICK)
    def process_ends(self, pick) -> None:
        session = self.world.living.pop(pick % len(self.world.living))
        session.die()
        self.world.left(session)
        self.world.sync(set(), set())

    @precondition(lambda self: self.world.sessions)
    @rule(pick=PICK)
    def quiesce(self, pick) -> None:
        session = self.session(pick)
        session.quiesce()
        self.world.left(session)
        self.world.sync(set(), set())

    @rule(seconds=st.sampled_from([0.1, 2.0, 5.0, 5.5, 100.0]), picks=st.lists(PICK, max_size=3))
    def time_passes(self, seconds, picks) -> None:
        self.world.driver.clock.advance(seconds)
        for pick in picks:
            if self.world.sessions:
                self.session(pick).heartbeat()

    # ---- reading -----------------------------------------------------------------------------------------

    @precondition(lambda self: self.world.sessions)
    @rule(pick=PICK, spec=CHAINS)
    def lookup(self, pick, spec) -> None:
        session = self.session(pick)
        chain = self.chain_for(session, pick, spec)
        found = session.lookup(chain)
        self.check_match(session, chain, found)
        if found.blocks:
            self.world.held.append(Held(session, chain, found.lease, found.blocks))
            self.check_loads(self.world.held[-1])
        self.world.sync(set(), set())

    def check_match(self, session: SessionDriver, chain, found: Found) -> None:
        """Exactly what was published and did not leave."""
        assert found.blocks == self.expected_match(session, chain)

    def expected_match(self, session: SessionDriver, chain) -> int:
        return self.world.leading(chain)

    def check_loads(self, held: Held) -> None:
        keys = rows(held.chain, 0, held.lease.host)
        if self.world.rotten & set(keys) or not all(map(self.world.readable, keys)):
            return
        assert held.session.faults(held.lease, held.chain) == []

    def loose(self) -> list[Held]:
        """Leases without a block table."""
        return [held for held in self.world.held if not len(held.lease.table)]

    @precondition(lambda self: self.loose())
    @rule(pick=PICK)
    def fetch(self, pick) -> None:
        self.check_loads(self.loose()[pick % len(self.loose())])

    @precondition(lambda self: self.loose())
    @rule(pick=PICK)
    def release(self, pick) -> None:
        held = self.loose()[pick % len(self.loose())]
        self.world.held.remove(held)
        self.let_go(held, refuse=bool(pick % 2))
        with pytest.raises(NotFound):
            held.session.release(held.lease)

    def let_go(self, held: Held, refuse: bool) -> None:
        orders = held.session.release(held.lease)
        self.world.sync(set(), self.world.all_but(self.world.protected()) if orders else set())
        self.obey(held.session, orders, refuse)

    def obey(self, session: SessionDriver, orders, refuse: bool) -> None:
        assert not orders, "an order without a pool"

    @precondition(lambda self: len(self.world.sessions) > 1)
    @rule(pick=PICK, other=PICK, spec=CHAINS)
    def foreign_root(self, pick, other, spec) -> None:
        mine, theirs = self.session(pick), self.session(other)
        foreign = set(theirs.caller.roots) - set(mine.caller.roots)
        for root in sorted(foreign):
            chain = theirs.chain(tokens_of(spec))
            stolen = type(chain)(root, chain.keys)
            with pytest.raises(BadRequest, match="not one of the roots"):
                mine.lookup(stolen)
            with pytest.raises(BadRequest, match="not one of the roots"):
                mine.reserve(stolen)
        if foreign and self.world.held:
            held = self.world.held[pick % len(self.world.held)]
            if held.session is not mine:
                with pytest.raises(NotFound):
                    mine.store.fetch(mine.caller, held.lease.id, 0, 0)

    # ---- writing -----------------------------------------------------------------------------------------

    @precondition(lambda self: self.world.sessions)
    @rule(pick=PICK, spec=CHAINS, start=st.integers(0, 18), at_edge=st.booleans())
    def reserve(self, pick, spec, start, at_edge) -> None:
        """Anywhere in a chain, or right after its deepest known block (which may be FILLING)."""
        session = self.session(pick)
        chain = self.chain_for(session, pick, spec)
        known = [key for key in rows(chain) if self.world.group.index.find(key) != NONE]
        self.ask_room(session, chain, len(known) if at_edge else min(start, len(chain)))

    @precondition(lambda self: self.world.sessions)
    @rule(pick=PICK, branch=st.integers(0, 18))
    def save_after_silence(self, pick, branch) -> None:
        """Everybody else has been silent for long, and one session needs much room."""
        self.world.driver.clock.advance(self.world.driver.config.daemon.stale_after_s + 1)
        self.save(pick, (pick % 2, 18, branch))

    @precondition(lambda self: self.world.open)
    @rule(pick=PICK, other=PICK)
    def overtake(self, pick, other) -> None:
        """A filling stalls; whoever may use its root fills a second slot for each key."""
        slow = self.world.open[pick % len(self.world.open)]
        able = [s for s in self.world.sessions if slow.chain.root in s.caller.roots]
        self.world.driver.clock.advance(self.world.driver.config.daemon.stall_s)
        if able:
            self.ask_room(able[other % len(able)], slow.chain, 0)

    @precondition(lambda self: self.world.sessions)
    @rule(pick=PICK, spec=CHAINS)
    def save(self, pick, spec) -> None:
        """Reserve, and every rank writes and publishes all of it."""
        session = self.session(pick)
        chain = self.chain_for(session, pick, spec)
        filling = self.ask_room(session, chain, 0)
        if filling is not None:
            for rank in self.writers_of(filling):
                if filling not in self.world.open:
                    break  # a process that copies whole blocks was enough
                self.hand_over(filling, rank, len(filling.positions))

    def ask_room(self, session: SessionDriver, chain, start: int) -> Open | None:
        world = self.world
        if start and world.group.index.find(chain.parent(start)) == NONE:
            assert session.reserve(chain, start).dropped == len(chain) - start
            return None
        parts = world.parts_of(session)
        if set().union(*parts.values()) != HEADS:
            got = session.reserve(chain, start)
            assert (got.filling, got.dropped) == (None, len(chain) - start), "nobody would write some cells"
            return None
        keys, now = rows(chain, start), world.driver.clock.now()
        before, times = world.host.keys(), [world.filled_since(key) for key in keys]
        session.heartbeat()
        silent = world.silent()
        got = session.reserve(chain, start)
        revoked = world.drop_revoked()
        assert revoked == (silent if got.dropped else revoked), (
            "silent sessions kept pins although room was needed"
        )
        kept = len(got.slots)
        asked = set(keys[:kept]) | {k for key in keys[:1] for k in world.above(key)}
        world.sync(set(), world.all_but(world.protected() | asked))
        stall_s = world.driver.config.daemon.stall_s
        filled = [key in before for key in keys[:kept]]
        elsewhere = [
            not ready and t is not None and now - t < stall_s
            for ready, t in zip(filled, times[:kept], strict=True)
        ]
        assert (got.filled, got.elsewhere, got.dropped) == (sum(filled), sum(elsewhere), len(keys) - kept)
        if got.dropped:
            assert not world.all_but(world.protected() | asked), "dropped although some could leave"
            assert got.reason
        mine = [start + i for i in range(kept) if not filled[i] and not elsewhere[i]]
        if got.filling is None:
            assert not mine
            return None
        assert len(got.filling.slots) == len(mine)
        world.open.append(Open(session, chain, got.filling, mine, now, parts))
        return world.open[-1]

    def writers_of(self, filling: Open) -> list[SessionDriver]:
        return [s for s in self.world.sessions if s.engine is filling.session.engine]

    @precondition(lambda self: self.world.open)
    @rule(pick=PICK, member=PICK, missing=st.sampled_from([0, 0, 0, 1, 2, 99]))
    def publish(self, pick, member, missing) -> None:
        filling = self.world.open[pick % len(self.world.open)]
        ranks = self.writers_of(filling)
        if ranks:
            count = max(0, len(filling.positions) - missing)
            self.hand_over(filling, ranks[member % len(ranks)], count)

    def hand_over(self, filling: Open, rank: SessionDriver, count: int) -> None:
        world = self.world
        if rank.caller.session not in filling.members:
            with pytest.raises(NotFound if rank.caller.copies else Refused):
                rank.publish(filling.filling, count)
            return
        rank.write(filling.filling)
        done = rank.publish(filling.filling, count)
        filling.speak(rank.caller.session, count)
        if not filling.over:
            assert done.pending and not done.ready
            return
        assert not done.pending
        world.open.remove(filling)
        fresh = world.would_be_ready(filling.wanted()[: filling.blocks])
        assert (done.ready, done.dropped) == (len(fresh), len(filling.positions) - len(fresh))
        world.sync(fresh, set())
        self.read_own_write(rank, filling)

    def read_own_write(self, session: SessionDriver, filling: Open) -> None:
        if filling.chain.root not in session.caller.roots:
            return
        found = session.lookup(filling.chain)
        self.check_match(session, filling.chain, found)
        if found.blocks:
            self.let_go(Held(session, filling.chain, found.lease, found.blocks), refuse=False)

    @precondition(lambda self: self.world.open)
    @rule(pick=PICK, member=PICK)
    def abort(self, pick, member) -> None:
        filling = self.world.open[pick % len(self.world.open)]
        ranks = self.writers_of(filling)
        if not ranks:
            return
        rank = ranks[member % len(ranks)]
        number = rank.caller.session
        if rank.caller.copies and number not in filling.members:
            with pytest.raises(NotFound):
                rank.abort(filling.filling)
            return
        rank.abort(filling.filling)
        filling.blocks = 0
        if number in filling.members:
            filling.speak(number, 0)
        if filling.over:
            self.world.open.remove(filling)
            with pytest.raises(NotFound):
                rank.abort(filling.filling)
        self.world.check_open()
        self.world.sync(set(), set())

    # ---- rot ---------------------------------------------------------------------------------------------

    @precondition(lambda self: self.world.sessions)
    @rule(pick=PICK, spec=CHAINS, place=PICK, flip=st.booleans())
    def report(self, pick, spec, place, flip) -> None:
        """A load failed its check, rightly or not."""
        world, session = self.world, self.session(pick)
        chain = self.chain_for(session, pick, spec)
        found = session.lookup(chain)
        if not found.blocks:
            return
        held = Held(session, chain, found.lease, found.blocks)
        world.held.append(held)
        if not held.lease.host:
            return
        position = place % held.lease.host
        key = rows(held.chain)[position]
        if flip and world.readable(key):
            node = np.array([world.group.index.find(key)], np.uint32)
            slot = int(world.group.host.pool.slots(node)[0])
            shape = held.session.caller.shape
            world.group.arena.view(slot, shape.length)[place % shape.cell_bytes] ^= 0xFF
            world.rotten ^= {key}
        rotten = {key} & world.rotten
        dropped = world.store.report(held.session.caller, held.lease.id, np.array([position], np.uint32))
        assert dropped == len(rotten), "the daemon believes its own check, not the report"
        world.hollow |= rotten
        world.sync(set(), rotten)

    # ---- always ------------------------------------------------------------------------------------------

    @invariant()
    def laws(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        world = self.world
        for session in [*world.sessions, *world.living]:
            session.die()
        world.store.check()
        counts = world.group.host.counts()
        assert (len(world.group.leases), len(world.group.fillings), world.group.index.pins()) == (0, 0, 0)
        assert (counts["filling"], counts["draining"]) == (0, 0), (
            "a slot outlived its last process and reader"
        )
        for layout in LAYOUTS:
            shape = SlotFormat(layout.layers, layout.kv_heads, layout.cell_bytes)
            while world.group.host.pool.evict(shape, 8192):
                pass
        assert len(world.group.index) == 0, "nodes without bytes, children and pins are reaped"
        assert world.group.host.counts()["used_bytes"] == 0
        world.store.check()
        world.driver.close()


StoreMachine.TestCase.settings = settings(
    max_examples=100,
    stateful_step_count=40,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestStore = StoreMachine.TestCase
