"""Leases of callers without a session: how long they live, who ends them, and that nothing stays pinned."""

from __future__ import annotations

import asyncio
import contextlib

import grpc
import pytest
from endpoint import Endpoint, Opener, eventually, failure, random_blocks

from kvstore.types import Tier
from kvstore.v1 import store_pb2 as pb

PROMPT = range(24)
BLOCKS = 6


async def granted(endpoint: Endpoint) -> bytes:
    """A lease on a prompt of six blocks."""
    if not (await endpoint.plan(endpoint.chain(PROMPT))).blocks:
        await endpoint.save(endpoint.chain(PROMPT), random_blocks(1, BLOCKS))
    return (await endpoint.look_up(endpoint.chain(PROMPT))).lease


async def refused(call: grpc.aio.Call) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return failure(caught.value).code


async def test_a_lease_pins_until_it_is_released(endpoint: Endpoint) -> None:
    lease = await granted(endpoint)
    group = endpoint.driver.group()
    assert (len(lease), group.index.pins(), len(group.leases)) == (16, 1, 1)
    await endpoint.release(lease)
    assert endpoint.quiet()
    request = pb.ReleaseRequest(lease=lease)
    assert await refused(endpoint.store.Release(request)) is grpc.StatusCode.NOT_FOUND


async def test_a_lease_ends_when_it_is_not_used(opening: Opener) -> None:
    async with opening(lease_s=10.0) as endpoint:
        lease = await granted(endpoint)
        endpoint.driver.clock.advance(9.9)
        assert endpoint.service.holdings.sweep() == 0
        endpoint.driver.clock.advance(0.1)
        assert endpoint.service.holdings.sweep() == 1
        assert endpoint.quiet()
        request = pb.FetchRequest(lease=lease)
        call = endpoint.store.Fetch(request)
        assert await refused(call.read()) is grpc.StatusCode.NOT_FOUND


async def test_expiry_needs_no_call(opening: Opener) -> None:
    async with opening(lease_s=0.1) as endpoint:
        await granted(endpoint)
        endpoint.driver.clock.advance(0.2)
        await endpoint.settle()


@pytest.mark.parametrize("use", ["renew", "fetch"])
async def test_use_renews_a_lease(opening: Opener, use: str) -> None:
    async with opening(lease_s=10.0) as endpoint:
        lease = await granted(endpoint)
        for _ in range(3):
            endpoint.driver.clock.advance(9.0)
            if use == "renew":
                reply = await endpoint.store.Renew(pb.RenewRequest(leases=[lease, b"another"]))
                assert (list(reply.ended), reply.lease_s) == ([b"another"], 10.0)
            else:
                assert (await endpoint.fetch(pb.FetchRequest(lease=lease))).end.stop == BLOCKS
        endpoint.driver.clock.advance(10.0)
        reply = await endpoint.store.Renew(pb.RenewRequest(leases=[lease]))
        assert list(reply.ended) == [lease]
        assert endpoint.quiet()


async def test_an_expired_lease_with_its_chain_costs_a_lookup_and_not_the_bytes(opening: Opener) -> None:
    async with opening(lease_s=10.0) as endpoint:
        lease = await granted(endpoint)
        endpoint.driver.clock.advance(11.0)
        fetched = await endpoint.fetch(pb.FetchRequest(lease=lease, chain=endpoint.chain(PROMPT)))
        assert fetched.data == random_blocks(1, BLOCKS)
        await endpoint.settle()


async def test_a_limit_on_leases(opening: Opener) -> None:
    async with opening(leases_max=3) as endpoint:
        leases = [await granted(endpoint) for _ in range(3)]
        assert len(set(leases)) == 3
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await endpoint.look_up(endpoint.chain(PROMPT))
        seen = failure(caught.value)
        assert (seen.code, seen.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "LIMIT_EXCEEDED")
        assert "grpc.leases_max = 3" in seen.message
        await endpoint.release(leases.pop())
        leases.append((await endpoint.look_up(endpoint.chain(PROMPT))).lease)
        for lease in leases:
            await endpoint.release(lease)
        assert endpoint.quiet()


async def test_pressure_takes_leases_of_silent_callers(opening: Opener) -> None:
    async with opening(lease_s=1000.0) as endpoint:
        lease = await granted(endpoint)
        group = endpoint.driver.group()
        endpoint.driver.clock.advance(endpoint.driver.config.daemon.stale_after_s + 1)
        assert group.revoke_stale() == 1
        endpoint.sound()
        fetch = endpoint.store.Fetch(pb.FetchRequest(lease=lease))
        assert await refused(fetch.read()) is grpc.StatusCode.NOT_FOUND
        again = await endpoint.fetch(pb.FetchRequest(lease=lease, chain=endpoint.chain(PROMPT)))
        assert again.end.stop == BLOCKS
        await endpoint.settle()


async def test_only_what_was_sent_is_a_hit(endpoint: Endpoint) -> None:
    group = endpoint.driver.group()
    for stop, hits in ((0, BLOCKS), (2, 2), (None, 0)):
        before = group.counters.hit_blocks
        lease = await granted(endpoint)
        if stop is not None:
            await endpoint.fetch(pb.FetchRequest(lease=lease, stop=stop))
        await endpoint.release(lease)
        assert group.counters.hit_blocks - before == hits
    assert group.counters.hit_blocks == group.counters.hit_blocks_by_tier[Tier.HOST]


async def test_a_release_ends_the_streams_of_the_lease(endpoint: Endpoint) -> None:
    blocks = 2000
    chain = endpoint.chain(range(blocks * 4))
    await endpoint.save(chain, random_blocks(2, blocks))
    lease = (await endpoint.look_up(chain)).lease
    stream = endpoint.store.Fetch(pb.FetchRequest(lease=lease))
    assert (await stream.read()).HasField("header")
    await endpoint.release(lease)
    message = await stream.read()
    while not message.HasField("end"):
        message = await stream.read()
    assert message.end.stop == blocks or "lease ended" in message.end.reason
    assert await stream.read() is grpc.aio.EOF
    await endpoint.settle()


async def test_a_fetch_cancelled_in_its_middle_leaves_no_pin(endpoint: Endpoint) -> None:
    blocks = 2000
    chain = endpoint.chain(range(blocks * 4))
    data = random_blocks(4, blocks)
    assert (await endpoint.save(chain, data)).ready == blocks
    for reads in (0, 1, 2):
        stream = endpoint.store.Fetch(pb.FetchRequest(chain=chain))
        for _ in range(reads):
            await stream.read()
        stream.cancel()
        await endpoint.settle()
    assert (await endpoint.fetch(pb.FetchRequest(chain=chain))).data == data


async def test_a_caller_that_leaves_before_the_answer_holds_nothing_for_long(opening: Opener) -> None:
    async with opening(lease_s=10.0) as endpoint:
        await endpoint.release(await granted(endpoint))
        for turns in range(24):
            call = endpoint.store.Lookup(pb.LookupRequest(chain=endpoint.chain(PROMPT)))
            for _ in range(turns):  # each turn of the loop finds the call at another step
                await asyncio.sleep(0)
            call.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await endpoint.release((await call).lease)  # answered before: it is the caller's to release
            endpoint.sound()
        # An answer that crossed the cancellation on the wire granted a lease that nobody knows.
        endpoint.driver.clock.advance(10.0)
        endpoint.service.holdings.sweep()
        await endpoint.settle()


async def test_a_lookup_whose_answer_cannot_be_sent_is_released_at_once(endpoint: Endpoint) -> None:
    await granted(endpoint)
    held = next(iter(endpoint.service.holdings._held.values()))

    class Done:
        def __init__(self, cancelled: bool) -> None:
            self.cancelled = lambda: cancelled

    endpoint.service._if_cancelled(Done(False), held)
    assert len(endpoint.service.holdings) == 1
    endpoint.service._if_cancelled(Done(True), held)
    assert endpoint.quiet()


async def test_a_vanished_connection_leaves_leases_to_their_time_only(opening: Opener) -> None:
    async with opening(lease_s=10.0) as endpoint:
        await granted(endpoint)
        other = grpc.aio.insecure_channel(endpoint.address)
        stream = other.unary_stream("/kvstore.v1.Store/Fetch")(
            pb.FetchRequest(chain=endpoint.chain(PROMPT)).SerializeToString()
        )
        await stream.read()
        await other.close()
        await eventually(lambda: not endpoint.service.streams)
        assert len(endpoint.service.holdings) == 1  # the one of the lookup
        endpoint.driver.clock.advance(10.0)
        endpoint.service.holdings.sweep()
        assert endpoint.quiet()
