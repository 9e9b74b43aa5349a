"""Store of protos/kvstore/v1: one method per call, each readable from top to bottom."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Any

from kvstore.errors import BadRequest, KVStoreError, LimitExceeded, Refused
from kvstore.group import Group
from kvstore.rpc.api import asking, observing, saving
from kvstore.rpc.api.access import Access, Peer, Verb, peer_of
from kvstore.rpc.api.chains import Asked, resolve
from kvstore.rpc.api.copies import Copies
from kvstore.rpc.api.failures import answers, deadline
from kvstore.rpc.api.fetching import Fetching
from kvstore.rpc.api.holding import Held, Holdings, may_ask, new_caller
from kvstore.rpc.api.watching import Watching
from kvstore.rpc.request_log import RequestLog
from kvstore.store import Store
from kvstore.types import SaveResult
from kvstore.v1 import store_pb2 as pb
from kvstore.v1.store_pb2_grpc import StoreServicer

__all__ = ["StoreService"]

LEASES_PER_RENEW_MAX = 2048
# Of leases; each takes some 5 µs.
RENEWALS_PER_SLICE = 256
EPOCH_BYTES = 16


class StoreService(StoreServicer):  # type: ignore[misc]  # generated without types
    """The service, on the loop that owns the store.

    Args:
        store: what is asked.
        copies: threads and buffers for block bytes.
        access: who may do what.
        requests: takes a line for each call.
    """

    def __init__(self, store: Store, copies: Copies, access: Access, requests: RequestLog) -> None:
        self.requests = requests
        self._store = store
        self._limits = store.config.grpc
        self._copies = copies
        self.access = access
        self.holdings = Holdings(store, self._limits)
        self.streams = 0
        self._watching: set[Watching] = set()
        self._publishing: set[asyncio.Task[SaveResult]] = set()

    @property
    def subscribers(self) -> int:
        """Subscribe streams that are open."""
        return len(self._watching)

    def check_subscribers(self) -> None:
        """Tenants or tokens have changed: streams of callers who may not hear them any more end."""
        for watching in tuple(self._watching):
            watching.doubt()

    def stop(self) -> None:
        """Streams that never end by themselves end now; others may go on."""
        for watching in tuple(self._watching):
            watching.stop()

    async def settle(self) -> None:
        """After the last call: wait for what is still being published, and end every lease."""
        if self._publishing:
            await asyncio.wait(self._publishing)
        self.holdings.close()

    def refused(self, call: str, context: Any, error: KVStoreError) -> None:
        """A stranger called: the call's own line in the log says so."""

    def _check(self, context: Any, verb: Verb, tenant: str) -> None:
        self._check_peer(peer_of(context), verb, tenant)

    def _check_peer(self, peer: Peer, verb: Verb, tenant: str) -> None:
        if not self.access.check(peer, verb, tenant):
            self._store.tenants.check_unseen(tenant, admin=False)

    async def _resolve(self, context: Any, verb: Verb, chain: pb.Chain) -> Asked:
        self._check(context, verb, chain.tenant)
        return await resolve(self._store, self._limits, chain)

    @contextlib.contextmanager
    def _stream(self) -> Iterator[None]:
        most = self._limits.streams_max
        if self.streams >= most:
            raise LimitExceeded(f"stream: grpc.streams_max = {most} Fetch and Save streams are open")
        self.streams += 1
        try:
            yield
        finally:
            self.streams -= 1

    # ---- reading -----------------------------------------------------------------------------------------

    @answers
    async def Lookup(self, request: pb.LookupRequest, context: Any) -> pb.LookupResponse:  # noqa: N802  (names of the service)
        asked = await self._resolve(context, Verb.READ, request.chain)
        async with self._taking_its_time():
            held = self.holdings.grant(asked, asking.intent_of(request.intent))
        if held is None:
            return asking.missed(self._store.epoch, asked)
        context.add_done_callback(lambda done: self._if_cancelled(done, held))
        return asking.found(self._store.epoch, asked, held, self._limits.lease_s)

    @contextlib.asynccontextmanager
    async def _taking_its_time(self) -> AsyncIterator[None]:
        """A question is answered after `daemon.lookup_time_s`, whatever was found, or refused."""
        began_s, least_s = self._store.clock.now(), self._store.config.daemon.lookup_time_s
        try:
            yield
        finally:
            if least_s:
                await asyncio.sleep(max(0.0, began_s + least_s - self._store.clock.now()))

    def _if_cancelled(self, done: Any, held: Held) -> None:
        """A caller that was gone before the answer knows no lease to release."""
        if done.cancelled():
            self.holdings.end(held)

    @answers
    async def Plan(self, request: pb.PlanRequest, context: Any) -> pb.PlanResponse:  # noqa: N802
        asked = await self._resolve(context, Verb.READ, request.chain)
        async with self._taking_its_time():
            may_ask(asked)
            return asking.planned(self._store.epoch, asked, asking.intent_of(request.intent))

    @answers
    async def Fetch(self, request: pb.FetchRequest, context: Any) -> None:  # noqa: N802
        with self._stream():
            held = await self._hold(request, context)
            try:
                await self._fetch(request, context, held)
            finally:
                if held is not None and held.id != request.lease:  # the stream's own
                    self.holdings.end(held)

    async def _hold(self, request: pb.FetchRequest, context: Any) -> Held | None:
        """The lease to read under: the one named, or one of the stream's own; None when nothing is known."""
        if not request.lease and not request.HasField("chain"):
            raise BadRequest("lease: name a lease, a chain, or both")
        if request.lease and (self.holdings.knows(request.lease) or not request.HasField("chain")):
            return self.holdings.find(request.lease, lambda tenant: self._check(context, Verb.READ, tenant))
        asked = await self._resolve(context, Verb.READ, request.chain)
        async with self._taking_its_time():
            return self.holdings.grant(asked)

    async def _fetch(self, request: pb.FetchRequest, context: Any, held: Held | None) -> None:
        start, known = request.start, 0 if held is None else len(held.lease.nodes)
        if request.stop and request.stop < start:
            raise BadRequest(f"stop: {request.stop} is before start = {start}")
        stop = min(request.stop or known, known)
        if held is None or start >= stop:
            reason = f"blocks [0, {known}) are known; start = {start}"
            header = pb.FetchHeader(epoch=self._store.epoch, start=start, stop=start)
            if held is not None:
                header.block_bytes = held.layout.block_bytes
            await context.write(pb.FetchResponse(header=header))
            await context.write(pb.FetchResponse(end=pb.FetchEnd(stop=start, reason=reason)))
            return
        stream = Fetching(self._store, self._copies, self.holdings, held, context, self._limits.stall_s)
        await stream.run(start, stop)

    @answers
    async def Renew(self, request: pb.RenewRequest, context: Any) -> pb.RenewResponse:  # noqa: N802
        if len(request.leases) > LEASES_PER_RENEW_MAX:
            raise LimitExceeded(f"leases: more than {LEASES_PER_RENEW_MAX} in one request")
        peer, ended = peer_of(context), []
        for number, lease in enumerate(dict.fromkeys(request.leases), 1):
            if self.holdings.knows(lease):
                self.holdings.find(lease, lambda tenant: self._check_peer(peer, Verb.READ, tenant))
            else:
                ended.append(lease)
            if number % RENEWALS_PER_SLICE == 0:
                await asyncio.sleep(0)
        return pb.RenewResponse(epoch=self._store.epoch, lease_s=self._limits.lease_s, ended=ended)

    @answers
    async def Release(self, request: pb.ReleaseRequest, context: Any) -> pb.ReleaseResponse:  # noqa: N802
        held = self.holdings.find(request.lease, lambda tenant: self._check(context, Verb.READ, tenant))
        self.holdings.end(held)
        return pb.ReleaseResponse(epoch=self._store.epoch)

    # ---- writing -----------------------------------------------------------------------------------------

    @answers
    async def Save(self, _: object, context: Any) -> pb.SaveResponse:  # noqa: N802
        with self._stream():
            stall_s = self._limits.stall_s
            async with deadline(stall_s, f"save: no header came within grpc.stall_s = {stall_s} s"):
                header = await saving.next_item(context, "header")
            if header is None:
                raise BadRequest("header: a Save stream begins with one")
            asked = await self._resolve(context, Verb.SAVE, header.chain)
            if asked.origin is None:
                raise Refused(f"tenant: {asked.tenant} reuses nothing, so it saves nothing")
            if header.start > len(asked):
                raise BadRequest(f"start: {header.start} is beyond the {len(asked)} blocks of the chain")
            caller = new_caller(self._store, asked)
            stream = saving.Saving(self._store, self._copies, asked, header.start, caller, self._publishing)
            return saving.saved(self._store.epoch, await stream.run(context, stall_s))

    # ---- measurements and events -------------------------------------------------------------------------

    @answers
    async def Observe(self, request: pb.ObserveRequest, context: Any) -> pb.ObserveResponse:  # noqa: N802
        self._check(context, Verb.OBSERVE, request.tenant)
        recorded = observing.record(self._group(request.tenant), request)
        return pb.ObserveResponse(epoch=self._store.epoch, recorded=recorded)

    @answers
    async def Subscribe(self, request: pb.SubscribeRequest, context: Any) -> None:  # noqa: N802
        peer = peer_of(context)
        self._may_subscribe(peer, request.tenant)
        if len(request.epoch) not in (0, EPOCH_BYTES):
            raise BadRequest(f"epoch: need {EPOCH_BYTES} bytes or none, got {len(request.epoch)}")
        most = self._limits.subscribers_max
        if self.subscribers >= most:
            raise LimitExceeded(f"subscribe: grpc.subscribers_max = {most} are subscribed")
        group, may = self._group(request.tenant), partial(self._may_subscribe, peer, request.tenant)
        watching = Watching(group, context, self._limits.stall_s, may)
        self._watching.add(watching)
        try:
            await watching.run(request.epoch, request.sequence)
        finally:
            self._watching.discard(watching)

    def _may_subscribe(self, peer: Peer, tenant: str) -> float:
        """For how many seconds, as far as is known now; raises where it may not."""
        self._check_peer(peer, Verb.SUBSCRIBE, tenant)
        self._group(tenant)
        try:
            for other in self._store.tenants.beside(tenant):
                self._check_peer(peer, Verb.SUBSCRIBE, other)
        except Refused:
            raise Refused(
                "subscribe: events tell of a whole trust group, and this caller may not act for every tenant "
                "in it"
            ) from None
        return self.access.left_s(peer)

    def _group(self, tenant: str) -> Group:
        return self._store.group_of([tenant])
