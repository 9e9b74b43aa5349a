"""Work finished in slices, between requests: ending thousands of leases, emptying a device pool."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator

import structlog

__all__ = ["Later"]

log = structlog.get_logger()


class Later:
    """Takes iterators; every step of one is a slice. The first is done at once, so small work is over then.

    Args:
        loop: one slice runs per wake-up, so others' requests wait for one slice at most.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[Iterator[None]] = deque()

    def begin(self, steps: Iterator[None]) -> None:
        """Do the first slice now, the others in turn."""
        if not self._step(steps):
            return
        self._waiting.append(steps)
        if len(self._waiting) == 1:
            self._loop.call_soon(self._turn)

    def close(self) -> None:
        """Forget what is left: its store ends too."""
        self._waiting.clear()

    def _turn(self) -> None:
        if not self._waiting:
            return
        steps = self._waiting.popleft()
        if self._step(steps):
            self._waiting.append(steps)
        if self._waiting:
            self._loop.call_soon(self._turn)

    def _step(self, steps: Iterator[None]) -> bool:
        """Whether there is more."""
        try:
            next(steps)
        except StopIteration:
            return False
        except Exception:  # a bug of ours costs this piece of work, not the daemon
            log.exception("bug in work done in slices")
            return False
        return True
