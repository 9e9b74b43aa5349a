"""How far one fetch has come, from its first block up or from its last one down: see kvstore/fetching.py."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvstore._native import SlotFormat
from kvstore.leases import Lease, Tail
from kvstore.tiers.host import HostTier
from kvstore.tiers.promotion import Promotion

__all__ = ["PIECES_MIN", "PIECE_BYTES", "Fetching", "TailFetching"]

U32 = NDArray[np.uint32]
# A piece of a tail. The largest: many are under way at once, and 3 GB/s bring 1,500 of them in a second. And
# so many at least: the one that comes when computing has met the tail is of no use.
PIECE_BYTES = 2 << 20
PIECES_MIN, PIECES_MAX = 16, 256


class Fetching:
    """One fetch of blocks [start, stop) of a lease.

    Attributes:
        lease: whose blocks.
        start, ready: blocks [start, ready) can be copied now.
        stop: where it ends; lowered when the rest will not come.
        came: blocks that are on HOST, in their order; a limit of HOST lets them out later.
        reason: why it was lowered.
        lagged: it was given up by its `Watch`.
    """

    def __init__(self, lease: Lease, start: int, stop: int, host: HostTier, shape: SlotFormat) -> None:
        self.lease = lease
        self.start = self.ready = start
        self.stop = stop
        self.came = host.leading(lease.nodes[start:stop])
        self.reason = ""
        self.lagged = False
        self.shape = shape
        self._host = host
        self._first: int | None = None

    @property
    def end(self) -> int:
        """Where it ends: `ready` gets there, or is there."""
        return self.stop

    @property
    def over(self) -> bool:
        """Nothing more will come."""
        return self.ready >= self.stop

    @property
    def arrived(self) -> int:
        """Blocks that can be copied now."""
        return self.ready - self.start

    def news(self, told: int) -> bytes:
        """Where the blocks lie that became ready since `ready` was `told`: `_native.pack_slots`."""
        return self.runs(told, self.ready)

    def runs(self, start: int, stop: int) -> bytes:
        """Where blocks [start, stop), which are ready, lie: `_native.pack_slots`."""
        return self._host.runs(self.lease.nodes[start:stop], self.shape)

    def brings(self, first: int) -> None:
        """What is behind block `first`, it included, comes from NVME."""
        self._first = first
        self.lease.brought = (first, first)

    def follow(self, first: int, promotion: Promotion) -> None:
        """The promotion of blocks [first, …) has changed."""
        self.stop = first + promotion.stop
        self.came = min(first + promotion.reached, self.stop) - self.start
        self.reason = promotion.reason

    def let(self, count: int) -> None:
        """So many of the blocks that came can be copied."""
        assert count <= self.came, f"{count} blocks are let out, and {self.came} came"
        self.ready = self.start + count
        self.lease.host = max(self.lease.host, self.ready)
        if self._first is not None:
            self.lease.brought = (self._first, max(self._first, self.ready))

    def here(self, count: int) -> bool:
        """Whether the next blocks, so that `count` are let out in all, are on HOST still."""
        return bool(self._host.readable(self.lease.nodes[self.ready : self.start + count]).all())

    def cut(self, reason: str) -> None:
        """Nothing more will come."""
        self.stop, self.reason = self.ready, reason


class TailFetching(Fetching):
    """The same from the last block downwards.

    Attributes:
        ready, stop: blocks [ready, stop) can be copied now.
        start: where it ends; raised when the rest will not come, or is not wanted.
    """

    def __init__(self, lease: Lease, start: int, stop: int, host: HostTier, shape: SlotFormat) -> None:
        super().__init__(lease, start, stop, host, shape)
        absent = np.flatnonzero(~host.readable(lease.nodes[start:stop]))
        self.came = stop - start - (int(absent[-1]) + 1 if len(absent) else 0)
        self.ready = stop
        self.tail = Tail(self.ready, stop, start, lease.host)
        count = stop - start
        size = max(1, min(PIECE_BYTES // shape.slot_bytes, count // PIECES_MIN), count // PIECES_MAX)
        # From the top down; the promotion's positions are those of the pieces one after another.
        self._pieces = [(max(start, top - size), top) for top in range(stop, start, -size)]
        self._behind = np.cumsum([top - low for low, top in self._pieces], dtype=np.uint32)

    @property
    def end(self) -> int:
        return self.start

    @property
    def over(self) -> bool:
        return self.ready <= self.start

    @property
    def arrived(self) -> int:
        return self.stop - self.ready

    def news(self, told: int) -> bytes:
        return self.runs(self.ready, told)

    def nodes(self) -> U32:
        """In the order in which they are brought."""
        return np.concatenate([self.lease.nodes[low:top] for low, top in self._pieces])

    @property
    def pieces(self) -> U32:
        """Positions in `nodes` at which another piece begins."""
        return self._behind[:-1]

    def follow(self, first: int, promotion: Promotion) -> None:
        self.start = max(self.start, self._lowest(promotion.stop))
        self.came = max(self.came, self.stop - max(self.start, self._lowest(promotion.reached)))
        self.reason = promotion.reason

    def let(self, count: int) -> None:
        assert count <= self.came, f"{count} blocks are let out, and {self.came} came"
        self.ready = max(self.start, self.stop - count)
        self.tail.start = self.ready

    def here(self, count: int) -> bool:
        return bool(self._host.readable(self.lease.nodes[max(0, self.stop - count) : self.ready]).all())

    def _lowest(self, reached: int) -> int:
        """The lowest block of the pieces that are whole with so many positions."""
        whole = int(np.searchsorted(self._behind, reached, "right"))
        return self._pieces[whole - 1][0] if whole else self.stop

    def enough(self, start: int) -> int:
        """No block below `start` is wanted any more; how many positions still are."""
        self.start = min(max(self.start, start), self.ready)
        return self.stop - next((low for low, top in self._pieces if low <= self.start < top), self.stop)

    def cut(self, reason: str) -> None:
        self.start, self.reason = self.ready, reason
