"""The tree of errors, and the one status each becomes at an edge.

KVStoreError
├── BadRequest            the caller sent something malformed or contradictory; nothing was changed
│   └── ConfigError       a key of the configuration is unknown, missing or out of range
├── Unauthenticated       nobody knows who the caller is: no token, an unknown one, one that has expired
├── Refused               the caller may not do this (identity, layout, tenant, version)
│   └── LayoutRefused     the layout proof failed: this engine must run uncached
├── NotFound              an id (lease, token) that is not, or no longer, yours
├── LimitExceeded         a named limit (`*_max`) was reached
├── Unavailable           no daemon at the socket, or it went away
├── DeadlineExceeded      no answer in time
└── OutOfMemory           the machine cannot give what the configuration asks for

A miss, `Busy` or a dropped save is a value, never an exception (types.py).
"""

from __future__ import annotations

__all__ = [
    "STATUS",
    "BadRequest",
    "ConfigError",
    "DeadlineExceeded",
    "KVStoreError",
    "LayoutRefused",
    "LimitExceeded",
    "NotFound",
    "OutOfMemory",
    "Refused",
    "Unauthenticated",
    "Unavailable",
    "from_status",
]


class KVStoreError(Exception):
    """Base of everything this project raises on purpose."""


class BadRequest(KVStoreError):
    """Malformed or contradictory input; the message names the field and the fix."""


class ConfigError(BadRequest):
    """A configuration key is unknown, missing or out of range; the message starts with its path."""


class Unauthenticated(KVStoreError):
    """Who calls is not known."""


class Refused(KVStoreError):
    """Not allowed, or not compatible."""


class LayoutRefused(Refused):
    """The engine's paged layout is not what it claimed: run uncached."""


class NotFound(KVStoreError):
    """Unknown id."""


class LimitExceeded(KVStoreError):
    """A named limit was reached."""


class Unavailable(KVStoreError):
    """The daemon is not there."""


class DeadlineExceeded(KVStoreError):
    """No answer within the deadline."""


class OutOfMemory(KVStoreError):
    """The machine cannot give the configured memory."""


# Names are gRPC status codes; the session sends them as strings.
STATUS: dict[type[KVStoreError], str] = {
    BadRequest: "INVALID_ARGUMENT",
    ConfigError: "INVALID_ARGUMENT",
    Unauthenticated: "UNAUTHENTICATED",
    Refused: "PERMISSION_DENIED",
    LayoutRefused: "FAILED_PRECONDITION",
    NotFound: "NOT_FOUND",
    LimitExceeded: "RESOURCE_EXHAUSTED",
    Unavailable: "UNAVAILABLE",
    DeadlineExceeded: "DEADLINE_EXCEEDED",
    OutOfMemory: "RESOURCE_EXHAUSTED",
    KVStoreError: "INTERNAL",
}

_FROM_STATUS: dict[str, type[KVStoreError]] = {
    "INVALID_ARGUMENT": BadRequest,
    "UNAUTHENTICATED": Unauthenticated,
    "PERMISSION_DENIED": Refused,
    "FAILED_PRECONDITION": LayoutRefused,
    "NOT_FOUND": NotFound,
    "RESOURCE_EXHAUSTED": LimitExceeded,
    "UNAVAILABLE": Unavailable,
    "DEADLINE_EXCEEDED": DeadlineExceeded,
}


def from_status(status: str, message: str) -> KVStoreError:
    """The error that a peer's status stands for.

    Returns:
        An instance of the class for `status`, `KVStoreError` for a status this version does not know.
    """
    return _FROM_STATUS.get(status, KVStoreError)(message)
