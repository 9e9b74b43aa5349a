"""Which headers pass the proxy, in both directions. Names are bytes, in lower case (ASGI's form)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["Headers", "answer_headers", "header", "request_headers"]

Headers = Sequence[tuple[bytes, bytes]]

# RFC 9110, 7.6.1: they speak of one connection, not of the message.
_HOP = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    )
)
# Made anew for the replica, or none of a caller's business: which of a replica's ranks computes is decided by
# whoever knows where the prefix lives.
_OURS = frozenset(
    (
        b"host",
        b"content-length",
        b"content-type",
        b"accept-encoding",
        b"authorization",
        b"cookie",
        b"expect",
        b"x-data-parallel-rank",
    )
)
# uvicorn writes its own; a set cookie would be for the replica's host.
_THEIRS = frozenset((b"date", b"server", b"set-cookie", b"alt-svc", b"strict-transport-security"))
_OWN_PREFIX = b"x-kvstore-"


def header(headers: Headers, name: str) -> str:
    """The first value of a header, "" = it is not there."""
    wanted = name.lower().encode()
    return next((value.decode("latin-1") for found, value in headers if found == wanted), "")


def request_headers(headers: Headers) -> list[tuple[bytes, bytes]]:
    """What a replica is shown of a caller's headers.

    Left out are those of the caller's connection, its credentials, everything that names a salt, and our own
    (`x-kvstore-*`). The body is JSON, and the answer must come uncompressed: its usage is read on the way.

    Args:
        headers: the caller's.
    """
    dropped = _HOP | _OURS | _named_by_connection(headers)
    passed = [
        (name, value)
        for name, value in headers
        if name not in dropped and b"salt" not in name and not name.startswith(_OWN_PREFIX)
    ]
    return [*passed, (b"content-type", b"application/json"), (b"accept-encoding", b"identity")]


def answer_headers(headers: Headers, *, changed: bool) -> list[tuple[bytes, bytes]]:
    """What a caller is shown of a replica's headers.

    Args:
        headers: the replica's.
        changed: the body may become another length.
    """
    dropped = _HOP | _THEIRS | _named_by_connection(headers)
    if changed:
        dropped |= {b"content-length"}
    return [
        (name.lower(), value)
        for name, value in headers
        if name.lower() not in dropped and not name.lower().startswith(_OWN_PREFIX)
    ]


def _named_by_connection(headers: Iterable[tuple[bytes, bytes]]) -> frozenset[bytes]:
    values = [value for name, value in headers if name.lower() == b"connection"]
    return frozenset(word.strip().lower() for value in values for word in value.split(b","))
