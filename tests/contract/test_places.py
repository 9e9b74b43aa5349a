"""One contract for every place that may hold block bytes: HOST, both kinds of device pool, and nothing."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvstore import _native
from kvstore._native import NONE, Arena, HostPool, Index, SlotFormat, Walk
from kvstore.keys import KeyChain
from kvstore.memory import GroupMemory
from kvstore.tiers.base import Place
from kvstore.tiers.gpu import BorrowedPool, OwnedPool
from kvstore.tiers.host import HostTier
from kvstore.tiers.noop import NoTier
from kvstore.types import Tier

ROOT = b"r" * 32
SHAPE = SlotFormat(1, 1, 60_000)
BLOCKS = 16
LONG = KeyChain.of(ROOT, range(40), 4)  # 10 blocks
OTHER = KeyChain.of(ROOT, range(20, 40), 4)
BRANCH = KeyChain.of(ROOT, [*range(12), *range(90, 110)], 4)  # shares 3 blocks with LONG


class World:
    """An index and a host pool that knows every node, so that walks have something to walk."""

    def __init__(self) -> None:
        self.arena = Arena.create("contract", 2 << 20)
        self.index = Index(1000)
        self.pool = HostPool(self.index, self.arena, 2 << 20)
        self.host = HostTier(GroupMemory(self.arena, self.index, self.pool, False))
        self.root = self.index.root(ROOT)

    def save(self, chain: KeyChain, stop: int) -> None:
        got = self.host.reserve(self.root, chain.keys[:stop], SHAPE, 0.0, 1.0, bytes(16))
        ours = got.slots != NONE
        assert got.dropped == 0
        if ours.any():
            self.host.publish(got.nodes[ours], got.slots[ours], SHAPE, checked=False)

    def walk(self, chain: KeyChain) -> Walk:
        positions = np.arange(len(chain), dtype=np.uint32)
        return self.index.walk(ROOT, len(chain), positions, chain.keys)


class HostPlace:
    """HOST itself."""

    tier, capacity = Tier.HOST, 2 << 20

    def __init__(self, world: World) -> None:
        self.world, self.place = world, world.host

    def fill(self, chain: KeyChain, stop: int) -> None:
        self.world.save(chain, stop)

    def empty(self, chain: KeyChain) -> None:
        for key in chain.keys[::-1]:
            self.world.pool.drop(self.world.index.find(key.tobytes()))

    def units(self, counts: dict[str, int]) -> int:
        used = (counts["filling"] + counts["ready"] + counts["draining"]) * SHAPE.slot_bytes
        assert counts["used_bytes"] == used
        return self.capacity if counts["free_slabs"] or counts["free"] else used


class OwnedPlace:
    """A device pool that the store runs."""

    tier, capacity = Tier.GPU, BLOCKS

    def __init__(self, world: World) -> None:
        self.world, self.place = world, OwnedPool(world.index, world.pool, BLOCKS, BLOCKS)

    def fill(self, chain: KeyChain, stop: int) -> None:
        blocks = self.place.allocate(stop).blocks
        self.place.commit(blocks, self.world.root, chain.keys[:stop])
        self.place.unpin(blocks)

    def empty(self, chain: KeyChain) -> None:
        self.place.unpin(self.place.allocate(BLOCKS).blocks)

    def units(self, counts: dict[str, int]) -> int:
        return sum(counts[state] for state in ("free", "mapped", "idle", "draining"))


class BorrowedPlace:
    """A device pool that the engine runs and tells about."""

    tier, capacity = Tier.GPU, BLOCKS

    def __init__(self, world: World) -> None:
        self.world, self.place = world, BorrowedPool(world.index, BLOCKS)

    def fill(self, chain: KeyChain, stop: int) -> None:
        self.tell(chain.keys[:stop], chain.keys[:0])

    def empty(self, chain: KeyChain) -> None:
        self.tell(chain.keys[:0], chain.keys)

    def tell(self, stored: np.ndarray, removed: np.ndarray) -> None:
        held = len({*map(bytes, self.place.keys())} - {*map(bytes, removed)} | {*map(bytes, stored)})
        self.place.observe({"mapped": 0, "idle": held, "free": BLOCKS - held}, stored, removed)

    def units(self, counts: dict[str, int]) -> int:
        return sum(counts.values())


PLACES: list[Callable[[World], HostPlace | OwnedPlace | BorrowedPlace]] = [
    HostPlace,
    OwnedPlace,
    BorrowedPlace,
]


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture(params=PLACES, ids=lambda p: p.__name__)
def at(request: pytest.FixtureRequest, world: World) -> HostPlace | OwnedPlace | BorrowedPlace:
    return request.param(world)


def rows(keys: np.ndarray) -> set[bytes]:
    assert keys.dtype == np.uint8 and keys.shape[1:] == (32,)
    return {key.tobytes() for key in keys}


def test_it_names_its_tier(at) -> None:
    assert at.place.tier is at.tier


def test_an_empty_place_matches_nothing(at, world: World) -> None:
    assert at.place.match(world.walk(LONG)) == 0
    assert len(at.place.take_removed()) == len(at.place.keys()) == 0
    at.place.check()


@pytest.mark.parametrize("held", [1, 4, 10])
def test_it_matches_what_it_holds(at, world: World, held: int) -> None:
    at.fill(LONG, held)
    world.save(LONG, 10)  # the walk is longer than what the place holds
    expected = 10 if at.tier is Tier.HOST else held
    assert at.place.match(world.walk(LONG)) == expected
    short = KeyChain(ROOT, LONG.keys[: held - 1])
    assert at.place.match(world.walk(short)) == held - 1
    at.place.check()


def test_it_matches_no_other_chain(at, world: World) -> None:
    at.fill(LONG, 10)
    assert at.place.match(world.walk(OTHER)) == 0
    if at.tier is not Tier.HOST:
        world.save(BRANCH, len(BRANCH))
    assert at.place.match(world.walk(BRANCH)) == 3


def test_a_question_changes_nothing(at, world: World) -> None:
    at.fill(LONG, 6)
    world.save(LONG, 6)
    walk, before = world.walk(LONG), at.place.counts()
    assert at.place.match(walk) == at.place.match(walk) == 6
    assert at.place.counts() == before
    assert len(at.place.take_removed()) == 0


def test_counts_add_up(at, world: World) -> None:
    for held in (0, 3, 10):
        if held:
            at.fill(LONG, held)
            at.empty(LONG) if held == 3 else None
        counts = at.place.counts()
        assert all(isinstance(n, int) and n >= 0 for n in counts.values())
        assert at.units(counts) == at.capacity
        at.place.check()


def test_what_left_is_told_once(at, world: World) -> None:
    world.save(LONG, 10)
    at.fill(LONG, 10)
    at.place.take_removed()
    at.empty(LONG)
    assert rows(at.place.take_removed()) == rows(LONG.keys)
    assert len(at.place.take_removed()) == 0
    assert at.place.match(world.walk(LONG)) == 0
    assert len(at.place.keys()) == 0
    at.place.check()


def test_what_came_back_did_not_leave(at, world: World) -> None:
    world.save(LONG, 10)
    at.fill(LONG, 10)
    at.place.take_removed()
    at.empty(LONG)
    at.fill(LONG, 10)
    if not isinstance(at.place, BorrowedPool):  # a mirror repeats what it was told
        assert len(at.place.take_removed()) == 0
    assert rows(at.place.keys()) == rows(LONG.keys)
    at.place.check()


def test_it_lists_what_it_holds(at, world: World) -> None:
    world.save(BRANCH, 0)
    at.fill(LONG, 7)
    assert rows(at.place.keys()) == rows(LONG.keys[:7])


def test_a_device_tells_what_it_stored_and_what_ended_with_it(world: World) -> None:
    world.save(LONG, 10)
    for at in (OwnedPlace(world), BorrowedPlace(world)):
        at.fill(LONG, 5)
        assert rows(at.place.take_stored()) == rows(LONG.keys[:5])
        assert len(at.place.take_stored()) == 0
        at.place.close()
        assert rows(at.place.take_removed()) == rows(LONG.keys[:5])
        assert at.place.match(world.walk(LONG)) == 0
    world.index.check()


@pytest.mark.parametrize("tier", Tier)
def test_nothing_is_a_place_too(world: World, tier: Tier) -> None:
    world.save(LONG, 10)
    place: Place = NoTier(tier)
    nothing = NoTier(tier)
    assert place.tier is tier
    assert place.match(world.walk(LONG)) == 0
    assert len(place.take_removed()) == len(nothing.take_stored()) == len(nothing.keys()) == 0
    assert set(place.counts().values()) == {0}
    assert nothing.blocks_of(np.arange(3, dtype=np.uint32)).tolist() == [_native.NONE] * 3
    nothing.touch(0)
    nothing.close()
    place.check()
