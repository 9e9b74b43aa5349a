"""A proxy between real sockets: replicas that do as told, and a picker that keeps a ledger."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import uvicorn
from starlette.types import ASGIApp

from kvstore.errors import Unavailable
from kvstore.router.front import Front
from kvstore.router.placing import Placement, Replica, RouteRequest
from kvstore.router.proxy import build_app
from kvstore.router.proxy_options import ProxyOptions

__all__ = [
    "CHAT",
    "DONE",
    "Asked",
    "LedgerPicker",
    "Peer",
    "RouteScene",
    "Ticket",
    "answers",
    "chat",
    "error_of",
    "event",
    "replica",
    "route",
    "served",
    "usage_event",
]

CHAT = "/v1/chat/completions"
DONE = b"data: [DONE]\n\n"


@dataclass
class Ticket:
    """Everything that was said of one placement."""

    replica: str
    request: RouteRequest
    said: list[str] = field(default_factory=list)
    cached_tokens: int | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    ok: bool | None = None


class LedgerPicker:
    """Takes the first replica that is not to be avoided; fails the test on bookkeeping out of order."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self.known = list(replicas)
        self.tickets: list[Ticket] = []
        self.wrong: list[str] = []
        self.in_flight_max = 0
        self.picked = asyncio.Event()
        self._settled = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()

    def pick(self, request: RouteRequest, avoid: frozenset[str]) -> Placement:
        for one in self.known:
            if one.up and one.name not in avoid:
                self.tickets.append(Ticket(one.name, request))
                self.in_flight_max = max(self.in_flight_max, sum(t.ok is None for t in self.tickets))
                self.picked.set()
                return Placement(one.name, one.url, 32, "first", len(self.tickets) - 1)
        raise Unavailable("no replica is up")

    def sent(self, ticket: int) -> None:
        self._say(ticket, "sent", after=[])

    def first_byte(self, ticket: int, seconds: float) -> None:
        assert seconds >= 0
        self._say(ticket, "first_byte", after=["sent"])

    def finished(
        self,
        ticket: int,
        cached_tokens: int | None,
        prompt_tokens: int | None,
        output_tokens: int | None,
        ok: bool,
    ) -> None:
        self._say(ticket, "finished", after=[s for s in self.tickets[ticket].said if s != "finished"])
        entry = self.tickets[ticket]
        entry.cached_tokens, entry.prompt_tokens = cached_tokens, prompt_tokens
        entry.output_tokens, entry.ok = output_tokens, ok
        task = asyncio.ensure_future(self._tell())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def replicas(self) -> Sequence[Replica]:
        return self.known

    def _say(self, ticket: int, what: str, after: list[str]) -> None:
        said = self.tickets[ticket].said
        if said != after:
            self.wrong.append(f"ticket {ticket}: {what} after {said}")
        said.append(what)

    async def _tell(self) -> None:
        async with self._settled:
            self._settled.notify_all()

    async def settled(self, tickets: int) -> list[Ticket]:
        """Wait until so many tickets were given and all of them are finished."""

        def done() -> bool:
            return len(self.tickets) >= tickets and all(t.ok is not None for t in self.tickets)

        async with asyncio.timeout(10), self._settled:
            await self._settled.wait_for(done)
        assert not self.wrong
        assert all(t.said.count("finished") == 1 for t in self.tickets)
        return self.tickets


@dataclass
class Asked:
    """A request as a replica got it."""

    path: str
    headers: dict[str, str]
    raw: bytes

    @property
    def body(self) -> Any:
        return json.loads(self.raw)


class Peer:
    """One connection of a replica under a test's control."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, asked: Asked) -> None:
        self._reader = reader
        self.writer = writer
        self.asked = asked

    async def head(self, status: int = 200, kind: str = "text/event-stream", more: str = "") -> None:
        """An answer that comes in chunks."""
        line = f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ntransfer-encoding: chunked\r\n{more}\r\n"
        await self.raw(line.encode())

    async def raw(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def chunk(self, data: bytes) -> None:
        await self.raw(chunk(data))

    async def end(self) -> None:
        await self.raw(b"0\r\n\r\n")

    async def whole(self, status: int, body: bytes, kind: str = "application/json") -> None:
        head = f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n"
        await self.raw(head.encode() + body)

    def reset(self) -> None:
        """Hang up so that the other end gets an error, not an end."""
        linger = (1).to_bytes(4, "little") + (0).to_bytes(4, "little")
        self.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.writer.transport.abort()

    async def gone(self) -> None:
        """Wait until the other end has hung up."""
        async with asyncio.timeout(10):
            with contextlib.suppress(ConnectionError):
                while await self._reader.read(1 << 16):
                    pass


Act = Callable[[Peer], Awaitable[None]]


@dataclass
class Running:
    """A replica that runs."""

    name: str
    url: str
    asked: list[Asked] = field(default_factory=list)

    def known(self, *, up: bool = True) -> Replica:
        return Replica(self.name, self.url, up)


@contextlib.asynccontextmanager
async def replica(name: str, act: Act) -> AsyncIterator[Running]:
    """A replica that answers every request by `act`."""
    running = Running(name, "")

    connections: set[asyncio.Task[None]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connections.add(task)
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                while True:
                    asked = await _request(reader)
                    running.asked.append(asked)
                    await act(Peer(reader, writer, asked))
        except asyncio.CancelledError:
            pass  # the test is over; Python 3.11 would print it as a failure
        finally:
            writer.transport.abort()
            connections.discard(task)

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    running.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield running
    finally:
        server.close()
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections)
        await server.wait_closed()


async def _request(reader: asyncio.StreamReader) -> Asked:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head.strip().split("\r\n")
    pairs = [line.split(":", 1) for line in lines]
    headers = {name.lower(): value.strip() for name, value in pairs}
    raw = await reader.readexactly(int(headers.get("content-length", "0")))
    return Asked(first.split()[1], headers, raw)


@contextlib.asynccontextmanager
async def served(app: ASGIApp) -> AsyncIterator[httpx.AsyncClient]:
    """The application behind a real socket, and a client of it."""
    # The protocol must be named: asyncio sets TCP_NODELAY only then, and events would wait 40 ms for an ACK.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    config = uvicorn.Config(app, lifespan="on", log_config=None, timeout_graceful_shutdown=5)
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    await server.startup(sockets=[listener])
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    limits = httpx.Limits(max_connections=None)
    try:
        async with httpx.AsyncClient(base_url=url, timeout=10, limits=limits, trust_env=False) as client:
            yield client
    finally:
        await server.shutdown(sockets=[listener])


# ---- bodies -----------------------------------------------------------------------------------------------


def chat(text: str = "hello", **fields: Any) -> dict[str, Any]:
    """A body of a chat."""
    return {"model": "m", "messages": [{"role": "user", "content": text}], **fields}


def chunk(data: bytes) -> bytes:
    """On the wire."""
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def event(text: str) -> bytes:
    """One token of a stream."""
    choices = [{"index": 0, "delta": {"content": text}}]
    return b"data: " + json.dumps({"id": "x", "choices": choices}).encode() + b"\n\n"


def usage_event(cached: int = 32, prompt: int = 48, output: int = 2) -> bytes:
    """The event behind the last token."""
    usage = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
    usage["prompt_tokens_details"] = {"cached_tokens": cached}  # type: ignore[assignment]
    return b"data: " + json.dumps({"id": "x", "choices": [], "usage": usage}).encode() + b"\n\n"


# ---- a replica as it should be, and the whole --------------------------------------------------------------


async def answers(peer: Peer) -> None:
    """A replica as it should be."""
    if peer.asked.path == "/v1/models":
        await peer.whole(200, b'{"object": "list", "data": [{"id": "m", "object": "model"}]}')
    elif peer.asked.body.get("stream"):
        await peer.head()
        for data in (event("a"), event("b")):
            await peer.chunk(data)
        if (peer.asked.body.get("stream_options") or {}).get("include_usage"):
            await peer.chunk(usage_event())
        await peer.chunk(DONE)
        await peer.end()
    else:
        usage = {"prompt_tokens": 48, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 32}}
        await peer.whole(200, json.dumps({"choices": [{"index": 0}], "usage": usage}).encode())


class RouteScene:
    """One proxy, its client, its picker."""

    def __init__(self, client: httpx.AsyncClient, picker: LedgerPicker) -> None:
        self.client = client
        self.picker = picker

    async def post(self, body: Any, **more: Any) -> httpx.Response:
        return await self.client.post(CHAT, json=body, **more)


@contextlib.asynccontextmanager
async def route(
    *replicas: Replica, options: ProxyOptions | None = None, **parts: Any
) -> AsyncIterator[RouteScene]:
    """`parts`: of the Front, beside its core."""
    picker = LedgerPicker(replicas)
    async with served(build_app(Front(picker, **parts), options or ProxyOptions())) as client:
        yield RouteScene(client, picker)


def error_of(answer: httpx.Response) -> dict[str, Any]:
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return dict(error)
