"""Pacing: what a tier has counts as arrived only when a slower one would have had it there.

For experiments (`limit_bytes_per_s` and `added_latency_s` of [nvme] and of [host]). Added latency runs from
the moment at which the tier had it, then the bytes take turns between their receivers, as real reads do,
through one bucket for the tier; those of one receiver in the order of its chain. Whoever gives up loses what
waits here: it had not come yet.

    NVME    reads are issued as ever; what they bring waits here, and takes up the window of its promotion: a
            slow disk holds its queue, too
    HOST    fetches wait here for blocks that lie in the arena: kvstore/fetching.py
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvstore.policy.throttle import TokenBucket

__all__ = ["Pacing"]

U32 = NDArray[np.uint32]
F64 = NDArray[np.float64]
Whose = TypeVar("Whose")
# Of one promotion before it is another's turn; one block at least. At 1 GB/s that is 4,000 turns a second.
TURN_BYTES = 256 << 10


@dataclass(slots=True, eq=False)
class _Line(Generic[Whose]):
    """What waits for one promotion, never nothing: (n,) positions in order, and when the disk had each."""

    whose: Whose
    block_bytes: int
    positions: U32
    came_s: F64

    def add(self, positions: U32, now_s: float) -> None:
        """Put more into its place."""
        both = np.concatenate([self.positions, positions])
        order = np.argsort(both)
        self.positions = both[order]
        self.came_s = np.concatenate([self.came_s, np.full(len(positions), now_s)])[order]

    def together(self) -> int:
        """How many of the first blocks were there when the first was."""
        later = np.flatnonzero(self.came_s > self.came_s[0])
        return int(later[0]) if len(later) else len(self.positions)


class Pacing(Generic[Whose]):
    """Of one tier. Whose = what a read is for; compared by identity."""

    def __init__(self) -> None:
        self._bucket = TokenBucket()
        self._latency_s = 0.0
        self._lines: deque[_Line[Whose]] = deque()  # in order of their turns

    @property
    def idle(self) -> bool:
        """Nothing waits and nothing would have to."""
        return not self._lines and not self._latency_s and math.isinf(self._bucket.bytes_per_s)

    def set_limits(self, limit_bytes_per_s: float, added_latency_s: float, now_s: float) -> None:
        """From now on, also for what waits; a limit of 0 is none."""
        self._bucket.set_rate(limit_bytes_per_s or math.inf, now_s)
        self._latency_s = added_latency_s

    def put(self, whose: Whose, positions: U32, block_bytes: int, now_s: float) -> None:
        """The disk had these, one at least, now."""
        line = self._line(whose)
        if line is None:
            line = _Line(whose, block_bytes, positions[:0], np.empty(0))
            self._lines.append(line)
        line.add(positions, now_s)

    def held(self, whose: Whose) -> int:
        """Blocks that wait."""
        line = self._line(whose)
        return 0 if line is None else len(line.positions)

    def drop(self, whose: Whose) -> U32:
        """It is given up: the positions that waited."""
        line = self._line(whose)
        if line is None:
            return np.empty(0, np.uint32)
        self._lines.remove(line)
        return line.positions

    def next_s(self) -> float | None:
        """When the next block arrives; None = nothing waits."""
        line = self._next()
        return None if line is None else self._bucket.ready_s(line.block_bytes, self._since_s(line))

    def take(self, now_s: float) -> list[tuple[Whose, U32]]:
        """What has arrived by now, in order. A turn of TURN_BYTES costs some µs."""
        taken = []
        while (line := self._next()) is not None:
            since_s = self._since_s(line)
            pieces = self._bucket.pieces(line.block_bytes, since_s, now_s)
            if not pieces:
                break
            turn = math.inf if math.isinf(pieces) else max(1, TURN_BYTES // line.block_bytes)
            count = int(min(pieces, line.together(), turn))
            self._bucket.take(count * line.block_bytes, since_s)
            taken.append((line.whose, line.positions[:count]))
            line.positions, line.came_s = line.positions[count:], line.came_s[count:]
            self._lines.remove(line)
            if len(line.positions):
                self._lines.append(line)
        return taken

    def _line(self, whose: Whose) -> _Line[Whose] | None:
        return next((line for line in self._lines if line.whose is whose), None)

    def _since_s(self, line: _Line[Whose]) -> float:
        return float(line.came_s[0]) + self._latency_s

    def _next(self) -> _Line[Whose] | None:
        """The first in turn of those that wait for the bucket; while it waits for them, the first to come."""
        if not self._lines:
            return None
        first = min(self._lines, key=self._since_s)
        starts_s = self._bucket.starts_s(self._since_s(first))
        return next((line for line in self._lines if self._since_s(line) <= starts_s), first)
