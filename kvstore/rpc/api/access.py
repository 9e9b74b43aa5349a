"""Who may do what: the one place that every call passes before it touches the store."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Protocol

from kvstore.errors import BadRequest

__all__ = ["Access", "Metadata", "OpenAccess", "Verb"]

Metadata = Sequence[tuple[str, str | bytes]]


class Verb(enum.StrEnum):
    """What a call wants to do."""

    READ = "read"
    SAVE = "save"
    OBSERVE = "observe"
    SUBSCRIBE = "subscribe"
    ADMIN = "admin"


class Access(Protocol):
    """Decides about one call."""

    def check(self, metadata: Metadata, verb: Verb, tenant: str) -> None:
        """Return if the caller may.

        Args:
            metadata: of the call, where a bearer token would be.
            verb: what it wants to do.
            tenant: in whose name, "" for what concerns the whole daemon.

        Raises:
            Refused: it may not.
            BadRequest: a tenant is needed.
        """
        ...


class OpenAccess:
    """Whoever reaches the endpoint may act as any configured tenant: the socket's mode is the door.

    When not to use it: on a port that others reach. TCP is refused unless `grpc.insecure_tcp` says so.
    """

    def check(self, metadata: Metadata, verb: Verb, tenant: str) -> None:
        if verb is not Verb.ADMIN and not tenant:
            raise BadRequest("tenant: name one of this daemon's tenants")
