"""GET /metrics and /healthz over HTTP/1.1: one small answer per connection, everything bounded.

No web framework: two fixed paths need a request line, one header and a deadline. It runs on the daemon's
loop, so that no other thread ever reads the store.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import structlog
from prometheus_client.registry import Collector

from kvstore.config import MetricsConfig
from kvstore.errors import ConfigError
from kvstore.rpc.metrics.collector import Page
from kvstore.rpc.server import free_path

__all__ = ["MetricsServer"]

log = structlog.get_logger()

HEAD_BYTES_MAX = 8 << 10  # request line and headers; Prometheus sends about 300 bytes
CONNECTIONS_MAX = 32
REQUEST_S = 5.0  # to send a request, and again to read the answer
# Pages at once, and a second after that: at 4 ms a page even a hostile scraper gets less than a tenth of the
# loop. Prometheus asks every 15 s.
PAGES_BURST, PAGES_PER_S = 60.0, 20.0
# Of a request that is refused before its end: closing with bytes unread resets the connection, and the
# reason would be lost on its way.
UNREAD_BYTES_MAX = 64 << 10
# Text is made until this much time is gone, then everybody else's turn comes.
TURN_S = 0.001
_REASONS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    408: "Request Timeout",
    429: "Too Many Requests",
    431: "Request Header Fields Too Large",
    503: "Service Unavailable",
}
_UNREAD = (408, 431, 503)


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    body: bytes
    content_type: str = "text/plain; charset=utf-8"


class MetricsServer:
    """Listens on `metrics.listen`.

    Args:
        config: where; an empty address serves nothing.
        collector: what.
        socket_mode: permission bits of a Unix socket.
    """

    def __init__(self, config: MetricsConfig, collector: Collector, socket_mode: int = 0o600) -> None:
        self._config = config
        self._collector = collector
        self._socket_mode = socket_mode
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False
        self._pages, self._pages_at_s = PAGES_BURST, 0.0
        self.address = ""
        """Where it listens: host:port, or unix:PATH; "" while it does not."""

    async def open(self) -> None:
        """Bind and listen, if there is an address.

        Raises:
            ConfigError: the address cannot be bound.
        """
        if not self._config.listen:
            log.info("no metrics: set metrics.listen to serve them", example="metrics.listen=127.0.0.1:9464")
            return
        try:
            path = self._config.socket_path
            self._server = await (self._open_unix(path) if path else self._open_tcp())
        except OSError as error:
            reason = error.strerror or str(error)
            raise ConfigError(f"metrics.listen: cannot bind {self._config.listen}: {reason}") from None
        log.info("metrics served", address=self.address)

    async def _open_tcp(self) -> asyncio.Server:
        host, port = self._config.host_port
        server = await asyncio.start_server(self._connected, host, port, limit=HEAD_BYTES_MAX)
        bound = server.sockets[0].getsockname()
        self.address = f"[{bound[0]}]:{bound[1]}" if ":" in bound[0] else f"{bound[0]}:{bound[1]}"
        if host not in ("127.0.0.1", "::1", "localhost"):
            log.warning(
                "metrics.listen can be reached from other machines: they see tenants' names and traffic",
                address=self.address,
                fix="listen on 127.0.0.1, or let a firewall choose who may scrape",
            )
        return server

    async def _open_unix(self, path: str) -> asyncio.Server:
        free_path(Path(path), "metrics.listen")
        previous = os.umask(0o777 & ~self._socket_mode)
        try:
            server = await asyncio.start_unix_server(self._connected, path, limit=HEAD_BYTES_MAX)
        finally:
            os.umask(previous)
        self.address = f"unix:{path}"
        return server

    async def close(self) -> None:
        """Stop listening and end what is under way."""
        if self._server is None:
            return
        self._server.close()
        if self._config.socket_path:
            _unlink(self._config.socket_path)
        self._closing = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()
        self._server, self.address = None, ""

    # ---- one connection ----------------------------------------------------------------------------------

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._exchange(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError, TimeoutError):
            pass  # it went away, or never read its answer
        except asyncio.CancelledError:
            if not self._closing:
                raise
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._tasks) > 2 * CONNECTIONS_MAX:
            return
        if len(self._tasks) > CONNECTIONS_MAX:
            answer, head = _Answer(503, b"too many connections; try again\n"), b""
        else:
            answer, head = await self._ask(reader)
        body = b"" if head.startswith(b"HEAD ") else answer.body
        lines = [
            f"HTTP/1.1 {answer.status} {_REASONS[answer.status]}",
            f"Content-Type: {answer.content_type}",
            f"Content-Length: {len(answer.body)}",
            *(["Allow: GET, HEAD"] if answer.status == 405 else []),
            "Connection: close",
        ]
        writer.write("\r\n".join([*lines, "", ""]).encode("latin-1") + body)
        async with asyncio.timeout(REQUEST_S):
            await writer.drain()
            if answer.status in _UNREAD:
                writer.write_eof()
                await reader.read(UNREAD_BYTES_MAX)
            writer.close()
            await writer.wait_closed()

    async def _ask(self, reader: asyncio.StreamReader) -> tuple[_Answer, bytes]:
        """Read one request and answer it; a request that is none gets an answer too."""
        try:
            async with asyncio.timeout(REQUEST_S):
                head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            return _Answer(431, f"at most {HEAD_BYTES_MAX} bytes of request and headers\n".encode()), b""
        except TimeoutError:
            return _Answer(408, f"no whole request within {REQUEST_S:g} s\n".encode()), b""
        line, _, rest = head.partition(b"\r\n")
        parts = line.decode("latin-1").split(" ")
        if len(parts) != 3 or not parts[2].startswith("HTTP/1."):
            return _Answer(400, b"not HTTP/1.1\n"), b""
        if parts[0] not in ("GET", "HEAD"):
            return _Answer(405, b"only GET and HEAD\n"), head
        answer = _PATHS.get(parts[1].partition("?")[0])
        if answer is None:
            return _Answer(404, b"here are /metrics and /healthz\n"), head
        return await answer(self, _header(rest, "accept")), head

    async def _metrics(self, accept: str) -> _Answer:
        loop = asyncio.get_running_loop()
        earned = (loop.time() - self._pages_at_s) * PAGES_PER_S
        self._pages, self._pages_at_s = min(PAGES_BURST, self._pages + earned), loop.time()
        if self._pages < 1.0:
            return _Answer(429, f"at most {PAGES_PER_S:g} pages a second\n".encode())
        self._pages -= 1.0
        page = Page(self._collector, accept)
        body, turn_s = bytearray(), loop.time()
        for piece in page.pieces():
            body += piece
            if loop.time() - turn_s > TURN_S:
                await asyncio.sleep(0)
                turn_s = loop.time()
        return _Answer(200, bytes(body), page.content_type)

    async def _health(self, _: str) -> _Answer:
        return _Answer(200, b"ok\n")


_PATHS: dict[str, Callable[[MetricsServer, str], Awaitable[_Answer]]] = {
    "/metrics": MetricsServer._metrics,
    "/healthz": MetricsServer._health,
}


def _unlink(path: str) -> None:
    Path(path).unlink(missing_ok=True)


def _header(lines: bytes, name: str) -> str:
    for line in lines.decode("latin-1").split("\r\n"):
        key, _, value = line.partition(":")
        if key.strip().lower() == name:
            return value.strip()
    return ""
