"""How fast the disk is: what is told of it after each promotion, and a disk that is made slower."""

from __future__ import annotations

from pathlib import Path

import pytest
from disk_turns import MB, STALL_S, DiskTurns, paced, set_limits
from nvme_stage import Reopen, brought, saved, tokens

from kvstore.config import Config
from kvstore.fetching import Fetching
from kvstore.leases import LeaseState
from kvstore.policy.rates import Rates, Source, Transfer
from kvstore.testing import SessionDriver, StoreDriver
from kvstore.tiers.promotions import PACE_S
from kvstore.types import Tier

NVME = Source(Tier.NVME)


def heard(driver: StoreDriver) -> list[Transfer]:
    transfers: list[Transfer] = []
    driver.nvme.observe(transfers.append, lambda _: None)
    return transfers


def begin(session: SessionDriver, blocks: int, start: int = 0) -> Fetching:
    return session.fetch(session.lookup(session.chain(tokens(blocks, start))).lease)


# ---- what is told ------------------------------------------------------------------------------------------


def test_a_promotion_is_told_once_with_its_own_bytes(reopen: Reopen, disk_config: Config) -> None:
    _, chain = saved(reopen(), 10)
    driver = reopen()
    transfers = heard(driver)
    session = driver.attach()
    assert brought(driver, session, chain).ready == 10
    block = session.caller.shape.length
    assert [(t.size_bytes, t.ahead_bytes, t.given_up) for t in transfers] == [(10 * block, 0, False)]
    assert 0 < transfers[0].first_bytes <= 10 * block
    begin(session, 10)
    assert len(transfers) == 1, "what is on HOST is no transfer"


def test_it_is_told_before_the_end_of_its_fetch(reopen: Reopen) -> None:
    saved(reopen(), 10)
    driver = reopen()
    transfers, session = heard(driver), driver.attach()
    known_at_end: list[int] = []
    lease = session.lookup(session.chain(tokens(10))).lease
    fetching = session.fetch(
        lease, on_progress=lambda f: known_at_end.append(len(transfers)) if f.over else None
    )
    driver.pump(lambda: fetching.over)
    assert known_at_end == [1]


def test_blocks_that_somebody_else_brings_are_not_counted(reopen: Reopen, tmp_path: Path) -> None:
    config = paced(tmp_path, limit=5 * MB)
    saved(reopen(config=config), 20)
    driver = reopen(config=config)
    transfers, turns = heard(driver), DiskTurns(driver)
    one, two, three = driver.attach(), driver.attach(), driver.attach()
    block = one.caller.shape.length
    fetches = [begin(one, 12), begin(two, 20), begin(three, 20)]
    turns.run(lambda: all(fetching.over for fetching in fetches))
    first, second = sorted(transfers, key=lambda t: t.size_bytes)
    assert (second.size_bytes, first.size_bytes) == (12 * block, 8 * block)
    assert first.ahead_bytes == 12 * block
    assert second.ahead_bytes in (0, 8 * block)  # had their turns before its end, or not
    assert driver.nvme.ahead_bytes(1 << 40) == 0
    turns.disks.close()


def test_ahead_is_what_it_shares_the_disk_with(reopen: Reopen, tmp_path: Path) -> None:
    config = paced(tmp_path, limit=5 * MB)
    for start in (0, 1000):
        saved(reopen(config=config), 20, start)
    driver = reopen(config=config)
    transfers, turns = heard(driver), DiskTurns(driver)
    one, two = driver.attach(), driver.attach()
    block = one.caller.shape.length
    large = begin(one, 20)
    assert driver.nvme.ahead_bytes(5 * block) == 5 * block
    assert driver.nvme.ahead_bytes(30 * block) == 20 * block
    small = begin(two, 5, 1000)
    turns.run(lambda: small.over)
    assert not large.over
    transfer = transfers[0]
    assert (transfer.size_bytes, transfer.ahead_bytes) == (5 * block, 5 * block)
    assert transfer.total_bytes / transfer.seconds == pytest.approx(5 * MB, rel=0.15), (
        "in turns of two blocks"
    )
    turns.run(lambda: large.over)
    turns.disks.close()


def test_rates_learn_the_limit_from_what_is_told(reopen: Reopen, tmp_path: Path) -> None:
    config = paced(tmp_path, limit=5 * MB, latency_s=0.03)
    for start in range(0, 5000, 1000):
        saved(reopen(config=config), 5 + start // 250, start)
    driver = reopen(config=config)
    rates, session = Rates(), driver.attach()
    driver.nvme.observe(lambda transfer: rates.observe(NVME, transfer, driver.clock.now()), lambda _: None)
    turns = DiskTurns(driver, late_s=0.001)
    for start in range(0, 5000, 1000):
        fetching = begin(session, 5 + start // 250, start)
        turns.run(lambda f=fetching: f.over)  # type: ignore[misc]
        assert fetching.ready == 5 + start // 250
    speed = rates.speed(NVME, 20 * session.caller.shape.length)
    assert speed.bytes_per_s == pytest.approx(5 * MB, rel=0.05)
    assert speed.latency_s == pytest.approx(0.03, abs=0.005)
    turns.disks.close()


@pytest.mark.parametrize("arrived", [0, 4])
def test_what_was_given_up_by_its_lease_is_what_came(reopen: Reopen, tmp_path: Path, arrived: int) -> None:
    config = paced(tmp_path, limit=5 * MB)
    saved(reopen(config=config), 20)
    driver = reopen(config=config)
    transfers, turns, session = heard(driver), DiskTurns(driver), driver.attach()
    fetching, began_s = begin(session, 20), driver.clock.now()
    block = session.caller.shape.length
    turns.run(lambda: fetching.ready >= arrived)
    session.release(fetching.lease)
    turns.run(lambda: driver.nvme.promotions == 0)
    if not arrived:
        assert transfers == []
    else:
        (transfer,) = transfers
        assert transfer.size_bytes == 4 * block and not transfer.given_up
        assert transfer.seconds == pytest.approx(4 * block / (5 * MB), abs=2 * PACE_S)
        assert transfer.seconds <= driver.clock.now() - began_s
    driver.store.check()
    turns.disks.close()


def test_a_stalling_disk_teaches_by_what_came_and_by_nothing_else(reopen: Reopen, tmp_path: Path) -> None:
    config = paced(tmp_path, limit=5 * MB)
    saved(reopen(config=config), 20)
    driver = reopen(config=config)
    transfers, turns, session = heard(driver), DiskTurns(driver), driver.attach()
    block = session.caller.shape.length
    fetching = begin(session, 20)
    turns.run(lambda: fetching.ready >= 5)
    set_limits(driver, 1)
    turns.run(lambda: fetching.over, STALL_S + 0.3)
    assert (fetching.ready, fetching.lease.state) == (5, LeaseState.ABANDONED)
    (transfer,) = transfers
    assert transfer.given_up and transfer.size_bytes == 20 * block
    spent_s = 5 * block / (5 * MB) + STALL_S
    assert transfer.seconds == pytest.approx(spent_s * 19 / 4, rel=0.25), "the pace so far, for all of it"
    again = begin(driver.attach(), 20)
    turns.run(lambda: again.over, STALL_S + 0.3)
    assert (again.ready, len(transfers)) == (5, 1), "of a source that gave nothing, nothing is learnt"
    driver.store.check()
    turns.disks.close()


# ---- a disk that is made slower ----------------------------------------------------------------------------


@pytest.mark.parametrize("late_s", [0.0, 0.002])
@pytest.mark.parametrize("limit", [1 * MB, 5 * MB, 80 * MB])
def test_a_limit_is_held_within_five_percent(
    reopen: Reopen, tmp_path: Path, limit: int, late_s: float
) -> None:
    config = paced(tmp_path, limit=limit)
    saved(reopen(config=config), 60)
    driver = reopen(config=config)
    turns, session = DiskTurns(driver, late_s), driver.attach()
    began_s, fetching = driver.clock.now(), begin(session, 60)
    turns.run(lambda: fetching.over)
    took_s = driver.clock.now() - began_s
    ideal_s = 60 * session.caller.shape.length / limit
    assert ideal_s - 1e-9 <= took_s <= ideal_s * 1.05 + PACE_S + late_s
    assert (fetching.ready, session.faults(fetching.lease, session.chain(tokens(60)))) == (60, [])
    assert turns.wakes <= 60 * 2 + took_s * 20, "it is woken when something is due, not all the time"
    turns.disks.close()


def test_added_latency_is_kept_to_the_millisecond(reopen: Reopen, tmp_path: Path) -> None:
    config = paced(tmp_path, latency_s=0.25)
    saved(reopen(config=config), 10)
    driver = reopen(config=config)
    turns, session = DiskTurns(driver), driver.attach()
    began_s, fetching = driver.clock.now(), begin(session, 10)
    turns.run(lambda: fetching.ready > 0)
    assert driver.clock.now() - began_s == pytest.approx(0.25, abs=2 * PACE_S)
    turns.run(lambda: fetching.over)
    assert driver.clock.now() - began_s == pytest.approx(0.25, abs=2 * PACE_S), "nothing but latency"
    turns.disks.close()


def test_limits_change_in_the_middle_of_a_load(reopen: Reopen, tmp_path: Path) -> None:
    """Unlimited, 5 MB/s, a stall, and back, by what a reload does."""
    config = paced(tmp_path)
    for start in (0, 1000):
        saved(reopen(config=config), 40, start)
    driver = reopen(config=config)
    turns, session = DiskTurns(driver), driver.attach()
    block, clock = session.caller.shape.length, driver.clock
    first = begin(session, 40)
    turns.run(lambda: first.over)
    fast_s = clock.now()
    set_limits(driver, 5 * MB)
    second = begin(session, 40, 1000)
    turns.run(lambda: second.ready >= 10)
    assert clock.now() - fast_s == pytest.approx(10 * block / (5 * MB), rel=0.05)
    set_limits(driver, 1)
    stalls_s = clock.now()
    turns.run(lambda: clock.now() >= stalls_s + STALL_S / 2)
    assert (second.ready, second.over) == (10, False)
    set_limits(driver, 0)
    turns.run(lambda: second.over)
    assert (second.ready, second.reason) == (40, "")
    assert clock.now() - stalls_s <= STALL_S / 2 + 0.1 + PACE_S
    assert session.faults(second.lease, session.chain(tokens(40, 1000))) == []
    turns.disks.close()


def test_without_a_loop_ticks_bring_it(reopen: Reopen, tmp_path: Path) -> None:
    config = paced(tmp_path, limit=5 * MB)
    saved(reopen(config=config), 10)
    driver = reopen(config=config)
    session = driver.attach()
    fetching = begin(session, 10)
    driver.pump(lambda: not driver.nvme._promotions._by_job)
    assert fetching.ready == 0
    driver.clock.advance(5.5 * session.caller.shape.length / (5 * MB))
    driver.nvme.tick()
    assert fetching.ready == 5
    driver.nvme.check()
    driver.group().check()


def test_what_went_on_for_somebody_else_is_told_when_he_leaves_too(reopen: Reopen, tmp_path: Path) -> None:
    config = paced(tmp_path, limit=5 * MB)
    saved(reopen(config=config), 20)
    driver = reopen(config=config)
    transfers, turns = heard(driver), DiskTurns(driver)
    one, two = driver.attach(), driver.attach()
    first, second = begin(one, 20), begin(two, 20)
    turns.run(lambda: first.ready >= 2)
    one.release(first.lease)
    turns.run(lambda: second.ready >= 4)
    assert transfers == []
    two.release(second.lease)
    assert [t.size_bytes for t in transfers] == [4 * one.caller.shape.length]
    assert driver.nvme.promotions == 0
    driver.store.check()
    turns.disks.close()
