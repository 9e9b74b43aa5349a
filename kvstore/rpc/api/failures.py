"""Errors of ours → gRPC statuses with rich details (google.rpc.ErrorInfo and BadRequest)."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import grpc
import structlog
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2

from kvstore.errors import STATUS, BadRequest, DeadlineExceeded, KVStoreError
from kvstore.rpc.api.access import peer_of
from kvstore.rpc.api.call_log import Call, Steps

__all__ = ["DOMAIN", "Malformed", "Unread", "abort", "answers", "deadline", "read", "rich_status"]

log = structlog.get_logger()

T = TypeVar("T")
DOMAIN = "kvstore"
# Status messages travel in HTTP/2 trailers, which clients bound to 8 KiB.
MESSAGE_CHARS_MAX = 1000
# Messages of BadRequest begin with the path of the field.
_FIELD = re.compile(r"([a-z][a-z0-9_]*(?:\[\d+\])?(?:\.[a-z][a-z0-9_]*(?:\[\d+\])?)*): ")


def rich_status(error: KVStoreError) -> status_pb2.Status:
    """google.rpc.Status of an error: code, message, ErrorInfo, and BadRequest where a field is to blame."""
    name = STATUS[type(error)]
    message = str(error)[:MESSAGE_CHARS_MAX]
    status = status_pb2.Status(code=grpc.StatusCode[name].value[0], message=message)
    reason = re.sub(r"(?<!^)(?=[A-Z])", "_", type(error).__name__).upper()
    details: list[Any] = [error_details_pb2.ErrorInfo(reason=reason, domain=DOMAIN)]
    field = _FIELD.match(message)
    if isinstance(error, BadRequest) and field is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=field[1], description=message[field.end() :]
        )
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    return status


@dataclass(frozen=True, slots=True)
class Malformed:
    """Stands in for a request that cannot be read."""

    error: KVStoreError


@dataclass(frozen=True, slots=True)
class Unread:
    """A request as it came: it is parsed, at most some 65 ms of the loop, only for who is known.

    Attributes:
        parse: returns the message, or Malformed.
    """

    data: bytes
    parse: Callable[[bytes], Any]


def read(request: Any) -> Any:
    """A request's message.

    Raises:
        KVStoreError: it is none.
    """
    message = request.parse(request.data) if isinstance(request, Unread) else request
    if isinstance(message, Malformed):
        raise message.error
    return message


async def abort(context: Any, error: KVStoreError) -> NoReturn:
    """End a call with the status of an error."""
    status = rich_status(error)
    context.set_trailing_metadata((("grpc-status-details-bin", status.SerializeToString()),))
    await context.abort(grpc.StatusCode[STATUS[type(error)]], status.message)
    raise AssertionError("abort() does not return")


def answers(
    method: Callable[[Any, Any, Any], Coroutine[Any, Any, T]],
) -> Callable[[Any, Any, Any], Awaitable[T]]:
    """For a method of a servicer, which has a RequestLog as its `requests`, an Access as its `access`, and is
    told by `refused` of strangers: no work after the deadline or for those, every error becomes its status,
    and what there is to say of the call is said."""
    name = method.__name__

    async def checked(self: Any, request: Any, context: Any, call: Call) -> T:
        left_s = context.time_remaining()
        if left_s is not None and left_s <= 0:
            raise DeadlineExceeded("the deadline passed before the call began")
        try:
            self.access.known(peer_of(context))
        except KVStoreError as error:
            self.refused(name, context, error)
            raise
        call.request = read(request)
        return await method(self, call.request, context)

    @functools.wraps(method)
    async def guarded(self: Any, request: Any, context: Any) -> T:
        call = Call(name, None, context)
        steps = Steps(checked(self, request, context, call), self.requests.clock)
        try:
            answer = await steps
            call.answered(answer)
            return answer
        except KVStoreError as error:
            call.refused(error)
            await abort(context, error)
        except grpc.aio.AbortError:
            raise
        except Exception as error:  # a bug of ours costs one call, not the daemon
            log.exception("bug", call=name)
            ours = KVStoreError(f"internal error: {type(error).__name__}; see the daemon's log")
            call.refused(ours)
            await abort(context, ours)
        finally:
            call.tell(self.requests, steps.longest_s)

    return guarded


@contextlib.asynccontextmanager
async def deadline(seconds: float, message: str) -> AsyncIterator[asyncio.Timeout]:
    """Bound a wait; who waits for several things in turn may reschedule it.

    Raises:
        DeadlineExceeded: it took longer.
    """
    try:
        async with asyncio.timeout(seconds) as timeout:
            yield timeout
    except TimeoutError:
        raise DeadlineExceeded(message) from None
