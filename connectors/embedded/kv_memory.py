"""Paged KV memory: one tensor that holds every block of every layer, and nothing about who owns a block.

    memory[layer, block, kv_head, plane, token, dim]        plane 0 = K, plane 1 = V

A *cell* is `memory[layer, block, kv_head]`: `[K|V][token][dim]`, contiguous, `cell_bytes` long. So the block
`b` of layer `l` starts at `bases[l] + b * block_stride_bytes`, and its head `h` lies `h * head_stride_bytes`
further: the numbers a copier needs to move cells without knowing anything of this module.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .spec import ModelSpec

__all__ = ["KVMemory"]


class KVMemory:
    """KV memory for `blocks` blocks of `block_tokens` tokens, allocated and touched once, never resized.

    Args:
        spec: gives layers, kv_heads and head_dim.
        blocks: number of blocks; ids are 0 … blocks − 1.
        block_tokens: tokens per block.
        dtype: element type of K and V.
        device: where the memory lies.

    Raises:
        ValueError: blocks or block_tokens is not positive.
    """

    def __init__(
        self,
        spec: ModelSpec,
        blocks: int,
        block_tokens: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> None:
        if blocks < 1:
            raise ValueError(f"blocks is {blocks}; at least 1 is needed")
        if block_tokens < 1:
            raise ValueError(f"block_tokens is {block_tokens}; at least 1 is needed")
        self.layers, self.blocks, self.kv_heads = spec.layers, blocks, spec.kv_heads
        self.block_tokens, self.head_dim, self.dtype = block_tokens, spec.head_dim, dtype
        self.device = device or torch.device("cpu")
        shape = (self.layers, blocks, self.kv_heads, 2, block_tokens, self.head_dim)
        # empty + zero_, not zeros: zeros maps untouched pages, and the first requests would pay for them.
        self.tensor = torch.empty(shape, dtype=dtype, device=self.device).zero_()
        self._planes = self.tensor.view(self.layers, -1, block_tokens * self.head_dim)
        self._vectors = self.tensor.view(self.layers, -1, self.head_dim)
        heads = torch.arange(self.kv_heads, device=self.device)[:, None] * 2
        # [kv_heads, 2]: rows of `_planes` that block 0 has.
        self._cell_planes = heads + torch.arange(2, device=self.device)

    @property
    def cell_bytes(self) -> int:
        """Bytes of one cell: K and V of one head of one layer for one block."""
        return 2 * self.block_tokens * self.head_dim * self.dtype.itemsize

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers and heads."""
        return self.layers * self.kv_heads * self.cell_bytes

    @property
    def head_stride_bytes(self) -> int:
        """Distance between the cells of neighbouring heads."""
        return self.tensor.stride(2) * self.dtype.itemsize

    @property
    def block_stride_bytes(self) -> int:
        """Distance between neighbouring blocks of one layer."""
        return self.tensor.stride(1) * self.dtype.itemsize

    @property
    def layer_stride_bytes(self) -> int:
        """Distance between neighbouring layers."""
        return self.tensor.stride(0) * self.dtype.itemsize

    @property
    def bases(self) -> tuple[int, ...]:
        """Address of block 0, head 0 of each layer. Valid as long as this object lives."""
        return tuple(self.tensor.data_ptr() + layer * self.layer_stride_bytes for layer in range(self.layers))

    def read_cell(self, block: int, layer: int, head: int) -> bytes:
        """Bytes of one cell, through plain indexing: independent of every stride above."""
        self._check(block, layer, head)
        return self.tensor[layer, block, head].cpu().contiguous().view(torch.uint8).numpy().tobytes()

    def write_cell(self, block: int, layer: int, head: int, data: bytes) -> None:
        """Overwrite one cell.

        Raises:
            ValueError: `data` is not exactly cell_bytes long.
        """
        self._check(block, layer, head)
        if len(data) != self.cell_bytes:
            raise ValueError(f"data is {len(data)} bytes; a cell is {self.cell_bytes}")
        cell = torch.frombuffer(bytearray(data), dtype=self.dtype)
        self.tensor[layer, block, head] = cell.view(2, self.block_tokens, self.head_dim).to(self.device)

    def plane_rows(self, blocks: Sequence[Sequence[int]]) -> Tensor:
        """Index for `gather` over equally long tables: int64, flat over [tables, kv_heads, 2, blocks]."""
        ids = torch.tensor(blocks, dtype=torch.int64, device=self.device) * (2 * self.kv_heads)
        return (ids[:, None, None, :] + self._cell_planes[None, :, :, None]).reshape(-1)

    def vector_rows(self, slots: Sequence[int]) -> Tensor:
        """Index for `write`: int64, flat over [tokens, kv_heads, 2].

        Args:
            slots: per token `block * block_tokens + offset`.
        """
        ids = torch.tensor(slots, dtype=torch.int64, device=self.device)
        block, offset = ids // self.block_tokens, ids % self.block_tokens
        planes = (block * (2 * self.kv_heads))[:, None, None] + self._cell_planes
        return (planes * self.block_tokens + offset[:, None, None]).reshape(-1)

    def write(self, layer: int, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store K and V, both [tokens, kv_heads, head_dim], at the places that `vector_rows` named."""
        both = torch.stack((keys, values), dim=2)
        self._vectors[layer].index_copy_(0, rows, both.view(-1, self.head_dim))

    def clear(self, blocks: Tensor) -> None:
        """Zero these blocks (int64 ids) in every layer."""
        if blocks.numel():
            self.tensor.index_fill_(1, blocks, 0)

    def gather(self, layer: int, rows: Tensor, tables: int) -> Tensor:
        """Copy whole blocks out in the order attention reads them: one copy, in runs of one plane each.

        Args:
            layer: which layer.
            rows: from `plane_rows`.
            tables: how many block tables `rows` was made of.

        Returns:
            [tables, kv_heads, 2, blocks · block_tokens, head_dim], contiguous.
        """
        planes = self._planes[layer].index_select(0, rows)
        return planes.view(tables, self.kv_heads, 2, -1, self.head_dim)

    def _check(self, block: int, layer: int, head: int) -> None:
        limits = (("block", block, self.blocks), ("layer", layer, self.layers), ("head", head, self.kv_heads))
        for name, value, limit in limits:
            if not 0 <= value < limit:
                raise ValueError(f"{name} is {value}; this memory has 0 … {limit - 1}")
