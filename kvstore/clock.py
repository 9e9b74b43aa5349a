"""Time as a parameter: every lease, deadline and rate runs on a monotonic clock that tests can drive."""

from __future__ import annotations

import time
from typing import Protocol

__all__ = ["Clock", "MonotonicClock", "unix_time_s"]


class Clock(Protocol):
    """Seconds that never go back."""

    def now(self) -> float:
        """Seconds since an arbitrary start."""
        ...


class MonotonicClock:
    """The machine's monotonic clock: wall-clock jumps do not reach it."""

    def now(self) -> float:
        return time.monotonic()


def unix_time_s() -> float:
    """The wall clock, for dates that people write and read: nothing is timed by it."""
    return time.clock_gettime(time.CLOCK_REALTIME)
