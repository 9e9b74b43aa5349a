"""An event loop whose turns a test takes by hand, as far as work in slices needs one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

__all__ = ["HandLoop"]


class HandLoop:
    """Callbacks in the order in which they are due; its clock jumps to the next one."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._due: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._made = 0

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """Itself, for what takes a loop."""
        return cast(asyncio.AbstractEventLoop, self)

    def call_later(self, delay_s: float, call: Callable[..., object], *arguments: Any) -> asyncio.TimerHandle:
        when = self.now_s + delay_s
        handle = asyncio.TimerHandle(when, call, arguments, self.loop)
        self._made += 1
        self._due.append((when, self._made, handle))
        return handle

    def call_soon(self, call: Callable[..., object], *arguments: Any) -> asyncio.TimerHandle:
        return self.call_later(0, call, *arguments)

    def get_debug(self) -> bool:
        """Handles ask."""
        return False

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Handles tell."""

    def turn(self) -> bool:
        """Run the next callback; False when there is none."""
        self._due = sorted(entry for entry in self._due if not entry[2].cancelled())
        if not self._due:
            return False
        when, _, handle = self._due.pop(0)
        self.now_s = max(self.now_s, when)
        handle._run()
        return True

    def run(self, most: int = 100_000) -> int:
        """Take turns until nothing is due; how many."""
        turns = 0
        while turns < most and self.turn():
            turns += 1
        assert turns < most, "it never comes to rest"
        return turns
