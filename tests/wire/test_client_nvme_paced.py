"""A client on a daemon whose disk is made slower while it runs: real time, a real loop."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from client_below import until
from client_kit import Maker, chain_of
from client_memory import WAIT_S, Memory
from test_client_nvme import BLOCKS, Restarting, kept

# Blocks are small here: half a second.
LIMIT = 40_000


@pytest.fixture
def restarting(path: Path, tmp_path: Path) -> Iterator[Restarting]:
    made = Restarting(path, tmp_path / "disk")
    yield made
    made.now.stop()


def limited(restarting: Restarting, **limits: Any) -> None:
    """What a reload tells the tier."""

    def tell() -> None:
        nvme = restarting.now.group().nvme
        nvme.reconfigure(msgspec.structs.replace(nvme.config, stall_s=60.0, **limits))

    restarting.now.call(tell)


def loading(client: Any, memory: Memory) -> tuple[Any, int]:
    """A load of all that is known, under way, and its bytes."""
    hit = client.lookup(chain_of(client, BLOCKS))
    target = np.arange(1 + BLOCKS, 1 + 2 * BLOCKS, dtype=np.uint32)
    return client.load(hit, target), BLOCKS * len(memory.block(1))


def test_a_limit_holds_in_real_time(restarting: Restarting, make: Maker) -> None:
    client, memory, originals = kept(restarting, make)
    limited(restarting, limit_bytes_per_s=LIMIT)
    began_s = time.monotonic()
    load, size = loading(client, memory)
    assert load.wait(WAIT_S).good == BLOCKS
    assert time.monotonic() - began_s >= size / LIMIT
    assert [memory.block(1 + BLOCKS + i) for i in range(BLOCKS)] == originals


def test_a_stall_in_the_middle_of_a_load_ends_with_the_next_reload(
    restarting: Restarting, make: Maker
) -> None:
    client, memory, originals = kept(restarting, make)
    limited(restarting, limit_bytes_per_s=1)
    load, _ = loading(client, memory)
    until(lambda: restarting.now.call(lambda: [f.ready for f in restarting.now.group().fetches]) == [0])
    until(lambda: restarting.now.call(lambda: restarting.now.group().nvme.alarms.next_s is not None))
    limited(restarting, limit_bytes_per_s=0, added_latency_s=0.0)
    assert load.wait(WAIT_S).good == BLOCKS
    assert [memory.block(1 + BLOCKS + i) for i in range(BLOCKS)] == originals
