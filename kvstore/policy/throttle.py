"""A tier that is slower than it could be, for experiments: a token bucket on somebody else's clock.

Bytes pass in the order in which they are given, a piece at a time, each at the moment at which its last byte
is through. When that is follows from when a piece came and what passed before it, not from when somebody
looked: a timer that is late by a millisecond each time costs a millisecond once, and nothing adds up.

    of a bucket that begins full, by moment t:     passed <= rate·t + burst
    between any two moments s < t:                 passed <= rate·(t − s) + burst + one piece

The piece is there because the one that ends right after s was on its way before it.
"""

from __future__ import annotations

import math

__all__ = ["RATE_MIN", "TokenBucket"]

# Bytes per second. One is a stall: a block would take days.
RATE_MIN = 1.0
# Of a piece: what rounding may take from a moment that was computed the other way round.
_ROUNDING = 1e-9


class TokenBucket:
    """Lets bytes pass at a rate. O(1) everything.

    Args:
        bytes_per_s: at least RATE_MIN; infinite = no limit.
        burst_bytes: what may pass at once after a pause; 0 = a pause earns nothing, as with a slow disk.

    Raises:
        ValueError: names the argument.
    """

    def __init__(self, bytes_per_s: float = math.inf, burst_bytes: float = 0.0) -> None:
        if not 0.0 <= burst_bytes < math.inf:
            raise ValueError(f"burst_bytes: need 0 at least, and finite, got {burst_bytes!r}")
        self.bytes_per_s = _rate(bytes_per_s)
        self.burst_bytes = burst_bytes
        self._free_s = -math.inf  # when all that passed is through, by the rate alone

    def set_rate(self, bytes_per_s: float, now_s: float) -> None:
        """Another rate from now on. A piece that is half through begins again.

        Raises:
            ValueError: as for the constructor.
        """
        rate = _rate(bytes_per_s)
        if rate != self.bytes_per_s:
            self.bytes_per_s = rate
            self._free_s = max(self._free_s, _moment(now_s))

    def starts_s(self, since_s: float) -> float:
        """From when on a piece that is there since `since_s` is being let through.

        Raises:
            ValueError: no moment.
        """
        return max(self._free_s, _moment(since_s) - self.burst_bytes / self.bytes_per_s)

    def ready_s(self, size_bytes: float, since_s: float) -> float:
        """When a piece that is there since `since_s` has passed, if it is next; never before `since_s`.

        Raises:
            ValueError: names the argument.
        """
        if not 0.0 <= size_bytes < math.inf:
            raise ValueError(f"size_bytes: need 0 at least, and finite, got {size_bytes!r}")
        return max(since_s, self.starts_s(since_s) + size_bytes / self.bytes_per_s)

    def pieces(self, size_bytes: float, since_s: float, now_s: float) -> float:
        """How many pieces of a size, all there since `since_s`, have passed by now if they are next.

        A whole number, or infinite. At least 1 from `ready_s` on.

        Raises:
            ValueError: names the argument.
        """
        if _moment(now_s) < self.ready_s(size_bytes, since_s):
            return 0
        if math.isinf(self.bytes_per_s) or not size_bytes:
            return math.inf
        passed = (now_s - self.starts_s(since_s)) * self.bytes_per_s
        return max(1, math.floor(passed / size_bytes + _ROUNDING))

    def take(self, size_bytes: float, since_s: float) -> None:
        """A piece has passed: what comes next begins behind it. Ask `ready_s` or `pieces` first.

        Raises:
            ValueError: names the argument.
        """
        self.ready_s(size_bytes, since_s)  # checks
        self._free_s = self.starts_s(since_s) + size_bytes / self.bytes_per_s


def _rate(bytes_per_s: float) -> float:
    if not bytes_per_s >= RATE_MIN:  # NaN too
        raise ValueError(f"bytes_per_s: need {RATE_MIN:g} at least, got {bytes_per_s!r}")
    return bytes_per_s


def _moment(at_s: float) -> float:
    if not math.isfinite(at_s):
        raise ValueError(f"need seconds of a monotonic clock, got {at_s!r}")
    return at_s
