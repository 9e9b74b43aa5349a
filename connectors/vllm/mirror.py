"""vLLM's own block pool as the daemon sees it: which keys it holds, how many blocks are mapped, idle, free.

The pool belongs to the scheduler's thread; here it is only read, a moment old and perhaps torn. That is
enough: a block that has left meanwhile makes a lookup skip too much, which the scheduler sees and asks again.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.client import Client

__all__ = ["Mirror"]

_KEY = 32
_PAUSE_S = 0.25  # between two looks at a pool that changes
_SHARE = 0.01  # of a core that looking may take, however large the pool is


class Mirror:
    """What the daemon was told.

    Args:
        pool: vLLM's BlockPool.
        blocks: its size, as the daemon was told.
        groups: KV groups; the device holds a key when it holds a block of it in each.
        block_tokens: tokens in a block; where vLLM hashes smaller pieces, no key is known to be there.
    """

    def __init__(self, pool: Any, blocks: int, groups: int, block_tokens: int) -> None:
        self._pool = pool
        self._blocks = blocks
        self._groups = groups
        self._by_block = pool.hash_block_size == block_tokens
        self._names: dict[bytes, bytes] = {}  # vLLM's hash → our key
        self._told: set[bytes] = set()
        self._counts: tuple[int, int, int] | None = None
        self._not_before = 0.0
        self.changed = True
        """Set by the scheduler after each step."""

    def learn(self, hashes: Sequence[bytes], keys: NDArray[np.uint8]) -> None:
        """vLLM calls the blocks with these keys so. Lengths may differ: what one lacks is not known yet."""
        count = min(len(hashes), len(keys)) if self._by_block else 0
        if not count or self._names.get(hashes[count - 1]) == keys[count - 1].tobytes():
            return
        named = np.ascontiguousarray(keys[:count]).view(f"V{_KEY}").ravel().tolist()
        if len(self._names) > 4 * self._blocks + 4096:  # names of blocks that left long ago
            held = {hash_ for hash_ in self._hashes() if hash_ in self._names}
            self._names = {hash_: self._names[hash_] for hash_ in held}
        self._names.update(zip(hashes[:count], named, strict=True))

    def tell(self, client: Client, *, now: bool = False) -> None:
        """Look at the pool and tell the daemon what changed, unless that was done a moment ago."""
        began = time.monotonic()
        if not now and (not self.changed or began < self._not_before):
            return
        self.changed = False
        names, idle, mapped = self._names, 0, 0
        tags = set()  # vLLM's hash, and 4 bytes that name the KV group
        for block in self._pool.blocks:
            tag = block.block_hash  # once: the scheduler's thread may take it away meanwhile
            if block.ref_cnt > 0 or block.is_null:
                mapped += 1
            elif tag is not None:
                idle += 1
            if tag is not None:
                tags.add(tag)
        hashes: Iterable[bytes] = (tag[:-4] for tag in tags)
        if self._groups > 1:
            hashes = (hash_ for hash_, count in Counter(hashes).items() if count == self._groups)
        held = {names[hash_] for hash_ in hashes if hash_ in names}
        counts = (mapped, idle, self._blocks - mapped - idle)
        stored, removed = held - self._told, self._told - held
        if counts != self._counts or stored or removed:
            if client.observe(*counts, _rows(stored), _rows(removed)):
                self._told, self._counts = held, counts
            else:
                self.changed = True
        ended = time.monotonic()
        self._not_before = ended + max(_PAUSE_S, (ended - began) / _SHARE)

    def forget_told(self) -> None:
        """Another daemon: it knows nothing yet."""
        self._told, self._counts, self.changed = set(), None, True

    def forget_names(self) -> None:
        """Every key changed."""
        self._names, self.changed = {}, True

    def _hashes(self) -> list[bytes]:
        tags = [block.block_hash for block in self._pool.blocks]
        return [tag[:-4] for tag in tags if tag is not None]


def _rows(keys: set[Any]) -> NDArray[np.uint8]:
    return np.frombuffer(b"".join(keys), np.uint8).reshape(-1, _KEY)
