"""Block tables of owned pools, one behaviour at a time."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

from kvstore import _native, block_tables
from kvstore._native import KEYS_MAX, NONE
from kvstore.errors import BadRequest, KVStoreError, LimitExceeded, NotFound
from kvstore.keys import KeyChain
from kvstore.testing import SessionDriver, StoreDriver, small_config

BLOCKS, IDLE_MAX = 12, 4


@pytest.fixture
def session(driver: StoreDriver) -> SessionDriver:
    session = driver.attach()
    session.own_pool(BLOCKS, IDLE_MAX)
    return session


def tokens(blocks: int, start: int = 0) -> range:
    return range(start, start + 4 * blocks)


def serve(session: SessionDriver, chain: KeyChain, blocks: int | None = None):
    """Look up, acquire, commit: what a request does; its table."""
    found = session.lookup(chain)
    table = session.acquire(found.lease.id if found.blocks else 0, blocks or len(chain))
    assert not table.busy and not table.demotions
    session.commit(table.lease, chain, table.device, len(chain))
    return table


def test_l1_becomes_l2_and_comes_back(session: SessionDriver) -> None:
    chain = session.chain(tokens(4))
    table = serve(session, chain)
    pool = session.engine.device
    assert (table.device, pool.counts()["mapped"], pool.counts()["idle"]) == (0, 4, 0)
    assert session.release(table.lease) == ()
    assert (pool.counts()["mapped"], pool.counts()["idle"]) == (0, 4)
    found = session.lookup(chain)
    assert (found.blocks, found.match.plan.load_start, found.match.plan.load_stop) == (4, 4, 4)
    again = session.acquire(found.lease.id, 5)
    assert again.device == 4
    assert again.added[:4].tolist() == table.added.tolist(), "the same blocks: nothing is copied"
    assert (again.load_start, again.load_stop, again.runs) == (4, 4, b"")


def test_what_only_host_has_is_loaded(session: SessionDriver) -> None:
    chain = session.chain(tokens(5))
    session.save(chain, 0, 3)
    found = session.lookup(chain)
    table = session.acquire(found.lease.id, 5)
    assert (table.device, table.load_start, table.load_stop) == (0, 0, 3)
    pages = session.caller.shape.slot_bytes // _native.PAGE_BYTES
    assert len(_native.unpack_slots(table.runs, 3, pages, session.caller.group.arena.pages)) == 3


def test_a_table_grows(session: SessionDriver) -> None:
    table = serve(session, session.chain(tokens(3)))
    more = session.acquire(table.lease.id, 5)
    assert len(more.added) == 2
    assert len(set(table.lease.table.tolist())) == 5
    assert len(session.acquire(table.lease.id, 5).added) == 0
    assert len(session.acquire(table.lease.id, 2).added) == 0, "a table never shrinks"


def test_busy_is_a_value_and_leaks_nothing(session: SessionDriver) -> None:
    chain = session.chain(tokens(8))
    serve(session, chain)
    leases = len(session.caller.group.leases)
    busy = session.acquire(0, 5)
    assert "8 of 12 blocks are mapped" in busy.busy and len(busy.added) == 0
    assert len(session.caller.group.leases) == leases
    found = session.lookup(session.chain(tokens(8)))
    again = session.acquire(found.lease.id, 12)
    assert not again.busy and again.device == 8


def test_idle_blocks_beyond_the_limit_are_demoted_and_stay_known(session: SessionDriver) -> None:
    chain = session.chain(tokens(6))
    table = serve(session, chain)
    orders = session.release(table.lease)
    filling = [order.filling for order in orders]
    assert sum(len(order.blocks) for order in orders) == 6, "ancestors that HOST lacks come along"
    assert all(NONE not in order.blocks for order in orders)
    session.write(filling[0])
    assert session.publish(filling[0]).ready == 6
    assert session.engine.device.counts() | {"events_lost": 0} == {
        "free": 8,
        "mapped": 0,
        "idle": 4,
        "draining": 0,
        "events_lost": 0,
    }
    assert session.caller.group.counters.demoted_blocks == 6
    found = session.lookup(chain)
    assert (found.blocks, found.lease.device, found.lease.host) == (6, 4, 6)


def test_what_is_on_host_already_is_not_copied_again(session: SessionDriver) -> None:
    chain = session.chain(tokens(6))
    table = serve(session, chain)
    session.save(chain)
    assert session.release(table.lease) == ()
    assert session.engine.device.counts()["idle"] == IDLE_MAX


def test_a_full_pool_demotes_before_it_hands_out(session: SessionDriver) -> None:
    for n in range(3):
        session.release(serve(session, session.chain(tokens(1, 1000 * n))).lease)
    got = session.acquire(0, 12)
    assert got.demotions and not len(got.added) and not got.busy
    for order in got.demotions:
        session.write(order.filling)
        session.publish(order.filling)
    again = session.acquire(0, 12)
    assert len(again.added) == 12
    assert session.lookup(session.chain(tokens(1, 2000))).blocks == 1


def test_a_refused_demotion_loses_the_bytes_but_not_the_block(session: SessionDriver) -> None:
    session.release(serve(session, session.chain(tokens(3))).lease)
    got = session.acquire(0, 12)
    for order in got.demotions:
        session.abort(order.filling)
    assert len(session.acquire(0, 12).added) == 12
    assert session.lookup(session.chain(tokens(3))).blocks == 0


def test_adoption_pins_and_indexes(driver: StoreDriver, session: SessionDriver) -> None:
    chain = session.chain(tokens(3))
    lease = session.adopt(chain, [7, 3, 9, 11])
    assert session.engine.device.counts()["mapped"] == 4
    found = session.lookup(chain)
    assert (found.blocks, found.lease.device) == (3, 3)
    session.release(lease)
    assert session.acquire(found.lease.id, 3).added.tolist() == [7, 3, 9]


def test_adopted_tables_share_what_they_shared_before(driver: StoreDriver, session: SessionDriver) -> None:
    """In any order, and also where one of them computed a block of its own."""
    pool = session.engine.device
    a, b, c = (session.chain([*tokens(2), *tokens(3, start)]) for start in (100, 200, 300))
    first = session.adopt(a, [0, 1, 2, 3, 4, 5])
    second = session.adopt(b, [0, 1, 6, 7, 8])
    copy = session.adopt(a, [0, 9, 2])  # its second block is a twin of block 1, its third is shared
    assert pool.counts()["free"] == BLOCKS - 10
    driver.store.check()
    busy = session.acquire(0, 3)
    assert busy.busy, "only two blocks are nobody's"
    assert sorted(session.acquire(0, 2).added.tolist()) == [10, 11]
    session.release(first)
    for chain, blocks in ((a, [0, 1, 2, 3, 4]), (b, [0, 1, 6, 7, 8]), (c, [0, 1])):
        found = session.lookup(chain)
        assert session.acquire(found.lease.id, len(blocks)).added.tolist() == blocks
        session.release(found.lease)
    session.release(copy)
    assert pool.counts()["free"] == 2, "blocks 5 and 9 were private"
    session.release(second)
    driver.store.check()


def test_adoption_refuses_a_block_with_two_contents(driver: StoreDriver, session: SessionDriver) -> None:
    session.adopt(session.chain(tokens(2)), [0, 1])
    with pytest.raises(BadRequest, match="already holds"):
        session.adopt(session.chain(tokens(2, 500)), [0, 2])
    assert session.engine.device.counts()["free"] == BLOCKS - 2
    driver.store.check()


@pytest.mark.parametrize("table", [[12], [0, 0], [2**32 - 1]])
def test_a_bad_adoption_changes_nothing(session: SessionDriver, table: list[int]) -> None:
    with pytest.raises(BadRequest, match=r"^adopt"):
        session.adopt(session.chain(tokens(1)), table)
    assert session.engine.device.counts()["free"] == BLOCKS
    assert len(session.caller.group.leases) == 0


def test_an_adoption_that_is_refused_late_changes_nothing(session: SessionDriver) -> None:
    """Keys that contradict the index, or a lease too many: no block may stay pinned for nobody."""
    chain = session.chain(tokens(3))
    session.save(chain)
    swapped = KeyChain(chain.root, np.ascontiguousarray(chain.keys[::-1]))
    with pytest.raises(BadRequest):
        session.adopt(swapped, [0, 1, 2])
    assert session.engine.device.counts()["free"] == BLOCKS
    assert len(session.caller.group.leases) == 0
    session.caller.group.leases.per_session_max = 0
    with pytest.raises(LimitExceeded):
        session.adopt(chain, [0, 1, 2])
    assert session.engine.device.counts()["free"] == BLOCKS


def test_commit_stays_inside_the_table(session: SessionDriver) -> None:
    chain = session.chain(tokens(4))
    table = session.acquire(0, 3)
    with pytest.raises(BadRequest, match=r"^commit: \[0, 4\) is not inside a table of 3"):
        session.commit(table.lease, chain, 0, 4)
    assert session.commit(table.lease, chain, 0, 3) == 3
    with pytest.raises(BadRequest, match="already holds"):
        session.commit(table.lease, chain, 0, 3)


def test_equal_blocks_stay_private(session: SessionDriver) -> None:
    chain = session.chain(tokens(3))
    one, two = session.acquire(0, 3), session.acquire(0, 3)
    assert session.commit(one.lease, chain, 0, 3) == 3
    assert session.commit(two.lease, chain, 0, 3) == 0
    session.release(two.lease)
    assert session.engine.device.counts()["free"] == BLOCKS - 3
    session.release(one.lease)
    assert session.engine.device.counts()["idle"] == 3


def test_a_commit_never_loosens_a_lease(driver: StoreDriver, session: SessionDriver) -> None:
    """The lease's own match stays pinned, whatever part of which chain is committed."""
    chain = session.chain(tokens(6))
    session.save(chain)
    for other, start, stop in ((chain, 0, 1), (session.chain(tokens(1, 7000)), 0, 1)):
        lease = session.lookup(chain).lease
        session.acquire(lease.id, 6)
        with contextlib.suppress(KVStoreError):  # refusing is right too
            session.commit(lease, other, start, stop)
        for n in range(1, 8):
            session.save(session.chain(tokens(6, 1000 * n)))
        assert session.faults(lease, chain) == []
        session.release(lease)


def test_tables_are_only_for_owned_pools(driver: StoreDriver) -> None:
    bare, borrowed = driver.attach(), driver.attach()
    borrowed.lend_pool(8)
    for session in (bare, borrowed):
        with pytest.raises(BadRequest, match="no owned device pool"):
            session.acquire(0, 1)
    with pytest.raises(BadRequest, match="has declared its pool"):
        borrowed.own_pool(8, 8)


@pytest.mark.parametrize(("blocks", "idle_max"), [(0, 0), (-1, 0), (1 << 30, 0), (8, 9), (8, -1)])
def test_pool_sizes(driver: StoreDriver, blocks: int, idle_max: int) -> None:
    with pytest.raises(BadRequest, match=r"^pool\."):
        driver.attach().own_pool(blocks, idle_max)


@pytest.mark.parametrize("blocks", [0, -1, BLOCKS + 1, 1 << 40])
def test_table_lengths(session: SessionDriver, blocks: int) -> None:
    with pytest.raises(BadRequest, match=r"^acquire\.blocks: need 1 to"):
        session.acquire(0, blocks)
    assert len(session.caller.group.leases) == 0


def test_the_table_of_a_very_long_sequence(driver: StoreDriver) -> None:
    """More blocks than one native call takes: 160,000 tokens at 16 a block."""
    session = driver.attach()
    session.own_pool(20_000, 20_000)
    table = session.acquire(0, 12_500)
    assert len(set(table.added.tolist())) == 12_500
    assert len(session.acquire(table.lease.id, 19_000).added) == 6_500
    assert session.acquire(0, 1_001).busy, "all or nothing"
    assert session.engine.device.counts()["free"] == 1_000
    session.release(table.lease)
    assert session.engine.device.counts()["free"] == 20_000
    assert len(session.caller.group.leases) == 0


def test_a_very_long_sequence_is_all_or_nothing_when_its_second_part_must_wait(driver: StoreDriver) -> None:
    session = driver.attach()
    session.own_pool(KEYS_MAX + 100, KEYS_MAX + 100)
    idle = session.chain(tokens(8))
    session.release(serve(session, idle).lease)
    got = session.acquire(0, KEYS_MAX + 100)
    assert got.demotions and not len(got.added)
    counts = session.engine.device.counts()
    assert (counts["mapped"], counts["free"]) == (0, KEYS_MAX + 92), "the first part was given back"
    for order in got.demotions:
        session.write(order.filling)
        session.publish(order.filling)
    assert len(session.acquire(0, KEYS_MAX + 100).added) == KEYS_MAX + 100


def test_a_very_long_sequence_is_reused_whole_and_adopted_whole() -> None:
    count = KEYS_MAX + 500
    with StoreDriver(small_config(nodes_max=2 * count)) as driver:
        reused_and_adopted_whole(driver, count)
        driver.store.check()


def reused_and_adopted_whole(driver: StoreDriver, count: int) -> None:
    session = driver.attach()
    session.own_pool(count, count)
    chain = session.chain(tokens(count))
    table = session.acquire(0, count)
    for start in range(0, count, KEYS_MAX):
        session.commit(table.lease, chain, start, min(count, start + KEYS_MAX))
    session.release(table.lease)
    found = session.lookup(chain)
    again = session.acquire(found.lease.id, count)
    assert (again.device, again.added.tolist()) == (count, table.added.tolist())
    session.disconnect()
    heir = driver.attach()
    heir.own_pool(count, count)
    lease = block_tables.adopt(driver.store, heir.caller, b"", table.added, np.empty((0, 32), np.uint8))
    assert heir.engine.device.counts()["mapped"] == count
    heir.release(lease)
    assert heir.engine.device.counts()["free"] == count
    with pytest.raises(BadRequest, match=r"^adopt\.table"):  # named twice, but in two parts
        block_tables.adopt(
            driver.store,
            heir.caller,
            b"",
            np.append(table.added, table.added[:1]),
            np.empty((0, 32), np.uint8),
        )
    assert heir.engine.device.counts()["free"] == count


def test_leases_end_once(session: SessionDriver) -> None:
    table = serve(session, session.chain(tokens(2)))
    session.release(table.lease)
    for again in (lambda: session.release(table.lease), lambda: session.acquire(table.lease.id, 2)):
        with pytest.raises(NotFound):
            again()


# ---- endings ----------------------------------------------------------------------------------------------


def test_a_pool_dies_with_its_session(driver: StoreDriver, session: SessionDriver) -> None:
    chain = session.chain(tokens(4))
    serve(session, chain)
    session.disconnect()
    driver.store.check()
    other = driver.attach()
    assert other.lookup(other.chain(tokens(4))).blocks == 0


def two_sessions(driver: StoreDriver) -> tuple[SessionDriver, SessionDriver]:
    first = driver.attach()
    first.own_pool(BLOCKS, IDLE_MAX)
    return first, driver.attach(engine=first.engine.id)


def test_a_demotion_of_a_dead_pool_touches_no_later_pool(driver: StoreDriver) -> None:
    first, second = two_sessions(driver)
    chain = first.chain(tokens(6))
    (order,) = first.release(serve(first, chain).lease)
    first.disconnect()
    pool = second.own_pool(BLOCKS, IDLE_MAX)
    table = second.acquire(0, BLOCKS)
    assert len(table.added) == BLOCKS
    with pytest.raises(NotFound):
        second.publish(order.filling)  # the order was not its own
    assert first.die() == 1
    assert pool.counts()["mapped"] == BLOCKS, "a block of a living table was taken"
    driver.store.check()


def test_a_table_of_a_dead_pool_touches_no_later_pool(driver: StoreDriver) -> None:
    first, second = two_sessions(driver)
    old = second.acquire(0, 5)
    first.disconnect()
    pool = second.own_pool(BLOCKS, IDLE_MAX)
    second.acquire(0, BLOCKS)
    second.release(old.lease)
    assert pool.counts()["mapped"] == BLOCKS, "a block of a living table was taken"
    driver.store.check()


def test_silent_sessions_do_not_keep_device_blocks(driver: StoreDriver, session: SessionDriver) -> None:
    """Another session's lease pins the node; when it falls silent the device gets its block back."""
    chain = session.chain(tokens(4))
    session.release(serve(session, chain).lease)
    driver.attach().lookup(chain)
    other = driver.attach(engine=session.engine.id)
    other.lookup(chain)
    assert session.acquire(0, BLOCKS).busy
    driver.clock.advance(driver.config.daemon.stale_after_s + 1)
    got = session.acquire(0, BLOCKS)
    assert not got.busy
