"""One request on its way: to a replica, and its answer chunk by chunk back to the caller.

    attempt ──refused, reset, 502, 503, no byte in time──→ Failed    the caller has heard nothing: try another
       └──first byte of the body──→ passed on ──→ done               from here on nobody else is asked

The head of an answer waits for the first byte of its body: an engine says 200 at once and may still die in
its queue or its prefill, where another replica can take over unnoticed.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import structlog
from starlette.types import Send

from kvstore.router.front import Front
from kvstore.router.headers import answer_headers, header
from kvstore.router.placing import Flight, Placement
from kvstore.router.proxy_options import ProxyOptions
from kvstore.router.replies import Failure
from kvstore.router.usage import BodyTap, EventTap, NoTap, Tap
from kvstore.router.wire import Answer, Broken, Connections, WireError

__all__ = ["Failed", "Outgoing", "Upstream"]

_log = structlog.get_logger(__name__)

# What another replica may do better: this one is gone, is restarting or has no room.
_ELSEWHERE = (502, 503)
# Of an answer that is kept because another replica may do better: its error, to be passed on if none does.
_ERROR_BYTES_MAX = 64 << 10


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A request as a replica gets it.

    Attributes:
        path: such as /v1/completions.
        headers: without those of credentials.
        authorization: of the caller, "" = not for replicas.
        body: JSON.
        hide_usage: the usage of the stream is for us alone.
        removed: names of fields that were taken out.
    """

    path: str
    headers: list[tuple[bytes, bytes]]
    authorization: str
    body: bytes
    hide_usage: bool
    removed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Failed:
    """An attempt that nobody but us knows of.

    Attributes:
        failure: what to say if no other replica does better.
        broke: its connection did, perhaps because it was an old one that the replica was just closing.
        said: the replica's own answer, None = it gave none.
        headers: of that.
    """

    failure: Failure
    broke: bool = False
    said: bytes | None = None
    headers: tuple[tuple[bytes, bytes], ...] = ()


@dataclass(frozen=True, slots=True)
class _Begun:
    """An answer whose first byte is here.

    Attributes:
        answer: with its head.
        first: the first chunk of its body, None = it has none.
    """

    answer: Answer
    first: bytes | None

    def says(self, name: str) -> str:
        """A header's value in lower case, "" = it is not there."""
        return header(self.answer.headers, name).lower()


class _Stalled(Exception):
    """The caller takes nothing any more."""


class Upstream:
    """Sends requests to replicas.

    Args:
        connections: to replicas.
        front: its core is told what becomes of every placement.
        options: limits.
    """

    def __init__(self, connections: Connections, front: Front, options: ProxyOptions) -> None:
        self._connections = connections
        self._front = front
        self._options = options

    async def attempt(self, outgoing: Outgoing, placement: Placement, send: Send) -> Failed | None:
        """Send a request to the replica it was placed on, and pass its answer on.

        The placement's ticket is finished when this returns or raises, also when it is cancelled.

        Returns:
            None = the caller has an answer, whole or broken off; else it has not heard a byte.
        """
        with Flight(self._front.picker, placement.ticket, self._front.clock) as flight:
            flight.sent()
            begun = await self._begin(outgoing, placement)
            if isinstance(begun, Failed):
                flight.failed = True
                _log.warning("a replica failed", replica=placement.replica, why=begun.failure.message)
                return begun
            try:
                flight.first_byte()
                await self._pass_on(begun, outgoing, placement, flight, send)
            finally:
                begun.answer.close()
        return None

    async def _begin(self, outgoing: Outgoing, placement: Placement) -> _Begun | Failed:
        """Up to the first byte of the answer's body. Whatever does not lead to one closes the answer."""
        name, answer, begun = placement.replica, None, None
        try:
            async with asyncio.timeout(self._options.first_byte_s):
                url = placement.url.rstrip("/") + outgoing.path
                answer = await self._connections.ask(
                    "POST", url, self._headers(outgoing, name), outgoing.body
                )
                if answer.status in _ELSEWHERE:
                    return await _refusal(answer, name)
                begun = _Begun(answer, await answer.chunk())
                return begun
        except TimeoutError:
            told = f"replica {name} said nothing in {self._options.first_byte_s:g} s"
            return Failed(Failure(504, "timed_out", told))
        except WireError as error:
            told = f"replica {name} does not answer: {error}"
            return Failed(Failure(502, "upstream_unreachable", told), isinstance(error, Broken))
        finally:
            if answer is not None and begun is None:
                answer.close()

    def _headers(self, outgoing: Outgoing, replica: str) -> list[tuple[bytes, bytes]]:
        key = self._front.keys.get(replica, "")
        authorization = f"Bearer {key}" if key else outgoing.authorization
        shown = [(b"authorization", authorization.encode("latin-1"))] if authorization else []
        return [*outgoing.headers, *shown]

    async def _pass_on(
        self, begun: _Begun, outgoing: Outgoing, placement: Placement, flight: Flight, send: Send
    ) -> None:
        flight.failed = begun.answer.status >= 500
        events = begun.says("content-type").startswith("text/event-stream")
        tap = _tap(begun, events=events, hide_usage=outgoing.hide_usage)
        passing = _Passing(send, self._options, tap)
        try:
            told = self._told(outgoing, placement)
            await passing.start(begun.answer, told, changed=outgoing.hide_usage and events)
            await passing.body(begun)
        except _Stalled:
            _log.info("a caller takes nothing", replica=placement.replica)
        except (TimeoutError, WireError) as error:
            flight.failed = True
            why = "it fell silent" if isinstance(error, TimeoutError) else str(error)
            _log.warning("an answer broke off", replica=placement.replica, why=why)
            if events:
                failure = Failure(502, "broken_off", f"replica {placement.replica} broke off: {why}")
                await passing.last_words(failure.event())
            # Else the connection is closed in the middle: the caller must not take half for the whole.
        finally:
            flight.heard(tap.usage.cached_tokens, tap.usage.prompt_tokens, tap.usage.output_tokens)

    def _told(self, outgoing: Outgoing, placement: Placement) -> list[tuple[bytes, bytes]]:
        if not self._options.show_placement:
            return []
        told = [
            (b"x-kvstore-replica", placement.replica.encode("ascii", "replace")),
            (b"x-kvstore-expected-tokens", str(placement.expected_tokens).encode()),
        ]
        if outgoing.removed:
            told.append((b"x-kvstore-removed", ", ".join(outgoing.removed).encode()))
        return told


class _Passing:
    """An answer on its way to the caller. `send` waits while the caller is slow, and so does the replica."""

    def __init__(self, send: Send, options: ProxyOptions, tap: Tap) -> None:
        self._send = send
        self._options = options
        self._tap = tap

    async def start(self, answer: Answer, told: list[tuple[bytes, bytes]], *, changed: bool) -> None:
        headers = answer_headers(answer.headers, changed=changed) + told
        await self._send({"type": "http.response.start", "status": answer.status, "headers": headers})

    async def body(self, begun: _Begun) -> None:
        chunk = begun.first
        while chunk is not None:
            await self._pass(self._tap.feed(chunk))
            async with asyncio.timeout(self._options.idle_s):
                chunk = await begun.answer.chunk()
        await self._pass(self._tap.end(), more=False)

    async def last_words(self, event: bytes) -> None:
        """End a stream of events so that the caller can tell it from one that is whole."""
        try:
            await self._pass(event, more=False)
        except _Stalled:
            _log.info("a caller takes nothing")

    async def _pass(self, data: bytes, *, more: bool = True) -> None:
        if not data and more:
            return
        try:
            async with asyncio.timeout(self._options.client_stall_s):
                await self._send({"type": "http.response.body", "body": data, "more_body": more})
        except TimeoutError:
            raise _Stalled from None


def _tap(begun: _Begun, *, events: bool, hide_usage: bool) -> Tap:
    if begun.says("content-encoding") not in ("", "identity"):
        return NoTap()  # compressed although we asked not to
    return EventTap(hide_usage=hide_usage) if events else BodyTap()


async def _refusal(answer: Answer, replica: str) -> Failed:
    """Its words are kept, unless they are long."""
    failure = Failure(answer.status, "upstream_error", f"replica {replica} refused")
    said = bytearray()
    while (chunk := await answer.chunk()) is not None:
        said += chunk
        if len(said) > _ERROR_BYTES_MAX:
            return Failed(failure)
    headers = answer_headers(answer.headers, changed=True)
    return Failed(failure, said=bytes(said), headers=tuple(headers))
