"""The NVME tier on a disk that fails, stalls, rots or is slow."""

from __future__ import annotations

from pathlib import Path

import pytest
from nvme_stage import MIB, Reopen, brought, saved, tokens

from kvstore.errors import BadRequest
from kvstore.fetching import Fetching
from kvstore.leases import LeaseState

# ---- what goes wrong ---------------------------------------------------------------------------------------


def flip(folder: Path, offset: int) -> None:
    """One bit of every segment file that has a record there."""
    for file in sorted(folder.glob("**/segment-*.kvs")):
        with file.open("r+b") as segment:
            segment.seek(offset)
            byte = segment.read(1)
            segment.seek(offset)
            segment.write(bytes([byte[0] ^ 1]))


def test_a_flipped_bit_costs_the_blocks_from_there_on_and_a_save_heals_it(
    reopen: Reopen, tmp_path: Path
) -> None:
    _, chain = saved(reopen(), 5)
    reopen().close()
    flip(tmp_path / "disk", 4096 + 2 * (4096 + 33 * 4096) + 8192)  # somewhere in the third record's payload
    driver = reopen()
    session = driver.attach()
    fetching = brought(driver, session, chain)
    assert (fetching.ready, fetching.lease.host) == (2, 2)
    assert "rotten" in fetching.reason
    assert driver.nvme.counters.corrupt == 1
    assert session.faults(fetching.lease, chain) == []
    session.release(fetching.lease)
    assert session.lookup(chain).blocks == 2
    session.save(chain, 2, 3)
    driver.settle()
    found = session.lookup(chain)
    assert found.blocks == 5, "what lies behind the hole is reachable again"
    driver.store.check()


def test_a_disk_that_stalls_ends_the_fetch_with_what_arrived(reopen: Reopen) -> None:
    _, chain = saved(reopen(), 5)
    driver = reopen("stall_ms=400:1.0")
    session = driver.attach()
    found = session.lookup(chain)
    heard: list[Fetching] = []
    fetching = session.fetch(found.lease, on_progress=heard.append)
    assert not fetching.over
    driver.clock.advance(driver.config.nvme.stall_s + 0.1)
    driver.nvme.tick()
    assert fetching.over and heard
    assert "stall" in fetching.reason
    assert found.lease.state is LeaseState.ABANDONED
    with pytest.raises(BadRequest, match="abandoned"):
        session.fetch(found.lease)
    driver.pump(lambda: driver.nvme.promotions == 0)  # what was under way lands all the same
    assert driver.group().host.counts()["filling"] == 0
    assert session.fetch(found.lease).ready == 5, "it is on HOST now"


def test_a_lease_that_ends_in_the_middle_leaves_nothing_half_way(reopen: Reopen) -> None:
    _, chain = saved(reopen(), 20)
    driver = reopen("stall_ms=50:1.0")
    session = driver.attach()
    found = session.lookup(chain)
    heard: list[Fetching] = []
    session.fetch(found.lease, on_progress=heard.append)
    session.release(found.lease)
    driver.pump(lambda: driver.nvme.promotions == 0)
    assert [fetching.over for fetching in heard] == [True], "told once, that the rest will not come"
    counts = driver.group().host.counts()
    assert counts["filling"] == 0
    driver.store.check()


def test_a_disk_that_refuses_writes_is_left_alone_and_tried_again(reopen: Reopen) -> None:
    driver = reopen("write_enospc=1.0")
    session = driver.attach()
    session.save(session.chain(tokens(4)))
    driver.pump(lambda: bool(driver.nvme.trouble) and not driver.nvme.queued_bytes)
    assert driver.nvme.counts()["records"] == 0
    session.save(session.chain(tokens(4, 500)))
    assert driver.nvme.admission.refused_by_reason()["disk"] == 8
    assert session.lookup(session.chain(tokens(4))).blocks == 4, "HOST serves on"
    driver.clock.advance(61)
    driver.nvme.tick()
    assert driver.nvme.trouble == ""


def test_reads_that_fail_are_misses_and_the_record_stays(reopen: Reopen) -> None:
    _, chain = saved(reopen(), 5)
    driver = reopen("read_eio=1.0")
    session = driver.attach()
    fetching = brought(driver, session, chain)
    assert (fetching.ready, driver.nvme.counters.read_failed) == (0, 5)
    session.release(fetching.lease)
    assert driver.nvme.counts()["records"] == 5
    driver = reopen()
    assert brought(driver, driver.attach(), chain).ready == 5


def test_a_burst_waits_for_the_disk_and_is_written_whole(reopen: Reopen) -> None:
    driver = reopen("slow_ms=20:1.0")
    session = driver.attach()
    for number in range(3):
        session.save(session.chain(tokens(7, 1000 * number)))  # a quarter of HOST is 1 MiB: seven blocks
    assert driver.nvme.queued_bytes <= MIB
    driver.settle()
    assert (driver.nvme.counts()["records"], driver.nvme.queued_bytes) == (21, 0)
    assert driver.nvme.admission.refused_blocks == 0


def test_what_host_evicts_while_it_waits_is_refused_and_counted(reopen: Reopen) -> None:
    driver = reopen("slow_ms=50:1.0")
    session = driver.attach()
    for number in range(12):  # 84 blocks through a HOST of 30
        session.save(session.chain(tokens(7, 1000 * number)))
    driver.settle()
    counts = driver.nvme.admission.counts()
    assert driver.nvme.admission.refused_by_reason()["queue"] > 0
    assert counts.offered.blocks == counts.admitted.blocks + driver.nvme.admission.refused_blocks
    driver.store.check()


def test_what_was_refused_is_offered_again_when_it_is_used(reopen: Reopen) -> None:
    driver = reopen()
    driver.nvme.admission.set_budget(MIB, driver.clock.now())
    driver.nvme.admission.wrote(MIB, driver.clock.now())  # the budget of the day is spent
    session = driver.attach()
    chain = session.chain(tokens(7))
    session.save(chain)
    driver.settle()
    assert driver.nvme.counts()["records"] == 0
    driver.nvme.admission.set_budget(0, driver.clock.now())
    session.release(session.lookup(chain).lease)
    driver.settle()
    assert driver.nvme.counts()["records"] == 7
