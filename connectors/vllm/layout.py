"""Where the cells of a block lie in vLLM's KV memory, or why we cannot tell.

vLLM hands every layer as one view `[kernel blocks, KV heads, tokens, 2 · head_dim]`, contiguous per head.
What is inside belongs to its attention kernel (CPU: a K plane and a V plane, perhaps packed for the
instruction set), so to us a cell is opaque bytes and its format names the kernel. A block of the scheduler
may be several blocks of the kernel: then a cell has several pieces.

A model whose layers differ in how far they look back has several KV groups, each with block tables of its
own. Every group is a *bank* here: a process of its own as far as the daemon is concerned, with its part of
each block's cells; a block is READY when all banks of all ranks have written.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore.client import PagedLayout
from kvstore.types import BlockLayout, Part

if TYPE_CHECKING:
    import torch

__all__ = ["Group", "LayerCells", "Unsupported", "block_layout", "groups_of", "heads_of", "part_of"]

_LAYER_NUMBER = re.compile(r"\.(\d+)\.")
# By class name: a subclass may lay its cells out in another way.
_SPECS = {"FullAttentionSpec": "full", "SlidingWindowSpec": "window"}


class Unsupported(ValueError):
    """This engine's KV cannot be kept; it runs uncached. The message says why, and what to change."""


@dataclass(frozen=True, slots=True)
class Group:
    """One KV group of the whole model.

    Attributes:
        index: number of the group in vLLM.
        layers: its layers, all pipeline stages together.
        first: number of its first layer in our order (groups one after the other).
        window: tokens that a layer looks back, 0 = all.
    """

    index: int
    layers: int
    first: int
    window: int

    def __str__(self) -> str:
        what = f"window={self.window}" if self.window else "full"
        return f"{what}:{self.first}-{self.first + self.layers - 1}"


def groups_of(kv_cache_config: Any, layers_total: int, stages: int) -> tuple[Group, ...]:
    """The KV groups of a model.

    Args:
        kv_cache_config: vLLM's, of any rank.
        layers_total: attention layers of the whole model.
        stages: pipeline stages.

    Raises:
        Unsupported: a group keeps something else than whole K and V of every token.
    """
    specs = [(group, group.kv_cache_spec) for group in kv_cache_config.kv_cache_groups]
    if not specs:
        raise Unsupported("the model has no KV cache")
    if stages > 1 and len(specs) > 1:
        raise Unsupported("pipeline parallelism with several KV groups; use tensor parallelism instead")
    groups = []
    first = 0
    for index, (group, spec) in enumerate(specs):
        kind = type(spec).__name__
        if kind not in _SPECS:
            raise Unsupported(f"KV group {index} is a {kind}; {' and '.join(_SPECS)} can be kept")
        _check_spec(index, spec, specs[0][1])
        count = layers_total if len(specs) == 1 else len(group.layer_names)
        window = int(getattr(spec, "sliding_window", None) or 0) if _SPECS[kind] == "window" else 0
        groups.append(Group(index, count, first, window))
        first += count
    if not any(not group.window for group in groups):
        raise Unsupported("every layer has a sliding window: no block stays useful for long")
    return tuple(groups)


def _check_spec(index: int, spec: Any, first: Any) -> None:
    if getattr(spec, "head_size_v", spec.head_size) != spec.head_size or spec.num_heads != spec.num_kv_heads:
        raise Unsupported(f"KV group {index}: K and V differ in size, or heads are packed")
    if spec.page_size_padded is not None or getattr(spec, "tokens_per_state", 1) != 1:
        raise Unsupported(f"KV group {index}: padded or compressed pages")
    if getattr(spec, "non_causal", False) or getattr(spec, "attention_chunk_size", None):
        raise Unsupported(f"KV group {index}: chunked or non-causal attention; a prefix is not all it reads")
    mine = (spec.block_size, spec.num_kv_heads, spec.head_size, spec.dtype)
    if mine != (first.block_size, first.num_kv_heads, first.head_size, first.dtype):
        raise Unsupported("KV groups differ in block size, heads or dtype")


def block_layout(groups: Sequence[Group], spec: Any, heads: int, kernel: str, attention: str) -> BlockLayout:
    """Shape of one block.

    Args:
        groups: of the model.
        spec: vLLM's KV cache spec of any group.
        heads: KV heads of the whole model.
        kernel: names the attention kernel and whatever decides how it packs a cell.
        attention: what else changes bytes.

    Raises:
        Unsupported: a KV dtype that we do not know.
    """
    dtype = str(spec.dtype).removeprefix("torch.")
    names = {"float8_e4m3fn": "fp8_e4m3", "float8_e5m2": "fp8_e5m2", "uint8": "fp8_e4m3"}
    try:
        return BlockLayout(
            layers=sum(group.layers for group in groups),
            kv_heads=heads,
            head_dim=int(spec.head_size),
            dtype=names.get(dtype, dtype),
            block_tokens=int(spec.block_size),
            cell_format=f"opaque:{kernel}",
            attention=attention,
            groups="full" if len(groups) == 1 and not groups[0].window else ";".join(map(str, groups)),
        )
    except ValueError as error:  # BadRequest: the limits of a layout
        raise Unsupported(str(error)) from None


def heads_of(total: int, rank: int, ranks: int) -> tuple[int, int, bool]:
    """KV heads of a tensor-parallel rank: first, how many, and whether this rank writes them.

    With more ranks than heads a head lies on several; the lowest of them writes it (LAWS D17).
    """
    if total >= ranks:
        if total % ranks:
            raise Unsupported(f"{total} KV heads cannot be split over {ranks} ranks")
        each = total // ranks
        return rank * each, each, True
    if ranks % total:
        raise Unsupported(f"{total} KV heads cannot be replicated over {ranks} ranks")
    copies = ranks // total
    return rank // copies, 1, rank % copies == 0


def part_of(group: Group, names: Sequence[str], stage: int, stages: int, heads: tuple[int, int]) -> Part:
    """The cells of `group` that a rank holds.

    Args:
        names: its layers of this group.
        stage, stages: its pipeline stage, and how many there are.
        heads: first head and number of heads.
    """
    if stages == 1:
        if len(names) != group.layers:
            raise Unsupported(f"{len(names)} layers have a KV cache, {group.layers} were expected")
        return Part(group.first, group.layers, *heads)
    numbers = layer_numbers(names)
    if numbers != list(range(numbers[0], numbers[0] + len(numbers))) or numbers[-1] >= group.layers:
        raise Unsupported(f"the layers of pipeline stage {stage} do not follow one another: {numbers}")
    return Part(group.first + numbers[0], len(numbers), *heads)


def layer_numbers(names: Sequence[str]) -> list[int]:
    """Number of each layer, as its name says, ascending.

    Raises:
        Unsupported: a name without a number, or two with the same.
    """
    numbers = []
    for name in names:
        found = _LAYER_NUMBER.search(name)
        if found is None:
            raise Unsupported(f"layer {name!r} has no number in its name")
        numbers.append(int(found[1]))
    if len(set(numbers)) != len(numbers):
        raise Unsupported(f"two layers with one number: {sorted(names)[:8]}")
    return sorted(numbers)


class LayerCells:
    """A bank: `kvstore.client.KVMemory` over the layers of one group in this process.

    Args:
        tensors: layer name → view `[kernel blocks, heads, tokens, 2 · head_dim]`.
        layout: of the whole model's blocks.
        part: what of it these tensors hold, in the order of the layers' numbers.
        blocks: device blocks of the scheduler.

    Raises:
        Unsupported: the tensors are not what vLLM's CPU attention uses.
    """

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], layout: BlockLayout, part: Part, blocks: int
    ) -> None:
        self.layout = layout
        self.part = part
        self.blocks = blocks
        ordered = sorted(tensors, key=lambda name: layer_numbers([name])[0])
        self._layers = [tensors[name] for name in ordered]
        sample = self._layers[0]
        self._ratio = sample.shape[0] // blocks if blocks else 0  # kernel blocks in one of the scheduler's
        self._check(sample)

    def _check(self, sample: torch.Tensor) -> None:
        if sample.device.type != "cpu":
            raise Unsupported(f"KV memory on {sample.device}: this version copies CPU memory only")
        layout, part = self.layout, self.part
        tokens = layout.block_tokens // max(1, self._ratio)
        want = (self.blocks * self._ratio, part.heads, tokens, 2 * layout.head_dim)
        for tensor in self._layers:
            if tuple(tensor.shape) != want or tokens * self._ratio != layout.block_tokens:
                raise Unsupported(f"a layer's KV memory is {tuple(tensor.shape)}, {want} was expected")
            if not tensor[0, 0].is_contiguous() or tensor.stride() != sample.stride():
                raise Unsupported(f"a head's cell is not contiguous: strides {tensor.stride()}")
        if sample[0, 0].nbytes * self._ratio != layout.cell_bytes:
            raise Unsupported(f"a cell has {sample[0, 0].nbytes} bytes, {layout.cell_bytes} were expected")

    def paged(self) -> PagedLayout:
        """A cell is one piece per kernel block."""
        sample = self._layers[0]
        block, head = (sample.stride(i) * sample.element_size() for i in (0, 1))
        return PagedLayout(
            np.array([[layer.data_ptr()] for layer in self._layers], np.uint64),
            blocks=self.blocks,
            heads=self.part.heads,
            block_stride=block * self._ratio,
            head_stride=head,
            piece_stride=block,
            piece_bytes=sample[0, 0].nbytes,
            pieces=self._ratio,
            layer_start=self.part.layer_start,
            head_start=self.part.head_start,
        )

    def read_cell(self, block: int, layer: int, head: int) -> bytes:
        return b"".join(piece.numpy().tobytes() for piece in self._pieces(block, layer, head))

    def write_cell(self, block: int, layer: int, head: int, data: bytes) -> None:
        source = np.frombuffer(data, np.uint8)
        for number, piece in enumerate(self._pieces(block, layer, head)):
            piece.numpy()[:] = source[number * piece.numel() : (number + 1) * piece.numel()]

    def _pieces(self, block: int, layer: int, head: int) -> list[torch.Tensor]:
        """A cell's bytes through vLLM's own view of its memory."""
        import torch

        tensor = self._layers[layer - self.part.layer_start]
        first = block * self._ratio
        return [
            tensor[first + number, head - self.part.head_start].reshape(-1).view(torch.uint8)
            for number in range(self._ratio)
        ]
