"""The OpenAI-compatible front of the router: a caller's request goes to the replica that holds its prefix.

POST /v1/chat/completions, POST /v1/completions    forwarded
GET  /v1/models                                    of all replicas, merged
GET  /health, GET /metrics                         of the router itself
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine, Mapping, MutableMapping
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from kvstore.errors import BadRequest, KVStoreError, Unavailable
from kvstore.router.bodies import CHAT, COMPLETIONS, Body, read_body, session_of, upstream_body
from kvstore.router.door import Caller
from kvstore.router.forwarding import Failed, Outgoing, Upstream
from kvstore.router.front import Front
from kvstore.router.headers import Headers, header, request_headers
from kvstore.router.models import ModelList
from kvstore.router.placing import Placement, RouteRequest
from kvstore.router.proxy_options import ProxyOptions
from kvstore.router.replies import Failure, failure_of
from kvstore.router.wire import Connections

__all__ = ["build_app"]

_SERVED = "POST /v1/chat/completions, POST /v1/completions, GET /v1/models, GET /health"
_SLO_S_MAX = 86_400.0


def build_app(front: Front, options: ProxyOptions) -> Starlette:
    """The proxy as an ASGI application; connections to replicas live as long as its lifespan.

    Raises:
        ConfigError: an option is out of range.
    """
    options.check()
    forwarder = _Forwarder(front, options)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with Connections(options.connect_s, front.clock) as connections, front.tokenizers:
            forwarder.open(connections)
            yield

    routes = [
        Route(CHAT, forwarder, methods=["POST"]),
        Route(COMPLETIONS, forwarder, methods=["POST"]),
        Route("/v1/models", forwarder.models, methods=["GET"]),
        Route("/health", forwarder.health, methods=["GET"]),
        Route("/metrics", forwarder.metrics, methods=["GET"]),
    ]
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers={HTTPException: _not_here})


class _Forwarder:
    """The endpoints. As an ASGI application itself it is the one that forwards."""

    def __init__(self, front: Front, options: ProxyOptions) -> None:
        self._front = front
        self._options = options
        self._running = 0
        self._upstream: Upstream | None = None
        self._models: ModelList | None = None

    def open(self, connections: Connections) -> None:
        """From now on replicas can be reached."""
        self._upstream = Upstream(connections, self._front, self._options)
        self._models = ModelList(connections, self._front, self._options)

    # ---- the router's own pages -------------------------------------------------------------------------

    async def health(self, _: Request) -> Response:
        """200 while any replica is up."""
        known = self._front.picker.replicas()
        up = sum(replica.up for replica in known)
        failure = Failure(503, "no_replica", f"none of {len(known)} replicas is up")
        if not up:
            return failure.response()
        return _json({"status": "ok", "replicas": len(known), "up": up})

    async def metrics(self, _: Request) -> Response:
        """What whoever built the application gives."""
        if self._front.metrics is None:
            return Failure(404, "not_found", "GET /metrics: this router has no page of metrics").response()
        return Response(self._front.metrics(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def models(self, request: Request) -> Response:
        """Of all replicas."""
        assert self._models is not None, "the lifespan has not begun"
        try:
            caller_headers: Headers = request.scope["headers"]
            self._admitted(caller_headers)
        except KVStoreError as error:
            return failure_of(error).response()
        authorization = "" if self._front.door.opaque else header(caller_headers, "authorization")
        found = await self._models.merged(authorization)
        return (
            found.response() if isinstance(found, Failure) else Response(found, media_type="application/json")
        )

    # ---- forwarding -------------------------------------------------------------------------------------

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A request from its arrival to the end of its answer, or to its caller's leaving."""
        failure = self._no_room(scope["headers"])
        if failure is not None:
            await failure.response()(scope, receive, send)
            return
        self._running += 1
        try:
            data = await self._data(scope["headers"], receive)
            if isinstance(data, Failure):
                await data.response()(scope, receive, send)
            elif data is not None:
                await _while_there(receive, self._serve(scope, data, send))
        finally:
            self._running -= 1

    async def _serve(self, scope: Scope, data: bytes, send: Send) -> None:
        headers: Headers = scope["headers"]
        try:
            caller = self._admitted(headers)
            body = read_body(scope["path"], data)
            route = await self._route(body, caller, headers)
            outgoing = self._outgoing(body, caller, headers)
        except KVStoreError as error:
            await failure_of(error).response()(scope, _nothing, send)
            return
        failed = await self._forward(route, outgoing, send)
        if failed is not None:
            await _respond(failed)(scope, _nothing, send)

    async def _forward(self, route: RouteRequest, outgoing: Outgoing, send: Send) -> Failed | None:
        """To one replica after the other, until one says a byte; None = one did."""
        assert self._upstream is not None, "the lifespan has not begun"
        failed: Failed | None = None
        avoid: frozenset[str] = frozenset()
        broke: frozenset[str] = frozenset()
        for _ in range(self._options.attempts_max):
            placement = self._pick(route, avoid, broke)
            if isinstance(placement, Failed):
                return failed or placement
            last = await self._upstream.attempt(outgoing, placement, send)
            if last is None:
                return None
            if failed is None or last.said is not None:  # what a replica itself says tells a caller most
                failed = last
            avoid |= {placement.replica}
            if last.broke:
                broke ^= {placement.replica}  # a second chance, but no third
        return failed

    def _pick(self, route: RouteRequest, avoid: frozenset[str], broke: frozenset[str]) -> Placement | Failed:
        """Where no other is left, one whose connection broke may serve it on a new one."""
        try:
            return self._front.picker.pick(route, avoid)
        except Unavailable as error:
            if not avoid & broke:
                return Failed(failure_of(error))
        return self._pick(route, avoid - broke, frozenset())

    def _no_room(self, headers: Headers) -> Failure | None:
        """Before anything of it is read."""
        options = self._options
        if len(headers) > options.headers_max:
            return Failure(431, "too_many_headers", f"need at most {options.headers_max} headers")
        if self._running >= options.requests_max:
            return Failure(429, "too_many_requests", f"{options.requests_max} requests are running already")
        if header(headers, "content-encoding") not in ("", "identity"):
            return Failure(415, "content_encoding", "content-encoding: send the body uncompressed")
        length = header(headers, "content-length")
        if length and int(length) > options.body_bytes_max:  # the server has checked that it is a number
            return _too_long(options)
        return None

    async def _data(self, headers: Headers, receive: Receive) -> bytes | Failure | None:
        """The body; None = the caller left while it was sending it."""
        data = bytearray()
        try:
            async with asyncio.timeout(self._options.body_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    data += message.get("body", b"")
                    if len(data) > self._options.body_bytes_max:
                        return _too_long(self._options)
                    if not message.get("more_body", False):
                        return bytes(data)
        except TimeoutError:
            told = f"the body did not come in {self._options.body_s:g} s"
            return Failure(408, "body_too_slow", told)

    def _admitted(self, headers: Headers) -> Caller:
        return self._front.door.admit(header(headers, "authorization"), header(headers, "x-kvstore-tenant"))

    async def _route(self, body: Body, caller: Caller, headers: Headers) -> RouteRequest:
        encoded = await self._front.tokenizers.encode(body)
        named = header(headers, self._options.session_header)
        slo_s = _slo_s(header(headers, self._options.slo_header), self._options)
        session = session_of(body, named, caller.tenant)
        return RouteRequest(
            body.model, encoded.tokens, encoded.exact, session, caller.tenant, caller.salt, slo_s
        )

    def _outgoing(self, body: Body, caller: Caller, headers: Headers) -> Outgoing:
        ask_usage = self._options.ask_usage
        return Outgoing(
            body.path,
            request_headers(headers),
            "" if self._front.door.opaque else header(headers, "authorization"),
            upstream_body(body, caller.salt, ask_usage=ask_usage),
            ask_usage and body.stream and not body.wants_usage,
            body.removed,
        )


async def _while_there(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Do this while the caller is there: when it leaves, the work is cancelled, and with it the replica's."""
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_left(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
    finally:
        watching.cancel()
        if not working.done():
            working.cancel()
        await asyncio.wait((working, watching))
    if not working.cancelled():
        working.result()


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _nothing() -> MutableMapping[str, Any]:
    """`receive` of whoever has read all there is."""
    return {"type": "http.disconnect"}


def _slo_s(text: str, options: ProxyOptions) -> float | None:
    if not text:
        return options.slo_s
    try:
        slo_s = float(text)
    except ValueError:
        slo_s = 0.0
    if not 0 < slo_s <= _SLO_S_MAX:
        raise BadRequest(f"{options.slo_header}: need seconds above 0, got {text!r:.80}")
    return slo_s


def _too_long(options: ProxyOptions) -> Failure:
    return Failure(413, "body_too_long", f"body: need at most {options.body_bytes_max} bytes")


def _respond(failed: Failed) -> Response:
    """With the replica's own words where it had some."""
    if failed.said is None:
        return failed.failure.response()
    response = Response(failed.said, failed.failure.status)
    response.raw_headers += [pair for pair in failed.headers if pair[0] != b"content-length"]
    return response


def _json(value: Mapping[str, Any]) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


async def _not_here(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    what = f"{request.method} {request.url.path:.200}"
    if status == 405:
        return Failure(405, "method_not_allowed", f"{what}: another method is served; {_SERVED}").response()
    return Failure(status, "not_found", f"{what} is not served; there are {_SERVED}").response()
