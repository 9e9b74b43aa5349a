"""The NVME tier on a disk that fails, stalls, rots or is slow."""

from __future__ import annotations

import asyncio
import contextlib
import resource
from pathlib import Path

import pytest
from nvme_stage import MIB, Reopen, brought, saved, tokens

from kvstore.dropping import drop_namespace
from kvstore.errors import BadRequest
from kvstore.fetching import Fetching
from kvstore.leases import LeaseState
from kvstore.testing import small_config, small_disk
from kvstore.tiers.disk_writes import Flushed

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
    driver = reopen("stall_ms=2000:1.0")
    session = driver.attach()
    found = session.lookup(chain)
    heard: list[Fetching] = []
    fetching = session.fetch(found.lease, on_progress=heard.append)
    assert not fetching.over
    with contextlib.suppress(AssertionError):  # until the disk has the request, or it would be taken back
        driver.pump(lambda: fetching.over, timeout_s=0.5)
    driver.clock.advance(driver.config.nvme.stall_s + 0.1)
    driver.nvme.tick()
    assert fetching.over and heard
    assert "stall" in fetching.reason or "lagged" in fetching.reason
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


def test_a_chain_as_long_as_the_disk_is_given_up_and_holds_nobody_up(reopen: Reopen, tmp_path: Path) -> None:
    """Its own pin keeps everything from leaving that would have to leave for it."""
    driver = reopen(config=small_config(capacity_bytes=32 * MIB, nvme=small_disk(tmp_path / "disk")))
    session = driver.attach()
    chain = session.chain(tokens(100))  # 13 MiB, and the disk has 8
    for start in range(0, 100, 5):
        session.save(chain, start, start + 5)
    answers: list[Flushed] = []
    driver.nvme.flush(answers.append)
    for _ in range(40):
        driver.clock.advance(1.0)
        with contextlib.suppress(AssertionError):  # not yet
            driver.pump(lambda: bool(answers), timeout_s=0.2)
    assert answers and "could not be written" in answers[0].error
    assert (driver.nvme.pins(), driver.nvme.queued_bytes) == (0, 0)
    assert driver.nvme.admission.refused_by_reason()["queue"] > 0
    saved(driver, 5, start=5000)  # and the disk goes on
    assert driver.nvme.counts()["records"] > 0
    driver.store.check()


def test_a_file_that_cannot_be_made_is_no_reason_to_leave_the_disk_alone(
    reopen: Reopen, tmp_path: Path
) -> None:
    one = small_config(nvme=small_disk(tmp_path / "disk", capacity_bytes=3 * MIB))
    saved(reopen(config=one), 1)
    driver = reopen()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB // 2, hard))  # a file of 1 MiB cannot be made any more
    try:
        saved(driver, 2, start=500)
        driver.pump(lambda: bool(driver.nvme.counters.errors))
        assert driver.nvme.counters.errors["File too large"] > 0
        assert driver.nvme.trouble == ""
        assert driver.nvme.counts()["records"] == 3
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    made = driver.nvme.counts()["file_bytes"]
    driver.clock.advance(61)
    driver.pump(lambda: driver.nvme.counts()["file_bytes"] > made)


async def test_what_is_being_written_is_dropped_too(reopen: Reopen) -> None:
    driver = reopen("stall_ms=300:1.0")
    session = driver.attach()
    chain = session.chain(tokens(5))
    session.save(chain)
    assert driver.nvme.counts()["records"] == 0
    await drop_namespace(driver.store, session.engine.namespace.digest)
    driver.pump(lambda: not driver.nvme.queued_bytes)
    assert driver.nvme.counts()["records"] == 0
    assert session.lookup(chain).blocks == 0
    driver.store.check()


async def test_namespaces_may_be_dropped_at_the_same_time(reopen: Reopen) -> None:
    driver = reopen()
    sessions = [driver.attach(model=f"m{number}") for number in range(6)]
    chains = [session.chain(tokens(3)) for session in sessions]
    for session, chain in zip(sessions, chains, strict=True):
        session.save(chain)
    driver.settle()
    digests = [session.engine.namespace.digest for session in sessions]
    dropped = await asyncio.gather(*(drop_namespace(driver.store, digest) for digest in digests))
    assert [one.nvme for one in dropped] == [3] * 6
    driver = reopen()
    for number, chain in enumerate(chains):
        assert driver.attach(model=f"m{number}").lookup(chain).blocks == 0


async def test_a_drop_holds_until_the_file_of_its_blocks_is_written_over(reopen: Reopen) -> None:
    """A segment that is free still has them, and a restart reads it."""
    driver = reopen()
    session = driver.attach()
    for number in range(6):  # more than a segment each
        session.save(session.chain(tokens(7, 1000 * number)))
        driver.settle()
    await drop_namespace(driver.store, session.engine.namespace.digest)
    driver.settle()
    other = driver.attach(model="other")
    for number in range(2):
        other.save(other.chain(tokens(7, 1000 * number)))
        driver.settle()
        await drop_namespace(driver.store, other.engine.namespace.digest)
        driver.settle()
    driver = reopen()
    session = driver.attach()
    assert [session.lookup(session.chain(tokens(7, 1000 * n))).blocks for n in range(6)] == [0] * 6
