"""Who may do what: the one place that every call passes before it touches the store."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvstore.clock import unix_time_s
from kvstore.config.tokens import Token, Tokens
from kvstore.errors import BadRequest, Refused, Unauthenticated

__all__ = ["Access", "OpenAccess", "Peer", "TokenAccess", "Verb", "agent_of", "peer_of"]

_SCHEME = "bearer "
_AGENT_CHARS_MAX = 80


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


def agent_of(context: Any) -> str:
    """What the caller's program calls itself, for the log; nobody checks that."""
    found = dict(context.invocation_metadata()).get("user-agent", "")
    return found[:_AGENT_CHARS_MAX] if isinstance(found, str) else ""


class Verb(enum.StrEnum):
    """What a call wants to do."""

    READ = "read"
    SAVE = "save"
    OBSERVE = "observe"
    SUBSCRIBE = "subscribe"
    ADMIN = "admin"


class Access(Protocol):
    """Decides about one call."""

    def known(self, peer: Peer) -> None:
        """Return if the caller may speak at all; before that nothing it sent is parsed.

        Raises:
            Unauthenticated: nobody knows who it is.
        """
        ...

    def check(self, peer: Peer, verb: Verb, tenant: str) -> str:
        """Return if the caller may.

        Args:
            peer: who calls.
            verb: what it wants to do.
            tenant: in whose name, "" for what concerns the whole daemon.

        Returns:
            The caller's name, for the log; "" = the door tells no more than that it let it in.

        Raises:
            Unauthenticated: nobody knows who it is.
            Refused: it may not.
            BadRequest: a tenant is needed.
        """
        ...

    def left_s(self, peer: Peer) -> float:
        """Seconds until what the caller shows expires by itself; inf = it does not, or shows nothing.

        Raises:
            Unauthenticated: nobody knows who it is.
        """
        ...


class OpenAccess:
    """Whoever reaches the endpoint may act as any configured tenant: the door itself lets in.

    That is a socket's mode, or a certificate (grpc.tls_clients). When not to use it: on a port that others
    reach. Plaintext TCP is refused unless `grpc.insecure_tcp` says so; over TCP it administers nothing.
    """

    def known(self, peer: Peer) -> None:
        """Whoever reached the endpoint is."""

    def check(self, peer: Peer, verb: Verb, tenant: str) -> str:
        if verb is Verb.ADMIN and not peer.local:
            raise Refused("admin: only over a Unix socket, or with a token (grpc.tokens_file)")
        _need_tenant(verb, tenant)
        return ""

    def left_s(self, peer: Peer) -> float:
        return math.inf


# What a word in the file of tokens allows.
_ALLOWS = {
    "read": frozenset({Verb.READ, Verb.OBSERVE, Verb.SUBSCRIBE}),
    "write": frozenset({Verb.SAVE}),
    "admin": frozenset({Verb.ADMIN}),
}


class TokenAccess:
    """Callers show a bearer token; those of a Unix socket may do without, because its mode let them in.

    Args:
        tokens: that are known; `tokens` may be replaced at any time.
        unix_needs: no: they have to show one, too.
        unix_time: for what expires.
    """

    def __init__(
        self, tokens: Tokens, *, unix_needs: bool = False, unix_time: Callable[[], float] = unix_time_s
    ) -> None:
        self.tokens = tokens
        self._unix_needs = unix_needs
        self._unix_time = unix_time
        self._open = OpenAccess()

    def known(self, peer: Peer) -> None:
        self._token_of(peer)

    def check(self, peer: Peer, verb: Verb, tenant: str) -> str:
        token = self._token_of(peer)
        if token is None:
            return self._open.check(peer, verb, tenant)
        if not any(verb in _ALLOWS[word] for word in token.verbs):
            raise Refused(f"authorization: the token of {token.name} does not allow to {verb}")
        _need_tenant(verb, tenant)
        if not token.opens(tenant):
            whose = f"tenant {tenant!r:.80}" if tenant else "the whole daemon"
            raise Refused(f"authorization: the token of {token.name} does not open {whose}")
        return token.name

    def left_s(self, peer: Peer) -> float:
        token = self._token_of(peer)
        return math.inf if token is None else token.expires_s - self._unix_time()

    def _token_of(self, peer: Peer) -> Token | None:
        """What it shows; None for those who need none."""
        shown = [value for key, value in peer.metadata if key == "authorization"]
        return self._found(shown) if shown or not peer.local or self._unix_needs else None

    def _found(self, shown: Sequence[str | bytes]) -> Token:
        text = shown[0] if len(shown) == 1 else ""
        if not isinstance(text, str) or text[: len(_SCHEME)].lower() != _SCHEME:
            raise Unauthenticated("authorization: send the metadata 'authorization: Bearer TOKEN', once")
        token = self.tokens.find(text[len(_SCHEME) :].strip())
        if token is None:
            raise Unauthenticated("authorization: nobody knows this token")
        if self._unix_time() >= token.expires_s:
            raise Unauthenticated(f"authorization: the token of {token.name} has expired")
        return token


def _need_tenant(verb: Verb, tenant: str) -> None:
    if verb is not Verb.ADMIN and not tenant:
        raise BadRequest("tenant: name one of this daemon's tenants")
