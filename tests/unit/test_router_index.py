"""The router's native tables against dictionaries and lists: any order, holes, full tables, resyncs."""

from __future__ import annotations

import threading
from collections.abc import Iterable

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore._native import (
    ROUTER_KEYS_MAX,
    EngineBlocks,
    PrefixLru,
    RouterIndex,
    chain_keys,
    token_fingerprints,
    unpack_hashes,
    unpack_tokens,
)

TIERS = 4
NODES_MAX = 40
SEED = 12345
# A chain: which of three heads, how many blocks of it, which of four tails, how many blocks of that.
CHAINS = st.tuples(st.integers(0, 2), st.integers(0, 12), st.integers(0, 3), st.integers(0, 12))
TIER = st.integers(0, TIERS - 1)
QUICK = settings(
    max_examples=25, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
Spec = tuple[int, int, int, int]


def chain(spec: Spec) -> list[int]:
    head, length, tail, more = spec
    return [1000 * head + i + 1 for i in range(length)] + [
        100_000 * (head + 1) + 1000 * tail + i + 1 for i in range(more)
    ]


def packed(keys: Iterable[int]) -> np.ndarray:
    return np.array(list(keys), np.uint64)


def unpacked(prints: bytes) -> list[int]:
    return np.frombuffer(prints, np.uint64).tolist()


class Recent:
    """Keys, most recently used first; a batch keeps its order, and a full one gives up its end."""

    def __init__(self, most: int) -> None:
        self.most, self.order = most, list[int]()

    def use(self, keys: list[int]) -> tuple[list[int], list[int]]:
        """Keys that are there now, and what left for them."""
        batch, left = list[int](), list[int]()
        for key in keys:
            if batch and batch[-1] == key:
                continue
            if key not in self.order and len(self.order) == self.most:
                if batch and self.order[-1] == batch[-1]:
                    break
                left.append(self.order.pop())
            self.order = [k for k in self.order if k != key]
            batch = [*(k for k in batch if k != key), key]
            rest = [k for k in self.order if k not in batch]
            self.order = [*batch, *rest]
        return batch, left


class IndexMachine(RuleBasedStateMachine):
    """RouterIndex beside a dictionary: key → {(replica, tier)}."""

    def __init__(self) -> None:
        super().__init__()
        self.index = RouterIndex(NODES_MAX, 70)  # two words of replicas
        self.holders: dict[int, set[tuple[int, int]]] = {}
        self.recent = Recent(NODES_MAX)
        self.replicas: list[int] = []
        self.evicted = 0

    @rule()
    def add(self) -> None:
        free = next(i for i in range(70) if i not in self.replicas)
        assert self.index.add_replica() == free
        self.replicas.append(free)

    @precondition(lambda self: self.replicas)
    @rule(pick=st.integers(0, 100))
    def remove_replica(self, pick: int) -> None:
        replica = self.replicas.pop(pick % len(self.replicas))
        self.index.remove_replica(replica)
        self.drop(set(self.holders), {(replica, tier) for tier in range(TIERS)})
        with pytest.raises(ValueError, match="replica"):
            self.index.blocks(replica)

    @precondition(lambda self: self.replicas)
    @rule(spec=CHAINS, tier=TIER, pick=st.integers(0, 100), start=st.integers(0, 3))
    def stored(self, spec: Spec, tier: int, pick: int, start: int) -> None:
        replica, keys = self.replicas[pick % len(self.replicas)], chain(spec)[start:]
        kept, left = self.recent.use(keys)
        for key in left:
            self.holders.pop(key, None)
        self.evicted += len(left)
        new = [k for k in kept if (replica, tier) not in self.holders.get(k, set())]
        for key in kept:
            self.holders.setdefault(key, set()).add((replica, tier))
        assert self.index.stored(replica, tier, packed(keys)) == len(new)

    @precondition(lambda self: self.replicas)
    @rule(spec=CHAINS, tier=TIER, pick=st.integers(0, 100), start=st.integers(0, 20))
    def removed(self, spec: Spec, tier: int, pick: int, start: int) -> None:
        """From anywhere: a start of 0 leaves a hole where a chain's head was."""
        replica, keys = self.replicas[pick % len(self.replicas)], chain(spec)[start:]
        there = {k for k in keys if (replica, tier) in self.holders.get(k, set())}
        assert self.index.removed(replica, tier, packed(keys).tobytes()) == len(there)
        self.drop(there, {(replica, tier)})

    @precondition(lambda self: self.replicas)
    @rule(tier=st.integers(-1, TIERS - 1), pick=st.integers(0, 100))
    def cleared(self, tier: int, pick: int) -> None:
        replica = self.replicas[pick % len(self.replicas)]
        gone = {(replica, t) for t in range(TIERS) if tier in (-1, t)}
        count = sum(len(by & gone) for by in self.holders.values())
        assert self.index.cleared(replica, tier) == count
        self.drop(set(self.holders), gone)

    @rule(spec=CHAINS)
    def touch(self, spec: Spec) -> None:
        known = [k for k in chain(spec) if k in self.holders]
        assert self.index.touch(packed(chain(spec))) == len(known)
        self.recent.use(known)

    @rule(spec=CHAINS)
    def find(self, spec: Spec) -> None:
        keys = chain(spec)
        found = self.index.find(packed(keys))
        assert found.dtype == np.int32
        assert found.shape == (max(self.replicas, default=-1) + 1, TIERS)
        expected = np.zeros_like(found)
        whole = True  # no replica has a hole that ends its prefix too early
        for replica in self.replicas:
            for tier in range(TIERS):
                within = {(replica, t) for t in range(tier + 1)}
                held = [bool(within & self.holders.get(k, set())) for k in keys]
                expected[replica, tier] = length = next((i for i, h in enumerate(held) if not h), len(keys))
                whole &= not any(held[length:])
        assert np.array_equal(found, expected)
        if whole:
            assert np.array_equal(self.index.find_bisected(packed(keys)), expected)

    def drop(self, keys: set[int], gone: set[tuple[int, int]]) -> None:
        for key in keys:
            self.holders[key] -= gone
            if not self.holders[key]:
                del self.holders[key]
                self.recent.order.remove(key)

    @invariant()
    def agree(self) -> None:
        self.index.check()
        assert self.index.nodes == len(self.holders)
        assert self.index.evicted == self.evicted
        for replica in self.replicas:
            for tier, count in enumerate(self.index.blocks(replica)):
                held = {k for k, by in self.holders.items() if (replica, tier) in by}
                assert count == len(held)
                assert set(self.index.keys_of(replica, tier).tolist()) == held


class BlocksMachine(RuleBasedStateMachine):
    """EngineBlocks, and an index fed by it, beside hash → (tokens of its whole chain, tiers)."""

    BLOCK = 2

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.index = EngineBlocks(12), RouterIndex(1000)
        self.replica = self.index.add_replica()
        self.known: dict[int, tuple[tuple[int, ...], set[int]]] = {}
        self.recent = Recent(12)
        self.orphans = 0

    @rule(
        salt=st.integers(1, 2),
        path=st.lists(st.integers(0, 1), max_size=5),
        count=st.integers(1, 4),
        tier=st.integers(0, 1),
    )
    def stored(self, salt: int, path: list[int], count: int, tier: int) -> None:
        """The last `count` blocks of a path; hashes bind a salt that the router does not know."""
        start = max(0, len(path) - count)
        if start == len(path):
            return
        names = [self.name(salt, path[: i + 1]) for i in range(len(path))]
        parent = names[start - 1] if start else None
        tokens = np.repeat(np.array(path[start:], np.uint32), self.BLOCK)
        prints = self.blocks.stored(parent, packed(names[start:]), 8, tokens, self.BLOCK, SEED, tier=tier)
        if parent is not None and parent not in self.known:
            assert prints == b""
            self.orphans += len(path) - start
            return
        kept, left = self.recent.use(names[start:])
        for name in left:
            del self.known[name]
        for name in kept:
            above = tuple(path[: names.index(name) + 1])
            self.known.setdefault(name, (above, set()))[1].add(tier)
        assert unpacked(prints) == [self.print_of(path[: start + i + 1]) for i in range(len(kept))]
        self.index.stored(self.replica, tier, prints)
        for t in range(2):
            self.index.removed(self.replica, t, self.blocks.take_evicted(t))

    @rule(
        salt=st.integers(1, 2),
        path=st.lists(st.integers(0, 1), min_size=1, max_size=5),
        tier=st.integers(0, 1),
    )
    def removed(self, salt: int, path: list[int], tier: int) -> None:
        name = self.name(salt, path)
        self.index.removed(self.replica, tier, self.blocks.removed(packed([name, 999_999]), 8, tier))
        if name in self.known:
            self.known[name][1].discard(tier)
            if not self.known[name][1]:
                del self.known[name]
                self.recent.order.remove(name)

    @rule(tier=st.integers(-1, 1))
    def clear(self, tier: int) -> None:
        self.blocks.clear(tier)
        self.index.cleared(self.replica, tier)
        for name in list(self.known):
            self.known[name][1].difference_update({0, 1} if tier == -1 else {tier})
            if not self.known[name][1]:
                del self.known[name]
                self.recent.order.remove(name)

    def name(self, salt: int, path: list[int]) -> int:
        return int("".join(map(str, [salt, *path])))

    def print_of(self, path: Iterable[int]) -> int:
        tokens = np.repeat(np.array(list(path), np.uint32), self.BLOCK)
        return int(token_fingerprints(tokens, self.BLOCK, SEED)[-1])

    @invariant()
    def agree(self) -> None:
        self.blocks.check()
        assert len(self.blocks) == len(self.known)
        assert self.blocks.orphans == self.orphans
        for tier in range(2):
            held = {self.print_of(path) for path, tiers in self.known.values() if tier in tiers}
            assert set(self.index.keys_of(self.replica, tier).tolist()) == held


TestIndex = IndexMachine.TestCase
TestIndex.settings = QUICK
TestBlocks = BlocksMachine.TestCase
TestBlocks.settings = QUICK


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(CHAINS, st.booleans()), max_size=30), st.integers(1, 30))
def test_a_prefix_lru_is_a_list(turns: list[tuple[Spec, bool]], capacity: int) -> None:
    lru, recent = PrefixLru(capacity), Recent(capacity)
    for spec, dropping in turns:
        keys = chain(spec)
        expected = next((i for i, k in enumerate(keys) if k not in recent.order), len(keys))
        assert lru.match(packed(keys)) == expected
        if dropping:
            assert lru.drop(packed(keys)) == len(set(keys) & set(recent.order))
            recent.order = [k for k in recent.order if k not in keys]
        else:
            assert lru.touch(packed(keys)).tolist() == recent.use(keys)[1]
        lru.check()
        assert len(lru) == len(recent.order)
    lru.clear()
    assert len(lru) == 0


def test_a_resync_fills_a_second_column_and_swaps() -> None:
    index = RouterIndex(1000)
    live = index.add_replica()
    index.stored(live, 0, packed(range(1, 101)))
    shadow = index.add_replica()
    for start in range(1, 61, 20):  # the snapshot, in parts
        index.stored(shadow, 0, packed(range(start, start + 20)))
        assert index.find(packed(range(1, 101)))[live, 0] == 100
    gone = set(index.keys_of(live, 0).tolist()) - set(index.keys_of(shadow, 0).tolist())
    assert gone == set(range(61, 101))
    index.remove_replica(live)
    assert index.find(packed(range(1, 101)))[shadow].tolist() == [60] * 4
    assert index.add_replica() == live
    index.check()


def test_keys_come_in_every_usual_form() -> None:
    index = RouterIndex(1000)
    replica = index.add_replica()
    keys = chain_keys(b"\0" * 32, np.arange(160, dtype=np.uint32), 16)
    assert index.stored(replica, 1, keys, 32) == 10
    prints = keys[:, :8].copy().view("<u8").ravel()
    for form, width in (
        (keys.tobytes(), 32),
        (bytearray(keys.tobytes()), 32),
        (memoryview(keys.tobytes()), 32),
        (prints, 8),
        (prints.view(np.int64), 8),
        (prints.tobytes(), 8),
    ):
        assert index.find(form, width)[replica].tolist() == [0, 10, 10, 10]
    assert set(index.keys_of(replica, 1).tolist()) == set(prints.tolist())


@pytest.mark.parametrize(
    ("keys", "width", "words"),
    [
        (b"1234567", 8, "keys: 7 bytes are not a multiple of 8"),
        (b"12345678", 12, "width: a key has 8, 16 or 32 bytes, got 12"),
        (np.zeros(4, np.uint32), 8, "keys: elements of 4 bytes"),
        (np.zeros(4, np.float64), 8, "keys: elements of 8 bytes, format 'd'"),
        (np.zeros(8, np.uint64)[::2], 8, "keys: expected bytes or a C-contiguous array"),
        ([1, 2], 8, "keys: expected bytes or a C-contiguous array"),
        (b"12345678" * (ROUTER_KEYS_MAX + 1), 8, f"keys: .* the most is {ROUTER_KEYS_MAX}"),
    ],
)
def test_wrong_keys_are_named(keys: object, width: int, words: str) -> None:
    index = RouterIndex(10)
    index.add_replica()
    with pytest.raises(ValueError, match=words):
        index.stored(0, 0, keys, width)  # type: ignore[arg-type]
    assert index.nodes == 0


def test_a_table_in_a_long_call_refuses_another_thread() -> None:
    """A batch this large runs without the GIL; nobody may see the table meanwhile, and nothing breaks."""
    index = RouterIndex(1 << 20)
    index.add_replica()
    keys = np.random.default_rng(1).integers(1, 1 << 63, (16, ROUTER_KEYS_MAX), dtype=np.uint64)
    refused, done = [], threading.Event()

    def look() -> None:
        while not done.is_set():
            try:
                index.find(keys[0, :10])
            except RuntimeError as error:
                refused.append(str(error))

    other = threading.Thread(target=look)
    other.start()
    try:
        stored = 0
        for batch in keys:
            while True:
                try:
                    stored += index.stored(0, 0, batch)
                    break
                except RuntimeError:  # pragma: no cover  the other thread's find is short and keeps the GIL
                    continue
    finally:
        done.set()
        other.join()
    assert stored == index.nodes == keys.size
    assert all("two threads" in text for text in refused)
    index.check()


def test_events_of_an_engine_are_found_by_the_prompt_alone() -> None:
    """vLLM's two kinds of hashes, straight from msgpack."""
    rng = np.random.default_rng(2)
    prompt = rng.integers(0, 1 << 17, 40, dtype=np.uint32)
    for hashes in ([-5, (1 << 64) - 7], [bytes([i]) * 32 for i in (1, 2)], [bytes([i]) * 16 for i in (3, 4)]):
        blocks, index = EngineBlocks(100), RouterIndex(100)
        replica = index.add_replica()
        for number, parent in ((0, None), (1, hashes[0])):
            tokens = prompt[16 * number : 16 * number + 16].tolist()
            raw = msgspec.msgpack.encode(hashes[number : number + 1]), msgspec.msgpack.encode(tokens)
            prints = blocks.stored(
                parent, unpack_hashes(raw[0]), 8, unpack_tokens(raw[1]), 16, SEED, b"adapter"
            )
            assert index.stored(replica, 0, prints) == 1
        asked = token_fingerprints(prompt, 16, SEED, b"adapter")
        assert index.find(asked)[replica, 0] == 2
        assert index.find(token_fingerprints(prompt, 16, SEED))[replica, 0] == 0


def test_memory_is_what_is_used_and_never_more_than_the_cap() -> None:
    assert RouterIndex(1 << 30).memory_bytes < 1 << 16  # a billion allowed, none there
    index = RouterIndex(20_000)
    replica = index.add_replica()
    rng = np.random.default_rng(3)
    for _ in range(100):
        index.stored(replica, 0, rng.integers(1, 1 << 63, 4096, dtype=np.uint64))
    assert index.nodes == 20_000
    assert index.memory_bytes < 20_000 * 64
    assert index.blocks(replica).tolist() == [20_000, 0, 0, 0]
