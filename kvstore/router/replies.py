"""What the proxy itself says: errors in the shape that clients of the OpenAI API know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
from starlette.responses import Response

from kvstore.errors import (
    BadRequest,
    DeadlineExceeded,
    KVStoreError,
    LimitExceeded,
    NotFound,
    Refused,
    Unauthenticated,
    Unavailable,
)

__all__ = ["Failure", "failure_of"]

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
}
_STATUS: Mapping[type[KVStoreError], int] = {
    BadRequest: 400,
    Unauthenticated: 401,
    Refused: 403,
    NotFound: 404,
    LimitExceeded: 429,
    Unavailable: 503,
    DeadlineExceeded: 504,
}
# Of 429 and 503: a queue is shorter, or a replica back, some moments later.
_RETRY_AFTER = {429: b"1", 503: b"1"}


@dataclass(frozen=True, slots=True)
class Failure:
    """A request that ends here.

    Attributes:
        status: of HTTP.
        code: for programs.
        message: for people: what is wrong, and what to do.
        param: the field that is wrong, "" = none.
    """

    status: int
    code: str
    message: str
    param: str = ""

    def body(self) -> bytes:
        """{"error": {"message", "type", "param", "code"}}."""
        kind = _KINDS.get(self.status, "server_error")
        error = {"message": self.message, "type": kind, "param": self.param or None, "code": self.code}
        return msgspec.json.encode({"error": error})

    def event(self) -> bytes:
        """The same as an event of a stream; the empty line before it ends an event that was cut short."""
        return b"\n\ndata: " + self.body() + b"\n\n"

    def response(self) -> Response:
        """The same as an answer."""
        response = Response(self.body(), self.status, media_type="application/json")
        if self.status in _RETRY_AFTER:
            response.raw_headers.append((b"retry-after", _RETRY_AFTER[self.status]))
        if self.status == 401:
            response.raw_headers.append((b"www-authenticate", b"Bearer"))
        return response


def failure_of(error: KVStoreError) -> Failure:
    """The answer that an error of ours becomes."""
    status = next((_STATUS[kind] for kind in type(error).__mro__ if kind in _STATUS), 500)
    codes = {401: "invalid_api_key", 403: "not_allowed", 429: "too_many_requests", 503: "no_replica"}
    return Failure(status, codes.get(status, "bad_request" if status == 400 else "failed"), str(error))
