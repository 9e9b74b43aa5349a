"""How late the event loop runs: what everybody who asks the daemon something waits for at the worst."""

from __future__ import annotations

import asyncio

from kvstore.meters import Histogram

__all__ = ["LoopLag"]

# Ten samples a second cost nothing and see every stall that lasts a tenth of a second, and each shorter one
# with the probability length / period.
PERIOD_S = 0.1
# The loop's own timer is good to about 1 ms.
BOUNDS_S = (0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)


class LoopLag:
    """A timer that notes how long after its time it ran."""

    def __init__(self, loop: asyncio.AbstractEventLoop, period_s: float = PERIOD_S) -> None:
        self.histogram = Histogram(BOUNDS_S)
        self._loop = loop
        self._period_s = period_s
        self._due_s = loop.time() + period_s
        self._timer = loop.call_at(self._due_s, self._tick)

    def _tick(self) -> None:
        now_s = self._loop.time()
        self.histogram.observe(max(0.0, now_s - self._due_s))
        self._due_s = now_s + self._period_s
        self._timer = self._loop.call_at(self._due_s, self._tick)

    def close(self) -> None:
        """Stop the timer."""
        self._timer.cancel()
