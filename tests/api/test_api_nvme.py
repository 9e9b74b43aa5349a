"""Fetch of blocks that are on the disk: brought to HOST, verified, sent; cut short without an error."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest
from endpoint import SMALL, Endpoint, configured, eventually, random_blocks

from kvstore.config import Config, Salts
from kvstore.disks import DiskLoop
from kvstore.rpc.api.server import GrpcServer
from kvstore.testing import StoreDriver, small_disk
from kvstore.types import Tier
from kvstore.v1 import store_pb2 as pb

Opening = Callable[..., contextlib.AbstractAsyncContextManager[Endpoint]]
BLOCKS = 40


@pytest.fixture
def disk(tmp_path: Path, socket_path: Path) -> Opening:
    """Opens endpoints one after another on the same disk; `faults`: what it does wrong."""
    config: Config = msgspec.structs.replace(
        configured(socket_path.parent), nvme=small_disk(tmp_path / "disk")
    )
    salts = Salts.load(config)

    @contextlib.asynccontextmanager
    async def over(faults: str = "") -> AsyncIterator[Endpoint]:
        with StoreDriver(config, salts, faults) as driver:
            disks = DiskLoop(driver.store, asyncio.get_running_loop())
            server = GrpcServer(driver.store)
            await server.open()
            endpoint = Endpoint(driver, server, server.addresses[0])
            try:
                yield endpoint
                driver.store.check()
            finally:
                await endpoint.channel.close()
                await server.close()
                disks.close()

    return over


async def saved(disk: Opening, seed: int, blocks: int = BLOCKS) -> bytes:
    """Blocks of a prompt that are on the disk, and nowhere else."""
    data = random_blocks(seed, blocks)
    async with disk() as endpoint:
        assert (await endpoint.save(endpoint.chain(range(blocks * 4)), data)).ready == blocks
        nvme = endpoint.driver.nvme
        await eventually(lambda: nvme.counts()["records"] == blocks)
    return data


async def test_what_is_on_the_disk_is_fetched_byte_for_byte(disk: Opening) -> None:
    data = await saved(disk, 1)
    async with disk() as endpoint:
        found = await endpoint.look_up(endpoint.chain(range(BLOCKS * 4)))
        assert [(s.tier, s.start, s.stop) for s in found.plan.spans] == [(pb.TIER_NVME, 0, BLOCKS)]
        fetched = await endpoint.fetch(pb.FetchRequest(lease=found.lease))
        assert fetched.data == data
        assert (fetched.end.stop, fetched.end.reason) == (BLOCKS, "")
        await endpoint.release(found.lease)
        by_tier = endpoint.driver.group().counters.hit_blocks_by_tier
        assert (by_tier[Tier.NVME], by_tier[Tier.HOST]) == (BLOCKS, 0)
        # And now from HOST, in one call.
        again = await endpoint.fetch(pb.FetchRequest(chain=endpoint.chain(range(BLOCKS * 4))))
        assert again.data == data
        await endpoint.settle()
        assert by_tier[Tier.HOST] == BLOCKS


async def test_a_range_in_the_middle_of_a_chain_on_the_disk(disk: Opening) -> None:
    data, size = await saved(disk, 2), SMALL.block_bytes
    async with disk() as endpoint:
        lease = (await endpoint.look_up(endpoint.chain(range(BLOCKS * 4)))).lease
        for start, stop in ((30, 35), (3, 5), (0, 1), (38, BLOCKS)):
            fetched = await endpoint.fetch(pb.FetchRequest(lease=lease, start=start, stop=stop))
            assert fetched.data == data[start * size : stop * size]
            assert (fetched.end.stop, fetched.end.reason) == (stop, "")
        await endpoint.release(lease)


async def test_two_streams_of_one_lease(disk: Opening) -> None:
    data, size = await saved(disk, 3), SMALL.block_bytes
    async with disk("slow_ms=20:1") as endpoint:
        lease = (await endpoint.look_up(endpoint.chain(range(BLOCKS * 4)))).lease
        first, second = await asyncio.gather(
            endpoint.fetch(pb.FetchRequest(lease=lease)),
            endpoint.fetch(pb.FetchRequest(lease=lease, start=20)),
        )
        assert (first.data, second.data) == (data, data[20 * size :])
        await endpoint.release(lease)


async def test_a_disk_that_cannot_be_read_ends_the_stream_with_a_reason(disk: Opening) -> None:
    await saved(disk, 4)
    async with disk("read_eio=1") as endpoint:
        fetched = await endpoint.fetch(pb.FetchRequest(chain=endpoint.chain(range(BLOCKS * 4))))
        assert (fetched.data, fetched.end.stop) == (b"", 0)
        assert "block 0 is unreadable" in fetched.end.reason
        await endpoint.settle()


async def test_a_lease_that_is_released_under_a_stream_that_waits(disk: Opening) -> None:
    await saved(disk, 5)
    async with disk("stall_ms=1500:1") as endpoint:
        lease = (await endpoint.look_up(endpoint.chain(range(BLOCKS * 4)))).lease
        stream = asyncio.ensure_future(endpoint.fetch(pb.FetchRequest(lease=lease)))
        group = endpoint.driver.group()
        await eventually(lambda: len(group.fetches) == 1)
        await endpoint.release(lease)
        fetched = await asyncio.wait_for(stream, 1.0)
        assert (fetched.data, fetched.end.stop) == (b"", 0)
        assert "the lease ended" in fetched.end.reason
        await eventually(lambda: group.nvme.filling_slots() == 0)  # what was at the disk has landed
