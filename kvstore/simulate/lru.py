"""Blocks of one replica, the least recently used of which leave first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.errors import BadRequest

__all__ = ["BlockLru", "Touched"]


@dataclass(frozen=True, slots=True)
class Touched:
    """What a request changed. Store first, then remove: a chain longer than the capacity loses its own tail.

    Attributes:
        stored: ids that were not there, parents first.
        removed: ids that left, leaves first.
    """

    stored: list[int]
    removed: list[int]


class BlockLru:
    """Chains are touched tail-first, so a tail is always older than its head and leaves before it: an O(1)
    list behaves as one that evicts only leaves.

    Args:
        capacity_blocks: 1 at least.

    Raises:
        BadRequest: it is not.
    """

    def __init__(self, capacity_blocks: int) -> None:
        if capacity_blocks < 1:
            raise BadRequest(f"capacity: need 1 block at least, got {capacity_blocks}")
        self._capacity_blocks = capacity_blocks
        self._held: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, block: object) -> bool:
        return block in self._held

    def match(self, ids: Sequence[int]) -> int:
        """Leading blocks that are there; changes nothing."""
        held, count = self._held, 0
        for block in ids:
            if block not in held:
                break
            count += 1
        return count

    def touch(self, ids: Sequence[int]) -> Touched:
        """A request has all these blocks now. O(len(ids))."""
        held, stored = self._held, []
        for block in reversed(ids):
            if block in held:
                held.move_to_end(block)
            else:
                held[block] = None
                stored.append(block)
        stored.reverse()
        removed = [held.popitem(last=False)[0] for _ in range(len(held) - self._capacity_blocks)]
        return Touched(stored, removed)
