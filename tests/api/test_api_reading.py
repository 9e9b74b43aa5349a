"""Lookup, Plan and Fetch: what is known, and its bytes, to callers that map no arena."""

from __future__ import annotations

from dataclasses import asdict

import grpc
import numpy as np
import pytest
from endpoint import SMALL, Endpoint, Opener, failure, random_blocks

from kvstore.config import TenantConfig
from kvstore.rpc.api.fetching import DATA_BYTES_MAX
from kvstore.testing import small_layout
from kvstore.types import BlockLayout, Reuse
from kvstore.v1 import store_pb2 as pb

# Cells of 24 bytes (padded to 64 in a slot), of whole cache lines, and blocks of many messages (4 MiB / 3).
ODD = BlockLayout(3, 5, 3, "int8", block_tokens=4)
LARGE = BlockLayout(4, 8, 2048, "float16", block_tokens=5)
# Two bytes a block: more of them in a batch than one native call takes.
TINY = BlockLayout(1, 1, 1, "int8", block_tokens=1)


LAYOUTS = {"3K": SMALL, "odd": ODD, "large": LARGE, "128K": small_layout(), "tiny": TINY}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
async def test_what_is_saved_is_fetched_byte_for_byte(endpoint: Endpoint, layout: BlockLayout) -> None:
    blocks = 3000 if layout is TINY else 2 if layout is LARGE else 7
    chain = endpoint.chain(range((blocks + 1) * layout.block_tokens - 1), layout=layout)
    data = random_blocks(1, blocks, layout)
    saved = await endpoint.save(chain, data)
    assert (saved.ready, saved.filled, saved.dropped) == (blocks, 0, 0)

    found = await endpoint.look_up(chain)
    assert (found.asked_blocks, found.blocks, found.block_bytes) == (blocks, blocks, layout.block_bytes)
    assert found.epoch == endpoint.driver.store.epoch
    fetched = await endpoint.fetch(pb.FetchRequest(lease=found.lease))
    assert fetched.data == data
    assert (fetched.header.start, fetched.header.stop, fetched.end.stop) == (0, blocks, blocks)
    assert fetched.end.reason == ""
    assert max(fetched.sizes) <= DATA_BYTES_MAX + 64
    await endpoint.release(found.lease)
    assert endpoint.quiet()


async def test_tokens_and_keys_name_the_same_blocks(endpoint: Endpoint) -> None:
    tokens = range(40)
    await endpoint.save(endpoint.chain(tokens), random_blocks(2, 10))
    by_tokens = await endpoint.look_up(endpoint.chain(tokens))
    by_keys = endpoint.chain([])
    keys = endpoint.keys_of(tokens, by_tokens.root)
    by_keys.keys.packed = keys.keys.tobytes()
    found = await endpoint.look_up(by_keys)
    assert found.blocks == by_tokens.blocks == 10
    assert (await endpoint.plan(by_keys)).blocks == 10
    fetched = await endpoint.fetch(pb.FetchRequest(lease=found.lease))
    assert fetched.data == random_blocks(2, 10)


async def test_extra_bytes_name_other_blocks(endpoint: Endpoint) -> None:
    plain, image = endpoint.chain(range(16)), endpoint.chain(range(16))
    image.tokens.extra[1] = b"digest of an image"
    image.tokens.extra[9] = b"of the tail, which has no key"
    await endpoint.save(plain, random_blocks(3, 4))
    assert (await endpoint.plan(image)).blocks == 1
    assert (await endpoint.save(image, random_blocks(4, 3), start=1)).ready == 3
    fetched = await endpoint.fetch(pb.FetchRequest(chain=image))
    assert fetched.data == random_blocks(3, 4)[: SMALL.block_bytes] + random_blocks(4, 3)


@pytest.mark.parametrize("known", [1, 7, 16, 137, 199, 200])
async def test_a_match_ends_where_the_store_ends(endpoint: Endpoint, known: int) -> None:
    await endpoint.save(endpoint.chain(range(known * 4)), random_blocks(5, known))
    longer = endpoint.chain(range(200 * 4))
    found = await endpoint.look_up(longer)
    assert (found.asked_blocks, found.blocks) == (200, known)
    assert [(s.tier, s.start, s.stop) for s in found.plan.spans] == [(pb.TIER_HOST, 0, known)]
    assert (found.plan.load_start, found.plan.load_stop) == (0, known)
    assert found.plan.reason
    assert (await endpoint.plan(longer)).plan == found.plan


async def test_a_plan_hears_of_its_request_and_says_what_it_chose(endpoint: Endpoint) -> None:
    await endpoint.save(endpoint.chain(range(32)), random_blocks(6, 8))
    chain = endpoint.chain(range(32))
    plan = (await endpoint.store.Plan(pb.PlanRequest(chain=chain, intent=pb.Intent(prompt_tokens=40)))).plan
    assert (plan.choice, plan.load_stop) == (pb.CHOICE_LOAD, 8)
    assert not plan.predictions and "no step was seen" in plan.reason  # nothing is invented
    for bad in (pb.Intent(queued_s=float("nan")), pb.Intent(queued_s=-1.0), pb.Intent(request="x" * 2000)):
        with pytest.raises(grpc.aio.AioRpcError, match="intent"):
            await endpoint.store.Plan(pb.PlanRequest(chain=chain, intent=bad))


async def test_a_miss_has_a_reason_and_no_lease(endpoint: Endpoint) -> None:
    for tokens, why in ((range(8), "nothing of this prompt"), (range(3), "shorter than one block")):
        missed = await endpoint.look_up(endpoint.chain(tokens))
        assert (missed.lease, missed.blocks) == (b"", 0)
        assert why in missed.plan.reason
    assert endpoint.quiet()


async def test_a_plan_changes_nothing(endpoint: Endpoint) -> None:
    await endpoint.save(endpoint.chain(range(32)), random_blocks(6, 8))
    group = endpoint.driver.group()
    before = (asdict(group.counters), group.events.sequence, len(group.index), set(group.roots))
    for model in ("model", "never seen"):
        for tokens in (range(32), range(64), range(100, 120)):
            await endpoint.plan(endpoint.chain(tokens, model=model))
    assert before == (asdict(group.counters), group.events.sequence, len(group.index), set(group.roots))
    assert endpoint.quiet()


async def test_lookups_of_unknown_namespaces_leave_no_root(endpoint: Endpoint) -> None:
    group = endpoint.driver.group()
    for number in range(50):
        await endpoint.look_up(endpoint.chain(range(8), model=f"m{number}"))
    assert not group.roots
    assert group.counters.lookups == 50
    assert group.counters.lookup_blocks == 100


async def test_a_range_of_blocks(endpoint: Endpoint) -> None:
    data, size = random_blocks(7, 9), SMALL.block_bytes
    await endpoint.save(endpoint.chain(range(36)), data)
    lease = (await endpoint.look_up(endpoint.chain(range(36)))).lease
    for start, stop, until in ((0, 1, 1), (3, 5, 5), (8, 9, 9), (2, 0, 9), (4, 100, 9)):
        fetched = await endpoint.fetch(pb.FetchRequest(lease=lease, start=start, stop=stop))
        assert (fetched.header.start, fetched.header.stop, fetched.end.stop) == (start, until, until)
        assert fetched.data == data[start * size : until * size]
    nothing = await endpoint.fetch(pb.FetchRequest(lease=lease, start=9))
    assert (nothing.data, nothing.end.stop) == (b"", 9)
    assert "[0, 9) are known" in nothing.end.reason


async def test_a_chain_is_fetched_in_one_call(endpoint: Endpoint) -> None:
    chain = endpoint.chain(range(24))
    missed = await endpoint.fetch(pb.FetchRequest(chain=chain))
    assert (missed.data, missed.end.stop) == (b"", 0)
    await endpoint.save(chain, random_blocks(8, 6))
    assert (await endpoint.fetch(pb.FetchRequest(chain=chain))).data == random_blocks(8, 6)
    await endpoint.settle()


async def test_an_engine_and_a_caller_share_blocks(endpoint: Endpoint) -> None:
    for layout in (SMALL, ODD):
        tokens = range(1000, 1000 + 6 * 4)
        expected, ready = endpoint.saved_by_engine(tokens, layout)
        assert ready == 6
        chain = endpoint.chain(tokens, layout=layout)
        assert (await endpoint.fetch(pb.FetchRequest(chain=chain))).data == expected


async def test_an_engine_finds_what_a_caller_saved(endpoint: Endpoint) -> None:
    expected, _ = endpoint.saved_by_engine(range(24))
    await endpoint.admin.DropNamespace(pb.DropNamespaceRequest(namespace=endpoint.namespace()))
    assert (await endpoint.save(endpoint.chain(range(24)), expected)).ready == 6
    session = endpoint.driver.attach(layout=SMALL)
    chain = session.chain(range(24))
    found = session.lookup(chain)
    assert found.blocks == 6
    assert session.faults(found.lease, chain) == []
    session.disconnect()


async def test_rot_is_seen_dropped_and_said(endpoint: Endpoint) -> None:
    chain, size = endpoint.chain(range(40)), SMALL.block_bytes
    data = random_blocks(9, 10)
    await endpoint.save(chain, data)
    found = await endpoint.look_up(chain)
    group = endpoint.driver.group()
    keys = endpoint.keys_of(range(40), found.root)
    slot = group.host.pool.slots(np.array([group.index.find(keys.keys[6].tobytes())], np.uint32))[0]
    group.arena.view(int(slot), SMALL.block_bytes)[100] ^= 1

    fetched = await endpoint.fetch(pb.FetchRequest(lease=found.lease))
    assert fetched.end.stop == 6
    assert "block 6 is corrupt" in fetched.end.reason
    assert fetched.data == data[: 6 * size]
    assert group.host.corrupt_blocks == 1
    assert (await endpoint.plan(chain)).blocks == 6
    again = await endpoint.fetch(pb.FetchRequest(lease=found.lease, start=6))
    assert (again.data, again.end.stop) == (b"", 6)
    await endpoint.release(found.lease)
    assert group.counters.hit_blocks == 6
    assert endpoint.quiet()


async def test_another_tenant_sees_nothing(opening: Opener) -> None:
    tenants = (TenantConfig(name="a"), TenantConfig(name="b"), TenantConfig(name="c", group="other"))
    async with opening(tenants=tenants) as endpoint:
        await endpoint.save(endpoint.chain(range(16), tenant="a"), random_blocks(10, 4))
        mine = await endpoint.look_up(endpoint.chain(range(16), tenant="a"))
        assert mine.blocks == 4
        for other in ("b", "c"):
            assert (await endpoint.look_up(endpoint.chain(range(16), tenant=other))).blocks == 0
            fetched = await endpoint.fetch(pb.FetchRequest(chain=endpoint.chain(range(16), tenant=other)))
            assert fetched.data == b""
        # Even who knows the keys gets nothing under another tenant's root.
        stolen = endpoint.chain([], tenant="b")
        stolen.keys.packed = endpoint.keys_of(range(16), mine.root).keys.tobytes()
        await endpoint.save(endpoint.chain(range(50, 54), tenant="b"), random_blocks(11, 1))
        unknown = await endpoint.fetch(pb.FetchRequest(chain=stolen))
        assert (unknown.data, unknown.end.stop) == (b"", 0), "nor that they are known at all"


async def test_tenants_that_share_meet_under_group_only(opening: Opener) -> None:
    tenants = (TenantConfig(name="a", reuse=Reuse.GROUP), TenantConfig(name="b", reuse=Reuse.GROUP))
    async with opening(tenants=tenants) as endpoint:
        group = pb.REUSE_GROUP
        await endpoint.save(endpoint.chain(range(16), tenant="a", reuse=group), random_blocks(12, 4))
        assert (await endpoint.plan(endpoint.chain(range(16), tenant="b", reuse=group))).blocks == 4
        assert (await endpoint.plan(endpoint.chain(range(16), tenant="b"))).blocks == 0
        assert (await endpoint.plan(endpoint.chain(range(16), tenant="a"))).blocks == 0


async def test_tokens_count_for_the_tenant_that_asked(opening: Opener) -> None:
    tenants = (TenantConfig(name="a", reuse=Reuse.GROUP), TenantConfig(name="b", reuse=Reuse.GROUP))
    async with opening(tenants=tenants) as endpoint:
        meters = endpoint.driver.group().meters
        shared = pb.REUSE_GROUP
        await endpoint.look_up(endpoint.chain(range(16), tenant="b", reuse=shared))  # not even a root
        assert {name: tokens.lookup for name, tokens in meters.tenants.items()} == {"a": 0, "b": 16}
        await endpoint.save(endpoint.chain(range(16), tenant="a", reuse=shared), random_blocks(12, 4))
        await endpoint.fetch(pb.FetchRequest(chain=endpoint.chain(range(24), tenant="b", reuse=shared)))
        await endpoint.settle()
        counted = {name: (tokens.lookup, tokens.hits) for name, tokens in meters.tenants.items()}
        assert counted == {"a": (0, 0), "b": (40, 16)}


async def test_a_lookup_that_is_refused_hit_nothing(endpoint: Endpoint) -> None:
    await endpoint.save(endpoint.chain(range(160)), random_blocks(14, 40))
    root = (await endpoint.plan(endpoint.chain(range(160)))).root
    keys = endpoint.keys_of(range(160), root).keys.copy()
    keys[[1, 2]] = keys[[2, 1]]  # positions that the first trip of a lookup does not ask about
    chain = endpoint.chain([])
    chain.keys.packed = keys.tobytes()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await endpoint.look_up(chain)
    assert failure(caught.value).code is grpc.StatusCode.INVALID_ARGUMENT
    group = endpoint.driver.group()
    assert (group.counters.hit_blocks, group.meters.of_tenant("default").hits) == (0, 0)
    assert endpoint.quiet()


async def test_layouts_never_meet(endpoint: Endpoint) -> None:
    await endpoint.save(endpoint.chain(range(16)), random_blocks(13, 4))
    other = BlockLayout(2, 2, 24, "float32", block_tokens=4, cell_format="opaque:other:ISA")
    chain = endpoint.chain(range(16))
    chain.layout.cell_format = other.cell_format
    chain.namespace.layout = ""
    assert (await endpoint.plan(chain)).blocks == 0
    chain.namespace.layout = SMALL.fingerprint
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await endpoint.plan(chain)
    assert failure(caught.value).fields == ["namespace.layout"]
