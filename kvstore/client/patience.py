"""How a caller waits for a reply that is due in microseconds: look a little while, then sleep.

Waking a thread that sleeps costs 30 to 60 µs in a virtual machine, as much as the daemon's whole answer. So
a waiter first looks at the socket again and again, for LOOK_S at most. Where that does not help (the daemon
shares this CPU, or is busy), it stops looking and tries only now and then whether that has changed.
"""

from __future__ import annotations

import select
import socket

from kvstore.clock import Clock

__all__ = ["Patience"]

# An answer to a lookup takes 30 to 150 µs; looking longer would burn CPU that others could use.
LOOK_S = 150e-6
# Looks in vain before it sleeps at once, and sleeps before it looks again.
_VAIN_MAX = 4
_SLEEPS = 32


class Patience:
    """Waits for a socket to become readable. One waiter at a time.

    Args:
        sock: stays open as long as somebody waits.
        clock: monotonic.
    """

    def __init__(self, sock: socket.socket, clock: Clock) -> None:
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._clock = clock
        self._vain = 0
        self._sleeps = 0

    def readable(self, deadline: float) -> bool:
        """Whether there is something to read (or the end of the stream) by `deadline`."""
        if self._vain < _VAIN_MAX or self._sleeps >= _SLEEPS:
            if self._look(min(deadline, self._clock.now() + LOOK_S)):
                self._vain = self._sleeps = 0
                return True
            self._vain, self._sleeps = min(self._vain + 1, _VAIN_MAX), 0
        self._sleeps += 1
        remaining_s = deadline - self._clock.now()
        # Rounded up, so that the last poll before the deadline does not spin; a mere question does not wait.
        remaining_ms = int(remaining_s * 1000) + 1 if remaining_s > 0 else 0
        return bool(self._poll.poll(remaining_ms))

    def _look(self, until: float) -> bool:
        poll, now = self._poll.poll, self._clock.now
        while not poll(0):
            if now() >= until:
                return False
        return True
