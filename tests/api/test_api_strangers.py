"""A lease's id in the hands of another tenant: refused, and nothing of the lease changes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from endpoint import Endpoint, configured, failure, random_blocks, save_messages

from kvstore.config import TenantConfig
from kvstore.errors import Refused
from kvstore.rpc.api.access import OpenAccess, Peer, Verb
from kvstore.rpc.api.server import GrpcServer
from kvstore.testing import StoreDriver
from kvstore.v1 import store_pb2 as pb

CODE = grpc.StatusCode
LEASE_S = 30.0
ALICE, BOB = ((("authorization", name),) for name in ("alice", "bob"))


class ByName(OpenAccess):
    """Lets everybody be whom it says it is."""

    def known(self, peer: Peer) -> None:
        """Everybody is."""

    def check(self, peer: Peer, verb: Verb, tenant: str) -> str:
        if ("authorization", tenant) not in peer.metadata:
            raise Refused("authorization: another tenant's")
        return tenant


@pytest_asyncio.fixture
async def endpoint(socket_path: Path) -> AsyncIterator[Endpoint]:
    tenants = TenantConfig(name="alice"), TenantConfig(name="bob")
    with StoreDriver(configured(socket_path.parent, tenants, lease_s=LEASE_S)) as driver:
        server = GrpcServer(driver.store, ByName())
        await server.open()
        endpoint = Endpoint(driver, server, server.addresses[0])
        yield endpoint
        await endpoint.channel.close()
        await server.close()
        driver.store.check()


async def lease_of_alice(endpoint: Endpoint) -> bytes:
    chain = endpoint.chain(range(8), tenant="alice")
    await endpoint.store.Save(save_messages(chain, random_blocks(1, 2)), metadata=ALICE)
    found = await endpoint.store.Lookup(pb.LookupRequest(chain=chain), metadata=ALICE)
    return bytes(found.lease)


async def refused(endpoint: Endpoint, call: str, lease: bytes) -> None:
    """Bob tries."""
    store = endpoint.store
    calls: dict[str, Callable[[], Any]] = {
        "Renew": lambda: store.Renew(pb.RenewRequest(leases=[lease]), metadata=BOB),
        "Release": lambda: store.Release(pb.ReleaseRequest(lease=lease), metadata=BOB),
        "Fetch": lambda: store.Fetch(pb.FetchRequest(lease=lease), metadata=BOB).read(),
    }
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await calls[call]()
    assert failure(caught.value).code is CODE.PERMISSION_DENIED


@pytest.mark.parametrize("call", ["Renew", "Release", "Fetch"])
async def test_a_stranger_does_not_end_a_lease(endpoint: Endpoint, call: str) -> None:
    lease = await lease_of_alice(endpoint)
    await refused(endpoint, call, lease)
    assert len(endpoint.service.holdings) == 1
    assert endpoint.driver.group().leases.pins() == 1
    await endpoint.store.Release(pb.ReleaseRequest(lease=lease), metadata=ALICE)
    assert endpoint.quiet()


@pytest.mark.parametrize("call", ["Renew", "Release", "Fetch"])
async def test_a_stranger_does_not_keep_a_lease_alive(endpoint: Endpoint, call: str) -> None:
    """Nor its pin: what its owner does not use ends in its time."""
    lease = await lease_of_alice(endpoint)
    for _ in range(2):
        endpoint.driver.clock.advance(LEASE_S * 0.4)
        await refused(endpoint, call, lease)
    endpoint.driver.clock.advance(LEASE_S * 0.4)
    endpoint.service.holdings.sweep()
    assert endpoint.quiet()
