"""The public API over a real server of a real store, on the test's own loop, and what callers do with it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import msgspec
import numpy as np
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from kvstore import _native
from kvstore.config import Config, DaemonConfig, GrpcConfig, TenantConfig
from kvstore.keys import KeyChain
from kvstore.rpc.api.server import GrpcServer
from kvstore.testing import StoreDriver, cell_pattern, small_config, small_layout
from kvstore.testing.driver import namespace_of
from kvstore.types import BlockLayout, Namespace
from kvstore.v1 import store_pb2 as pb
from kvstore.v1 import store_pb2_grpc as rpc

__all__ = ["SMALL", "Endpoint", "Failure", "Fetched", "Opener", "failure", "opened", "random_blocks"]

WAIT_S = 30.0
# 3 KiB a block, 4 tokens each: many fit, and none of a cell's bytes are padding.
SMALL = small_layout(head_dim=24)


@dataclass(frozen=True)
class Failure:
    """One error as a caller sees it."""

    code: grpc.StatusCode
    message: str
    reason: str
    fields: list[str]


def failure(error: grpc.RpcError) -> Failure:
    """The status and its rich details."""
    status = rpc_status.from_call(error)
    reason, fields = "", []
    for detail in status.details if status is not None else ():
        info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
        if detail.Unpack(info):
            assert info.domain == "kvstore"
            reason = info.reason
        elif detail.Unpack(bad):
            fields += [violation.field for violation in bad.field_violations]
    return Failure(error.code(), error.details(), reason, fields)


@dataclass
class Fetched:
    """What a Fetch stream brought."""

    header: pb.FetchHeader = field(default_factory=pb.FetchHeader)
    end: pb.FetchEnd = field(default_factory=pb.FetchEnd)
    data: bytes = b""
    sizes: list[int] = field(default_factory=list)

    def add(self, message: pb.FetchResponse) -> None:
        """Take one message; asserts that positions and sums are right."""
        kind = message.WhichOneof("item")
        if kind == "header":
            self.header = message.header
        elif kind == "end":
            self.end = message.end
        else:
            size, piece = self.header.block_bytes, message.data
            at = (piece.block - self.header.start) * size + piece.offset
            assert at == len(self.data), "a hole in the stream"
            assert piece.crc32c == _native.crc32c(piece.data)
            self.data += piece.data
            self.sizes.append(message.ByteSize())


def random_blocks(seed: int, blocks: int, layout: BlockLayout = SMALL) -> bytes:
    """Bytes of some blocks that only this seed has."""
    return np.random.default_rng(seed).bytes(blocks * layout.block_bytes)


class Endpoint:
    """A store, its gRPC server, and one caller's channel."""

    def __init__(self, driver: StoreDriver, server: GrpcServer, address: str) -> None:
        self.driver = driver
        self.server = server
        self.address = address
        self.channel = grpc.aio.insecure_channel(address)
        self.store = rpc.StoreStub(self.channel)
        self.admin = rpc.AdminStub(self.channel)

    @property
    def service(self) -> Any:
        """The servicer."""
        assert self.server.service is not None
        return self.server.service

    # ---- messages ----------------------------------------------------------------------------------------

    def chain(
        self,
        tokens: Iterable[int],
        *,
        layout: BlockLayout = SMALL,
        tenant: str = "default",
        model: str = "model",
        reuse: Any = pb.REUSE_UNSPECIFIED,
    ) -> pb.Chain:
        """A prompt by token ids."""
        return pb.Chain(
            tenant=tenant,
            reuse=reuse,
            namespace=self.namespace(layout, model),
            layout=pb.Layout(
                layers=layout.layers,
                kv_heads=layout.kv_heads,
                head_dim=layout.head_dim,
                dtype=layout.dtype,
                block_tokens=layout.block_tokens,
            ),
            tokens=pb.Tokens(ids=list(tokens)),
        )

    def namespace(self, layout: BlockLayout = SMALL, model: str = "model") -> pb.Namespace:
        """The eight fields that a session of the driver has."""
        fields = namespace_of(layout, model)
        block_tokens = int(fields.pop("block_tokens"))
        return pb.Namespace(**fields, block_tokens=block_tokens)

    def keys_of(self, tokens: Iterable[int], root: bytes, layout: BlockLayout = SMALL) -> KeyChain:
        """Keys as a caller chains them from a root that it was told."""
        return KeyChain.of(root, np.fromiter(tokens, np.uint32), layout.block_tokens)

    def digest(self, layout: BlockLayout = SMALL, model: str = "model") -> bytes:
        """Of the namespace."""
        return Namespace.parse(namespace_of(layout, model)).digest

    # ---- calls -------------------------------------------------------------------------------------------

    async def save(
        self, chain: pb.Chain, data: bytes, *, start: int = 0, piece_bytes: int = 100_000
    ) -> pb.SaveResponse:
        """Save blocks [start, …) of a chain."""
        return await self.store.Save(save_messages(chain, data, start, piece_bytes), timeout=WAIT_S)

    async def look_up(self, chain: pb.Chain) -> pb.LookupResponse:
        """Look up, with a lease."""
        return await self.store.Lookup(pb.LookupRequest(chain=chain), timeout=WAIT_S)

    async def plan(self, chain: pb.Chain) -> pb.PlanResponse:
        """The same without effects."""
        return await self.store.Plan(pb.PlanRequest(chain=chain), timeout=WAIT_S)

    async def fetch(self, request: pb.FetchRequest) -> Fetched:
        """Fetch to the end of the stream."""
        fetched = Fetched()
        async for message in self.store.Fetch(request, timeout=WAIT_S):
            fetched.add(message)
        return fetched

    async def release(self, lease: bytes) -> None:
        """End a lease."""
        await self.store.Release(pb.ReleaseRequest(lease=lease), timeout=WAIT_S)

    # ---- truths ------------------------------------------------------------------------------------------

    def sound(self) -> None:
        """Every conservation law holds."""
        self.driver.store.check()

    def quiet(self) -> bool:
        """Nothing of any caller is left: no lease, pin, filling, stream, engine."""
        self.sound()
        groups = self.driver.store.groups.values()
        left = [len(g.leases) + len(g.fillings) + len(g.callers) + len(g.engines) for g in groups]
        return not any(left) and not len(self.service.holdings) and not self.service.streams

    async def settle(self) -> None:
        """Wait until quiet."""
        await eventually(self.quiet)

    def saved_by_engine(self, tokens: Iterable[int], layout: BlockLayout = SMALL) -> tuple[bytes, int]:
        """Let a session engine save a prompt; its canonical bytes, and how many blocks became readable."""
        session = self.driver.attach(layout=layout)
        chain = session.chain(tokens)
        ready = session.save(chain).ready
        session.quiesce()
        session.disconnect()
        return canonical(chain, layout), ready


def canonical(chain: KeyChain, layout: BlockLayout) -> bytes:
    """What the driver's sessions write for a chain: [block][layer][head][cell]."""
    cells = [
        cell_pattern(key.tobytes(), layer, head, layout.cell_bytes).tobytes()
        for key in chain.keys
        for layer in range(layout.layers)
        for head in range(layout.kv_heads)
    ]
    return b"".join(cells)


async def save_messages(
    chain: pb.Chain, data: bytes, start: int = 0, piece_bytes: int = 100_000
) -> AsyncIterator[pb.SaveRequest]:
    """The messages of a whole Save stream."""
    yield pb.SaveRequest(header=pb.SaveHeader(chain=chain, start=start))
    for at in range(0, len(data), piece_bytes):
        piece = data[at : at + piece_bytes]
        yield pb.SaveRequest(data=pb.SaveData(data=piece, crc32c=_native.crc32c(piece)))


async def eventually(ask: Any) -> None:
    """Until `ask()` is true; fails after WAIT_S."""
    async with asyncio.timeout(WAIT_S):
        while not ask():  # noqa: ASYNC110  (what is asked about has no event)
            await asyncio.sleep(0.001)


def configured(
    folder: Path, tenants: tuple[TenantConfig, ...] = (), log_max: int = 10_000, **limits: Any
) -> Config:
    """A small configuration with a socket in `folder`."""
    small = small_config(
        capacity_bytes=16 << 20,
        slab_bytes=4 << 20,
        tenants=tenants or (TenantConfig(name="default"),),
        nodes_max=20_000,
        log_max=log_max,
    )
    return msgspec.structs.replace(
        small, daemon=DaemonConfig(socket=str(folder / "kv.sock")), grpc=GrpcConfig(**limits)
    )


@contextlib.asynccontextmanager
async def opened(config: Config) -> AsyncIterator[Endpoint]:
    """A server that listens; every law is checked at the end."""
    with StoreDriver(config) as driver:
        server = GrpcServer(driver.store)
        await server.open()
        endpoint = Endpoint(driver, server, server.addresses[0])
        try:
            yield endpoint
        finally:
            await endpoint.channel.close()
            await server.close()
        driver.store.check()


Opener = Callable[..., contextlib.AbstractAsyncContextManager[Endpoint]]
