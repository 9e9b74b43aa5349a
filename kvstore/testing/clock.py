"""Time that a test turns by hand."""

from __future__ import annotations

__all__ = ["SimClock"]


class SimClock:
    """A `Clock` that stands still until `advance`.

    Args:
        start_s: first reading; not 0, so that a forgotten reading shows.
    """

    def __init__(self, start_s: float = 1000.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        """Seconds since an arbitrary start."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Let time pass.

        Raises:
            ValueError: seconds is negative (the clock is monotonic).
        """
        if seconds < 0:
            raise ValueError(f"seconds: a monotonic clock cannot go back by {-seconds}")
        self._now_s += seconds
