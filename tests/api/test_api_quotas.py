"""Quotas of gRPC callers: refused with a status and the key, and nobody else is."""

from __future__ import annotations

import grpc
import pytest
from endpoint import SMALL, Endpoint, Opener, failure, random_blocks

from kvstore.config import TenantConfig

SLOT = SMALL.slot_bytes


async def saved(endpoint: Endpoint, tenant: str, start: int, blocks: int) -> int:
    chain = endpoint.chain(range(start, start + 4 * blocks), tenant=tenant)
    return int((await endpoint.save(chain, random_blocks(start, blocks))).ready)


async def test_who_asks_too_often_is_told_so(opening: Opener) -> None:
    tenants = (TenantConfig(name="a", lookups_per_s=3.0), TenantConfig(name="b"))
    async with opening(tenants=tenants) as endpoint:
        from_a, from_b = (endpoint.chain(range(8), tenant=name) for name in "ab")
        await endpoint.look_up(from_a)
        await endpoint.plan(from_a)
        await endpoint.look_up(from_a)
        for call in (endpoint.look_up, endpoint.plan):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call(from_a)
            said = failure(refused.value)
            assert said.code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert said.message == "tenants.lookups_per_s = 3.0 of a: it asks more often"
        for _ in range(10):
            await endpoint.look_up(from_b)
        endpoint.driver.clock.advance(1.0)
        await endpoint.look_up(from_a)


async def test_a_save_beyond_the_bytes_says_why(opening: Opener) -> None:
    tenants = (TenantConfig(name="a", host_bytes=2 * SLOT), TenantConfig(name="b"))
    async with opening(tenants=tenants) as endpoint:
        reply = await endpoint.save(endpoint.chain(range(12), tenant="a"), random_blocks(1, 3))
        assert (reply.ready, reply.dropped) == (2, 1)
        assert reply.reason == f"tenants.host_bytes = {2 * SLOT} of a: its other blocks are in use"
        assert await saved(endpoint, "a", 1000, 2) == 2, "the older ones made room"
        assert await saved(endpoint, "b", 2000, 5) == 5


async def test_leases_of_a_tenant(opening: Opener) -> None:
    async with opening(tenants=(TenantConfig(name="a", leases_max=1), TenantConfig(name="b"))) as endpoint:
        await saved(endpoint, "a", 0, 2)
        chain = endpoint.chain(range(8), tenant="a")
        held = await endpoint.look_up(chain)
        assert held.blocks == 2
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await endpoint.look_up(chain)
        assert failure(refused.value).message == "tenants.leases_max = 1 of a: it holds as many"
        await endpoint.release(held.lease)
        assert (await endpoint.look_up(chain)).blocks == 2
