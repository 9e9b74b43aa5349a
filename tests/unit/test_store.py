"""The store, one behaviour at a time: what the model test would find, small enough to read."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore import _native
from kvstore.errors import BadRequest, KVStoreError, LimitExceeded, NotFound
from kvstore.keys import KeyChain
from kvstore.leases import LeaseState
from kvstore.testing import SessionDriver, StoreDriver, small_layout
from kvstore.types import Part

SLOTS = 30  # of small_layout() in the arena of small_config()


@pytest.fixture
def session(driver: StoreDriver) -> SessionDriver:
    return driver.attach()


def tokens(blocks: int, start: int = 0) -> range:
    return range(start, start + 4 * blocks)


# ---- reading ----------------------------------------------------------------------------------------------


def test_read_your_writes(session: SessionDriver) -> None:
    chain = session.chain(tokens(8))
    assert session.lookup(chain).blocks == 0
    assert session.save(chain).ready == 8
    found = session.lookup(chain)
    assert (found.blocks, found.match.plan.load_start, found.match.plan.load_stop) == (8, 0, 8)
    assert session.faults(found.lease, chain) == []


@pytest.mark.parametrize("saved", range(26))
def test_a_prefix_of_any_length_is_found_within_two_trips(driver: StoreDriver, saved: int) -> None:
    session = driver.attach()
    chain = session.chain(tokens(25))
    session.save(chain, 0, saved)
    found = session.lookup(chain)
    assert found.trips <= 2
    assert found.blocks == saved


def test_a_growing_conversation_needs_one_trip(session: SessionDriver) -> None:
    session.save(session.chain(tokens(20)))
    for more in range(8):
        assert session.lookup(session.chain(tokens(20 + more))).trips == 1


def test_only_ready_blocks_match(session: SessionDriver) -> None:
    chain = session.chain(tokens(4))
    got = session.reserve(chain)
    assert got.filling is not None
    assert session.lookup(chain).blocks == 0
    session.write(got.filling)
    assert session.lookup(chain).blocks == 0
    session.publish(got.filling)
    assert session.lookup(chain).blocks == 4


def test_a_branch_matches_the_prefix_it_shares(session: SessionDriver) -> None:
    session.save(session.chain(tokens(8)))
    assert session.lookup(session.chain([*tokens(5), *tokens(3, 900)])).blocks == 5


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("blocks", -1),
        ("blocks", 1 << 32),
        ("blocks", 1 << 64),
        ("positions", np.array([1, 0], np.uint32)),
        ("positions", np.array([0, 9], np.uint32)),
        ("positions", np.array([0], np.uint32)),
        ("root", b"short"),
        ("root", bytes(32)),
    ],
    ids=str,
)
def test_malformed_lookups_are_bad_requests(session: SessionDriver, field: str, wrong: object) -> None:
    chain = session.chain(tokens(2))
    session.save(chain)
    ask = {"root": chain.root, "blocks": 2, "positions": np.arange(2, dtype=np.uint32), "keys": chain.keys}
    with pytest.raises(BadRequest):
        session.store.lookup(session.caller, **{**ask, field: wrong})
    assert len(session.caller.group.leases) == 0


def test_contradictory_keys_are_bad_requests(session: SessionDriver) -> None:
    chain = session.chain(tokens(4))
    session.save(chain)
    swapped = KeyChain(chain.root, np.ascontiguousarray(chain.keys[::-1]))
    with pytest.raises(BadRequest, match=r"^keys: "):
        session.lookup(swapped)


@pytest.mark.parametrize("parent", [b"", b"short", bytes(33)])
def test_a_malformed_parent_is_a_bad_request(session: SessionDriver, parent: bytes) -> None:
    chain = session.chain(tokens(2))
    with pytest.raises(BadRequest):
        session.store.reserve(session.caller, chain.root, parent, chain.keys)


def test_fetch_stays_inside_the_match(session: SessionDriver) -> None:
    chain = session.chain(tokens(4))
    session.save(chain)
    lease = session.lookup(chain).lease
    for start, stop in ((0, 5), (-1, 2), (3, 2)):
        with pytest.raises(BadRequest, match=r"^fetch: "):
            session.store.fetch(session.caller, lease.id, start, stop)
    assert len(session.store.fetch(session.caller, lease.id, 1, 3).runs(1, 3)) > 0
    assert lease.state is LeaseState.DONE


def test_leases_are_limited(driver: StoreDriver, session: SessionDriver) -> None:
    chain = session.chain(tokens(1))
    session.save(chain)
    session.caller.group.leases.per_session_max = 2
    leases = [session.lookup(chain).lease for _ in range(2)]
    with pytest.raises(LimitExceeded, match="leases_max = 2"):
        session.lookup(chain)
    session.release(leases[0])
    session.lookup(chain)


def test_hits_are_counted_once_and_by_tier(session: SessionDriver) -> None:
    chain = session.chain(tokens(5))
    session.save(chain, 0, 3)
    counters = session.caller.group.counters
    lease = session.lookup(chain).lease
    assert (counters.lookups, counters.lookup_blocks, counters.hit_blocks) == (1, 5, 0)
    session.release(lease)
    assert counters.hit_blocks == sum(counters.hit_blocks_by_tier.values()) == 3


# ---- rot --------------------------------------------------------------------------------------------------


def rot(session: SessionDriver, chain: KeyChain, block: int) -> None:
    group = session.caller.group
    node = np.array([group.index.find(chain.keys[block].tobytes())], np.uint32)
    group.arena.view(int(group.host.pool.slots(node)[0]), 64)[7] ^= 1


def test_a_report_is_checked_before_it_is_believed(session: SessionDriver) -> None:
    chain = session.chain(tokens(5))
    session.save(chain)
    lease = session.lookup(chain).lease
    bad = np.array([2], np.uint32)
    assert session.store.report(session.caller, lease.id, bad) == 0
    rot(session, chain, 2)
    assert session.store.report(session.caller, lease.id, bad) == 1
    assert session.lookup(chain).blocks == 2
    assert session.caller.group.host.corrupt_blocks == 1


def test_a_hole_is_refilled_by_the_next_save(session: SessionDriver) -> None:
    chain = session.chain(tokens(5))
    session.save(chain)
    lease = session.lookup(chain).lease
    rot(session, chain, 2)
    session.store.report(session.caller, lease.id, np.array([2], np.uint32))
    got = session.reserve(chain)
    assert got.filling is not None
    assert (got.filled, len(got.filling.slots)) == (4, 1)
    session.write(got.filling)
    session.publish(got.filling)
    assert session.lookup(chain).blocks == 5


def test_another_lease_is_never_sent_to_a_dropped_slot(session: SessionDriver) -> None:
    chain = session.chain(tokens(5))
    session.save(chain)
    first, second = session.lookup(chain).lease, session.lookup(chain).lease
    rot(session, chain, 2)
    session.store.report(session.caller, first.id, np.array([2], np.uint32))
    try:
        runs = session.store.fetch(session.caller, second.id, 0, 5)
    except KVStoreError:
        return  # refusing is right too
    pages = session.caller.shape.slot_bytes // _native.PAGE_BYTES
    slots = _native.unpack_slots(runs, 5, pages, session.caller.group.arena.pages)
    assert _native.NONE not in slots


def test_a_report_outside_the_match_is_refused(session: SessionDriver) -> None:
    chain = session.chain(tokens(2))
    session.save(chain)
    lease = session.lookup(chain).lease
    with pytest.raises(BadRequest, match=r"^report\.bad: position 2"):
        session.store.report(session.caller, lease.id, np.array([2], np.uint32))
    assert session.store.report(session.caller, lease.id, np.empty(0, np.uint32)) == 0


# ---- writing ----------------------------------------------------------------------------------------------


def test_a_second_save_writes_nothing(session: SessionDriver) -> None:
    chain = session.chain(tokens(4))
    session.save(chain)
    got = session.reserve(chain)
    assert (got.filling, got.filled, got.dropped) == (None, 4, 0)


def test_a_save_after_an_unknown_parent_is_dropped(session: SessionDriver) -> None:
    got = session.reserve(session.chain(tokens(4)), 2)
    assert (got.filling, got.dropped) == (None, 2)
    assert "parent" in got.reason


def test_another_writer_fills_after_a_stall(driver: StoreDriver, session: SessionDriver) -> None:
    chain = session.chain(tokens(3))
    slow = session.reserve(chain)
    quick = driver.attach()
    assert quick.reserve(chain).elsewhere == 3
    driver.clock.advance(driver.config.daemon.stall_s)
    second = quick.reserve(chain)
    assert second.filling is not None and slow.filling is not None
    quick.write(second.filling)
    assert quick.publish(second.filling).ready == 3
    session.write(slow.filling)
    late = session.publish(slow.filling)
    assert (late.ready, late.dropped) == (0, 3)
    found = quick.lookup(chain)
    assert found.blocks == 3 and quick.faults(found.lease, chain) == []


def test_a_token_is_used_once_and_only_by_its_engine(driver: StoreDriver, session: SessionDriver) -> None:
    filling = session.reserve(session.chain(tokens(2))).filling
    assert filling is not None
    with pytest.raises(NotFound, match="no filling of this engine"):
        driver.attach().publish(filling)
    with pytest.raises(BadRequest, match=r"^publish\.blocks: need 0 to 2"):
        session.publish(filling, 3)
    session.write(filling)
    session.publish(filling)
    with pytest.raises(NotFound):
        session.publish(filling)
    with pytest.raises(NotFound):
        session.abort(filling)


def test_part_of_a_filling(session: SessionDriver) -> None:
    chain = session.chain(tokens(5))
    filling = session.reserve(chain).filling
    assert filling is not None
    session.write(filling)
    done = session.publish(filling, 3)
    assert (done.ready, done.dropped) == (3, 2)
    assert session.lookup(chain).blocks == 3


def test_a_block_is_ready_when_every_rank_wrote_its_part(driver: StoreDriver) -> None:
    left = driver.attach(part=Part(0, 2, 0, 1))
    right = driver.attach(part=Part(0, 2, 1, 1), engine=left.engine.id)
    chain = left.chain(tokens(4))
    filling = left.reserve(chain).filling
    assert filling is not None
    left.write(filling)
    assert left.publish(filling).pending
    assert left.publish(filling).pending, "one rank cannot stand for two"
    assert right.lookup(chain).blocks == 0
    right.write(filling)
    done = right.publish(filling, 3)
    assert (done.ready, done.dropped, done.pending) == (3, 1, False)
    found = right.lookup(chain)
    assert found.blocks == 3 and right.faults(found.lease, chain) == []


# ---- room -------------------------------------------------------------------------------------------------


def test_a_burst_keeps_the_newest_complete_prefixes(session: SessionDriver) -> None:
    chains = [session.chain(tokens(5, 1000 * n)) for n in range(18)]  # 90 blocks into 30 slots
    for chain in chains:
        assert session.save(chain).ready == 5, "an acknowledged save is honest"
    lengths = [session.lookup(chain).blocks for chain in chains]
    assert lengths[-5:] == [5] * 5
    host = session.caller.group.host
    host.take_removed()
    assert sum(lengths) == host.counts()["ready"] == SLOTS
    assert host.dropped["evicted"] == 90 - SLOTS


def test_a_chain_longer_than_the_arena_keeps_its_head(session: SessionDriver) -> None:
    chain = session.chain(tokens(SLOTS + 10))
    got = session.reserve(chain)
    assert got.filling is not None
    assert (len(got.slots), got.dropped) == (SLOTS, 10)
    assert "no room" in got.reason and not got.busy
    session.write(got.filling)
    session.publish(got.filling)
    assert session.lookup(chain).blocks == SLOTS


def test_pinned_blocks_are_never_evicted(driver: StoreDriver, session: SessionDriver) -> None:
    chain = session.chain(tokens(10))
    session.save(chain)
    lease = session.lookup(chain).lease
    for n in range(1, 9):
        session.save(session.chain(tokens(5, 1000 * n)))
    assert session.faults(lease, chain) == []
    driver.store.check()


def test_busy_when_everything_is_pinned(driver: StoreDriver, session: SessionDriver) -> None:
    chain = session.chain(tokens(SLOTS))
    session.save(chain)
    lease = session.lookup(chain).lease
    got = session.reserve(session.chain(tokens(2, 5000)))
    assert (got.filling, got.dropped) == (None, 2)
    assert "pinned" in got.busy
    assert session.caller.group.counters.refused_saves == 2
    session.release(lease)
    assert session.save(session.chain(tokens(2, 5000))).ready == 2


def test_silent_sessions_lose_pins_only_under_pressure(driver: StoreDriver, session: SessionDriver) -> None:
    chain = session.chain(tokens(SLOTS))
    session.save(chain)
    lease = session.lookup(chain).lease
    driver.clock.advance(driver.config.daemon.stale_after_s + 1)
    other = driver.attach()
    assert other.lookup(chain).blocks == SLOTS
    assert session.faults(lease, chain) == [], "time alone takes nothing"


@pytest.mark.parametrize("shared", [0, 1, 5])
def test_a_save_gets_the_room_that_silent_sessions_hold(
    driver: StoreDriver, session: SessionDriver, shared: int
) -> None:
    """Also when its head is readable already, or when some slots are free."""
    session.save(session.chain(tokens(SLOTS)))
    session.lookup(session.chain(tokens(SLOTS)))
    driver.clock.advance(driver.config.daemon.stale_after_s + 1)
    other = driver.attach()
    chain = other.chain([*tokens(shared), *tokens(4, 5000)])
    assert other.save(chain).ready == 4
    assert other.lookup(chain).blocks == shared + 4
    assert driver.group().counters.revoked_leases == 1


def test_two_block_sizes_share_an_arena(driver: StoreDriver, session: SessionDriver) -> None:
    wide = driver.attach(layout=small_layout(head_dim=2048))
    for n in range(6):
        session.save(session.chain(tokens(6, 1000 * n)))
    chain = wide.chain(tokens(6))
    assert wide.save(chain).ready == 6
    found = wide.lookup(chain)
    assert found.blocks == 6 and wide.faults(found.lease, chain) == []
    assert driver.faults(session) == [] and driver.faults(wide) == []
