"""Datagrams with descriptors to somebody who may be slow: in order, and the event loop never waits."""

from __future__ import annotations

import asyncio
import os
import select
import socket
import time
from collections import deque
from collections.abc import Iterable

import structlog

from kvstore.keep.wire import close_all

__all__ = ["WAITING_MAX", "Datagrams", "notify_address"]

log = structlog.get_logger()

# Datagrams that wait for a reader; a session is two. Those beyond are lost, as everything is that a keeper
# never heard of.
WAITING_MAX = 4096
_CALL_S = 1.0


def notify_address(named: str) -> str:
    """What NOTIFY_SOCKET names, for `connect`; "" = nothing that we could reach."""
    if not named.startswith(("/", "@")):
        return ""
    return "\0" + named[1:] if named.startswith("@") else named


class Datagrams:
    """One non-blocking socket. Without a loop, a send waits for the reader, for a second at most.

    Args:
        address: of the reader; "" = there is none, and everything is lost.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._sock: socket.socket | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: deque[tuple[bytes, list[int]]] = deque()
        self._deaf = False  # it has let us wait in vain: not again before it reads

    def send(self, text: str, fds: Iterable[int] = ()) -> None:
        """Send after everything that waits; the descriptors stay the caller's. Never raises for it."""
        if not self._address:
            return
        if len(self._waiting) >= WAITING_MAX:
            log.warning("the service manager does not read; not told", lost=text.replace("\n", " "))
            return
        self._waiting.append((text.encode(), [os.dup(fd) for fd in fds]))
        if len(self._waiting) == 1 or self._loop is None:
            self._flush()
        if self._waiting and self._loop is None:
            self._wait()

    def serve(self, loop: asyncio.AbstractEventLoop) -> None:
        """From now on what does not go out at once is sent by this loop."""
        self._loop = loop
        if self._waiting and self._sock is not None:
            loop.add_writer(self._sock.fileno(), self._flush)

    def leave(self) -> None:
        """The loop's time is over: from now on a send waits again."""
        if self._loop is not None and self._sock is not None:
            self._loop.remove_writer(self._sock.fileno())
        self._loop = None
        if self._waiting:
            self._wait()

    def close(self) -> None:
        """Give a second to what waits, then it is lost."""
        self.leave()
        for _, fds in self._waiting:
            close_all(fds)
        self._waiting.clear()
        self._disconnect()

    def _wait(self) -> None:
        deadline = time.monotonic() + (0.0 if self._deaf else _CALL_S)
        while self._waiting and self._sock is not None:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([], [self._sock], [], left)[1]:
                self._deaf = True
                return
            self._flush()

    def _flush(self) -> None:
        while self._waiting:
            data, fds = self._waiting[0]
            try:
                self._send(data, fds)
            except BlockingIOError:
                if self._loop is not None and self._sock is not None:
                    self._loop.add_writer(self._sock.fileno(), self._flush)
                return
            except OSError as error:
                log.warning("the service manager does not hear us", reason=str(error))
                self._disconnect()
            else:
                self._deaf = False
            self._waiting.popleft()
            close_all(fds)
        if self._loop is not None and self._sock is not None:
            self._loop.remove_writer(self._sock.fileno())

    def _send(self, data: bytes, fds: list[int]) -> None:
        """Once more on a new socket: the reader may have been replaced."""
        fresh = self._sock is None
        try:
            sock = self._connected()
            if fds:
                socket.send_fds(sock, [data], fds, socket.MSG_NOSIGNAL)
            else:
                sock.send(data, socket.MSG_NOSIGNAL)
        except (ConnectionError, FileNotFoundError):
            self._disconnect()
            if fresh:
                raise
            self._send(data, fds)

    def _connected(self) -> socket.socket:
        if self._sock is None:
            self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
            self._sock.connect(self._address)
        return self._sock

    def _disconnect(self) -> None:
        if self._sock is not None:
            if self._loop is not None:
                self._loop.remove_writer(self._sock.fileno())
            self._sock.close()
            self._sock = None
