"""Loads from the last block down, on a real daemon whose disk is slow: computing meets them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from client_below import until
from client_kit import Maker, chain_of
from client_memory import WAIT_S
from test_client_nvme import BLOCKS, Restarting, kept
from test_client_nvme_paced import limited

# Blocks are small here: half a second for all of them.
LIMIT = 40_000
FIRST = 1 + BLOCKS


@pytest.fixture
def restarting(path: Path, tmp_path: Path) -> Iterator[Restarting]:
    made = Restarting(path, tmp_path / "disk")
    yield made
    made.now.stop()


def tail(client: Any) -> tuple[Any, Any]:
    """A hit, and its load from the end under way."""
    hit = client.lookup(chain_of(client, BLOCKS))
    return hit, client.load_tail(hit, np.arange(FIRST, FIRST + BLOCKS, dtype=np.uint32))


def hits(restarting: Restarting) -> dict[str, int]:
    counted = restarting.now.call(lambda: dict(restarting.now.group().counters.hit_blocks_by_tier))
    return {str(tier): n for tier, n in counted.items() if n}


def test_all_of_it(restarting: Restarting, make: Maker) -> None:
    client, memory, originals = kept(restarting, make)
    hit, load = tail(client)
    result = load.wait(WAIT_S)
    assert (result.good, result.reason) == (BLOCKS, "")
    assert [memory.block(FIRST + i) for i in range(BLOCKS)] == originals
    client.release(hit.lease)
    assert hits(restarting) == {"NVME": BLOCKS}
    hit, load = tail(client)
    assert load.wait(WAIT_S).good == BLOCKS
    client.release(hit.lease)
    assert hits(restarting) == {"NVME": BLOCKS, "HOST": BLOCKS}
    assert client.check()["ok"] is True


def test_computing_meets_it(restarting: Restarting, make: Maker) -> None:
    client, memory, originals = kept(restarting, make)
    limited(restarting, limit_bytes_per_s=LIMIT)
    hit, load = tail(client)
    front = 0

    def step() -> bool:
        """Compute a block, at the pace of the disk."""
        nonlocal front
        client.poll()
        if BLOCKS - load.lowest >= front and (granted := load.claim(front + 1)) > front:
            memory.fill(FIRST + front, b"computed %d" % front)
            front = granted
        return bool(load.done)

    until(step)
    result = load.wait(WAIT_S)
    assert 0 < result.good < BLOCKS
    assert front <= BLOCKS - result.good == load.claim(BLOCKS)
    assert [memory.block(FIRST + i) for i in range(BLOCKS - result.good, BLOCKS)] == originals[-result.good :]
    for block in range(front):
        memory.fill(1, b"computed %d" % block)
        assert memory.block(FIRST + block) == memory.block(1), block
    until(restarting.promoted)
    client.release(hit.lease)
    assert hits(restarting) == {"NVME": result.good}
    assert client.check()["ok"] is True


def test_a_stall_in_the_middle(restarting: Restarting, make: Maker) -> None:
    """Nobody waits: what is left is computed."""
    client, memory, originals = kept(restarting, make)
    limited(restarting, limit_bytes_per_s=LIMIT)
    hit, load = tail(client)

    def some() -> bool:
        client.poll()
        return bool(load.lowest < BLOCKS)

    until(some)
    limited(restarting, limit_bytes_per_s=1)
    low = load.claim(BLOCKS)
    assert 0 < low < BLOCKS
    result = load.wait(WAIT_S)
    assert result.good == BLOCKS - low
    assert [memory.block(FIRST + i) for i in range(low, BLOCKS)] == originals[low:]
    until(restarting.promoted)
    client.release(hit.lease)
    assert hits(restarting) == {"NVME": result.good}


def test_two_of_one_chain_read_it_once(restarting: Restarting, make: Maker) -> None:
    client, memory, originals = kept(restarting, make)
    (hit, load), other = tail(client), client.lookup(chain_of(client, BLOCKS))
    second = client.load_tail(other, np.arange(FIRST + BLOCKS, FIRST + 2 * BLOCKS, dtype=np.uint32))
    assert [one.wait(WAIT_S).good for one in (load, second)] == [BLOCKS, BLOCKS]
    for first in (FIRST, FIRST + BLOCKS):
        assert [memory.block(first + i) for i in range(BLOCKS)] == originals
    assert restarting.now.call(lambda: restarting.now.group().nvme.counters.read) == BLOCKS
    client.release(hit.lease)
    client.release(other.lease)


def test_a_lease_that_is_released_in_the_middle(restarting: Restarting, make: Maker) -> None:
    client, _, _ = kept(restarting, make)
    limited(restarting, limit_bytes_per_s=LIMIT)
    hit, load = tail(client)
    client.release(hit.lease)
    result = load.wait(WAIT_S)
    assert result.good < BLOCKS and result.reason
    until(restarting.promoted)
    assert client.check()["ok"] is True


def test_memory_is_only_written_where_it_was_asked_to(restarting: Restarting, make: Maker) -> None:
    """A load of the upper half leaves the lower half alone."""
    client, memory, originals = kept(restarting, make)
    hit = client.lookup(chain_of(client, BLOCKS))
    half = dataclasses.replace(hit, plan=dataclasses.replace(hit.plan, load_start=20))
    load = client.load_tail(half, np.arange(FIRST + 20, FIRST + BLOCKS, dtype=np.uint32))
    assert load.wait(WAIT_S).good == 20
    assert [memory.block(FIRST + i) for i in range(20, BLOCKS)] == originals[20:]
    assert not any(memory.block(FIRST + i).strip(b"\0") for i in range(20))
    client.release(hit.lease)
    assert hits(restarting) == {"NVME": 20}
