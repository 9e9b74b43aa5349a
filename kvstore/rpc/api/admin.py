"""Admin of protos/kvstore/v1: state, self-check, flush, and dropping a namespace."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import structlog

from kvstore import __version__
from kvstore.checks import CheckReport, Checks
from kvstore.disks import FlushReport, flush
from kvstore.dropping import drop_namespace
from kvstore.errors import BadRequest, KVStoreError
from kvstore.rpc.api.access import Access, Verb, agent_of, peer_of
from kvstore.rpc.api.chains import namespace_of
from kvstore.rpc.api.failures import answers
from kvstore.rpc.api.service import StoreService
from kvstore.status import status
from kvstore.store import Store
from kvstore.v1 import store_pb2 as pb
from kvstore.v1.store_pb2_grpc import AdminServicer

__all__ = ["AdminService"]

log = structlog.get_logger()

DIGEST_BYTES = 32


class AdminService(AdminServicer):  # type: ignore[misc]  # generated without types
    """The service.

    Args:
        service: what this endpoint holds itself, for the status.
        checks: of the store, in slices.
    """

    def __init__(self, store: Store, service: StoreService, access: Access, checks: Checks) -> None:
        self.requests = service.requests
        self._checks = checks
        self._store = store
        self._service = service
        self.access = access

    def refused(self, call: str, context: Any, error: KVStoreError, tenant: str = "") -> None:
        """Every attempt is in the log, with what the program calls itself: an audit tries on purpose."""
        facts = {"call": call, "tenant": tenant[:80] or "(all)", "peer": context.peer()}
        facts["agent"] = agent_of(context)
        log.warning("administration refused", **facts, reason=str(error))

    def _check(self, context: Any, what: str, tenant: str = "") -> None:
        """Every attempt is in the log, with whoever made it; a status changes nothing, and is asked often."""
        peer = peer_of(context)
        facts = {"call": what, "tenant": tenant[:80] or "(all)", "peer": context.peer()}
        try:
            who = self.access.check(peer, Verb.ADMIN, tenant)
            if not who:
                self._store.tenants.check_unseen(tenant, admin=True)
        except KVStoreError as error:
            self.refused(what, context, error, tenant)
            raise
        tell = log.debug if what == "Status" else log.info
        tell("administration", **facts, who=who or "whoever may open the socket")

    @answers
    async def Status(self, request: pb.StatusRequest, context: Any) -> pb.StatusResponse:  # noqa: N802  (names of the service)
        self._check(context, "Status")
        reply = pb.StatusResponse(epoch=self._store.epoch, version=__version__)
        reply.report.update(json.loads(json.dumps(status(self._store))))
        service = self._service
        held = {
            "leases": len(service.holdings),
            "streams": service.streams,
            "subscribers": service.subscribers,
        }
        reply.report.update({"grpc": held})
        return reply

    @answers
    async def Check(self, request: pb.CheckRequest, context: Any) -> pb.CheckResponse:  # noqa: N802
        self._check(context, "Check")
        answered: asyncio.Future[CheckReport] = asyncio.get_running_loop().create_future()

        def answer(report: CheckReport) -> None:
            if not answered.done():  # the caller may have left
                answered.set_result(report)

        self._checks.ask(answer)
        report = await answered
        epoch, broken = self._store.epoch, report.broken
        return pb.CheckResponse(epoch=epoch, ok=not broken, broken=broken, partial=not report.complete)

    @answers
    async def Flush(self, request: pb.FlushRequest, context: Any) -> pb.FlushResponse:  # noqa: N802
        """HOST is memory: it has nothing to write and outlives nothing. NVME does both."""
        self._check(context, "Flush")
        answered: asyncio.Future[FlushReport] = asyncio.get_running_loop().create_future()

        def answer(report: FlushReport) -> None:
            if not answered.done():  # the caller may have left
                answered.set_result(report)

        flush(self._store, answer)
        report = await answered
        tiers = [
            pb.TierFlush(
                tier=pb.TIER_HOST, reason="memory: nothing to write, and nothing outlives the daemon"
            )
        ]
        if any(group.nvme.configured for group in self._store.groups.values()):
            tiers.append(pb.TierFlush(tier=pb.TIER_NVME, durable=report.durable, reason=report.error))
        return pb.FlushResponse(epoch=self._store.epoch, tiers=tiers)

    @answers
    async def DropNamespace(self, request: pb.DropNamespaceRequest, context: Any) -> pb.DropNamespaceResponse:  # noqa: N802
        self._check(context, "DropNamespace", request.tenant)
        if request.HasField("namespace") == bool(request.digest):
            raise BadRequest("digest: name the namespace by its digest or by its fields, one of the two")
        digest = request.digest or namespace_of(request.namespace).digest
        if len(digest) != DIGEST_BYTES:
            raise BadRequest(f"digest: need {DIGEST_BYTES} bytes, got {len(digest)}")
        dropped = await drop_namespace(self._store, digest, request.tenant)
        return pb.DropNamespaceResponse(
            epoch=self._store.epoch, dropped_blocks=dropped.host, idle_blocks=dropped.device
        )
