"""What a router knows of the replicas' blocks: everything, only what it sent where, or nothing."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import BadRequest

__all__ = ["ApproximateView", "ExactView", "NoView", "View"]


class View(Protocol):
    """One per fleet. Times do not go back.

    A request is asked about, then told as routed, then its events arrive, at once or late.
    """

    def matched_blocks(self, ids: Sequence[int], now_s: float) -> NDArray[np.int64]:
        """(n,) leading blocks of this chain that each replica is thought to hold."""

    def routed(self, replica: int, ids: Sequence[int], at_s: float) -> None:
        """The request was sent there: it will have these blocks. Sent at once, whatever the lag of events."""

    def served(self, replica: int, stored: Sequence[int], removed: Sequence[int], at_s: float) -> None:
        """Events of that replica arrive. Store first, then remove.

        Args:
            stored: ids, parents first.
            removed: ids.
            at_s: when they arrive.
        """


class NoView:
    """Knows nothing, for policies that do not look at matches.

    Args:
        replicas: n, 1 at least.
    """

    def __init__(self, replicas: int) -> None:
        self._nothing = np.zeros(replicas, np.int64)

    def matched_blocks(self, ids: Sequence[int], now_s: float) -> NDArray[np.int64]:
        """See `View`. None."""
        return self._nothing

    def routed(self, replica: int, ids: Sequence[int], at_s: float) -> None:
        """See `View`. Not looked at."""

    def served(self, replica: int, stored: Sequence[int], removed: Sequence[int], at_s: float) -> None:
        """See `View`. Not looked at."""


class ExactView:
    """Follows events and nothing else; as old as they are. One number of n bits a block.

    Args:
        replicas: n, 1 at least.
    """

    def __init__(self, replicas: int) -> None:
        self._replicas = replicas
        self._holders: dict[int, int] = {}

    def matched_blocks(self, ids: Sequence[int], now_s: float) -> NDArray[np.int64]:
        """See `View`. O(length of the longest match)."""
        matched = np.zeros(self._replicas, np.int64)
        left = (1 << self._replicas) - 1
        depth = 0
        for block in ids:
            still = left & self._holders.get(block, 0)
            if still != left:
                _note(matched, left ^ still, depth)
                left = still
                if not left:
                    break
            depth += 1
        _note(matched, left, depth)
        return matched

    def routed(self, replica: int, ids: Sequence[int], at_s: float) -> None:
        """See `View`. Not looked at."""

    def served(self, replica: int, stored: Sequence[int], removed: Sequence[int], at_s: float) -> None:
        """See `View`."""
        holders, bit = self._holders, 1 << replica
        for block in stored:
            holders[block] = holders.get(block, 0) | bit
        for block in removed:
            rest = holders.get(block, 0) & ~bit
            if rest:
                holders[block] = rest
            else:
                holders.pop(block, None)


def _note(matched: NDArray[np.int64], replicas: int, depth: int) -> None:
    """Those of the bit set end at this depth."""
    while replicas:
        low = replicas & -replicas
        matched[low.bit_length() - 1] = depth
        replicas ^= low


class ApproximateView:
    """For replicas that send no events: believes that each holds what was sent there last.

    Args:
        replicas: n, 1 at least.
        capacity_blocks: believed of each; None = no limit.
        ttl_s: seconds after which a block is believed gone; None = never.

    Raises:
        BadRequest: neither bound is given, and it would grow for ever, or one is not above 0.
    """

    def __init__(self, replicas: int, capacity_blocks: int | None = None, ttl_s: float | None = None) -> None:
        if capacity_blocks is None and ttl_s is None:
            raise BadRequest("view: an approximate one needs a capacity or a time to live")
        if (capacity_blocks is not None and capacity_blocks < 1) or (ttl_s is not None and not ttl_s > 0):
            raise BadRequest("view: need 1 block at least, and a time to live above 0")
        self._sent: list[OrderedDict[int, float]] = [OrderedDict() for _ in range(replicas)]
        self._capacity_blocks = math.inf if capacity_blocks is None else capacity_blocks
        self._ttl_s = math.inf if ttl_s is None else ttl_s

    def matched_blocks(self, ids: Sequence[int], now_s: float) -> NDArray[np.int64]:
        """See `View`."""
        since_s = now_s - self._ttl_s
        matched = np.zeros(len(self._sent), np.int64)
        for replica, sent in enumerate(self._sent):
            depth = 0
            for block in ids:
                if sent.get(block, -math.inf) < since_s or block not in sent:
                    break
                depth += 1
            matched[replica] = depth
        return matched

    def routed(self, replica: int, ids: Sequence[int], at_s: float) -> None:
        """See `View`. Tail-first, as the replica itself does; what is too old or too much leaves."""
        sent = self._sent[replica]
        for block in reversed(ids):
            sent[block] = at_s
            sent.move_to_end(block)
        since_s = at_s - self._ttl_s
        while len(sent) > self._capacity_blocks or (sent and next(iter(sent.values())) < since_s):
            sent.popitem(last=False)

    def served(self, replica: int, stored: Sequence[int], removed: Sequence[int], at_s: float) -> None:
        """See `View`. There are none."""
