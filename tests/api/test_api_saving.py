"""Save: all of a stream becomes readable, or nothing of it; and no slot is ever lost."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import grpc
import pytest
from endpoint import SMALL, Endpoint, Failure, Opener, eventually, failure, random_blocks, save_messages

from kvstore.config import TenantConfig
from kvstore.errors import LimitExceeded
from kvstore.testing import small_layout
from kvstore.types import BlockLayout, Reuse
from kvstore.v1 import store_pb2 as pb

SIZE = SMALL.block_bytes
# 1 MiB a block: two to a batch, twelve in the arena of 16 MiB.
LARGE = BlockLayout(4, 8, 2048, "float16", block_tokens=4)
assert LARGE.block_bytes == 1 << 20


async def refused(endpoint: Endpoint, *messages: pb.SaveRequest) -> Failure:
    """A stream that must fail; nothing of it may be left."""

    async def stream() -> AsyncIterator[pb.SaveRequest]:
        for message in messages:
            yield message

    before = endpoint.driver.group().host.counts()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await endpoint.store.Save(stream())
    await endpoint.settle()
    after = endpoint.driver.group().host.counts()
    assert (after["ready"], after["filling"]) == (before["ready"], 0)
    return failure(caught.value)


def header(endpoint: Endpoint, blocks: int, start: int = 0) -> pb.SaveRequest:
    chain = endpoint.chain(range(blocks * 4))
    return pb.SaveRequest(header=pb.SaveHeader(chain=chain, start=start))


def data(content: bytes, crc32c: int | None = None) -> pb.SaveRequest:
    return pb.SaveRequest(data=pb.SaveData(data=content, crc32c=crc32c))


# ---- what is kept -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("piece_bytes", [1, 1000, SIZE, 3 * SIZE + 1, 1 << 20])
async def test_pieces_may_be_cut_anywhere(endpoint: Endpoint, piece_bytes: int) -> None:
    blocks = 2 if piece_bytes == 1 else 20
    chain, content = endpoint.chain(range(blocks * 4)), random_blocks(1, blocks)
    saved = await endpoint.save(chain, content, piece_bytes=piece_bytes)
    assert (saved.ready, saved.dropped, saved.epoch) == (blocks, 0, endpoint.driver.store.epoch)
    assert (await endpoint.fetch(pb.FetchRequest(chain=chain))).data == content
    await endpoint.settle()


async def test_blocks_that_are_there_are_not_written_again(endpoint: Endpoint) -> None:
    await endpoint.save(endpoint.chain(range(16)), random_blocks(2, 4))
    saved = await endpoint.save(endpoint.chain(range(28)), random_blocks(3, 7))
    assert (saved.ready, saved.filled, saved.elsewhere, saved.dropped) == (3, 4, 0, 0)
    fetched = await endpoint.fetch(pb.FetchRequest(chain=endpoint.chain(range(28))))
    assert fetched.data == random_blocks(2, 4) + random_blocks(3, 7)[4 * SIZE :]


async def test_a_plan_says_where_a_save_may_start(endpoint: Endpoint) -> None:
    await endpoint.save(endpoint.chain(range(16)), random_blocks(2, 4))
    start = (await endpoint.plan(endpoint.chain(range(28)))).blocks
    saved = await endpoint.save(endpoint.chain(range(28)), random_blocks(3, 3), start=start)
    assert (start, saved.ready, saved.filled) == (4, 3, 0)


async def test_blocks_after_an_unknown_parent_are_dropped_and_said_so(endpoint: Endpoint) -> None:
    saved = await endpoint.save(endpoint.chain(range(28)), random_blocks(3, 3), start=4)
    assert (saved.ready, saved.dropped) == (0, 3)
    assert "parent block is not known" in saved.reason
    await endpoint.settle()


async def test_nothing_to_save_is_a_save(endpoint: Endpoint) -> None:
    assert (await endpoint.save(endpoint.chain(range(3)), b"")).ready == 0
    assert (await endpoint.save(endpoint.chain(range(16)), b"", start=4)).dropped == 0
    await endpoint.settle()


async def test_a_prompt_larger_than_the_arena_keeps_its_beginning(endpoint: Endpoint) -> None:
    chain = endpoint.chain(range(80), layout=LARGE)
    content = random_blocks(4, 20, LARGE)
    saved = await endpoint.save(chain, content, piece_bytes=300_000)
    assert 0 < saved.ready < 20
    assert (saved.ready + saved.dropped, saved.filled) == (20, 0)
    assert "no room" in saved.reason
    kept = (await endpoint.fetch(pb.FetchRequest(chain=chain))).data
    assert kept == content[: saved.ready * LARGE.block_bytes]
    await endpoint.settle()
    assert (await endpoint.save(endpoint.chain(range(4), layout=LARGE, model="b"), content[: 1 << 20])).ready


async def test_of_two_who_save_the_same_one_wins(endpoint: Endpoint) -> None:
    chain, content = endpoint.chain(range(40)), random_blocks(5, 10)
    both = await asyncio.gather(*(endpoint.save(chain, content, piece_bytes=500) for _ in range(4)))
    for saved in both:
        assert saved.ready + saved.filled + saved.elsewhere + saved.dropped == 10
    assert sum(saved.ready for saved in both) == 10
    assert (await endpoint.fetch(pb.FetchRequest(chain=chain))).data == content
    await endpoint.settle()


# ---- what breaks ------------------------------------------------------------------------------------------


async def test_malformed_streams(endpoint: Endpoint) -> None:
    begin, block = header(endpoint, 2), data(bytes(SIZE))
    cases: list[tuple[list[pb.SaveRequest], str]] = [
        ([], "header"),
        ([block], "header"),
        ([begin, begin], "data"),
        ([begin, block, pb.SaveRequest()], "data"),
        ([header(endpoint, 2, start=3)], "start"),
        ([begin, block], "data"),
        ([begin, block, data(bytes(SIZE - 1))], "data"),
        ([begin, data(bytes(2 * SIZE + 1))], "data.data"),
        ([begin, block, block, data(b"x")], "data.data"),
        ([begin, block, data(b""), block], "data.data"),
        ([begin, block, block, data(b"")], "data.data"),
        ([begin, block, data(bytes(SIZE), crc32c=1)], "data.crc32c"),
    ]
    for messages, field in cases:
        seen = await refused(endpoint, *messages)
        assert (seen.code, seen.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "BAD_REQUEST")
        assert seen.fields == [field], seen
    assert (await endpoint.plan(endpoint.chain(range(8)))).blocks == 0


@pytest.mark.parametrize("sent", [0, 1, 5, 9])
async def test_a_stream_that_is_cancelled_leaves_nothing(endpoint: Endpoint, sent: int) -> None:
    chain, content = endpoint.chain(range(16), layout=LARGE), random_blocks(6, 4, LARGE)
    call = endpoint.store.Save()
    await call.write(pb.SaveRequest(header=pb.SaveHeader(chain=chain)))
    for number in range(sent):  # after five pieces the first batch is in FILLING slots
        await call.write(data(content[number * 420_000 : (number + 1) * 420_000]))
    await eventually(lambda: endpoint.service.streams == 1)
    call.cancel()
    await endpoint.settle()
    assert (await endpoint.plan(chain)).blocks == 0
    assert endpoint.driver.group().host.counts()["filling"] == 0
    assert (await endpoint.save(endpoint.chain(range(16), layout=LARGE), content)).ready == 4


async def test_what_is_being_saved_is_not_readable(endpoint: Endpoint) -> None:
    chain, content = endpoint.chain(range(16), layout=LARGE), random_blocks(7, 4, LARGE)
    call = endpoint.store.Save()
    await call.write(pb.SaveRequest(header=pb.SaveHeader(chain=chain)))
    for at in range(0, 3 << 20, 1 << 19):
        await call.write(data(content[at : at + (1 << 19)]))
    group = endpoint.driver.group()
    await eventually(lambda: group.host.counts()["filling"] >= 2)
    assert (await endpoint.plan(chain)).blocks == 0
    endpoint.sound()
    await call.write(data(content[3 << 20 :]))
    await call.done_writing()
    assert (await call).ready == 4
    await endpoint.settle()


async def test_a_caller_that_falls_silent_is_ended(opening: Opener) -> None:
    async with opening(stall_s=0.1) as endpoint:
        call = endpoint.store.Save()
        await call.write(header(endpoint, 2))
        await call.write(data(bytes(SIZE)))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert failure(caught.value).code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "grpc.stall_s" in failure(caught.value).message
        await endpoint.settle()


async def test_a_caller_that_trickles_is_ended(opening: Opener) -> None:
    """Each message comes in time, the bytes do not."""
    async with opening(stall_s=0.3) as endpoint:
        call = endpoint.store.Save()
        await call.write(pb.SaveRequest(header=pb.SaveHeader(chain=endpoint.chain(range(16), layout=LARGE))))
        for _ in range(4):  # two batches: slots are held from now on
            await call.write(data(bytes(1 << 19)))
        await eventually(lambda: endpoint.driver.group().host.counts()["filling"] == 2)

        over = contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError)
        async with asyncio.timeout(10):
            with over:
                while not call.done():
                    await call.write(data(b"x"))
                    await asyncio.sleep(0.01)
        assert await call.code() is not grpc.StatusCode.OK  # which one: a write may cross it on the wire
        await endpoint.settle()


async def test_a_deadline_in_the_middle_of_a_save(endpoint: Endpoint) -> None:
    call = endpoint.store.Save(timeout=0.2)
    await call.write(header(endpoint, 2))
    await call.write(data(bytes(SIZE)))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await endpoint.settle()
    assert (await endpoint.plan(endpoint.chain(range(8)))).blocks == 0


async def test_a_tenant_that_reuses_nothing_saves_nothing(opening: Opener) -> None:
    async with opening(tenants=(TenantConfig(name="default", reuse=Reuse.NONE),)) as endpoint:
        seen = await refused(endpoint, header(endpoint, 1), data(bytes(SIZE)))
        assert (seen.code, seen.reason) == (grpc.StatusCode.PERMISSION_DENIED, "REFUSED")
        missed = await endpoint.look_up(endpoint.chain(range(8)))
        assert "reuses nothing" in missed.plan.reason
        assert (await endpoint.fetch(pb.FetchRequest(chain=endpoint.chain(range(8))))).data == b""


async def test_saves_stop_with_the_server_and_leave_nothing(opening: Opener) -> None:
    async with opening(stop_s=0.0) as endpoint:
        chain = endpoint.chain(range(16), layout=LARGE)
        content = random_blocks(8, 4, LARGE)
        messages = save_messages(chain, content[: 3 << 20], piece_bytes=1 << 19)
        call = endpoint.store.Save()
        async for message in messages:
            await call.write(message)
        group = endpoint.driver.group()
        await eventually(lambda: group.host.counts()["filling"] >= 2)
        await endpoint.server.close()
        assert group.host.counts()["filling"] == 0
        assert not group.engines
        endpoint.sound()
        call.cancel()


async def test_a_header_alone_makes_no_root(endpoint: Endpoint) -> None:
    roots = endpoint.driver.group().roots
    await refused(endpoint, header(endpoint, 1))
    await refused(endpoint, header(endpoint, 1), data(bytes(SIZE - 1)))
    assert not roots
    await endpoint.save(endpoint.chain(range(4)), bytes(SIZE))
    assert len(roots) == 1


async def test_a_tenant_that_invents_models_stops_at_its_own_limit(
    opening: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.roots.ROOTS_PER_TENANT_MAX", 2)
    async with opening(tenants=(TenantConfig(name="a"), TenantConfig(name="b"))) as endpoint:
        for model in ("one", "two"):
            await endpoint.save(endpoint.chain(range(4), tenant="a", model=model), bytes(SIZE))
        begin = pb.SaveRequest(
            header=pb.SaveHeader(chain=endpoint.chain(range(4), tenant="a", model="three"))
        )
        seen = await refused(endpoint, begin, data(bytes(SIZE)))
        assert seen.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "roots_per_tenant_max = 2" in seen.message
        with pytest.raises(LimitExceeded, match="roots_per_tenant_max = 2"):
            endpoint.driver.attach(layout=SMALL, tenants=("a",), model="four")
        again = await endpoint.save(endpoint.chain(range(4), tenant="a", model="two"), bytes(SIZE))
        assert again.filled == 1
        assert (await endpoint.save(endpoint.chain(range(4), tenant="b", model="x"), bytes(SIZE))).ready == 1


async def test_engines_and_callers_may_save_the_same_prompt(endpoint: Endpoint) -> None:
    layout = small_layout()
    expected, _ = endpoint.saved_by_engine(range(16), layout)
    more = expected + bytes(2 * layout.block_bytes)
    saved = await endpoint.save(endpoint.chain(range(24), layout=layout), more)
    assert (saved.ready, saved.filled) == (2, 4)
