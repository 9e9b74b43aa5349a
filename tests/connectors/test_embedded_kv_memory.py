"""The layout of KV memory: by plain indexing, by strides and raw addresses, by the model's own writes."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import pytest
import torch
from kvstore.connectors.embedded.kv_memory import KVMemory
from kvstore.connectors.embedded.tiny import TINY

SPEC = replace(TINY, layers=3, heads=4, kv_heads=2, head_dim=8)


def filled(dtype: torch.dtype = torch.float32) -> KVMemory:
    memory = KVMemory(SPEC, 5, 4, dtype)
    memory.tensor.copy_(torch.randn(memory.tensor.shape, generator=torch.Generator().manual_seed(3)))
    return memory


def every_cell(memory: KVMemory) -> list[tuple[int, int, int]]:
    return [
        (b, n, h) for b in range(memory.blocks) for n in range(memory.layers) for h in range(memory.kv_heads)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_strides_and_addresses_lead_to_the_cells(dtype: torch.dtype) -> None:
    memory = filled(dtype)
    assert memory.cell_bytes == 2 * 4 * 8 * dtype.itemsize
    assert memory.block_bytes == 3 * 2 * memory.cell_bytes
    for block, layer, head in every_cell(memory):
        address = memory.bases[layer] + block * memory.block_stride_bytes + head * memory.head_stride_bytes
        assert ctypes.string_at(address, memory.cell_bytes) == memory.read_cell(block, layer, head)


def test_a_cell_is_keys_then_values_token_by_token() -> None:
    memory = filled()
    slots = [3 * 4 + 2, 1 * 4 + 0]  # block 3 offset 2, block 1 offset 0
    keys, values = torch.randn(2, 2, 8), torch.randn(2, 2, 8)
    memory.write(1, memory.vector_rows(slots), keys, values)
    for head in range(2):
        cell = torch.frombuffer(bytearray(memory.read_cell(3, 1, head)), dtype=torch.float32)
        assert torch.equal(cell[2 * 8 : 3 * 8], keys[0, head])
        assert torch.equal(cell[(4 + 2) * 8 : (4 + 3) * 8], values[0, head])
        cell = torch.frombuffer(bytearray(memory.read_cell(1, 1, head)), dtype=torch.float32)
        assert torch.equal(cell[:8], keys[1, head])


def test_write_cell_changes_that_cell_only() -> None:
    memory = filled()
    before = {where: memory.read_cell(*where) for where in every_cell(memory)}
    data = bytes(range(256)) * (memory.cell_bytes // 256)
    memory.write_cell(4, 2, 1, data)
    before[4, 2, 1] = data
    assert {where: memory.read_cell(*where) for where in every_cell(memory)} == before


def test_gather_is_in_table_order() -> None:
    memory = filled()
    got = memory.gather(2, memory.plane_rows([[4, 0], [1, 1]]), 2)
    assert got.shape == (2, 2, 2, 8, 8)
    for row, blocks in enumerate(([4, 0], [1, 1])):
        expected = torch.cat([memory.tensor[2, block] for block in blocks], dim=2)
        assert torch.equal(got[row], expected)


def test_clear_zeroes_whole_blocks_in_every_layer() -> None:
    memory = filled()
    expected = memory.tensor.clone()
    expected[:, 2] = 0
    memory.clear(torch.tensor([2]))
    memory.clear(torch.tensor([], dtype=torch.int64))
    assert torch.equal(memory.tensor, expected)


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="blocks"):
        KVMemory(SPEC, 0, 4)
    with pytest.raises(ValueError, match="block_tokens"):
        KVMemory(SPEC, 4, 0)
    memory = filled()
    for where, name in (((5, 0, 0), "block"), ((0, 3, 0), "layer"), ((0, 0, -1), "head")):
        with pytest.raises(ValueError, match=name):
            memory.read_cell(*where)
    with pytest.raises(ValueError, match="a cell is"):
        memory.write_cell(0, 0, 0, b"short")
