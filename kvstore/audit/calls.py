"""The calls of the public API that an audit makes: each ends in an answer, whatever its status is."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import grpc
import numpy as np
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from numpy.typing import NDArray

from kvstore.audit.looks import QUOTAS, Look, again
from kvstore.audit.probe import LAYOUT
from kvstore.audit.session import ANSWER_S
from kvstore.types import Namespace
from kvstore.v1 import store_pb2 as pb
from kvstore.v1 import store_pb2_grpc as rpc

__all__ = ["REFUSED", "Answer", "Calls"]

U32 = NDArray[np.uint32]
REFUSED = ("UNAUTHENTICATED", "PERMISSION_DENIED")


@dataclass(frozen=True, slots=True)
class Answer:
    """How a call ended.

    Attributes:
        code: name of the gRPC status.
        reply: the message, for a stream all of them; None unless the code is OK.
        said: words of the status.
    """

    code: str
    reply: Any = None
    said: str = ""

    @property
    def ok(self) -> bool:
        """It was let in."""
        return self.code == "OK"


class Calls:
    """What may be asked over one channel.

    Args:
        tokens: tenant → bearer token that is shown where none is named.
    """

    def __init__(self, channel: Any, namespace: Namespace, tokens: Mapping[str, str]) -> None:
        self._store, self._admin = rpc.StoreStub(channel), rpc.AdminStub(channel)
        self._health = health_pb2_grpc.HealthStub(channel)
        self._reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        self._tokens = tokens
        fields: dict[str, Any] = asdict(namespace)
        fields["block_tokens"] = int(fields["block_tokens"])
        self._namespace = pb.Namespace(**fields)
        self._digest = namespace.digest

    # ---- messages ----------------------------------------------------------------------------------------

    def chain(self, tenant: str, tokens: U32, reuse: pb.Reuse = pb.REUSE_OWN) -> pb.Chain:
        """A prompt by its token ids."""
        return self._chain(tenant, pb.Chain(tokens=pb.Tokens(ids=tokens.tolist()), reuse=reuse))

    def keyed(self, tenant: str, keys: NDArray[np.uint8]) -> pb.Chain:
        """A prompt by (n, 32) keys."""
        return self._chain(tenant, pb.Chain(keys=pb.Keys(packed=keys.tobytes())))

    def _chain(self, tenant: str, blocks: pb.Chain) -> pb.Chain:
        layout = pb.Layout(
            layers=LAYOUT.layers,
            kv_heads=LAYOUT.kv_heads,
            head_dim=LAYOUT.head_dim,
            dtype=LAYOUT.dtype,
            block_tokens=LAYOUT.block_tokens,
        )
        chain = pb.Chain(tenant=tenant, namespace=self._namespace, layout=layout)
        chain.MergeFrom(blocks)
        return chain

    # ---- reading: `token` "" = none, None = the tenant's ---------------------------------------------------

    def plan(self, chain: pb.Chain, token: str | None = None) -> Answer:
        """Without any effect."""
        return self._rated(self._store.Plan, pb.PlanRequest(chain=chain), self._shown(chain.tenant, token))

    def lookup(self, chain: pb.Chain, token: str | None = None) -> Answer:
        """With a lease where anything is found."""
        request = pb.LookupRequest(chain=chain)
        return self._rated(self._store.Lookup, request, self._shown(chain.tenant, token))

    def fetched(self, chain: pb.Chain, token: str | None = None) -> Answer:
        """A Fetch of a chain, without a lease that is known."""
        request, shown = pb.FetchRequest(chain=chain), self._shown(chain.tenant, token)
        return again(
            lambda: self._stream(self._store.Fetch, request, shown),
            lambda answer: answer.code != "RESOURCE_EXHAUSTED",
        )

    def looks(self, chain: pb.Chain) -> dict[str, Look]:
        """What every verb that reads a chain finds of it, in blocks; nothing stays held."""
        plan, lookup, fetched = self.plan(chain), self.lookup(chain), self.fetched(chain)
        if lookup.ok and lookup.reply.lease:
            self.release(lookup.reply.lease, chain.tenant)
        return {
            "Plan": _look(plan, lambda reply: int(reply.blocks)),
            "Lookup": _look(lookup, lambda reply: int(reply.blocks)),
            "Fetch": _look(fetched, _blocks_brought),
        }

    def fetch(self, lease: bytes, tenant: str) -> Answer:
        """Under a lease, with the token of a tenant."""
        return self._stream(self._store.Fetch, pb.FetchRequest(lease=lease), self._shown(tenant))

    def renew(self, lease: bytes, tenant: str) -> Answer:
        """With the token of a tenant."""
        return self._unary(self._store.Renew, pb.RenewRequest(leases=[lease]), self._shown(tenant))

    def release(self, lease: bytes, tenant: str) -> Answer:
        """With the token of a tenant."""
        return self._unary(self._store.Release, pb.ReleaseRequest(lease=lease), self._shown(tenant))

    def subscribe(self, tenant: str, token: str | None = None) -> Answer:
        """Whether a tenant's subscription is let in: its first message."""
        request = pb.SubscribeRequest(tenant=tenant)
        try:
            stream = self._store.Subscribe(request, timeout=ANSWER_S, metadata=self._shown(tenant, token))
            first = next(iter(stream))
            stream.cancel()
        except grpc.RpcError as error:
            return Answer(error.code().name, None, error.details() or "")
        return Answer("OK", first)

    def observe(self, tenant: str, token: str | None = None) -> Answer:
        """Tell of no measurement at all."""
        request = pb.ObserveRequest(tenant=tenant)
        return self._unary(self._store.Observe, request, self._shown(tenant, token))

    def events(self, tenant: str, epoch: str, sequence: int, last: bytes) -> list[bytes]:
        """Keys that a tenant's events tell, from a sequence on and up to a key that it waits for.

        Returns:
            The keys, `last` at their end unless it did not come within ANSWER_S.
        """
        request = pb.SubscribeRequest(tenant=tenant, epoch=bytes.fromhex(epoch), sequence=sequence)
        told: list[bytes] = []
        try:
            stream = self._store.Subscribe(request, timeout=ANSWER_S, metadata=self._shown(tenant))
            for message in stream:
                packed = message.event.keys or message.snapshot.keys
                told += [packed[at : at + 32] for at in range(0, len(packed), 32)]
                if last in told:
                    stream.cancel()
                    return [*(key for key in told if key != last), last]
        except grpc.RpcError:  # refused, or nothing came: the caller sees that `last` is missing
            return told
        return told

    # ---- writing -----------------------------------------------------------------------------------------

    def save(self, chain: pb.Chain, token: str | None = None) -> Answer:
        """Random bytes for every block of a prompt, again where a quota was in the way."""
        ids, packed = len(chain.tokens.ids), len(chain.keys.packed)
        blocks, shown = ids // LAYOUT.block_tokens or packed // 32, self._shown(chain.tenant, token)

        def messages() -> Iterator[pb.SaveRequest]:
            yield pb.SaveRequest(header=pb.SaveHeader(chain=chain))
            yield pb.SaveRequest(data=pb.SaveData(data=os.urandom(blocks * LAYOUT.block_bytes)))

        return again(
            lambda: self._unary(self._store.Save, messages(), shown),
            lambda answer: not answer.ok or not answer.reply.reason.startswith(QUOTAS),
        )

    # ---- administration ----------------------------------------------------------------------------------

    def status(self, token: str) -> Answer:
        """The daemon's report, with a token or ("") without."""
        return self._unary(self._admin.Status, pb.StatusRequest(), _bearer(token))

    def drop_nothing(self, token: str) -> Answer:
        """Drop a namespace that there is not."""
        request = pb.DropNamespaceRequest(digest=os.urandom(32))
        return self._unary(self._admin.DropNamespace, request, _bearer(token))

    def drop(self, tenant: str, token: str) -> Answer:
        """Drop a tenant's part of the probe's namespace."""
        request = pb.DropNamespaceRequest(digest=self._digest, tenant=tenant)
        return self._unary(self._admin.DropNamespace, request, _bearer(token))

    # ---- services that are not ours ------------------------------------------------------------------------

    def told_to_strangers(self) -> dict[str, Answer]:
        """What health and reflection say to a caller who shows nothing."""
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        health = health_pb2.HealthCheckRequest()
        return {
            "health": self._unary(self._health.Check, health, []),
            "reflection": self._stream(self._reflection.ServerReflectionInfo, iter([asked]), []),
        }

    # ---- inside ------------------------------------------------------------------------------------------

    def _shown(self, tenant: str, token: str | None = None) -> list[tuple[str, str]]:
        return _bearer(self._tokens.get(tenant, "") if token is None else token)

    def _rated(self, call: Callable[..., Any], request: Any, metadata: list[tuple[str, str]]) -> Answer:
        """Again where a tenant's rate was in the way."""
        return again(
            lambda: self._unary(call, request, metadata), lambda answer: answer.code != "RESOURCE_EXHAUSTED"
        )

    def _unary(self, call: Callable[..., Any], request: Any, metadata: list[tuple[str, str]]) -> Answer:
        try:
            return Answer("OK", call(request, timeout=ANSWER_S, metadata=metadata))
        except grpc.RpcError as error:
            return Answer(error.code().name, None, error.details() or "")

    def _stream(self, call: Callable[..., Any], request: Any, metadata: list[tuple[str, str]]) -> Answer:
        return self._unary(
            lambda asked, *, timeout, metadata: list(call(asked, timeout=timeout, metadata=metadata)),
            request,
            metadata,
        )


def _look(answer: Answer, blocks: Callable[[Any], int]) -> Look:
    return Look(blocks(answer.reply)) if answer.ok else Look.failed(answer.code, answer.said)


def _blocks_brought(replies: Any) -> int:
    """Of which any byte came."""
    return -(-sum(len(message.data.data) for message in replies) // LAYOUT.block_bytes)


def _bearer(token: str) -> list[tuple[str, str]]:
    return [("authorization", f"Bearer {token}")] if token else []
