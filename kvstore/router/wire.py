"""HTTP/1.1 to replicas: one request on one connection at a time, connections used again while they are young.

A general client's pool looks at every connection for every request: at a thousand in flight that is most of
a core. Here a replica's idle connections are a stack, and what taking one costs does not depend on how many
requests are in flight.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from urllib.parse import urlsplit

import h11

from kvstore.clock import Clock

__all__ = ["Answer", "Broken", "Connections", "Unreachable", "WireError"]

# vLLM and uvicorn close an idle connection after 5 s; one that has been idle for this long is not used again,
# so that a request does not meet a replica's hanging up.
_IDLE_S = 2.0
_IDLE_MAX = 256  # of one replica
_READ_BYTES = 64 << 10
_HEAD_BYTES_MAX = 64 << 10
_PORTS = {"http": 80, "https": 443}


class WireError(Exception):
    """A replica cannot be talked to."""


class Unreachable(WireError):
    """There is no connection."""


class Broken(WireError):
    """The connection broke, or what came is not HTTP."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a replica listens."""

    scheme: str
    host: str
    port: int
    path: str
    name: str

    @staticmethod
    def of(url: str) -> _Place:
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise Unreachable(f"{url!r:.80} is no address: {error}") from None
        if parts.scheme not in _PORTS or not parts.hostname:
            raise Unreachable(f"{url!r:.80} is no address: need http://HOST:PORT or https://HOST:PORT")
        return _Place(
            parts.scheme,
            parts.hostname,
            port or _PORTS[parts.scheme],
            parts.path.rstrip("/"),
            parts.netloc.rpartition("@")[2],
        )


class _Connection:
    """One socket, and the state of HTTP on it."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, idle_since_s: float
    ) -> None:
        self.reader = reader
        self.writer = writer
        self.http = h11.Connection(h11.CLIENT, max_incomplete_event_size=_HEAD_BYTES_MAX)
        self.idle_since_s = idle_since_s

    def alive(self) -> bool:
        return not self.reader.at_eof() and not self.writer.transport.is_closing()

    def drop(self) -> None:
        self.writer.transport.abort()

    async def send(self, *events: h11.Event) -> None:
        data = b"".join(self.http.send(event) or b"" for event in events)
        self.writer.write(data)
        await self.writer.drain()

    async def event(self) -> h11.Event:
        """The next of what the replica says; it reads no further than it is asked."""
        while True:
            found = self.http.next_event()
            if found is h11.PAUSED:
                raise Broken("it goes on behind the end of its answer")
            if found is not h11.NEED_DATA:
                assert isinstance(found, h11.Event)
                return found
            data = await self.reader.read(_READ_BYTES)
            if not data and self.http.their_state is h11.SEND_RESPONSE:
                raise Broken("it hung up before its answer")
            self.http.receive_data(data)


class Answer:
    """A replica's answer: its head is here, its body comes. Close it, however far it was read."""

    def __init__(
        self, status: int, headers: Sequence[tuple[bytes, bytes]], connection: _Connection, home: _Home
    ) -> None:
        self.status = status
        self.headers = headers
        """Names in lower case."""
        self._connection = connection
        self._home = home
        self._over = False

    async def chunk(self) -> bytes | None:
        """The next bytes of the body as they come; None = it is complete.

        Raises:
            Broken: it never will be.
        """
        while not self._over:
            try:
                event = await self._connection.event()
            except (OSError, h11.ProtocolError) as error:
                raise Broken(_why(error)) from None
            if isinstance(event, h11.Data) and event.data:
                return bytes(event.data)
            self._over = isinstance(event, h11.EndOfMessage | h11.ConnectionClosed)
        return None

    def close(self) -> None:
        """Give the connection back if the answer was read to its end, else hang up: so the replica stops."""
        self._home.take_back(self._connection)


class _Home:
    """A replica's idle connections, the latest used on top."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._idle: list[_Connection] = []

    def idle(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.alive() and self._clock.now() - connection.idle_since_s < _IDLE_S:
                return connection
            connection.drop()
        return None

    def take_back(self, connection: _Connection) -> None:
        http = connection.http
        # What came behind the end of an answer would be taken for the beginning of the next one.
        whole = http.our_state is h11.DONE and http.their_state is h11.DONE and not http.trailing_data[0]
        if whole and len(self._idle) < _IDLE_MAX:
            http.start_next_cycle()
            connection.idle_since_s = self._clock.now()
            self._idle.append(connection)
        else:
            connection.drop()

    def drop_all(self) -> None:
        while self._idle:
            self._idle.pop().drop()


class Connections:
    """To all replicas, for one event loop. A context: leaving it closes what is idle.

    Args:
        connect_s: for one connection.
        clock: monotonic.
    """

    def __init__(self, connect_s: float, clock: Clock) -> None:
        self._connect_s = connect_s
        self._clock = clock
        self._homes: dict[tuple[str, str, int], _Home] = {}
        self._tls: ssl.SSLContext | None = None

    async def __aenter__(self) -> Connections:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        for home in self._homes.values():
            home.drop_all()

    async def ask(
        self, method: str, url: str, headers: Sequence[tuple[bytes, bytes]], body: bytes = b""
    ) -> Answer:
        """Send a request; the answer's head is there when this returns.

        Args:
            method: of HTTP.
            url: of the replica, with the path.
            headers: without host and length.
            body: may be empty.

        Raises:
            Unreachable: no connection.
            Broken: it broke before a whole head came.
        """
        place = _Place.of(url)
        home = self._homes.setdefault((place.scheme, place.host, place.port), _Home(self._clock))
        connection = home.idle() or await self._connected(place)
        try:
            made = [*headers, (b"host", place.name.encode()), (b"content-length", str(len(body)).encode())]
            request = h11.Request(method=method, target=place.path or "/", headers=made)
            await connection.send(request, *([h11.Data(data=body)] if body else []), h11.EndOfMessage())
            while isinstance(head := await connection.event(), h11.InformationalResponse):
                pass
            if not isinstance(head, h11.Response):
                raise Broken("it sent no answer")
        except (OSError, h11.ProtocolError) as error:
            connection.drop()
            raise Broken(_why(error)) from None
        except BaseException:  # also when the caller has left: nobody will read the answer
            connection.drop()
            raise
        return Answer(head.status_code, list(head.headers), connection, home)

    async def _connected(self, place: _Place) -> _Connection:
        if place.scheme == "https" and self._tls is None:
            self._tls = ssl.create_default_context()
        tls = self._tls if place.scheme == "https" else None
        try:
            async with asyncio.timeout(self._connect_s):
                reader, writer = await asyncio.open_connection(place.host, place.port, ssl=tls)
        except TimeoutError:
            raise Unreachable(f"no connection in {self._connect_s:g} s") from None
        except OSError as error:
            raise Unreachable(_why(error)) from None
        return _Connection(reader, writer, self._clock.now())


def _why(error: Exception) -> str:
    return f"{str(error) or type(error).__name__:.200}"
