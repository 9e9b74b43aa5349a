"""Demotions where a chain has a hole, and what a full pool tells of evictions that were in vain."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.events import EventKind
from kvstore.keys import KeyChain
from kvstore.testing import SessionDriver, StoreDriver
from kvstore.types import Tier

BLOCKS, IDLE_MAX = 12, 8


@pytest.fixture
def session(driver: StoreDriver) -> SessionDriver:
    session = driver.attach()
    session.own_pool(BLOCKS, IDLE_MAX)
    return session


def idle(session: SessionDriver, blocks: int, start: int = 0) -> KeyChain:
    """A request that was served and has ended: its blocks are L2, and not on HOST."""
    chain = session.chain(range(start, start + 4 * blocks))
    table = session.acquire(0, blocks)
    session.commit(table.lease, chain, 0, blocks)
    assert session.release(table.lease) == ()
    return chain


def test_what_lies_below_a_hole_is_given_up_and_what_lies_above_is_saved(session: SessionDriver) -> None:
    chain = idle(session, 6)
    group, pool = session.caller.group, session.engine.device
    hole = group.index.find(chain.keys[2].tobytes())
    assert pool.drop(np.array([hole], np.uint32)) == 1
    orders = []
    while not len((table := session.acquire(0, BLOCKS)).added):
        assert table.demotions
        for order in table.demotions:
            assert (order.blocks < BLOCKS).all(), "an order names a block that is not there"
            session.write(order.filling)
            orders.append(session.publish(order.filling))
    assert sum(done.ready for done in orders) == 2
    assert group.counters.lost_on_demote == 3
    assert session.lookup(chain).blocks == 2
    session.store.check()


def test_evictions_of_a_table_that_found_no_room_are_told(session: SessionDriver) -> None:
    group = session.caller.group
    kept, left = idle(session, 4), idle(session, 4, start=1000)
    for chain in (kept, left):
        session.save(chain)  # on HOST as well: nothing has to be copied before it leaves
    assert session.lookup(kept).blocks == 4  # a lease: these four stay
    before = group.events.sequence
    assert session.acquire(0, BLOCKS).busy
    told = {
        key.tobytes()
        for event in group.events.since(group.events.epoch, before).events
        if event.tier is Tier.GPU and event.kind is EventKind.REMOVED
        for key in event.keys
    }
    assert told == {key.tobytes() for key in left.keys}
    assert session.lookup(left).lease.device == 0
