"""GPU: the device pool of one engine. L1 = mapped (pins > 0), L2 = idle (pins == 0): one pool, two labels.

Owned: the daemon hands out the engine's block table and evicts idle blocks. Borrowed: the engine does both
and tells (`Observe`); the mirror answers lookups and shows counts, and never evicts. The bytes stay in the
engine's device memory either way: nothing here touches them, so this file needs neither torch nor CUDA.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from kvstore._native import KEYS_MAX, NONE, Allocation, DeviceChecker, DevicePool, HostPool, Index, Walk
from kvstore.errors import BadRequest
from kvstore.types import Tier

__all__ = ["BorrowedPool", "OwnedPool"]

# Blocks that one slice of closing() takes out of the index, below 1 µs each.
CLOSE_SLICE = 4096
BLOCKS_MAX = 1 << 22  # 12 bytes each here; 67 M tokens at 16 a block


def _parts(blocks: NDArray[np.uint32]) -> list[NDArray[np.uint32]]:
    """A table in pieces that one native call takes."""
    return [blocks[start : start + KEYS_MAX] for start in range(0, len(blocks), KEYS_MAX)]


def _rows(keys: Iterable[bytes]) -> NDArray[np.uint8]:
    """Keys as (n, 32) bytes."""
    return np.frombuffer(b"".join(keys), np.uint8).reshape(-1, 32)


def _split(keys: NDArray[np.uint8]) -> set[bytes]:
    """(n, 32) bytes as a set of keys."""
    return {key.tobytes() for key in np.ascontiguousarray(keys)}


def _check_blocks(blocks: int, idle_max: int) -> None:
    if not 1 <= blocks <= BLOCKS_MAX:
        raise BadRequest(f"pool.blocks: need 1 to {BLOCKS_MAX}, got {blocks}")
    if not 0 <= idle_max <= blocks:
        raise BadRequest(f"pool.idle_max: need 0 to pool.blocks = {blocks}, got {idle_max}")


class OwnedPool:
    """A device pool whose block tables the daemon allocates."""

    tier = Tier.GPU
    kind = "owned"

    def __init__(self, index: Index, host: HostPool | None, blocks: int, idle_max: int) -> None:
        _check_blocks(blocks, idle_max)
        self.blocks = blocks
        self.idle_max = idle_max
        self._index = index
        self._pool = DevicePool(index, host, blocks, idle_max)

    def match(self, walk: Walk) -> int:
        return self._pool.match(walk)

    def hits(self, nodes: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """Blocks of the leading nodes that are here."""
        blocks = self._pool.blocks_of(nodes)
        absent = np.flatnonzero(blocks == NONE)
        return blocks[: absent[0]] if len(absent) else blocks

    def blocks_of(self, nodes: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """(n,) block of each node, or NONE."""
        return self._pool.blocks_of(nodes)

    def touch(self, node: int) -> None:
        """The chain that ends in `node` was used."""
        self._pool.touch(node)

    def pin(self, blocks: NDArray[np.uint32]) -> None:
        """L2 → L1 (or one user more)."""
        for part in _parts(blocks):
            self._pool.pin(part)

    def unpin(self, blocks: NDArray[np.uint32]) -> None:
        """L1 → L2, or free when the block was never committed."""
        for part in _parts(blocks):
            self._pool.unpin(part)

    def allocate(self, wanted: int) -> Allocation:
        """Fresh pinned blocks, evicting idle ones; may ask for demotions first (see the native stub)."""
        return self._pool.allocate(wanted)

    def trim(self, most: int) -> Allocation:
        """Evict idle blocks beyond `idle_max`."""
        return self._pool.trim(most)

    def drained(self, blocks: NDArray[np.uint32]) -> None:
        """A demotion ended."""
        self._pool.drained(blocks)

    def adopt(self, blocks: NDArray[np.uint32]) -> None:
        """Blocks that were in use before this daemon knew the engine.

        Raises:
            BadRequest: a block is out of range, draining or named twice.
        """
        try:
            self._pool.adopt(blocks)
        except ValueError as error:
            raise BadRequest(f"adopt.table: {error}") from None

    def commit(self, blocks: NDArray[np.uint32], parent: int, keys: NDArray[np.uint8]) -> int:
        """The blocks hold these keys' bytes; how many are indexed under these very blocks."""
        return int(self._pool.commit(blocks, parent, keys).sum())

    def nodes(self) -> NDArray[np.uint32]:
        """Every node with a block here. Walks the whole pool."""
        return self._pool.indexed_nodes()

    def drop(self, nodes: NDArray[np.uint32]) -> int:
        """Blocks that must not match any more, free at their last unpin; how many there were."""
        return sum(self._pool.drop(node) for node in nodes.tolist())

    def keys(self) -> NDArray[np.uint8]:
        """(n, 32) keys of every block that is indexed here. Walks the whole pool: for snapshots."""
        return self._index.keys(self._pool.indexed_nodes())

    def take_removed(self) -> NDArray[np.uint8]:
        return self._pool.take_removed()

    def take_stored(self) -> NDArray[np.uint8]:
        """(n, 32) keys that became readable here since the last call."""
        return self._pool.take_stored()

    def keys_in_parts(self) -> Iterator[NDArray[np.uint8]]:
        """keys() a part at a time; between two of them keys may come and go."""
        for start in range(0, self.blocks, KEYS_MAX):
            yield self._index.keys(self._pool.indexed_nodes(start, KEYS_MAX))

    def counts(self) -> dict[str, int]:
        return self._pool.counts()

    def close(self) -> None:
        """The engine is gone."""
        self._pool.close()

    def closing(self) -> Iterator[None]:
        """close() in slices: nothing is found here from the first on. What leaves is not told key by key."""
        while not self._pool.close_some(CLOSE_SLICE):
            self._pool.take_removed()
            yield

    def check(self) -> None:
        self._pool.check()

    def checker(self) -> DeviceChecker:
        """The same in slices."""
        return DeviceChecker(self._pool)


class BorrowedPool:
    """A mirror of a pool that the engine runs itself: which keys it holds, and its counts."""

    tier = Tier.GPU
    kind = "borrowed"

    def __init__(self, index: Index, blocks: int) -> None:
        _check_blocks(blocks, 0)
        self.blocks = blocks
        self.idle_max = blocks
        self._index = index
        self._keys: set[bytes] = set()
        self._removed: set[bytes] = set()
        self._stored: set[bytes] = set()
        self._counts = {"free": blocks, "mapped": 0, "idle": 0, "draining": 0}

    def match(self, walk: Walk) -> int:
        """Leading blocks that the engine said it holds; stops at the first that it does not."""
        if not self._keys:
            return 0
        raw = self._index.keys(walk.nodes).tobytes()
        for start in range(0, len(raw), 32):  # ends at the first miss
            if raw[start : start + 32] not in self._keys:
                return start // 32
        return walk.depth

    def observe(self, counts: dict[str, int], stored: NDArray[np.uint8], removed: NDArray[np.uint8]) -> None:
        """Apply one report of the engine.

        Raises:
            BadRequest: the counts do not add up to the pool, or more keys than blocks would be held.
        """
        if min(counts.values()) < 0 or sum(counts.values()) != self.blocks:
            raise BadRequest(f"observe: mapped + idle + free must be pool.blocks = {self.blocks}: {counts}")
        new = _split(stored)
        fresh, left = new - self._keys, (_split(removed) - new) & self._keys
        held = len(self._keys) + len(fresh) - len(left)
        if held > self.blocks:
            raise BadRequest(f"observe.stored: {held} keys cannot lie in {self.blocks} blocks")
        # In place: a report costs what it holds, not what the pool holds.
        self._removed = (self._removed - fresh) | left
        self._stored = (self._stored - left) | fresh
        self._keys -= left
        self._keys |= fresh
        self._counts = {**counts, "draining": 0}

    def keys(self) -> NDArray[np.uint8]:
        """(n, 32) keys that the engine said it holds."""
        return _rows(self._keys)

    def keys_in_parts(self) -> Iterator[NDArray[np.uint8]]:
        """keys() a part at a time; between two of them keys may come and go."""
        keys = self.keys()
        for start in range(0, len(keys), KEYS_MAX):
            yield keys[start : start + KEYS_MAX]

    def touch(self, node: int) -> None:
        """The engine keeps its own order."""

    def take_removed(self) -> NDArray[np.uint8]:
        out, self._removed = self._removed, set()
        return _rows(out)

    def take_stored(self) -> NDArray[np.uint8]:
        """(n, 32) keys that the engine stored since the last call."""
        out, self._stored = self._stored, set()
        return _rows(out)

    def counts(self) -> dict[str, int]:
        return self._counts

    def close(self) -> None:
        """The engine is gone."""
        self._removed |= self._keys
        self._keys = set()

    def closing(self) -> Iterator[None]:
        """Nothing here needs slices: the keys are let go as one set."""
        self._keys, self._removed, self._stored = set(), set(), set()
        return iter(())

    def check(self) -> None:
        counted = sum(self._counts.values())
        if counted != self.blocks or len(self._keys) > self.blocks:
            raise RuntimeError(f"borrowed pool of {self.blocks}: counts {counted}, keys {len(self._keys)}")
