"""Paged memory in which every block holds bytes that only its key may hold: one wrong byte anywhere shows."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvstore._native import PagedLayout
from kvstore.types import BlockLayout, Part

__all__ = ["KeyedMemory"]

U8 = NDArray[np.uint8]
U64 = NDArray[np.uint64]
_ODD = np.uint64(0x9E3779B97F4A7C15)
_KEY_WORDS = 4


class KeyedMemory:
    """`[block, head, cell byte]` of a model of one layer.

    Args:
        layout: of one layer; cells of a multiple of 64 bytes.
        blocks: how many, the last one for the layout proof.
    """

    def __init__(self, layout: BlockLayout, blocks: int) -> None:
        assert layout.layers == 1, "a block's bytes lie together"
        self.layout, self.part, self.blocks = layout, Part.whole(layout), blocks
        self.cells = np.zeros((blocks, layout.kv_heads, layout.cell_bytes), np.uint8)
        # What is added to the key, word by word: words of equal keys at other places differ, too.
        words = np.arange(layout.block_bytes // 8, dtype=np.uint64)
        self._steps: U64 = (words * _ODD).reshape(-1, _KEY_WORDS)

    def paged(self) -> PagedLayout:
        """Where the cells lie."""
        cell = self.layout.cell_bytes
        return PagedLayout(
            np.array([[self.cells.ctypes.data]], np.uint64),
            blocks=self.blocks,
            heads=self.layout.kv_heads,
            block_stride=self.layout.block_bytes,
            head_stride=cell,
            piece_stride=cell,
            piece_bytes=cell,
            pieces=1,
        )

    def read_cell(self, block: int, layer: int, head: int) -> bytes:
        """One head's bytes."""
        return bytes(self.cells[block, head].tobytes())

    def write_cell(self, block: int, layer: int, head: int, data: bytes) -> None:
        """Set them."""
        self.cells[block, head] = np.frombuffer(data, np.uint8)

    def fill(self, keys: U8) -> None:
        """Blocks 0, 1, … get the bytes of these (n, 32) keys."""
        self._words(len(keys))[:] = self._expected(keys)

    def clear(self, blocks: int) -> None:
        """The first blocks hold nothing that belongs to a key."""
        self._words(blocks)[:] = 0

    def wrong(self, keys: U8) -> list[int]:
        """Which of the blocks 0, 1, … do not hold the bytes of these keys."""
        same = (self._words(len(keys)) == self._expected(keys)).all(axis=(1, 2))
        return [int(block) for block in np.flatnonzero(~same)]

    def _words(self, blocks: int) -> U64:
        """(blocks, words / 4, 4) view."""
        return self.cells[:blocks].reshape(blocks, -1).view(np.uint64).reshape(blocks, -1, _KEY_WORDS)

    def _expected(self, keys: U8) -> U64:
        words = np.ascontiguousarray(keys).view(np.uint64).reshape(len(keys), 1, _KEY_WORDS)
        return words + self._steps
