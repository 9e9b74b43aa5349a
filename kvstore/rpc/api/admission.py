"""What is decided about a call before any method sees it: the size of its requests, and how many streams of
the standard services there may be."""

from __future__ import annotations

import contextlib
import inspect
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from kvstore.errors import BadRequest, KVStoreError, LimitExceeded
from kvstore.rpc.api.failures import Malformed, Unread, abort

__all__ = ["SMALL_BYTES_MAX", "BytesCheck", "StandardServices"]

# A message is parsed in one go on the loop, at worst some 15 ns a byte (nothing but empty fields). What names
# no chain and carries no block needs less than this: 2,048 leases take 36 KiB, 2,048 measurements 30.
SMALL_BYTES_MAX = 64 << 10
_LARGE = frozenset(f"/kvstore.v1.Store/{name}" for name in ("Lookup", "Plan", "Fetch", "Save"))
# Of Health.Watch and of reflection, each: they never end by themselves, so they must not take all calls.
_STREAMS_MAX, _PART_OF_CALLS = 32, 8


class BytesCheck(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """Requests that are too large are not even parsed. Bytes that are no message are the caller's mistake
    (INVALID_ARGUMENT); by itself gRPC calls it INTERNAL and logs a traceback each time.

    Args:
        message_bytes_max: for calls that carry chains or blocks; SMALL_BYTES_MAX for all others.
    """

    def __init__(self, message_bytes_max: int) -> None:
        self._message_bytes_max = message_bytes_max

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        handler = await continuation(details)
        if handler is None:
            return handler
        parse, name = handler.request_deserializer, details.method.rpartition("/")[2]
        most = self._message_bytes_max
        if details.method not in _LARGE:
            most = min(most, SMALL_BYTES_MAX)

        def checked(data: bytes) -> Any:
            if len(data) > most:
                return Malformed(LimitExceeded(f"request: {len(data)} bytes; {name} takes at most {most}"))
            try:
                return parse(data)
            except DecodeError as error:
                return Malformed(BadRequest(f"request: not a message of {name}: {error}"))

        if details.method.startswith("/kvstore."):
            return handler._replace(request_deserializer=lambda data: Unread(data, checked))
        return handler._replace(request_deserializer=checked)


class StandardServices(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """Health and reflection, whose code is not ours: their requests are refused as ours are, and only some of
    `grpc.calls_max` are left to their streams.

    Args:
        calls_max: of the server.
    """

    def __init__(self, calls_max: int) -> None:
        self._streams_max = max(1, min(_STREAMS_MAX, calls_max // _PART_OF_CALLS))
        self._open: Counter[str] = Counter()

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        handler = await continuation(details)
        if handler is None or details.method.startswith("/kvstore."):
            return handler
        if not handler.response_streaming:
            return handler._replace(unary_unary=_one(handler.unary_unary))
        kind = "stream_stream" if handler.request_streaming else "unary_stream"
        return handler._replace(**{kind: self._stream(getattr(handler, kind), details.method)})

    def _stream(self, method: Any, name: str) -> Any:
        async def answer(request: Any, context: Any) -> None:
            try:
                with self._counted(name):
                    asked = _checked(request) if hasattr(request, "__aiter__") else _sound(request)
                    if not inspect.isasyncgenfunction(method):
                        await method(asked, context)
                        return
                    async with contextlib.aclosing(method(asked, context)) as replies:
                        async for reply in replies:
                            await context.write(reply)
            except KVStoreError as error:
                await abort(context, error)

        return answer

    @contextlib.contextmanager
    def _counted(self, name: str) -> Iterator[None]:
        if self._open[name] >= self._streams_max:
            raise LimitExceeded(f"stream: {self._streams_max} of {name} are open; end some")
        self._open[name] += 1
        try:
            yield
        finally:
            self._open[name] -= 1


def _one(method: Any) -> Any:
    async def answer(request: Any, context: Any) -> Any:
        try:
            asked = _sound(request)
        except KVStoreError as error:
            await abort(context, error)
        return await method(asked, context)

    return answer


def _sound(request: Any) -> Any:
    if isinstance(request, Malformed):
        raise request.error
    return request


async def _checked(requests: Any) -> AsyncIterator[Any]:
    async for request in requests:
        yield _sound(request)
