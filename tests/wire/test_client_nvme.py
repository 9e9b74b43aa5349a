"""Both clients on a real daemon with a real disk: what it brings is copied, whoever asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from client_below import until
from client_kit import Changes, Maker, chain_of
from client_memory import WAIT_S, Memory
from client_running import Running, fill

from kvstore.client import PoolSpec
from kvstore.testing import small_disk
from kvstore.types import Hit, Tier

BLOCKS = 40


class Restarting:
    """Daemons one after another on the same socket and disk."""

    def __init__(self, path: Path, directory: Path) -> None:
        self._path, self._directory = path, directory
        self.now = self._start()

    def _start(self) -> Running:
        return Running(self._path, nvme=small_disk(self._directory))

    def again(self) -> None:
        self.now.stop()
        self.now = self._start()

    def records(self) -> int:
        return int(self.now.call(lambda: self.now.group().nvme.counts()["records"]))

    def promoted(self) -> bool:
        """Nothing is being brought."""
        return not self.now.call(lambda: len(self.now.group().fetches))


@pytest.fixture
def restarting(path: Path, tmp_path: Path) -> Iterator[Restarting]:
    made = Restarting(path, tmp_path / "disk")
    yield made
    made.now.stop()


def kept(restarting: Restarting, make: Maker) -> tuple[Any, Memory, list[bytes]]:
    """A client whose blocks only the disk holds, attached to the daemon that came after."""
    memory = Memory(3 * BLOCKS + 4)
    client = make.attached(memory)
    originals = fill(memory, BLOCKS)
    source = np.arange(1, 1 + BLOCKS, dtype=np.uint32)
    assert client.save(chain_of(client, BLOCKS), 0, BLOCKS, source).wait(WAIT_S).ready == BLOCKS
    until(lambda: restarting.records() == BLOCKS)
    changes = Changes(client)
    restarting.again()
    changes.until(lambda: client.generation == 2 and client.attached)
    return client, memory, originals


def test_a_load_brings_what_the_disk_holds(restarting: Restarting, make: Maker) -> None:
    client, memory, originals = kept(restarting, make)
    hit = client.lookup(chain_of(client, BLOCKS))
    assert isinstance(hit, Hit)
    assert (hit.ready, hit.plan.load_stop) == (0, BLOCKS)
    assert [span.tier for span in hit.plan.spans] == [Tier.NVME]
    target = np.arange(1 + BLOCKS, 1 + 2 * BLOCKS, dtype=np.uint32)
    result = client.load(hit, target).wait(WAIT_S)
    assert (result.good, result.reason) == (BLOCKS, "")
    assert [memory.block(int(block)) for block in target] == originals
    client.release(hit.lease)
    again = client.lookup(chain_of(client, BLOCKS))
    assert again.ready == BLOCKS, "it is on HOST now"
    client.release(again.lease)


def test_a_fetch_for_another_process(restarting: Restarting, make: Maker) -> None:
    worker, memory, originals = kept(restarting, make)
    scheduler = make.attached(role="scheduler", layout=memory.layout)
    chain = chain_of(scheduler, BLOCKS)
    hit = scheduler.lookup(chain)
    fetched = scheduler.fetch(hit, 0, BLOCKS).wait(WAIT_S)
    assert (fetched.ready, fetched.reason) == (BLOCKS, "")
    target = np.arange(1 + BLOCKS, 1 + 2 * BLOCKS, dtype=np.uint32)
    assert worker.load_slots(fetched.slots, chain.keys, target).wait(WAIT_S).good == BLOCKS
    assert [memory.block(int(block)) for block in target] == originals
    scheduler.release(hit.lease)


def test_two_leases_on_one_chain_bring_it_once(restarting: Restarting, make: Maker) -> None:
    client, memory, originals = kept(restarting, make)
    chain = chain_of(client, BLOCKS)
    hits = [client.lookup(chain) for _ in range(2)]
    first = np.arange(1 + BLOCKS, 1 + 2 * BLOCKS, dtype=np.uint32)
    loads = [client.load(hit, first + BLOCKS * number) for number, hit in enumerate(hits)]
    assert [load.wait(WAIT_S).good for load in loads] == [BLOCKS, BLOCKS]
    for number, hit in enumerate(hits):
        assert [memory.block(int(block)) for block in first + BLOCKS * number] == originals
        client.release(hit.lease)
    assert restarting.now.call(lambda: restarting.now.group().nvme.counters.read) == BLOCKS


def test_a_lease_that_is_released_while_its_blocks_are_brought(restarting: Restarting, make: Maker) -> None:
    client, _, _ = kept(restarting, make)
    hit = client.lookup(chain_of(client, BLOCKS))
    load = client.load(hit, np.arange(1 + BLOCKS, 1 + 2 * BLOCKS, dtype=np.uint32))
    client.release(hit.lease)
    assert load.wait(WAIT_S).good <= BLOCKS
    until(restarting.promoted)
    assert client.check()["ok"] is True


def test_the_disk_continues_what_the_device_holds(restarting: Restarting, make: Maker) -> None:
    """An engine outlives its daemon: the first blocks are in its own pool and on no HOST any more."""
    client, memory, originals = kept(restarting, make)
    scheduler = make.attached(role="scheduler", layout=memory.layout, pool=PoolSpec("borrowed", 64))
    chain = chain_of(scheduler, BLOCKS)
    assert scheduler.observe(10, 0, 54, chain.keys[:10], chain.keys[:0])
    hit = scheduler.lookup(chain)
    assert (hit.device, hit.ready, hit.plan.load_stop) == (10, 10, BLOCKS)
    fetched = scheduler.fetch(hit, 10, BLOCKS).wait(WAIT_S)
    assert (fetched.ready, fetched.reason, len(fetched.slots)) == (BLOCKS, "", BLOCKS - 10)
    target = np.arange(1 + BLOCKS, 1 + 2 * BLOCKS - 10, dtype=np.uint32)
    assert client.load_slots(fetched.slots, chain.keys[10:], target).wait(WAIT_S).good == BLOCKS - 10
    assert [memory.block(int(block)) for block in target] == originals[10:]
    scheduler.release(hit.lease)
