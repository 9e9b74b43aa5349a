"""The calls of the public API that an audit makes: each ends in an answer, whatever its status is."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import grpc
import numpy as np
from numpy.typing import NDArray

from kvstore.audit.looks import Look, again, answered
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
        self._tokens = tokens
        fields: dict[str, Any] = asdict(namespace)
        fields["block_tokens"] = int(fields["block_tokens"])
        self._namespace = pb.Namespace(**fields)
        self._digest = namespace.digest

    # ---- messages ----------------------------------------------------------------------------------------

    def chain(self, tenant: str, tokens: U32) -> pb.Chain:
        """A prompt by its token ids."""
        return self._chain(tenant, pb.Chain(tokens=pb.Tokens(ids=tokens.tolist())))

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

    # ---- reading -----------------------------------------------------------------------------------------

    def plan(self, chain: pb.Chain, token: str | None = None) -> Answer:
        """Without any effect; `token`: "" = none, None = the tenant's."""
        request, shown = pb.PlanRequest(chain=chain), self._shown(chain.tenant, token)
        return again(
            lambda: self._unary(self._store.Plan, request, shown),
            lambda answer: answer.code != "RESOURCE_EXHAUSTED",
        )

    def lookup(self, chain: pb.Chain) -> Answer:
        """With a lease where anything is found."""
        request, shown = pb.LookupRequest(chain=chain), self._shown(chain.tenant)
        return again(
            lambda: self._unary(self._store.Lookup, request, shown),
            lambda answer: answer.code != "RESOURCE_EXHAUSTED",
        )

    def look(self, chain: pb.Chain) -> Look:
        """Whether any of a chain is found; nothing stays held."""
        answer = self.lookup(chain)
        if not answer.ok:
            return Look.failed(answer.code, answer.said)
        if answer.reply.lease:
            self.release(answer.reply.lease, chain.tenant)
        return Look(int(answer.reply.blocks))

    def brought(self, chain: pb.Chain) -> Look:
        """Whether a Fetch of a chain brings any bytes."""
        return answered(lambda: self._brought(chain))

    def _brought(self, chain: pb.Chain) -> Look:
        answer = self._stream(self._store.Fetch, pb.FetchRequest(chain=chain), self._shown(chain.tenant))
        if not answer.ok:
            return Look.failed(answer.code, answer.said)
        return Look(sum(len(message.data.data) for message in answer.reply))

    def fetch(self, lease: bytes, tenant: str) -> Answer:
        """Under a lease, with the token of a tenant."""
        return self._stream(self._store.Fetch, pb.FetchRequest(lease=lease), self._shown(tenant))

    def renew(self, lease: bytes, tenant: str) -> Answer:
        """With the token of a tenant."""
        return self._unary(self._store.Renew, pb.RenewRequest(leases=[lease]), self._shown(tenant))

    def release(self, lease: bytes, tenant: str) -> Answer:
        """With the token of a tenant."""
        return self._unary(self._store.Release, pb.ReleaseRequest(lease=lease), self._shown(tenant))

    def subscribe(self, tenant: str) -> Answer:
        """Whether a tenant's subscription is let in: its first message."""
        request = pb.SubscribeRequest(tenant=tenant)
        try:
            stream = self._store.Subscribe(request, timeout=ANSWER_S, metadata=self._shown(tenant))
            first = next(iter(stream))
            stream.cancel()
        except grpc.RpcError as error:
            return Answer(error.code().name, None, error.details() or "")
        return Answer("OK", first)

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

    def save(self, tenant: str, tokens: U32) -> Answer:
        """Random bytes for every block of a prompt, again where a quota was in the way."""
        chain = self.chain(tenant, tokens)
        blocks, shown = len(tokens) // LAYOUT.block_tokens, self._shown(tenant)

        def messages() -> Iterator[pb.SaveRequest]:
            yield pb.SaveRequest(header=pb.SaveHeader(chain=chain))
            yield pb.SaveRequest(data=pb.SaveData(data=os.urandom(blocks * LAYOUT.block_bytes)))

        return again(
            lambda: self._unary(self._store.Save, messages(), shown),
            lambda answer: not answer.ok or answer.reply.ready + answer.reply.filled == blocks,
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

    # ---- inside ------------------------------------------------------------------------------------------

    def _shown(self, tenant: str, token: str | None = None) -> list[tuple[str, str]]:
        return _bearer(self._tokens.get(tenant, "") if token is None else token)

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


def _bearer(token: str) -> list[tuple[str, str]]:
    return [("authorization", f"Bearer {token}")] if token else []
