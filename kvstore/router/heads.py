"""Which prefixes most requests begin with, and their tokens: what a fresh replica should compute first.

A head is named by the block some way behind what everybody shares (`Ask.head`). What all its requests have in
common is kept as token ids, and gets shorter as they differ; so after some requests it is the shared prompt,
and no single request's text. Counts fade. Bounded: HEADS_MAX heads of TOKENS_MAX tokens each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstore.clock import Clock

__all__ = ["HEADS_MAX", "Head", "Heads"]

HEADS_MAX = 256
TOKENS_MAX = 1 << 15
_FADE_S = 3600.0

Ids = NDArray[np.uint32]


@dataclass(slots=True)
class Head:
    """One of them.

    Attributes:
        tokens: (n,) ids that all its requests began with.
        count: requests, those of an hour ago counting 1/e.
        seen_s: when the last one came.
        salt: of the tenant, "" = none. It stays in the router.
        model: as the requests named it.
    """

    tokens: Ids
    count: float
    seen_s: float
    salt: str
    model: str

    def __repr__(self) -> str:
        return f"Head({self.tokens.size} tokens, count {self.count:.3g})"


class Heads:
    """Of one deployment."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._by_name: dict[bytes, Head] = {}

    def __len__(self) -> int:
        return len(self._by_name)

    def observe(self, name: bytes, tokens: Ids, salt: str, model: str) -> None:
        """A request came. O(tokens that it has in common with the others)."""
        now_s = self._clock.now()
        known = self._by_name.get(name)
        if known is None:
            if len(self._by_name) >= HEADS_MAX:
                del self._by_name[
                    min(self._by_name, key=lambda each: self._worth(self._by_name[each], now_s))
                ]
            self._by_name[name] = Head(tokens[:TOKENS_MAX].copy(), 1.0, now_s, salt, model)
            return
        known.count = self._worth(known, now_s) + 1
        known.seen_s = now_s
        length = min(known.tokens.size, tokens.size)
        differs = np.flatnonzero(known.tokens[:length] != tokens[:length])
        shared = int(differs[0]) if differs.size else length
        if shared < known.tokens.size:
            known.tokens = known.tokens[:shared].copy()

    def top(self, count: int) -> Sequence[Head]:
        """Those that save most: requests times tokens; only what more than one request had."""
        now_s = self._clock.now()
        often = [head for head in self._by_name.values() if head.count > 1]
        often.sort(key=lambda head: -self._worth(head, now_s) * head.tokens.size)
        return often[:count]

    def _worth(self, head: Head, now_s: float) -> float:
        return head.count * math.exp(-(now_s - head.seen_s) / _FADE_S)
