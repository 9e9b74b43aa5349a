"""For the client's tests: an identity, limits, and engine memory."""

from __future__ import annotations

import numpy as np

from kvstore._native import PagedLayout
from kvstore.client import Limits
from kvstore.rpc import messages as m
from kvstore.types import BlockLayout, Namespace, Part

LAYOUT = BlockLayout(layers=2, kv_heads=2, head_dim=8, dtype="float16", block_tokens=4)
NAMESPACE = Namespace("model", "w1", "t1", "none", "rope", "float16", LAYOUT.fingerprint, "4")
ROOT = bytes(range(32))
# Short enough that a test of a deadline is over soon, long enough for a loaded machine to answer in time.
LIMITS = Limits(call_s=5.0, attach_s=5.0, copy_s=5.0, retry_s=0.001, retry_max_s=0.02, refused_s=3600.0)
WAIT_S = 20.0


class Memory:
    """Paged KV memory as an engine may have it: per layer and plane [block][token][head][dim]."""

    def __init__(self, blocks: int = 16, part: Part | None = None, layout: BlockLayout = LAYOUT) -> None:
        self.layout = layout
        self.part = part or Part.whole(layout)
        self.blocks = blocks
        shape = (self.part.layers, 2, blocks, layout.block_tokens, self.part.heads, layout.head_dim)
        self.cells = np.zeros(shape, np.uint16)
        self.lie_about_heads = False

    def paged(self) -> PagedLayout:
        cells = self.cells
        rows = range(self.part.layers)
        bases = np.array([[cells[row, plane].ctypes.data for plane in (0, 1)] for row in rows], np.uint64)
        if self.lie_about_heads:
            bases[-1] = bases[-1][::-1]  # K and V of the last layer swapped
        return PagedLayout(
            bases,
            blocks=self.blocks,
            heads=self.part.heads,
            block_stride=cells.strides[2],
            head_stride=cells.strides[4],
            piece_stride=cells.strides[3],
            piece_bytes=self.layout.head_dim * 2,
            pieces=self.layout.block_tokens,
            layer_start=self.part.layer_start,
            head_start=self.part.head_start,
        )

    def _cell(self, block: int, layer: int, head: int) -> np.ndarray:
        return self.cells[layer - self.part.layer_start, :, block, :, head - self.part.head_start]

    def read_cell(self, block: int, layer: int, head: int) -> bytes:
        return self._cell(block, layer, head).tobytes()

    def write_cell(self, block: int, layer: int, head: int, data: bytes) -> None:
        cell = self._cell(block, layer, head)
        cell[:] = np.frombuffer(data, np.uint16).reshape(cell.shape)

    def fill(self, block: int, seed: bytes) -> None:
        """Distinct bytes in every cell of a block."""
        for layer in range(self.part.layers):
            for head in range(self.part.heads):
                self.write_cell(block, layer, head, m.pattern(seed, layer, head, self.layout.cell_bytes))

    def block(self, block: int) -> bytes:
        return self.cells[:, :, block].tobytes()
