"""Which leading blocks nearly every request has: the system prompt, the template, the first block of all."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from kvstore.errors import BadRequest

__all__ = ["UniversalPrefix"]

# Shares follow the latest 64 requests or so. What was seen fewer than 32 times is no custom yet: a burst of
# one conversation must not count as everybody.
_STEP, _AGE_MIN = 1 / 64, 32
_LIKELY, _SHARED, _DEPTH_MAX = 0.5, 0.9, 1024


class UniversalPrefix:
    """Learns from the chains that pass by; give it those of one model.

    At each depth one candidate and its share of the requests since it became one, later of the latest ones. A
    candidate that most requests do not have gives way to the next one seen, with all below it.

    Args:
        depth_max: blocks; what is shared beyond counts as a hit like any other. Bounds memory, too.

    Raises:
        BadRequest: depth_max is below 1.
    """

    def __init__(self, depth_max: int = _DEPTH_MAX) -> None:
        if depth_max < 1:
            raise BadRequest(f"depth_max: need 1 at least, got {depth_max}")
        self._depth_max = depth_max
        self._ids: list[Hashable] = []
        self._shares = np.zeros(depth_max)
        self._ages = np.zeros(depth_max)
        self._blocks = 0

    @property
    def blocks(self) -> int:
        """How many leading blocks nine in ten of the latest requests had."""
        return self._blocks

    def leading(self, ids: Sequence[Hashable]) -> int:
        """How many leading blocks of this chain are universal. O(that many)."""
        return self._same(ids, self._blocks)

    def observe(self, ids: Sequence[Hashable]) -> None:
        """A request came. O(depth_max), mostly O(universal blocks): some 10 µs.

        Args:
            ids: of its blocks in order; an id stands for its block and all before it.
        """
        count = len(self._ids)
        same = self._same(ids, count)
        shares, ages = self._shares[:count], self._ages[:count]
        # The mean of all while it is young (as if it had been seen once and missed once before), then fading.
        step = np.maximum(_STEP, 1 / (ages + 3))
        shares -= step * shares
        shares[:same] += step[:same]
        ages += 1
        lost = shares < _LIKELY
        if lost.any():
            del self._ids[int(lost.argmax()) :]
        if same >= len(self._ids):
            self._extend(ids)
        # What begins now is too young in any case.
        count = min(count, len(self._ids))
        short = (shares[:count] < _SHARED) | (ages[:count] < _AGE_MIN)
        self._blocks = int(short.argmax()) if short.any() else count

    def _extend(self, ids: Sequence[Hashable]) -> None:
        start, stop = len(self._ids), min(len(ids), self._depth_max)
        self._ids += ids[start:stop]
        self._shares[start:stop] = _LIKELY
        self._ages[start:stop] = 0

    def _same(self, ids: Sequence[Hashable], count: int) -> int:
        """Of the first candidates those that this chain begins with."""
        same, count = 0, min(count, len(ids))
        known = self._ids
        while same < count and ids[same] == known[same]:
            same += 1
        return same
