"""One connection for an event loop: several requests in flight.

asyncio's streams cannot receive file descriptors, so this reads the raw socket from `add_reader`.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvstore.client.sockets import close_fds, hang_up, has_hung_up, open_socket, receive
from kvstore.client.wire import Wire
from kvstore.clock import Clock
from kvstore.errors import BadRequest, DeadlineExceeded, Unavailable
from kvstore.rpc.messages import Progress, Reply, Request

__all__ = ["LoopLink"]


class LoopLink:
    """See `effects.Link`. Only the loop's thread calls it."""

    def __init__(self, sock: socket.socket, clock: Clock, wake: asyncio.Event) -> None:
        self.on_notice: Callable[[Progress], None] | None = None
        self._loop = asyncio.get_running_loop()
        self._sock = sock
        self._clock = clock
        self._wake = wake
        self._wire = Wire()
        self._waiting: dict[int, asyncio.Future[Reply]] = {}
        self._listeners: set[asyncio.Future[None]] = set()
        self._fds: list[int] = []
        self._send_turn = asyncio.Lock()
        self._dead = ""
        self._closed = False
        self._loop.add_reader(sock.fileno(), self._readable)

    @staticmethod
    def connect(path: Path, clock: Clock, wake: asyncio.Event) -> LoopLink:
        """Raises Unavailable when nobody listens at `path`; `wake` is set when the link dies."""
        return LoopLink(open_socket(path), clock, wake)

    @property
    def dead(self) -> str:
        return self._dead

    def hung_up(self) -> bool:
        return bool(self._dead) or has_hung_up(self._sock)

    async def call(self, message: Request, deadline: float) -> Reply:
        """Send a request and await its reply.

        Raises:
            Unavailable: the connection is, or just became, unusable.
            DeadlineExceeded: no reply in time. What the daemon did is unknown, so the link is dead too.
        """
        if self._dead:
            raise Unavailable(self._dead)
        ident, frame = self._wire.request(message)
        reply: asyncio.Future[Reply] = self._loop.create_future()
        self._waiting[ident] = reply
        try:
            async with asyncio.timeout(deadline - self._clock.now()):
                await self._send(frame)
                return await reply
        except TimeoutError:
            reason = f"no answer to {type(message).__name__} in time"
            self.fail(reason)
            raise DeadlineExceeded(reason) from None
        except asyncio.CancelledError:
            self.fail("a call was cancelled half-way")  # the frame may be cut; operations are shielded
            raise
        finally:
            self._waiting.pop(ident, None)
            if reply.done() and not reply.cancelled():
                reply.exception()  # seen: a deadline and a failure may meet

    async def hear(self, done: Callable[[], bool], deadline: float) -> bool:
        """Await the notices that make `done` true; False at the deadline. Raises Unavailable."""
        while not done():
            if self._dead:
                raise Unavailable(self._dead)
            notice: asyncio.Future[None] = self._loop.create_future()
            self._listeners.add(notice)
            try:
                async with asyncio.timeout(deadline - self._clock.now()):
                    await notice
            except TimeoutError:
                return False
            finally:
                self._listeners.discard(notice)
        return True

    def fail(self, reason: str) -> None:
        if self._dead:
            return
        self._dead = reason
        self._loop.remove_reader(self._sock.fileno())
        hang_up(self._sock)
        waiters: list[asyncio.Future[Any]] = [*self._waiting.values(), *self._listeners]
        for waiter in waiters:
            if not waiter.done():
                waiter.set_exception(Unavailable(reason))
        self._wake.set()

    def take_fds(self) -> list[int]:
        fds, self._fds = self._fds, []
        return fds

    def close(self) -> None:
        self.fail("closed")
        if not self._closed:
            self._closed = True
            # A sender that waits for room has its writer registered with the loop under this number.
            self._loop.remove_writer(self._sock.fileno())
            close_fds(self._fds)
            self._sock.close()

    def abandon(self) -> None:
        """In a forked child: drop this copy of the descriptor without ending the parent's connection."""
        self._dead = self._dead or "belongs to another process"
        self._sock.close()

    async def _send(self, frame: bytes) -> None:
        async with self._send_turn:
            rest = memoryview(frame)
            try:
                with contextlib.suppress(BlockingIOError):
                    rest = rest[self._sock.send(rest, socket.MSG_NOSIGNAL) :]
                if rest:
                    await self._loop.sock_sendall(self._sock, rest)
            except OSError as error:
                self.fail(f"connection lost: {error}")
                raise Unavailable(self._dead) from None

    def _readable(self) -> None:
        try:
            data = receive(self._sock, self._fds)
            if not data:
                self.fail("the daemon closed the connection")
                return
            frames = self._wire.feed(data)
        except BlockingIOError:
            return
        except BadRequest as error:
            self.fail(f"malformed reply: {error}")
            return
        except OSError as error:
            self.fail(f"connection lost: {error}")
            return
        for frame in frames:
            if isinstance(frame.body, Progress):
                self._notice(frame.body)
                continue
            waiter = self._waiting.get(frame.id)
            if waiter is not None and not waiter.done():
                waiter.set_result(frame.body)

    def _notice(self, notice: Progress) -> None:
        if self.on_notice is not None:
            self.on_notice(notice)
        for listener in self._listeners:
            if not listener.done():
                listener.set_result(None)
