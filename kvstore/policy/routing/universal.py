"""Which leading blocks nearly every request has: the system prompt, the template, the first block of all."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import BadRequest

__all__ = ["UniversalPrefix"]

# Shares follow the latest 64 requests or so. What was seen fewer than 32 times is no custom yet: a burst of
# one conversation must not count as everybody.
_STEP, _AGE_MIN = 1 / 64, 32
_LIKELY, _SHARED, _DEPTH_MAX = 0.5, 0.9, 1024

Ids = Sequence[int] | NDArray[np.uint64]


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
        self._ids = np.zeros(depth_max, np.uint64)
        self._count = 0  # of candidates
        self._shares = np.zeros(depth_max)
        self._ages = np.zeros(depth_max)
        self._blocks = 0

    @property
    def blocks(self) -> int:
        """How many leading blocks nine in ten of the latest requests had."""
        return self._blocks

    def leading(self, ids: Ids) -> int:
        """How many leading blocks of this chain are universal. O(that many)."""
        return self._same(_array(ids), self._blocks)

    def observe(self, ids: Ids) -> None:
        """A request came. O(depth_max), some 10 µs.

        Args:
            ids: of its blocks in order, 64 bits each; an id stands for its block and all before it.
        """
        chain, count = _array(ids), self._count
        same = self._same(chain, count)
        shares, ages = self._shares[:count], self._ages[:count]
        # The mean of all while it is young (as if it had been seen once and missed once before), then fading.
        step = np.maximum(_STEP, 1 / (ages + 3))
        shares -= step * shares
        shares[:same] += step[:same]
        ages += 1
        lost = shares < _LIKELY
        if lost.any():
            self._count = int(lost.argmax())
        if same >= self._count:
            self._extend(chain)
        # What begins now is too young in any case.
        count = min(count, self._count)
        short = (shares[:count] < _SHARED) | (ages[:count] < _AGE_MIN)
        self._blocks = int(short.argmax()) if short.any() else count

    def _extend(self, chain: NDArray[np.uint64]) -> None:
        start, stop = self._count, min(len(chain), self._depth_max)
        if stop > start:
            self._ids[start:stop] = chain[start:stop]
            self._shares[start:stop] = _LIKELY
            self._ages[start:stop] = 0
            self._count = stop

    def _same(self, chain: NDArray[np.uint64], count: int) -> int:
        """Of the first candidates those that this chain begins with."""
        count = min(count, len(chain))
        differs = np.flatnonzero(self._ids[:count] != chain[:count])
        return int(differs[0]) if len(differs) else count


def _array(ids: Ids) -> NDArray[np.uint64]:
    return np.asarray(ids, np.uint64)
