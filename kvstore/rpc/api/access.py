"""Who may do what: the one place that every call passes before it touches the store."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvstore.errors import BadRequest, Refused

__all__ = ["Access", "OpenAccess", "Peer", "Verb", "peer_of"]


@dataclass(frozen=True, slots=True)
class Peer:
    """Who calls, as far as the connection tells.

    Attributes:
        metadata: of the call, where a bearer token would be.
        local: it came through a Unix socket, so that the socket's mode let it in.
    """

    metadata: Sequence[tuple[str, str | bytes]]
    local: bool


def peer_of(context: Any) -> Peer:
    """The peer of a gRPC call."""
    metadata = tuple((key, value) for key, value in context.invocation_metadata())
    return Peer(metadata, context.peer().startswith("unix:"))


class Verb(enum.StrEnum):
    """What a call wants to do."""

    READ = "read"
    SAVE = "save"
    OBSERVE = "observe"
    SUBSCRIBE = "subscribe"
    ADMIN = "admin"


class Access(Protocol):
    """Decides about one call."""

    def check(self, peer: Peer, verb: Verb, tenant: str) -> None:
        """Return if the caller may.

        Args:
            peer: who calls.
            verb: what it wants to do.
            tenant: in whose name, "" for what concerns the whole daemon.

        Raises:
            Refused: it may not.
            BadRequest: a tenant is needed.
        """
        ...


class OpenAccess:
    """Whoever reaches the endpoint may act as any configured tenant: the socket's mode is the door.

    When not to use it: on a port that others reach. TCP is refused unless `grpc.insecure_tcp` says so, and
    even then administers nothing.
    """

    def check(self, peer: Peer, verb: Verb, tenant: str) -> None:
        if verb is Verb.ADMIN and not peer.local:
            raise Refused("admin: only over a Unix socket; a plaintext port does not say who asks")
        if verb is not Verb.ADMIN and not tenant:
            raise BadRequest("tenant: name one of this daemon's tenants")
