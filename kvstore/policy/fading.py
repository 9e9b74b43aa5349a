"""What admission knows of the past, weighted so that it fades: rates, mixes, shares. A few numbers each."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["PRIOR_AGAIN", "PRIOR_FIRST", "Kind", "Mix", "Rate", "Share"]

_FORGOTTEN = 1e-6
# Before anything is known: as if 256 blocks had been seen, of which so many were used again.
_PRIOR_BLOCKS = 256.0
PRIOR_FIRST, PRIOR_AGAIN = 0.1, 0.5
_REUSE_MIN = 1 / 1024
# Blocks after which what was seen before counts 1/e: of offers, and of those that were let in.
_OFFERED_BLOCKS, _ADMITTED_BLOCKS = 65_536.0, 8_192.0


class Rate:
    """Bytes per second, of the last `window_s` or so."""

    def __init__(self, window_s: float, now_s: float) -> None:
        self._window_s = window_s
        self._weight = 0.0
        self._at_s = now_s

    def add(self, size_bytes: int, now_s: float) -> None:
        """`now_s`: never less than before."""
        self._weight = self._weight * math.exp((self._at_s - now_s) / self._window_s) + size_bytes
        self._at_s = now_s

    def take_back(self, size_bytes: int) -> None:
        """Of what was added just now."""
        self._weight = max(0.0, self._weight - size_bytes)

    def per_s(self) -> float:
        """As of the last add."""
        return self._weight / self._window_s


class Mix:
    """How offered bytes spread over steps of worth, of the last `window_bytes` or so.

    Attributes:
        shares: by step, none of them below a millionth.
        total: of the shares: 1 once a window's worth was added.
    """

    def __init__(self) -> None:
        self.shares: dict[int, float] = {}
        self.total = 0.0

    def add(self, step: int, size_bytes: int, window_bytes: float) -> None:
        """Count some more of one step."""
        stays, least = math.exp(-size_bytes / window_bytes), self.total * _FORGOTTEN
        shares = {s: left for s, share in self.shares.items() if (left := share * stays) > least}
        shares[step] = shares.get(step, 0.0) - math.expm1(-size_bytes / window_bytes)
        self.shares, self.total = shares, sum(shares.values())


@dataclass(slots=True)
class Share:
    """Which share of blocks was hit again, of the last `window` or so."""

    prior: float
    window: float
    seen: float = 0.0
    hits: float = 0.0

    def see(self, blocks: int) -> None:
        """So many more could be hit."""
        stays = math.exp(-blocks / self.window)
        self.seen = min(self.window, self.seen * stays + blocks)
        self.hits *= stays

    def hit(self, blocks: int) -> None:
        """So many of those were."""
        self.hits = min(self.seen, self.hits + blocks)

    @property
    def value(self) -> float:
        """In (0, 1)."""
        return (self.hits + self.prior * _PRIOR_BLOCKS) / (self.seen + _PRIOR_BLOCKS)


class Kind:
    """How often one kind of block is used again.

    What is refused can be found only while HOST has it, so the share of those let in is looked at by itself.
    """

    def __init__(self, prior: float) -> None:
        self.offered = Share(prior, _OFFERED_BLOCKS)
        self.admitted = Share(prior, _ADMITTED_BLOCKS)

    @property
    def reuse(self) -> float:
        """In [1/1024, 1]: never so low that nothing could be told apart."""
        return min(1.0, max(_REUSE_MIN, self.offered.value, self.admitted.value))
