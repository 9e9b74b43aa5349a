"""One connection for threads: several requests in flight, no thread of its own.

Whoever waits for a reply and finds nobody reading becomes the reader and hands every reply to its waiter, so
a lone caller pays no hop between threads. The upkeep thread watches for a hang-up only (POLLRDHUP) and so is
not woken by replies.
"""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable
from pathlib import Path

from kvstore.client.sockets import close_fds, hang_up, has_hung_up, open_socket, receive
from kvstore.client.wire import Wire
from kvstore.clock import Clock
from kvstore.errors import BadRequest, DeadlineExceeded, Unavailable
from kvstore.patience import Waiter
from kvstore.rpc.messages import Progress, Reply, ReplyFrame, Request

__all__ = ["ThreadLink"]


class ThreadLink:
    """See `effects.Link`. Every method may be called from any thread."""

    def __init__(self, sock: socket.socket, clock: Clock) -> None:
        self.on_notice: Callable[[Progress], None] | None = None
        self._sock = sock
        self._clock = clock
        self._wire = Wire()
        self._waiter = Waiter(sock, clock)
        self._lock = threading.RLock()  # guards everything below
        self._changed = threading.Condition(self._lock)
        self._waiting = 0  # threads in `_changed`: mostly none, and then nobody need be notified
        self._sending = threading.Lock()
        self._replies: dict[int, Reply] = {}
        self._fds: list[int] = []
        self._reading = False
        self._users = 0
        self._dead = ""
        self._closed = False

    @staticmethod
    def connect(path: Path, clock: Clock) -> ThreadLink:
        """Raises Unavailable when nobody listens at `path`."""
        return ThreadLink(open_socket(path), clock)

    @property
    def dead(self) -> str:
        return self._dead

    def hung_up(self) -> bool:
        with self._lock:  # so that nobody closes the socket meanwhile
            return bool(self._dead) or has_hung_up(self._sock)

    def fileno(self) -> int:
        """For the upkeep thread's poll; it is the one that closes."""
        return self._sock.fileno()

    def call(self, message: Request, deadline: float) -> Reply:
        """Send a request and await its reply.

        Raises:
            Unavailable: the connection is, or just became, unusable.
            DeadlineExceeded: no reply in time. What the daemon did is unknown, so the link is dead too.
        """
        self._enter()
        try:
            if not self._sending.acquire(timeout=max(0.0, deadline - self._clock.now())):
                raise self._late(message)
            try:
                with self._lock:
                    ident, frame = self._wire.request(message)
                self._send(frame, deadline, message)
            finally:
                self._sending.release()
            return self._reply(ident, deadline, message)
        finally:
            self._leave()

    def hear(self, done: Callable[[], bool], deadline: float) -> bool:
        """Read until notices have made `done` true; False at the deadline. Raises Unavailable."""
        self._enter()
        try:
            while not done():
                if not self._turn(deadline, done):
                    return False
            return True
        finally:
            self._leave()

    def fail(self, reason: str) -> None:
        with self._lock:
            if not self._dead:
                self._dead = reason
                hang_up(self._sock)  # wakes every poll on it
                self._tell_waiting()

    def take_fds(self) -> list[int]:
        with self._lock:
            fds, self._fds = self._fds, []
            return fds

    def close(self) -> None:
        self.fail("closed")
        with self._lock:
            # A thread that still polls the descriptor must let go first: its number may be reused.
            while self._users:
                self._wait(None)
            if not self._closed:
                self._closed = True
                close_fds(self._fds)
                self._sock.close()

    def abandon(self) -> None:
        """In a forked child: drop this copy of the descriptor without ending the parent's connection."""
        self._dead = self._dead or "belongs to another process"
        self._sock.close()

    def _enter(self) -> None:
        """A thread uses the descriptor from here to `_leave`: it stays open so long."""
        with self._lock:
            if self._dead:
                raise Unavailable(self._dead)
            self._users += 1

    def _leave(self) -> None:
        with self._lock:
            self._users -= 1
            self._tell_waiting()

    def _wait(self, seconds: float | None) -> None:
        self._waiting += 1
        try:
            self._changed.wait(seconds)
        finally:
            self._waiting -= 1

    def _tell_waiting(self) -> None:
        if self._waiting:
            self._changed.notify_all()

    def _send(self, frame: bytes, deadline: float, message: Request) -> None:
        rest = memoryview(frame)
        while rest:
            try:
                rest = rest[self._sock.send(rest, socket.MSG_NOSIGNAL) :]
            except BlockingIOError:
                if not self._writable(deadline):
                    raise self._late(message) from None
            except OSError as error:
                raise self._lost(f"connection lost: {error}") from None

    def _reply(self, ident: int, deadline: float, message: Request) -> Reply:
        while True:
            with self._lock:
                if ident in self._replies:
                    return self._replies.pop(ident)
            if not self._turn(deadline, lambda: ident in self._replies):
                raise self._late(message)

    def _turn(self, deadline: float, done: Callable[[], bool]) -> bool:
        """Wait for news, as the reader or behind one; False at the deadline."""
        with self._lock:
            if self._dead:
                raise Unavailable(self._dead)
            if done():
                return True
            if self._reading:
                remaining = deadline - self._clock.now()
                if remaining <= 0:
                    return False
                self._wait(remaining)
                return True
            self._reading = True
        try:
            return self._read(deadline)
        finally:
            with self._lock:
                self._reading = False
                self._tell_waiting()

    def _read(self, deadline: float) -> bool:
        if not self._waiter.readable(deadline):
            return False
        arrived: list[int] = []
        try:
            data = receive(self._sock, arrived)
            if not data:
                raise self._lost("the daemon closed the connection")
            with self._lock:
                self._fds += arrived
                arrived = []
                if len(self._fds) > 2:
                    raise BadRequest("file descriptors came twice")
                self._deliver(self._wire.feed(data))
        except BlockingIOError:
            return True  # somebody's shutdown woke the poll; the next turn sees why
        except BadRequest as error:
            raise self._lost(f"malformed reply: {error}") from None
        except OSError as error:
            raise self._lost(f"connection lost: {error}") from None
        finally:
            close_fds(arrived)
        return True

    def _deliver(self, frames: list[ReplyFrame]) -> None:
        for frame in frames:
            if isinstance(frame.body, Progress):
                if self.on_notice is not None:
                    self.on_notice(frame.body)
            else:
                self._replies[frame.id] = frame.body

    def _writable(self, deadline: float) -> bool:
        poll = select.poll()
        poll.register(self._sock, select.POLLOUT)
        return bool(poll.poll(max(0, int((deadline - self._clock.now()) * 1000) + 1)))

    def _lost(self, reason: str) -> Unavailable:
        self.fail(reason)
        return Unavailable(self._dead)

    def _late(self, message: Request) -> DeadlineExceeded:
        reason = f"no answer to {type(message).__name__} in time"
        self.fail(reason)
        return DeadlineExceeded(reason)
