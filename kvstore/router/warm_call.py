"""Asking a router to warm a replica: what `kvstore warm` does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import grpc

from kvstore.errors import from_status
from kvstore.v1 import routing_pb2 as pb
from kvstore.v1 import routing_pb2_grpc as rpc

__all__ = ["Progress", "warm_replica"]


@dataclass(frozen=True, slots=True)
class Progress:
    """One prefix of `of`.

    Attributes:
        number: from 1 on.
        prompt_tokens: that were sent.
        cached_tokens: that the replica had already.
        seconds: it took.
        error: "" = none.
    """

    number: int
    of: int
    prompt_tokens: int
    cached_tokens: int
    seconds: float
    error: str


def warm_replica(address: str, replica: str, top: int, token: str, root: bytes | None) -> Iterator[Progress]:
    """Each prefix as it is done.

    Args:
        address: gRPC of the router.
        token: bearer token, "" = none.
        root: PEM of what its certificate is checked against; None = plain text.

    Raises:
        KVStoreError: the router refuses, or does not answer.
    """
    metadata = [("authorization", f"Bearer {token}")] if token else []
    if root is None:
        channel = grpc.insecure_channel(address)
    else:
        channel = grpc.secure_channel(address, grpc.ssl_channel_credentials(root))
    with channel:
        try:
            for each in rpc.RoutingStub(channel).Warm(
                pb.WarmRequest(replica=replica, top=top), metadata=metadata
            ):
                yield Progress(
                    each.number, each.of, each.prompt_tokens, each.cached_tokens, each.seconds, each.error
                )
        except grpc.RpcError as error:
            raise from_status(error.code().name, error.details() or "the router does not answer") from None
