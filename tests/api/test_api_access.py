"""Every call passes the one place that decides who may do what."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from endpoint import Endpoint, configured, failure, opened, random_blocks, save_messages

from kvstore.errors import Refused
from kvstore.rpc.api import service
from kvstore.rpc.api.access import Peer, Verb, peer_of
from kvstore.rpc.api.server import GrpcServer
from kvstore.testing import StoreDriver
from kvstore.v1 import store_pb2 as pb
from kvstore.v1 import store_pb2_grpc as rpc


class Bearer:
    """Lets through whoever sends the password."""

    def __init__(self) -> None:
        self.asked: list[tuple[Verb, str]] = []

    def known(self, peer: Peer) -> None:
        """Everybody is."""

    def check(self, peer: Peer, verb: Verb, tenant: str) -> None:
        assert peer.local
        self.asked.append((verb, tenant))
        if ("authorization", "Bearer sesame") not in peer.metadata:
            raise Refused("authorization: no token that opens this tenant")


@pytest.fixture
def access() -> Bearer:
    return Bearer()


@pytest_asyncio.fixture
async def guarded(socket_path: Path, access: Bearer) -> AsyncIterator[Endpoint]:
    with StoreDriver(configured(socket_path.parent)) as driver:
        server = GrpcServer(driver.store, access)
        await server.open()
        endpoint = Endpoint(driver, server, server.addresses[0])
        yield endpoint
        await endpoint.channel.close()
        await server.close()
        driver.store.check()


TOKEN = (("authorization", "Bearer sesame"),)


async def test_no_call_goes_past_it(guarded: Endpoint, access: Bearer) -> None:
    chain, data = guarded.chain(range(8)), random_blocks(1, 2)
    store, admin = guarded.store, guarded.admin
    assert (await store.Save(save_messages(chain, data), metadata=TOKEN)).ready == 2
    found = await store.Lookup(pb.LookupRequest(chain=chain), metadata=TOKEN)
    assert access.asked == [(Verb.SAVE, "default"), (Verb.READ, "default")]

    calls: dict[str, tuple[Callable[[], Any], tuple[Verb, str]]] = {
        "Lookup": (lambda: store.Lookup(pb.LookupRequest(chain=chain)), (Verb.READ, "default")),
        "Plan": (lambda: store.Plan(pb.PlanRequest(chain=chain)), (Verb.READ, "default")),
        "Fetch": (lambda: store.Fetch(pb.FetchRequest(lease=found.lease)).read(), (Verb.READ, "default")),
        "Fetch a chain": (lambda: store.Fetch(pb.FetchRequest(chain=chain)).read(), (Verb.READ, "default")),
        "Save": (lambda: store.Save(save_messages(chain, data)), (Verb.SAVE, "default")),
        "Renew": (lambda: store.Renew(pb.RenewRequest(leases=[found.lease])), (Verb.READ, "default")),
        "Release": (lambda: store.Release(pb.ReleaseRequest(lease=found.lease)), (Verb.READ, "default")),
        "Observe": (lambda: store.Observe(pb.ObserveRequest(tenant="default")), (Verb.OBSERVE, "default")),
        "Subscribe": (
            lambda: store.Subscribe(pb.SubscribeRequest(tenant="default")).read(),
            (Verb.SUBSCRIBE, "default"),
        ),
        "Status": (lambda: admin.Status(pb.StatusRequest()), (Verb.ADMIN, "")),
        "Check": (lambda: admin.Check(pb.CheckRequest()), (Verb.ADMIN, "")),
        "Flush": (lambda: admin.Flush(pb.FlushRequest()), (Verb.ADMIN, "")),
        "DropNamespace": (
            lambda: admin.DropNamespace(pb.DropNamespaceRequest(digest=guarded.digest(), tenant="default")),
            (Verb.ADMIN, "default"),
        ),
    }
    methods = {m.name for s in pb.DESCRIPTOR.services_by_name.values() for m in s.methods}
    assert {name.partition(" ")[0] for name in calls} == methods, "a method without a case"
    for name, (call, asked) in calls.items():
        access.asked.clear()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call()
        assert failure(caught.value).code is grpc.StatusCode.PERMISSION_DENIED, name
        assert access.asked[-1] == asked, name
    # Nothing of all that had an effect: the lease and the blocks are where they were.
    assert len(guarded.service.holdings) == 1
    assert (await store.Plan(pb.PlanRequest(chain=chain), metadata=TOKEN)).blocks == 2
    await store.Release(pb.ReleaseRequest(lease=found.lease), metadata=TOKEN)
    assert guarded.quiet()


async def test_a_renewal_asks_once_for_each_lease_and_lets_others_in_between(
    guarded: Endpoint, access: Bearer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who calls is read off the connection once, however many leases are named, and named twice."""
    chain = guarded.chain(range(8))
    await guarded.store.Save(save_messages(chain, random_blocks(1, 2)), metadata=TOKEN)
    lookup = pb.LookupRequest(chain=chain)
    leases = [(await guarded.store.Lookup(lookup, metadata=TOKEN)).lease for _ in range(600)]
    peers = turns = 0
    seen_at: list[int] = []

    def counted(context: Any) -> Peer:
        nonlocal peers
        peers += 1
        return peer_of(context)

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    def check(peer: Peer, verb: Verb, tenant: str) -> None:
        seen_at.append(turns)

    monkeypatch.setattr(service, "peer_of", counted)
    monkeypatch.setattr(access, "check", check)
    counting = asyncio.create_task(count_turns())
    reply = await guarded.store.Renew(pb.RenewRequest(leases=leases * 3), metadata=TOKEN)
    counting.cancel()
    assert (peers, len(seen_at), list(reply.ended)) == (1, 600, [])
    assert max(seen_at.count(turn) for turn in seen_at) <= 256


async def test_case_33_nobody_administers_over_a_plaintext_port(socket_path: Path) -> None:
    config = configured(socket_path.parent, listen="auto,127.0.0.1:0", insecure_tcp=True)
    async with opened(config) as endpoint:
        calls = {
            "Status": pb.StatusRequest(),
            "Check": pb.CheckRequest(),
            "Flush": pb.FlushRequest(),
            "DropNamespace": pb.DropNamespaceRequest(digest=endpoint.digest()),
        }
        await endpoint.save(endpoint.chain(range(8)), random_blocks(1, 2))
        async with grpc.aio.insecure_channel(endpoint.server.addresses[1]) as channel:
            for name, request in calls.items():
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await getattr(rpc.AdminStub(channel), name)(request)
                assert failure(caught.value).code is grpc.StatusCode.PERMISSION_DENIED, name
            plan = pb.PlanRequest(chain=endpoint.chain(range(8)))
            assert (await rpc.StoreStub(channel).Plan(plan)).blocks == 2
        for name, request in calls.items():
            await getattr(endpoint.admin, name)(request)
