"""Admin: the state of the daemon, its self-check, flush, and dropping a namespace."""

from __future__ import annotations

import asyncio
import json

import grpc
import numpy as np
import pytest
from endpoint import SMALL, Endpoint, Opener, failure, random_blocks
from google.protobuf import json_format

from kvstore import __version__
from kvstore.config import TenantConfig
from kvstore.status import status
from kvstore.types import Reuse
from kvstore.v1 import store_pb2 as pb


async def drop(endpoint: Endpoint, **request: object) -> pb.DropNamespaceResponse:
    return await endpoint.admin.DropNamespace(pb.DropNamespaceRequest(**request))


async def test_status_is_what_the_session_reports(endpoint: Endpoint) -> None:
    await endpoint.save(endpoint.chain(range(16)), random_blocks(1, 4))
    await endpoint.look_up(endpoint.chain(range(16)))
    reply = await endpoint.admin.Status(pb.StatusRequest())
    report = json_format.MessageToDict(reply.report)
    assert report.pop("grpc") == {"leases": 1, "streams": 0, "subscribers": 0}
    assert report == json.loads(json.dumps(status(endpoint.driver.store)))
    assert reply.version == __version__


async def test_check_says_which_law_is_broken(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (await endpoint.admin.Check(pb.CheckRequest())).ok
    with monkeypatch.context() as patched:
        patched.setattr(type(endpoint.driver.group().leases), "pins", lambda _: 7)
        broken = await endpoint.admin.Check(pb.CheckRequest())
    assert not broken.ok
    assert "0 pins in the index, 7 held by leases" in broken.broken


async def test_flush_says_that_memory_is_not_durable(endpoint: Endpoint) -> None:
    (host,) = (await endpoint.admin.Flush(pb.FlushRequest())).tiers
    assert (host.tier, host.durable) == (pb.TIER_HOST, False)
    assert "memory" in host.reason


async def test_a_namespace_is_dropped_and_others_stay(endpoint: Endpoint) -> None:
    for model in ("one", "two"):
        await endpoint.save(endpoint.chain(range(40), model=model), random_blocks(1, 10))
    group = endpoint.driver.group()
    before = group.events.sequence
    reply = await drop(endpoint, namespace=endpoint.namespace(model="one"))
    assert (reply.dropped_blocks, reply.idle_blocks) == (10, 0)
    assert (await endpoint.plan(endpoint.chain(range(40), model="one"))).blocks == 0
    assert (await endpoint.plan(endpoint.chain(range(40), model="two"))).blocks == 10
    removed = group.events.since(group.events.epoch, before).events
    assert sum(len(event.keys) for event in removed) == 10
    assert group.host.dropped["namespace"] == 10
    assert group.host.corrupt_blocks == 0
    assert len(group.index) == 10  # hollow nodes are reaped
    assert (await drop(endpoint, digest=endpoint.digest(model="one"))).dropped_blocks == 0
    assert (await drop(endpoint, digest=endpoint.digest(model="two"))).dropped_blocks == 10


async def test_blocks_under_a_lease_stop_matching_and_are_free_when_it_ends(endpoint: Endpoint) -> None:
    chain = endpoint.chain(range(40))
    await endpoint.save(chain, random_blocks(2, 10))
    lease = (await endpoint.look_up(chain)).lease
    assert (await drop(endpoint, namespace=endpoint.namespace())).dropped_blocks == 10
    endpoint.sound()
    assert endpoint.driver.group().host.counts()["draining"] == 10
    assert (await endpoint.plan(chain)).blocks == 0
    assert (await endpoint.fetch(pb.FetchRequest(lease=lease))).data == b""
    await endpoint.release(lease)
    assert endpoint.driver.group().host.counts()["draining"] == 0
    assert endpoint.quiet()


async def test_a_tenants_own_blocks(opening: Opener) -> None:
    shared = {"group": "g", "reuse": Reuse.GROUP}
    async with opening(
        tenants=(TenantConfig(name="g", **shared), TenantConfig(name="b", **shared))
    ) as endpoint:
        for tenant, reuse in (("g", pb.REUSE_OWN), ("b", pb.REUSE_OWN), ("b", pb.REUSE_GROUP)):
            chain = endpoint.chain(range(16), tenant=tenant, reuse=reuse)
            await endpoint.save(chain, random_blocks(3, 4))
        # The tenant is called like its trust group: what the group shares is not its own all the same.
        assert (await drop(endpoint, namespace=endpoint.namespace(), tenant="g")).dropped_blocks == 4
        left = endpoint.chain(range(16), tenant="g", reuse=pb.REUSE_GROUP)
        assert (await endpoint.plan(left)).blocks == 4
        assert (await drop(endpoint, namespace=endpoint.namespace())).dropped_blocks == 8


async def test_idle_device_blocks_go_too(endpoint: Endpoint) -> None:
    session = endpoint.driver.attach(layout=SMALL)
    session.own_pool(32, 32)
    chain = session.chain(range(40))
    table = session.acquire(0, 10)
    session.commit(table.lease, chain, 0, 10)
    session.release(table.lease)
    reply = await drop(endpoint, namespace=endpoint.namespace())
    assert (reply.dropped_blocks, reply.idle_blocks) == (0, 10)
    counts = session.engine.device.counts()
    assert (counts["idle"], counts["free"]) == (0, 32)
    endpoint.sound()


async def test_dropping_much_never_holds_the_loop(endpoint: Endpoint) -> None:
    """Between any two slices others are served: the loop turns once per slice, not once in all."""
    for number in range(4):
        tokens = range(number * 10_000, number * 10_000 + 4000)
        await endpoint.save(endpoint.chain(tokens), random_blocks(number, 1000))
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    assert (await drop(endpoint, namespace=endpoint.namespace())).dropped_blocks == 4000
    counting.cancel()
    assert turns >= 4000 / 32
    endpoint.sound()


async def test_saves_and_evictions_may_run_while_a_namespace_is_dropped(endpoint: Endpoint) -> None:
    for number in range(8):
        tokens = range(number * 10_000, number * 10_000 + 1200)
        await endpoint.save(endpoint.chain(tokens, model="old"), random_blocks(number, 300))
    busy = [
        endpoint.save(endpoint.chain(range(n * 7000, n * 7000 + 2000), model="new"), random_blocks(n, 500))
        for n in range(8)
    ]
    dropped, *_ = await asyncio.gather(drop(endpoint, namespace=endpoint.namespace(model="old")), *busy)
    assert dropped.dropped_blocks <= 2400
    group = endpoint.driver.group()
    old_root = endpoint.driver.store.tenants.origins("default", endpoint.digest(model="old"))[Reuse.OWN]
    node = group.roots[old_root.key].node
    assert node not in {group.index.root_of(int(n)) for n in group.host.ready_nodes()}
    await endpoint.settle()


async def test_malformed_drops(endpoint: Endpoint) -> None:
    whole = endpoint.namespace()
    incomplete = pb.Namespace()
    incomplete.CopyFrom(whole)
    incomplete.layout = ""
    no_block = pb.Namespace()
    no_block.CopyFrom(whole)
    no_block.block_tokens = 0
    cases: list[tuple[dict[str, object], list[str]]] = [
        ({}, ["digest"]),
        ({"digest": bytes(32), "namespace": whole}, ["digest"]),
        ({"digest": bytes(31)}, ["digest"]),
        ({"namespace": incomplete}, ["namespace.layout"]),
        ({"namespace": no_block}, ["namespace.block_tokens"]),
        ({"digest": bytes(32), "tenant": "nobody"}, []),
    ]
    for request, fields in cases:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await drop(endpoint, **request)
        assert failure(caught.value).fields == fields
    assert np.array_equal(endpoint.driver.group().host.ready_nodes(), [])
