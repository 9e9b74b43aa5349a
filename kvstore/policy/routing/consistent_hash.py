"""Consistent hash over the head of the prompt; a popular head has several owners."""

from __future__ import annotations

import math
from collections import Counter

from kvstore.policy.routing.base import Ask, Choice, Fleet, Ties, lowest
from kvstore.policy.routing.rendezvous import owners

__all__ = ["ConsistentHash"]

# A count that reaches this halves all of them: what was popular an hour ago fades, and the table is bounded.
_WINDOW = 1024
_HEADS_MAX = 4096
# An owner takes up to this multiple of an equal share before its head gets another owner.
_SHARE_MAX = 1.25


class ConsistentHash:
    """Prompts that begin alike go to the same owner, or the least loaded of their r owners.

    r follows from how popular the head is: one that a share s of the latest requests has would load a single
    owner with s · n of an equal part, so it gets ⌈s · n / 1.25⌉. The first r of r + 1 owners stay owners, so
    a head that grows popular keeps its blocks. Remembers at most 4,096 heads.

    When not to use it: where heads are few and long prompts differ behind them; `scored` sees where blocks
    really are.
    """

    name = "consistent_hash"

    def __init__(self) -> None:
        self._seen: Counter[bytes] = Counter()
        self._requests = 0

    def pick(self, ask: Ask, fleet: Fleet, ties: Ties) -> Choice:
        """See `Policy`. A request without a head goes where the fewest are in flight."""
        if not ask.head:
            return Choice(ties(lowest(fleet.in_flight)), reason="no head, fewest in flight")
        share = self._share(ask.head)
        count = min(len(fleet), max(1, math.ceil(share * len(fleet) / _SHARE_MAX)))
        mine = owners(fleet.names, b"head " + ask.head, count)
        mine.sort()
        replica = ties(lowest(fleet.in_flight, mine))
        return Choice(replica, reason=f"one of {count} owners of the head")

    def _share(self, head: bytes) -> float:
        """Of the latest requests, this one included, how many have this head."""
        if self._requests >= _WINDOW or len(self._seen) >= _HEADS_MAX:
            self._seen = Counter({each: seen // 2 for each, seen in self._seen.items() if seen >= 2})
            self._requests = self._seen.total()
        self._seen[head] += 1
        self._requests += 1
        # The first requests of all are no fashion: nothing is popular before some dozens were seen.
        return self._seen[head] / max(self._requests, 32)
