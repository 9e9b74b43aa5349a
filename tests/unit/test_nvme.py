"""The NVME tier on a real disk, one behaviour at a time; no loop and no socket between."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from nvme_stage import MIB, Reopen, brought, saved, tokens

from kvstore.config import Config, Salts, TenantConfig
from kvstore.dropping import drop_namespace
from kvstore.errors import BadRequest, ConfigError, NotFound
from kvstore.events import EventKind
from kvstore.leases import LeaseState
from kvstore.testing import StoreDriver, small_config, small_disk
from kvstore.tiers.nvme import Flushed
from kvstore.types import Tier

# ---- there and back ----------------------------------------------------------------------------------------


def test_what_was_saved_is_on_the_disk_and_comes_back_after_a_restart(reopen: Reopen) -> None:
    driver = reopen()
    session, chain = saved(driver)
    assert driver.nvme.counts()["records"] == 10
    driver = reopen()
    session = driver.attach()
    found = session.lookup(chain)
    plan = found.match.plan
    assert (found.blocks, plan.load_start, plan.load_stop) == (10, 0, 10)
    assert [(span.tier, span.start, span.stop) for span in plan.spans] == [(Tier.NVME, 0, 10)]
    assert found.match.runs == b""
    fetching = session.fetch(found.lease)
    driver.pump(lambda: fetching.over)
    assert (fetching.ready, fetching.reason, found.lease.state) == (10, "", LeaseState.DONE)
    assert session.faults(found.lease, chain) == []
    session.release(found.lease)
    assert driver.group().counters.hit_blocks_by_tier == {Tier.GPU: 0, Tier.HOST: 0, Tier.NVME: 10}
    again = session.lookup(chain)
    assert [span.tier for span in again.match.plan.spans] == [Tier.HOST]
    session.release(again.lease)
    assert driver.group().counters.hit_blocks_by_tier[Tier.HOST] == 10


def test_a_fetch_tells_of_blocks_as_they_land_in_chain_order(reopen: Reopen) -> None:
    saved(reopen(), 25)
    driver = reopen()
    session = driver.attach()
    chain = session.chain(tokens(25))
    found = session.lookup(chain)
    heard: list[tuple[int, int]] = []
    fetching = session.fetch(found.lease, on_progress=lambda f: heard.append((f.ready, f.stop)))
    first = fetching.ready
    driver.pump(lambda: fetching.over)
    reached = [first, *(ready for ready, _ in heard)]
    assert reached == sorted(set(reached)) and reached[-1] == 25
    assert all(stop == 25 for _, stop in heard)


def test_a_match_may_begin_on_host_and_go_on_on_the_disk(reopen: Reopen) -> None:
    saved(reopen(), 12)
    driver = reopen()
    session = driver.attach()
    chain = session.chain(tokens(12))
    found = session.lookup(chain)
    fetching = session.fetch(found.lease, 0, 5)
    driver.pump(lambda: fetching.over)
    session.release(found.lease)
    found = session.lookup(chain)
    spans = [(span.tier, span.start, span.stop) for span in found.match.plan.spans]
    assert spans == [(Tier.HOST, 0, 5), (Tier.NVME, 5, 12)]
    assert len(found.match.runs) > 0
    fetching = session.fetch(found.lease, 5)
    driver.pump(lambda: fetching.over)
    assert session.faults(found.lease, chain) == []
    session.release(found.lease)
    tiers = driver.group().counters.hit_blocks_by_tier
    assert (tiers[Tier.HOST], tiers[Tier.NVME]) == (5, 5 + 7)


def test_blocks_that_host_evicted_are_found_on_the_disk(reopen: Reopen, tmp_path: Path) -> None:
    driver = reopen(config=small_config(nvme=small_disk(tmp_path / "large", capacity_bytes=16 * MIB)))
    session, first = saved(driver, 10)
    for number in range(1, 5):  # 30 slots on HOST
        session.save(session.chain(tokens(10, 1000 * number)))
        driver.settle()
    found = session.lookup(first)
    assert found.blocks == 10
    assert found.lease.host < 10
    fetching = session.fetch(found.lease)
    driver.pump(lambda: fetching.over)
    assert session.faults(found.lease, first) == []


def test_two_fetches_of_the_same_blocks_read_them_once(reopen: Reopen) -> None:
    saved(reopen(), 10)
    driver = reopen()
    one, two = driver.attach(), driver.attach()
    chain = one.chain(tokens(10))
    leases = [one.lookup(chain).lease, two.lookup(chain).lease]
    fetches = [one.fetch(leases[0]), two.fetch(leases[1])]
    driver.pump(lambda: all(fetching.over for fetching in fetches))
    assert [fetching.ready for fetching in fetches] == [10, 10]
    assert driver.nvme.counters.read == 10


def test_a_chain_longer_than_host_comes_as_far_as_there_is_room(reopen: Reopen, tmp_path: Path) -> None:
    disk = small_disk(tmp_path / "large", capacity_bytes=16 * MIB)
    _, chain = saved(reopen(config=small_config(capacity_bytes=8 * MIB, nvme=disk)), 45)
    driver = reopen(config=small_config(nvme=disk))  # 30 slots
    session = driver.attach()
    found = session.lookup(chain)
    assert found.blocks == 45
    fetching = session.fetch(found.lease)
    driver.pump(lambda: fetching.over)
    assert 25 <= fetching.ready <= 30
    assert "room" in fetching.reason
    assert session.faults(found.lease, chain) == []


def test_a_save_may_go_on_behind_what_only_the_disk_has(reopen: Reopen) -> None:
    """An engine that has the beginning itself does not bring it back first."""
    saved(reopen(), 6)
    driver = reopen()
    session = driver.attach()
    longer = session.chain(tokens(9))
    assert session.save(longer, 6).ready == 3
    driver.settle()
    found = session.lookup(longer)
    assert (found.blocks, found.lease.host) == (9, 0)
    fetching = session.fetch(found.lease)
    driver.pump(lambda: fetching.over)
    assert fetching.ready == 9
    assert driver.nvme.counters.read == 6
    assert session.faults(found.lease, longer) == []


# ---- limits and mistakes -----------------------------------------------------------------------------------


def test_fetch_names_what_is_wrong_with_a_range(reopen: Reopen) -> None:
    _, chain = saved(reopen(), 10)
    driver = reopen("stall_ms=50:1.0")
    session = driver.attach()
    lease = session.lookup(chain).lease
    with pytest.raises(BadRequest, match="not inside the 10 blocks"):
        session.fetch(lease, 0, 11)
    session.fetch(lease, 0, 5)
    with pytest.raises(BadRequest, match="under way"):
        session.fetch(lease, 0, 5)
    driver.pump(lambda: driver.nvme.promotions == 0)


def test_without_a_disk_a_block_that_left_host_is_not_found(driver: StoreDriver) -> None:
    session = driver.attach()
    chain = session.chain(tokens(3))
    session.save(chain)
    lease = session.lookup(chain).lease
    driver.group().host.pool.drop(int(lease.nodes[1]))
    with pytest.raises(NotFound, match="block 1"):
        session.fetch(lease)


def test_capacity_holds_also_when_it_is_lowered(tmp_path: Path) -> None:
    salts = None
    for capacity in (12, 5):
        config = small_config(nvme=small_disk(tmp_path / "disk", capacity_bytes=capacity * MIB))
        salts = salts or Salts.load(config)
        with StoreDriver(config, salts) as driver:
            session = driver.attach()
            driver.pump(lambda most=capacity * MIB: driver.nvme.counts()["file_bytes"] <= most)
            for number in range(30):
                session.save(session.chain(tokens(5, 1000 * number)))
                driver.settle()
                files = list((tmp_path / "disk").glob("**/segment-*.kvs"))
                assert sum(file.stat().st_size for file in files) <= capacity * MIB
            driver.store.check()


def test_a_lowered_capacity_keeps_shared_heads_and_what_is_youngest(reopen: Reopen, tmp_path: Path) -> None:
    sizes = [small_config(nvme=small_disk(tmp_path / "disk", capacity_bytes=size * MIB)) for size in (40, 8)]
    driver = reopen(config=sizes[0])
    session = driver.attach()
    head = list(tokens(3))
    chains = [session.chain(head + list(tokens(4, 1000 * number))) for number in range(1, 31)]
    for chain in chains:
        session.save(chain)
        driver.settle()
    driver = reopen(config=sizes[1])
    assert driver.nvme.counts()["records"] >= 3 + 25 * 4  # a pump or two have passed
    assert driver.nvme.counts()["file_bytes"] > 8 * MIB
    session = driver.attach()
    young = session.chain(head + list(tokens(4, 90_000)))
    session.save(young)  # it is on the disk when there is room
    driver.settle()
    assert driver.nvme.counts()["file_bytes"] <= 8 * MIB
    blocks = [session.lookup(chain).blocks for chain in chains]
    assert min(blocks) == 3
    assert blocks[-1] == 7
    assert driver.nvme.counts()["records"] >= 3 + 3 * 4
    assert driver.nvme.counters.dropped["evicted"] > 0


def test_one_directory_serves_one_daemon(reopen: Reopen, disk_config: Config) -> None:
    driver = reopen()
    with pytest.raises(ConfigError, match=r"another|this process"):
        StoreDriver(disk_config, driver.salts)


def test_a_flush_says_what_is_durable(reopen: Reopen) -> None:
    driver = reopen()
    session = driver.attach()
    session.save(session.chain(tokens(6)))
    answers: list[Flushed] = []
    driver.nvme.flush(answers.append)
    driver.pump(lambda: bool(answers))
    assert answers == [Flushed(6)]


# ---- tenants, events, dropping -----------------------------------------------------------------------------


def test_tenants_are_apart_on_the_disk_too(tmp_path: Path) -> None:
    tenants = (TenantConfig(name="a"), TenantConfig(name="b"))
    config = small_config(nvme=small_disk(tmp_path / "disk"), tenants=tenants)
    salts = Salts.load(config)
    with StoreDriver(config, salts) as driver:
        session = driver.attach(("a",))
        session.save(session.chain(tokens(5)))
        driver.settle()
    with StoreDriver(config, salts) as driver:
        other, owner = driver.attach(("b",)), driver.attach(("a",))
        assert other.lookup(other.chain(tokens(5))).blocks == 0
        assert owner.lookup(owner.chain(tokens(5))).blocks == 5
        stolen = owner.chain(tokens(5))
        with pytest.raises(BadRequest, match="root"):
            other.lookup(stolen)


def test_events_tell_of_the_disk_and_of_what_it_brings(reopen: Reopen) -> None:
    driver = reopen()
    _, chain = saved(driver, 5)

    def told(kind: EventKind, tier: Tier) -> set[bytes]:
        replay = driver.group().events.since(driver.store.epoch, 0, 10_000)
        events = [event for event in replay.events if (event.kind, event.tier) == (kind, tier)]
        return {key.tobytes() for event in events for key in event.keys}

    keys = {key.tobytes() for key in chain.keys}
    assert told(EventKind.STORED, Tier.NVME) == keys
    driver = reopen()
    brought(driver, driver.attach(), chain)
    assert told(EventKind.STORED, Tier.HOST) == keys
    assert {key.tobytes() for key in driver.store.snapshot(driver.group()).nvme} == keys
    driver.nvme.drop(driver.group().host.ready_nodes()[:1], "test")
    driver.group().record_changes()
    assert told(EventKind.REMOVED, Tier.NVME)


def test_the_oldest_leave_and_what_is_used_stays(reopen: Reopen) -> None:
    driver = reopen()
    session, hot = saved(driver, 4)
    for number in range(1, 25):
        session.save(session.chain(tokens(4, 1000 * number)))
        driver.settle()
        found = session.lookup(hot)
        assert found.blocks == 4, f"lost after {number} chains"
        session.release(found.lease)
    assert driver.nvme.counters.dropped["reinserted"] > 0
    assert driver.nvme.counters.dropped["evicted"] > 0
    cold = session.lookup(session.chain(tokens(4, 1000)))
    assert cold.blocks == 0


def test_pins_and_slots_are_given_back(reopen: Reopen) -> None:
    driver = reopen()
    session, chain = saved(driver, 10)
    driver.store.check()
    group = driver.group()
    assert (group.index.pins(), group.host.counts()["filling"]) == (0, 0)
    lease = session.lookup(chain).lease
    assert group.index.pins() == 1
    session.release(lease)
    assert np.all(group.nvme.readable(group.host.ready_nodes()))
    driver.store.check()


async def test_what_was_dropped_stays_dropped_after_a_restart(reopen: Reopen) -> None:
    driver = reopen()
    session, chain = saved(driver, 5)
    other = driver.attach(model="other")
    kept = other.chain(tokens(5))
    other.save(kept)
    driver.settle()
    dropped = await drop_namespace(driver.store, session.engine.namespace.digest)
    assert (dropped.host, dropped.nvme) == (5, 5)
    again = session.chain(tokens(3, 900))
    session.save(again)  # after the drop: it stays
    driver.settle()
    driver = reopen()
    session, other = driver.attach(), driver.attach(model="other")
    assert session.lookup(chain).blocks == 0
    assert session.lookup(again).blocks == 3
    assert other.lookup(kept).blocks == 5
    driver.store.check()


def test_a_damaged_list_of_drops_is_no_reason_to_serve_them(reopen: Reopen, tmp_path: Path) -> None:
    saved(reopen(), 5)
    (tmp_path / "disk" / "default" / "dropped.json").write_text('{"format": "kvstore-dropped"')
    with pytest.raises(ConfigError, match=r"dropped\.json.*restore it, or delete it"):
        reopen()
    (tmp_path / "disk" / "default" / "dropped.json").unlink()
