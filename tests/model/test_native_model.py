"""Index and host pool under any order of calls, against dictionaries: exact nodes, slots and counts."""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstore import _native
from kvstore._native import NONE, Arena, HostPool, Index, SlotFormat

STALL_S = 5.0
FORMATS = (SlotFormat(1, 1, 120_000), SlotFormat(1, 1, 250_000))  # 17 and 8 slots to a slab of 2 MiB
ROOTS = (b"A" * 32, b"B" * 32)  # each root has its own block size
# A chain: root, length, and from which block on it goes its own way.
CHAINS = st.tuples(st.integers(0, 1), st.integers(1, 24), st.integers(0, 24))
PICK = st.integers(0, 1 << 16)
Spec = tuple[int, int, int]


def keys_of(spec: Spec) -> list[bytes]:
    root, length, branch = spec
    out, above = [], ROOTS[root]
    for i in range(length):
        above = hashlib.sha256(above + bytes([i < branch])).digest()
        out.append(above)
    return out


def rows(keys: list[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(keys), np.uint8).reshape(-1, 32)


def array(numbers: list[int]) -> np.ndarray:
    return np.array(numbers, np.uint32)


@dataclass(eq=False)
class Fill:
    """A slot that somebody is filling."""

    key: bytes
    slot: int
    since_s: float


@dataclass(eq=False)
class Drain:
    """A dropped slot that readers may still be copying from."""

    key: bytes
    slot: int
    readers: set[bytes] = field(default_factory=set)


class NativeMachine(RuleBasedStateMachine):
    """One index, one arena, two sizes of block."""

    @initialize(slabs=st.integers(1, 2), nodes_max=st.sampled_from([12, 1000]))
    def begin(self, slabs, nodes_max) -> None:
        self.arena = Arena.create("model", slabs << 21)
        self.index = Index(nodes_max)
        self.pool = HostPool(self.index, self.arena, 2 << 20)
        self.roots = [self.index.root(root) for root in ROOTS]
        self.nodes_max = nodes_max
        self.now_s = 100.0
        self.parent: dict[bytes, bytes] = {}
        self.format: dict[bytes, SlotFormat] = {}
        self.ready: dict[bytes, int] = {}
        self.fills: list[Fill] = []
        self.drains: list[Drain] = []
        self.pins: Counter[bytes] = Counter()
        self.dropped: set[bytes] = set()
        self.generation: dict[int, int] = {}

    # ---- the oracle --------------------------------------------------------------------------------------

    def learn(self, spec: Spec) -> list[bytes]:
        keys = keys_of(spec)
        for above, key in zip([ROOTS[spec[0]], *keys], keys, strict=False):
            self.parent[key] = above
            self.format[key] = FORMATS[spec[0]]
        return keys

    def above(self, key: bytes) -> set[bytes]:
        out = set()
        while key in self.parent:
            out.add(key)
            key = self.parent[key]
        return out

    def known(self) -> set[bytes]:
        """Nodes that must exist: whatever has bytes, is pinned or filled, and its ancestors."""
        alive = {*self.ready, *(f.key for f in self.fills), *(d.key for d in self.drains), *+self.pins}
        return {k for key in alive for k in self.above(key)}

    def protected(self) -> set[bytes]:
        return {k for key in [*+self.pins, *(f.key for f in self.fills)] for k in self.above(key)}

    def took(self, may_leave: set[bytes]) -> None:
        """Apply what the pool says it evicted."""
        left = {key.tobytes() for key in self.pool.take_removed()}
        assert left <= self.ready.keys() & may_leave
        for key in left:
            del self.ready[key]

    def node(self, key: bytes) -> int:
        return self.index.find(key)

    # ---- filling -----------------------------------------------------------------------------------------

    @rule(spec=CHAINS, start=st.integers(0, 24))
    def reserve(self, spec, start) -> None:
        keys = self.learn(spec)
        before = self.known()
        leading = next((i for i, key in enumerate(keys) if key not in before), len(keys))
        start = min(start, leading)
        parent = self.roots[spec[0]] if start == 0 else self.node(keys[start - 1])
        wanted, shape = keys[start:], FORMATS[spec[0]]
        newest = {f.key: f.since_s for f in sorted(self.fills, key=lambda f: f.since_s)}
        was_ready = set(self.ready)
        got = self.pool.reserve(parent, rows(wanted), shape, self.now_s, STALL_S)
        kept = len(got.nodes)
        filled = [key in was_ready for key in wanted[:kept]]
        busy = [
            not full and key in newest and self.now_s - newest[key] < STALL_S
            for key, full in zip(wanted[:kept], filled, strict=True)
        ]
        assert (got.filled, got.elsewhere, got.dropped) == (sum(filled), sum(busy), len(wanted) - kept)
        asked = {k for key in keys[: start + kept] for k in self.above(key)}
        self.took(set(self.ready) - self.protected() - asked)
        for key, node, slot, full, other in zip(
            wanted[:kept], got.nodes.tolist(), got.slots.tolist(), filled, busy, strict=True
        ):
            assert self.node(key) == node
            assert (slot == NONE) == (full or other)
            if slot != NONE:
                self.fills.append(Fill(key, slot, self.now_s))
                self.handed_out(slot)
        if got.dropped and len(self.known()) < self.nodes_max:
            # Nothing else could leave: every block that stays is protected or was asked for.
            assert not set(self.ready) - self.protected() - asked

    def handed_out(self, slot: int) -> None:
        control = self.arena.control(slot)
        assert control.state == _native.FILLING
        assert control.generation > self.generation.get(slot, 0), "a reader would not notice the reuse"
        self.generation[slot] = control.generation

    @precondition(lambda self: self.fills)
    @rule(picks=st.lists(PICK, min_size=1, max_size=30), all_of_it=st.booleans())
    def publish(self, picks, all_of_it) -> None:
        chosen = self.some_fills(picks, all_of_it)
        shape = self.format[chosen[0].key]
        chosen = [f for f in chosen if self.format[f.key] is shape]
        nodes, slots = array([self.node(f.key) for f in chosen]), array([f.slot for f in chosen])
        done = self.pool.publish(nodes, slots, array([7] * len(chosen)), shape.length, 1)
        order = sorted(range(len(chosen)), key=lambda i: len(self.above(chosen[i].key)))
        expected = [0] * len(chosen)
        for i in order:  # parents first, whatever the order of the call
            key, slot = chosen[i].key, chosen[i].slot
            if key not in self.ready and (self.parent[key] in ROOTS or self.parent[key] in self.ready):
                expected[i], self.ready[key] = 1, slot
                self.dropped.discard(key)
                assert bytes(self.arena.control(slot).fingerprint) == key[:16]
        assert done.tolist() == expected
        self.fills = [f for f in self.fills if f not in chosen]

    @precondition(lambda self: self.fills)
    @rule(picks=st.lists(PICK, min_size=1, max_size=5), all_of_it=st.booleans())
    def abort(self, picks, all_of_it) -> None:
        chosen = self.some_fills(picks, all_of_it)
        self.pool.abort(array([self.node(f.key) for f in chosen]), array([f.slot for f in chosen]))
        self.fills = [f for f in self.fills if f not in chosen]

    def some_fills(self, picks: list[int], all_of_it: bool) -> list[Fill]:
        if all_of_it:
            return list(self.fills)
        return [self.fills[i] for i in dict.fromkeys(pick % len(self.fills) for pick in picks)]

    @rule(seconds=st.sampled_from([1.0, STALL_S]))
    def time_passes(self, seconds) -> None:
        self.now_s += seconds

    # ---- pins, rot, eviction -----------------------------------------------------------------------------

    @precondition(lambda self: self.known())
    @rule(pick=PICK)
    def pin(self, pick) -> None:
        key = sorted(self.known())[pick % len(self.known())]
        self.index.pin(self.node(key))
        self.pins[key] += 1

    @precondition(lambda self: +self.pins)
    @rule(pick=PICK)
    def unpin(self, pick) -> None:
        key = sorted(+self.pins)[pick % len(+self.pins)]
        self.index.unpin(self.node(key))
        self.pins[key] -= 1
        if not self.pins[key]:
            for drain in self.drains:
                drain.readers.discard(key)
            self.drains = [d for d in self.drains if d.readers]

    @precondition(lambda self: self.ready)
    @rule(pick=PICK)
    def drop(self, pick) -> None:
        key = sorted(self.ready)[pick % len(self.ready)]
        readers = {pinned for pinned in +self.pins if key in self.above(pinned)}
        assert self.pool.drop(self.node(key))
        slot = self.ready.pop(key)
        self.dropped.add(key)
        if readers:
            self.drains.append(Drain(key, slot, readers))
            assert not self.pool.drop(self.node(key))
        assert {k.tobytes() for k in self.pool.take_removed()} == {key}

    @rule(size=st.integers(0, 1), count=st.integers(1, 20))
    def evict(self, size, count) -> None:
        before = len(self.ready)
        shape = FORMATS[size]
        loose = {k for k in self.ready if self.format[k] is shape} - self.protected()
        done = self.pool.evict(shape, count)
        self.took(loose)
        assert before - len(self.ready) == done == min(count, done)
        if done < count:
            left = {k for k in self.ready if self.format[k] is shape} - self.protected()
            assert not left, "some could leave and did not"

    # ---- questions ---------------------------------------------------------------------------------------

    @rule(spec=CHAINS, picks=st.lists(PICK, max_size=6), touch=st.booleans())
    def walk(self, spec, picks, touch) -> None:
        keys, known = self.learn(spec), self.known()
        positions = sorted({pick % len(keys) for pick in picks} | {0})
        walk = self.index.walk(
            ROOTS[spec[0]], len(keys), array(positions), rows([keys[i] for i in positions])
        )
        asked = [i for i in positions if keys[i] in known]
        depth = asked[-1] + 1 if asked else 0
        unknown = [i for i in positions if keys[i] not in known]
        assert (walk.depth, walk.gap_stop) == (depth, unknown[0] if unknown else len(keys))
        assert walk.root == self.roots[spec[0]]
        assert walk.nodes.tolist() == [self.node(key) for key in keys[:depth]]
        assert self.index.digest(walk, depth) == _native.keys_digest(rows(keys[:depth])) if depth else True
        readable = next((i for i in range(depth) if keys[i] not in self.ready), depth)
        assert self.pool.match(walk) == readable
        if touch and depth:
            self.pool.touch(walk.deepest)

    @precondition(lambda self: self.known())
    @rule(pick=PICK)
    def missing(self, pick) -> None:
        key = sorted(self.known())[pick % len(self.known())]
        chain = sorted(self.above(key), key=lambda k: len(self.above(k)))
        held = [i for i, k in enumerate(chain) if k in self.ready]
        stop = held[-1] + 1 if held else 0  # the nearest readable block; holes above it are not its concern
        assert self.pool.missing(self.node(key)).tolist() == [self.node(k) for k in chain[stop:]]
        assert self.index.depth(self.node(key)) == len(chain)

    @precondition(lambda self: self.known())
    @rule(pick=PICK)
    def contradict(self, pick) -> None:
        """A known key after another parent is refused, and changes nothing."""
        key = sorted(self.known())[pick % len(self.known())]
        other = next(root for root in ROOTS if root != self.parent[key])
        with pytest.raises(ValueError, match="known after another parent"):
            self.pool.reserve(self.index.root(other), rows([key]), FORMATS[0], self.now_s, STALL_S)

    # ---- always ------------------------------------------------------------------------------------------

    @invariant()
    def states(self) -> None:
        self.index.check()
        self.pool.check()
        counts = self.pool.counts()
        assert counts["ready"] == len(self.ready)
        assert counts["filling"] == len(self.fills)
        assert counts["draining"] == len(self.drains)
        assert self.index.pins() == sum(self.pins.values())
        known = sorted(self.known())
        assert len(self.index) == len(known) <= self.nodes_max
        assert {k.tobytes() for k in self.index.keys(self.pool.ready_nodes())} == set(self.ready)
        slots = self.pool.slots(array([self.node(key) for key in known])).tolist()
        assert slots == [self.ready.get(key, NONE) for key in known]

    @invariant()
    def slots_do_not_overlap(self) -> None:
        used = [
            *self.ready.items(),
            *((f.key, f.slot) for f in self.fills),
            *((d.key, d.slot) for d in self.drains),
        ]
        spans = sorted((slot, slot + self.format[key].slot_bytes // 4096) for key, slot in used)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
        assert not spans or spans[-1][1] <= self.arena.pages
        assert self.pool.counts()["used_bytes"] == sum(4096 * (stop - start) for start, stop in spans)

    @invariant()
    def leaves_leave_first(self) -> None:
        for key in self.ready:
            holes = {k for k in self.above(key) if k not in self.ready}
            assert holes <= self.dropped

    def teardown(self) -> None:
        for fill in list(self.fills):
            self.pool.abort(array([self.node(fill.key)]), array([fill.slot]))
        for key, count in self.pins.items():
            for _ in range(count):
                self.index.unpin(self.node(key))
        for shape in FORMATS:
            while self.pool.evict(shape, 100):
                pass
        assert len(self.index) == 0
        assert self.pool.counts()["used_bytes"] == 0


NativeMachine.TestCase.settings = settings(
    max_examples=120,
    stateful_step_count=50,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestNative = NativeMachine.TestCase
