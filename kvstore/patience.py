"""How to wait for what is due in microseconds: look a little while, then sleep.

Waking a thread that sleeps costs 30 to 60 µs in a virtual machine, about half of it paid by whoever wakes
it: together as much as the daemon's whole answer. So both ends of a conversation look at their sockets again
and again for a moment before they sleep: the client for its reply, the daemon for what a caller that has just
been answered asks next (an Extend, a Release, the next request of the same engine step). Where that does not
help (both share one CPU, or the other is busy), they stop looking and try only now and then whether it has
changed.
"""

from __future__ import annotations

import select
import selectors
import socket
from collections.abc import Callable
from typing import TypeVar

from kvstore.clock import Clock, MonotonicClock

__all__ = ["LookingSelector", "Patience", "Waiter"]

T = TypeVar("T")

# An answer to a lookup takes 30 to 150 µs; looking longer would burn CPU that others could use.
REPLY_S = 150e-6
# Between an answer and the next question lies the Python of a client that does nothing else.
NEXT_S = 100e-6
# Looks in vain before it sleeps at once, and sleeps before it looks again.
_VAIN_MAX = 4
_SLEEPS = 32


class Patience:
    """Decides whether to look, and looks.

    Args:
        look_s: look this long at most.
        clock: monotonic.
    """

    def __init__(self, look_s: float, clock: Clock) -> None:
        self._look_s = look_s
        self._clock = clock
        self._vain = 0
        self._sleeps = 0

    def look(self, ready: Callable[[], T], deadline: float) -> T | None:
        """What `ready` gives as soon as that is true; None: sleep now, it is not (or nobody looked)."""
        if self._vain >= _VAIN_MAX and self._sleeps < _SLEEPS:
            self._sleeps += 1
            return None
        now = self._clock.now
        until = min(deadline, now() + self._look_s)
        while not (got := ready()):
            if now() >= until:
                self._vain, self._sleeps = min(self._vain + 1, _VAIN_MAX), 0
                return None
        self._vain = self._sleeps = 0
        return got


class Waiter:
    """Waits for a socket to become readable. One waiter at a time.

    Args:
        sock: stays open as long as somebody waits.
        clock: monotonic.
    """

    def __init__(self, sock: socket.socket, clock: Clock) -> None:
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._clock = clock
        self._patience = Patience(REPLY_S, clock)

    def readable(self, deadline: float) -> bool:
        """Whether there is something to read (or the end of the stream) by `deadline`."""
        if self._patience.look(self._ready, deadline):
            return True
        remaining_s = deadline - self._clock.now()
        # Rounded up, so that the last poll before the deadline does not spin; a mere question does not wait.
        remaining_ms = int(remaining_s * 1000) + 1 if remaining_s > 0 else 0
        return bool(self._poll.poll(remaining_ms))

    def _ready(self) -> bool:
        return bool(self._poll.poll(0))


_Events = list[tuple[selectors.SelectorKey, int]]


class LookingSelector(selectors.DefaultSelector):
    """For an event loop: after it was busy it looks a moment before it sleeps; idle, it just sleeps."""

    def __init__(self, clock: Clock | None = None) -> None:
        super().__init__()
        self._clock = clock or MonotonicClock()
        self._patience = Patience(NEXT_S, self._clock)
        self._busy = False

    def select(self, timeout: float | None = None) -> _Events:
        """As every selector: events by `timeout` seconds, None = whenever."""
        if timeout is not None and timeout <= 0:  # the loop has work: it does not sleep
            now = super().select(timeout)
            self._busy = self._busy or bool(now)
            return now
        if self._busy:
            deadline = float("inf") if timeout is None else self._clock.now() + timeout
            if seen := self._patience.look(self._ready, deadline):
                return seen
            timeout = None if timeout is None else max(0.0, deadline - self._clock.now())
        events = super().select(timeout)
        self._busy = bool(events)
        return events

    def _ready(self) -> _Events:
        return super().select(0)
