"""How fast may one save, so that the disk's queue refuses nothing?"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

__all__ = ["Pace"]

_LOOK_S = 0.003


class Pace:
    """Keeps everything that is saved and not yet on the disk within what the disk's queue takes.

    Any thread may call. The daemon is asked only when what is known leaves no room.

    Args:
        queued_bytes: asks the daemon.
        room_bytes: of the queue.
    """

    def __init__(self, queued_bytes: Callable[[], int], room_bytes: int) -> None:
        self._ask, self._room_bytes = queued_bytes, room_bytes
        self._turn, self._lock = threading.Lock(), threading.Lock()
        self._flying = self._queued = self._ended = 0

    def begin(self, size: int) -> None:
        """Before a save of so many bytes (slots): waits for room. Raises what the question raises."""
        with self._turn:
            while not self._fits(size):
                with self._lock:
                    ended = self._ended
                queued = self._ask()
                with self._lock:  # what was acknowledged meanwhile may be in the answer, or not
                    self._queued = queued + self._ended - ended
                if not self._fits(size):
                    time.sleep(_LOOK_S)
            with self._lock:
                self._flying += size

    def end(self, size: int) -> None:
        """After it: the disk may have it in its queue now."""
        with self._lock:
            self._flying -= size
            self._queued += size
            self._ended += size

    def _fits(self, size: int) -> bool:
        with self._lock:
            ahead = self._queued + self._flying
        return ahead + size <= self._room_bytes or not ahead
