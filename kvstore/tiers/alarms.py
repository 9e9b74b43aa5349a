"""Alarms: what has to happen at a moment, on the loop, whether or not the disk says something.

set        it rings once, at the first look at or after its moment
wake_at    whoever runs the loop is told of the earliest moment; without that, looks are ticks
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

from kvstore.clock import Clock

__all__ = ["Alarm", "Alarms"]


@dataclass(slots=True, eq=False)
class Alarm:
    """One; cancelled by `cancel`, however often."""

    at_s: float
    ring: Callable[[], None] | None

    def cancel(self) -> None:
        """It will not ring."""
        self.ring = None


class Alarms:
    """Of one tier. O(log n) each.

    Args:
        clock: monotonic.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._heap: list[tuple[float, int, Alarm]] = []
        self._last = 0
        self.wake_at: Callable[[float], None] = _nobody
        """Told of a moment that is earlier than all before it; answers with `ring` then."""

    @property
    def next_s(self) -> float | None:
        """The moment of the earliest alarm; None = there is none."""
        while self._heap and self._heap[0][2].ring is None:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def set(self, at_s: float, ring: Callable[[], None]) -> Alarm:
        """Call `ring` at that moment, or at the first look after it."""
        before, alarm = self.next_s, Alarm(at_s, ring)
        self._last += 1
        heapq.heappush(self._heap, (at_s, self._last, alarm))
        if before is None or at_s < before:
            self.wake_at(at_s)
        return alarm

    def ring(self) -> None:
        """Ring what is due, in order of time. What is set meanwhile waits for the next look."""
        now_s, last = self.clock.now(), self._last
        try:
            while (at_s := self.next_s) is not None and at_s <= now_s and self._heap[0][1] <= last:
                alarm = heapq.heappop(self._heap)[2]
                ring, alarm.ring = alarm.ring, None
                if ring is not None:
                    ring()
        finally:  # a bug in one must not silence the others
            if (at_s := self.next_s) is not None:
                self.wake_at(at_s)


def _nobody(_: float) -> None:
    """Ticks are all there is."""
