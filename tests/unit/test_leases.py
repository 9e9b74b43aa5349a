"""Leases: their life cycle, their one pin, and whose they are."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from kvstore._native import NONE, DevicePool, Index
from kvstore.errors import LimitExceeded, NotFound
from kvstore.keys import KeyChain
from kvstore.leases import Lease, Leases, LeaseState

ROOT = b"r" * 32
G, F, D = LeaseState.GRANTED, LeaseState.FETCHING, LeaseState.DONE
ALLOWED = {
    G: {F, LeaseState.RELEASED, LeaseState.REVOKED},
    F: {D, LeaseState.ABANDONED, LeaseState.RELEASED, LeaseState.REVOKED},
    D: {F, LeaseState.RELEASED, LeaseState.REVOKED},
    LeaseState.ABANDONED: {LeaseState.RELEASED, LeaseState.REVOKED},
    LeaseState.RELEASED: set(),
    LeaseState.REVOKED: set(),
}


def lease_in(state: LeaseState) -> Lease:
    return Lease(1, 1, ROOT, 4, np.empty(0, np.uint32), state=state)


@pytest.mark.parametrize(
    ("state", "to"), list(itertools.product(LeaseState, repeat=2)), ids=lambda s: s.value
)
def test_every_pair_of_states(state: LeaseState, to: LeaseState) -> None:
    lease = lease_in(state)
    if to in ALLOWED[state]:
        lease.move(to)
        assert lease.state is to
    else:
        with pytest.raises(RuntimeError, match=f"{state.value} → {to.value} is not a move"):
            lease.move(to)
        assert lease.state is state


class Tree:
    """An index with one chain of 8 nodes."""

    def __init__(self) -> None:
        self.index = Index(1000)
        self.pool = DevicePool(self.index, None, 64, 64)
        chain = KeyChain.of(ROOT, range(32), 4)
        blocks = self.pool.allocate(8).blocks
        self.pool.commit(blocks, self.index.root(ROOT), chain.keys)
        self.nodes = np.array([self.index.find(key.tobytes()) for key in chain.keys], np.uint32)
        self.leases = Leases(self.index, per_session_max=3)

    def check(self) -> None:
        self.index.check()
        assert self.index.pins() == self.leases.pins()


@pytest.fixture
def tree() -> Tree:
    return Tree()


def test_a_lease_pins_the_deepest_node(tree: Tree) -> None:
    lease = tree.leases.grant(7, ROOT, 8, tree.nodes[:5])
    assert lease.pinned == tree.nodes[4]
    assert tree.index.pins() == 1
    assert tree.leases.of(7) == [lease]
    assert tree.leases.get(7, lease.id) is lease
    tree.check()
    tree.leases.end(lease)
    assert (lease.state, lease.pinned, len(tree.leases)) == (LeaseState.RELEASED, NONE, 0)
    assert tree.index.pins() == 0
    tree.check()


def test_a_lease_on_nothing_pins_nothing(tree: Tree) -> None:
    lease = tree.leases.grant(7, b"", 0, tree.nodes[:0])
    assert (lease.pinned, tree.index.pins()) == (NONE, 0)
    tree.leases.end(lease)
    tree.check()


def test_a_pin_moves(tree: Tree) -> None:
    lease = tree.leases.grant(7, ROOT, 8, tree.nodes[:2])
    tree.leases.repin(lease, int(tree.nodes[7]))
    assert (lease.pinned, tree.index.pins()) == (tree.nodes[7], 1)
    tree.leases.repin(lease, int(tree.nodes[7]))
    assert tree.index.pins() == 1
    tree.check()
    tree.leases.end(lease)
    assert tree.index.pins() == 0


def test_two_leases_on_one_node(tree: Tree) -> None:
    one, two = (tree.leases.grant(session, ROOT, 8, tree.nodes) for session in (1, 2))
    assert tree.index.pins() == 2
    tree.leases.end(one)
    assert tree.index.pins() == 1
    tree.leases.end(two, LeaseState.REVOKED)
    tree.check()


def test_a_lease_is_its_sessions(tree: Tree) -> None:
    lease = tree.leases.grant(1, ROOT, 8, tree.nodes)
    for session, number in ((2, lease.id), (1, lease.id + 1), (1, 0), (1, -1)):
        with pytest.raises(NotFound, match=f"lease {number}: not held by this session"):
            tree.leases.get(session, number)
    tree.leases.end(lease)
    with pytest.raises(NotFound):
        tree.leases.get(1, lease.id)
    assert tree.leases.of(1) == []


def test_ids_are_never_reused(tree: Tree) -> None:
    seen = set()
    for _ in range(10):
        lease = tree.leases.grant(1, ROOT, 8, tree.nodes)
        assert lease.id not in seen and lease.id > 0
        seen.add(lease.id)
        tree.leases.end(lease)


def test_a_session_holds_so_many(tree: Tree) -> None:
    mine = [tree.leases.grant(1, ROOT, 8, tree.nodes) for _ in range(3)]
    with pytest.raises(LimitExceeded, match="leases_max = 3"):
        tree.leases.grant(1, ROOT, 8, tree.nodes)
    assert tree.index.pins() == 3
    tree.leases.grant(2, ROOT, 8, tree.nodes)
    tree.leases.end(mine[0])
    tree.leases.grant(1, ROOT, 8, tree.nodes)
    assert len(tree.leases) == len(list(tree.leases)) == 4
    tree.check()
