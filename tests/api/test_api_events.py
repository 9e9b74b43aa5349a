"""Subscribe: a snapshot and every event after it, resumed where that can be, begun anew where it cannot."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import numpy as np
import pytest
from endpoint import SMALL, WAIT_S, Endpoint, Opener, eventually, failure, random_blocks

from kvstore.config import TenantConfig
from kvstore.events import EventKind
from kvstore.keys import KeyChain
from kvstore.testing import SessionDriver
from kvstore.types import Tier
from kvstore.v1 import store_pb2 as pb


class Follower:
    """A subscriber that applies what it is told, as a router would."""

    def __init__(
        self, endpoint: Endpoint, epoch: bytes = b"", sequence: int = 0, tenant: str = "default"
    ) -> None:
        self.epoch, self.sequence = epoch, sequence
        self.known: set[bytes] = set()
        self.devices: dict[bytes, set[bytes]] = {}
        self.snapshots = 0
        request = pb.SubscribeRequest(tenant=tenant, epoch=epoch, sequence=sequence)
        self.call = endpoint.store.Subscribe(request)

    async def step(self) -> pb.SubscribeResponse:
        """Apply one message."""
        async with asyncio.timeout(WAIT_S):
            message = await self.call.read()
        item: Any = getattr(message, message.WhichOneof("item"))
        if message.HasField("snapshot"):
            self.snapshots += item.first
            if item.first:
                self.known, self.devices = set(), {}
        keys = {item.keys[at : at + 32] for at in range(0, len(item.keys), 32)}
        place = self.known if item.tier == pb.TIER_HOST else self.devices.setdefault(item.engine, set())
        if message.HasField("event") and item.kind == pb.EVENT_KIND_REMOVED:
            place -= keys
        elif message.HasField("event") and item.kind == pb.EVENT_KIND_CLEARED:
            place.clear()
        else:
            place |= keys
        if message.last:
            self.epoch, self.sequence = message.epoch, message.sequence
        return message

    async def until(self, sequence: int) -> Follower:
        """Apply everything up to a sequence, and at least one item."""
        applied = False
        while not applied or self.sequence < sequence:
            applied |= (await self.step()).last
        return self

    async def leave(self) -> None:
        self.call.cancel()


def host_keys(endpoint: Endpoint) -> set[bytes]:
    """What is readable on HOST, from the store itself."""
    keys = endpoint.driver.group().host.keys()
    return {key.tobytes() for key in keys}


def engine(endpoint: Endpoint) -> tuple[SessionDriver, KeyChain]:
    """A session engine and a prompt of ten blocks."""
    session = endpoint.driver.attach(layout=SMALL)
    return session, session.chain(range(40))


async def test_a_snapshot_then_events(endpoint: Endpoint) -> None:
    await endpoint.save(endpoint.chain(range(40)), random_blocks(1, 10))
    group = endpoint.driver.group()
    follower = await Follower(endpoint).until(group.events.sequence)
    assert follower.epoch == endpoint.driver.store.epoch
    assert (follower.known, follower.snapshots) == (host_keys(endpoint), 1)

    await endpoint.save(endpoint.chain(range(100, 140)), random_blocks(2, 10))
    stored = await follower.step()
    assert (stored.event.kind, stored.event.tier, stored.last) == (pb.EVENT_KIND_STORED, pb.TIER_HOST, True)
    assert len(stored.event.parent) == 32
    await endpoint.admin.DropNamespace(pb.DropNamespaceRequest(namespace=endpoint.namespace()))
    await follower.until(group.events.sequence)
    assert follower.known == host_keys(endpoint) == set()
    await follower.leave()
    await eventually(lambda: not endpoint.service.subscribers)
    assert not group.events._listeners


async def test_devices_of_engines(endpoint: Endpoint) -> None:
    session, chain = engine(endpoint)
    session.own_pool(32, 32)
    table = session.acquire(0, 10)
    session.commit(table.lease, chain, 0, 6)
    group = endpoint.driver.group()
    follower = await Follower(endpoint).until(group.events.sequence)
    assert follower.devices == {session.engine.id: {key.tobytes() for key in chain.keys[:6]}}
    session.commit(table.lease, chain, 6, 10)
    await follower.until(group.events.sequence)
    assert len(follower.devices[session.engine.id]) == 10
    session.disconnect()
    await follower.until(group.events.sequence)
    assert follower.devices == {session.engine.id: set()}
    await follower.leave()


async def test_a_subscriber_resumes_where_it_was(endpoint: Endpoint) -> None:
    group = endpoint.driver.group()
    for number in range(3):
        await endpoint.save(endpoint.chain(range(number * 100, number * 100 + 8)), random_blocks(number, 2))
    first = await Follower(endpoint).until(group.events.sequence)
    await first.leave()
    await endpoint.save(endpoint.chain(range(900, 908)), random_blocks(9, 2))
    again = Follower(endpoint, first.epoch, first.sequence)
    again.known = set(first.known)
    await again.until(group.events.sequence)
    assert again.snapshots == 0
    assert again.known == host_keys(endpoint)
    await again.leave()


@pytest.mark.parametrize("why", ["another epoch", "from the future", "too old"])
async def test_a_gap_begins_anew_with_a_snapshot(opening: Opener, why: str) -> None:
    async with opening(log_max=4) as endpoint:
        for number in range(10):
            await endpoint.save(endpoint.chain(range(number * 10, number * 10 + 8)), random_blocks(number, 2))
        group = endpoint.driver.group()
        epoch, sequence = group.events.epoch, group.events.sequence
        position = {
            "another epoch": (bytes(16), sequence),
            "from the future": (epoch, sequence + 1),
            "too old": (epoch, sequence - 5),
        }[why]
        follower = await Follower(endpoint, *position).until(group.events.sequence)
        assert (follower.snapshots, follower.known) == (1, host_keys(endpoint))
        assert follower.epoch == epoch
        await follower.leave()


async def test_a_subscriber_that_falls_behind_gets_a_snapshot_in_its_stream(opening: Opener) -> None:
    async with opening(log_max=4) as endpoint:
        group = endpoint.driver.group()
        follower = await Follower(endpoint).until(0)
        for number in range(50):  # in one turn of the loop: the stream cannot follow
            keys = np.random.default_rng(number).integers(0, 256, (3, 32), np.uint8)
            group.events.append(EventKind.STORED, Tier.HOST, keys)
        await follower.until(50)
        assert follower.snapshots == 2
        assert follower.known == host_keys(endpoint)  # made-up events said nothing true
        await follower.leave()


async def test_large_events_and_snapshots_come_in_parts(endpoint: Endpoint) -> None:
    group = endpoint.driver.group()
    follower = await Follower(endpoint).until(0)
    keys = np.random.default_rng(3).integers(0, 256, (20_000, 32), np.uint8)
    parent = bytes(range(32))
    group.events.append(EventKind.STORED, Tier.HOST, keys, parent=parent)
    parts = [await follower.step() for _ in range(3)]
    assert [len(part.event.keys) // 32 for part in parts] == [8192, 8192, 20_000 - 2 * 8192]
    assert [part.last for part in parts] == [False, False, True]
    assert [part.sequence for part in parts] == [1, 1, 1]
    parents = [parent, keys[8191].tobytes(), keys[2 * 8192 - 1].tobytes()]
    assert [part.event.parent for part in parts] == parents
    assert len(follower.known) == 20_000
    await follower.leave()


async def test_a_snapshot_taken_while_the_store_changes_is_completed_by_events(opening: Opener) -> None:
    async with opening(log_max=10_000) as endpoint:
        group = endpoint.driver.group()
        saved = 0
        follower = Follower(endpoint)
        while saved < 40:  # bytes leave and come while the snapshot's parts are read
            await endpoint.save(
                endpoint.chain(range(saved * 100, saved * 100 + 80)), random_blocks(saved, 20)
            )
            if saved % 3 == 0:
                node = group.host.ready_nodes()[-1:]
                group.host.drop(node, "test")
                group.record_changes()
            saved += 1
            await follower.step()
        await follower.until(group.events.sequence)
        assert follower.known == host_keys(endpoint)
        await follower.leave()


async def test_groups_see_their_own_events_only(opening: Opener) -> None:
    tenants = (TenantConfig(name="a", group="g"), TenantConfig(name="b", group="h"))
    async with opening(tenants=tenants) as endpoint:
        await endpoint.save(endpoint.chain(range(8), tenant="a"), random_blocks(1, 2))
        mine = await Follower(endpoint, tenant="a").until(1)
        other = Follower(endpoint, tenant="b")
        await other.until(0)
        assert (len(mine.known), len(other.known)) == (2, 0)
        await mine.leave()
        await other.leave()


async def test_a_stop_ends_subscribers_with_a_reason(opening: Opener) -> None:
    async with opening(stop_s=20.0) as endpoint:
        follower = await Follower(endpoint).until(0)
        async with asyncio.timeout(10):
            await endpoint.server.close()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await follower.step()
        assert failure(caught.value).code is grpc.StatusCode.UNAVAILABLE


async def test_a_malformed_position(endpoint: Endpoint) -> None:
    for bad, field in (({"epoch": b"short"}, "epoch"), ({"tenant": ""}, "tenant")):
        request = pb.SubscribeRequest(**{"tenant": "default", **bad})
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await endpoint.store.Subscribe(request).read()
        assert failure(caught.value).fields == [field]
