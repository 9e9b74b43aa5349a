"""The roots of tenants' chains, from the daemons: without them nobody can name a block of theirs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc
import msgspec
import structlog

from kvstore.router.kvstore_feed import KvstoreSource, open_channel
from kvstore.router.settings import DeploymentConfig
from kvstore.v1 import store_pb2 as pb
from kvstore.v1 import store_pb2_grpc as rpc

__all__ = ["learn_roots"]

log = structlog.get_logger()

_CALL_S = 5.0
_PAUSE_S, _PAUSE_MAX_S = 0.5, 30.0


async def learn_roots(
    deployment: DeploymentConfig,
    sources: Sequence[KvstoreSource],
    tenants: Sequence[str],
    roots: dict[str, bytes],
) -> None:
    """Fill `roots` for every tenant, from any daemon that answers: a fleet has the same salts.

    Returns when every daemon has told them all; until then those that do not answer are asked again, ever
    more rarely. A daemon with other salts than the first is told of: nothing that it holds can be found.
    """
    pause_s = _PAUSE_S
    wanted = [(source, tenant) for source in sources for tenant in tenants]
    while wanted:
        for source, tenant in list(wanted):
            root = await _ask(deployment, source, tenant)
            if not root:
                continue
            wanted.remove((source, tenant))
            if roots.setdefault(tenant, root) != root:
                log.warning(
                    "a daemon has other salts",
                    daemon=source.target,
                    tenant=tenant,
                    fix="give all daemons of a fleet the same daemon.secrets_file",
                )
        if wanted:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_MAX_S)


async def _ask(deployment: DeploymentConfig, source: KvstoreSource, tenant: str) -> bytes:
    """32 bytes; b"" when this daemon does not tell."""
    assert deployment.namespace is not None
    assert deployment.layout is not None
    chain = pb.Chain(
        tenant=tenant,
        namespace=pb.Namespace(**msgspec.structs.asdict(deployment.namespace)),
        layout=pb.Layout(**msgspec.structs.asdict(deployment.layout)),
        tokens=pb.Tokens(),
    )
    metadata = [("authorization", f"Bearer {source.token}")] if source.token else []
    try:
        async with open_channel(source) as channel:
            answer = await rpc.StoreStub(channel).Plan(
                pb.PlanRequest(chain=chain), timeout=_CALL_S, metadata=metadata
            )
    except grpc.aio.AioRpcError as error:
        log.warning("no root", daemon=source.target, tenant=tenant, reason=(error.details() or "")[:200])
        return b""
    return bytes(answer.root)
