"""The transformer: a whole step, for sequences at any point of their life, over paged KV.

Arithmetic is that of HF's Llama / Mistral / Qwen2 (float32 logits agree to rounding). What differs: K and V
lie in `KVMemory`, reached through block tables, and projections with the same input are one matrix.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody uses
from torch import Tensor

from .batch import Batch, Chunk, DecodeGroup, Segment, flatten
from .kv_memory import KVMemory
from .spec import ModelSpec, RopeScaling, read_spec
from .weights import ROPE_FACTORS, load_weights

__all__ = ["Model", "load_model"]


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm: Tensor
    qkv: Tensor  # rows: all q heads, then all k heads, then all v heads
    qkv_bias: Tensor | None
    output: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


class Model:
    """Weights of one model, ready to run over one `KVMemory`.

    Args:
        spec: what the weights are.
        weights: as `load_weights` returns them; fused copies are made, the rest is shared.
        memory: paged KV of the same layers, KV heads, head_dim and dtype.

    Raises:
        ValueError: the memory's shape or dtype is not the model's.
    """

    def __init__(self, spec: ModelSpec, weights: Mapping[str, Tensor], memory: KVMemory) -> None:
        embedding = weights["model.embed_tokens.weight"].to(memory.device)
        if (memory.layers, memory.kv_heads, memory.head_dim) != (spec.layers, spec.kv_heads, spec.head_dim):
            raise ValueError("memory has other layers, kv_heads or head_dim than the spec")
        if memory.dtype != embedding.dtype:
            raise ValueError(f"memory is {memory.dtype}, weights are {embedding.dtype}; they must be equal")
        self.spec, self.memory = spec, memory
        self._embedding = embedding
        self._head = embedding if spec.tied_embeddings else weights["lm_head.weight"].to(memory.device)
        self._norm = weights["model.norm.weight"].to(memory.device)
        self._layers = [_fuse(weights, f"model.layers.{i}.", spec, memory.device) for i in range(spec.layers)]
        self._frequencies = _frequencies(spec, weights.get(ROPE_FACTORS)).to(memory.device)

    @torch.inference_mode()
    def forward(self, segments: Sequence[Segment]) -> Tensor:
        """Run one step: write the K and V of all tokens into memory, return the logits that are wanted.

        Returns:
            float32 [segments that want logits, vocab], in the order of `segments`.

        Raises:
            ValueError: see `flatten`.
        """
        batch = flatten(segments, self.memory)
        # Zero the rest of blocks that are only begun: padding is weighted with 0, but 0 · NaN is NaN.
        self.memory.clear(batch.opened)
        cos, sin = self._rotations(batch.positions)
        hidden = F.embedding(batch.tokens, self._embedding)
        for index, layer in enumerate(self._layers):
            normed = self._rms_norm(hidden, layer.attention_norm)
            mixed = self._attend(index, F.linear(normed, layer.qkv, layer.qkv_bias), batch, cos, sin)
            hidden = F.linear(mixed, layer.output).add_(hidden)
            gate, up = F.linear(self._rms_norm(hidden, layer.mlp_norm), layer.gate_up).chunk(2, dim=-1)
            hidden = F.linear(F.silu(gate).mul_(up), layer.down).add_(hidden)
        last = self._rms_norm(hidden.index_select(0, batch.outputs), self._norm)
        return F.linear(last, self._head).float()

    def _attend(self, layer: int, qkv: Tensor, batch: Batch, cos: Tensor, sin: Tensor) -> Tensor:
        """[tokens, (heads + 2 · kv_heads) · head_dim] → [tokens, heads · head_dim]."""
        spec = self.spec
        vectors = qkv.view(-1, spec.heads + 2 * spec.kv_heads, spec.head_dim)
        rotated, values = vectors[:, : spec.heads + spec.kv_heads], vectors[:, spec.heads + spec.kv_heads :]
        rotated = _rotate(rotated, cos, sin)
        self.memory.write(layer, batch.writes, rotated[:, spec.heads :], values)
        queries = rotated[:, : spec.heads].view(-1, spec.kv_heads, spec.query_group, spec.head_dim)
        parts = [self._attend_decodes(layer, queries, group) for group in batch.groups]
        for chunk in batch.chunks:
            parts += self._attend_chunk(layer, queries, chunk)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attend_decodes(self, layer: int, queries: Tensor, group: DecodeGroup) -> Tensor:
        """Query heads of one KV head stand where attention expects positions: K is read once for all."""
        keys_values = self.memory.gather(layer, group.planes, group.count)[..., : group.context, :]
        asked = queries[group.row : group.row + group.count]
        mixed = F.scaled_dot_product_attention(
            asked, keys_values[:, :, 0], keys_values[:, :, 1], attn_mask=group.mask
        )
        return mixed.reshape(group.count, -1)

    def _attend_chunk(self, layer: int, queries: Tensor, chunk: Chunk) -> list[Tensor]:
        """KV heads are the batch, their query heads the heads: K and V are broadcast instead of repeated."""
        keys_values = self.memory.gather(layer, chunk.planes, 1)[0, :, :, None]
        keys_values = keys_values.expand(-1, -1, self.spec.query_group, -1, -1)
        parts = []
        for piece in chunk.pieces:
            mixed = F.scaled_dot_product_attention(
                queries[piece.row : piece.row + piece.count].permute(1, 2, 0, 3),
                keys_values[:, 0, :, : piece.context],
                keys_values[:, 1, :, : piece.context],
                attn_mask=piece.mask,
                is_causal=piece.mask is None,
            )
            parts.append(mixed.permute(2, 0, 1, 3).reshape(piece.count, -1))
        return parts

    def _rms_norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """As F.rms_norm, which takes five times as long for 512 rows on one CPU thread [measured]."""
        length = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True, dtype=torch.float32)
        scale = length.square_().div_(self.spec.hidden).add_(self.spec.norm_eps).rsqrt_()
        normed: Tensor = (hidden * scale).to(hidden.dtype).mul_(weight)
        return normed

    def _rotations(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and signed sin, both [tokens, 1, head_dim]; computed in float32 whatever the weights are."""
        angles = positions[:, None].float() * self._frequencies
        cos, sin = angles.cos(), angles.sin()
        return (
            torch.cat((cos, cos), dim=-1)[:, None].to(self.memory.dtype),
            torch.cat((-sin, sin), dim=-1)[:, None].to(self.memory.dtype),
        )


def load_model(
    path: str | Path,
    *,
    blocks: int,
    block_tokens: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
) -> Model:
    """Read spec and weights at `path` and allocate KV memory of `blocks` blocks.

    Raises:
        FileNotFoundError, UnsupportedModel: see `read_spec` and `load_weights`.
    """
    spec = read_spec(path)
    memory = KVMemory(spec, blocks, block_tokens, dtype, device)
    return Model(spec, load_weights(path, spec, dtype), memory)


def _fuse(weights: Mapping[str, Tensor], prefix: str, spec: ModelSpec, device: torch.device) -> _Layer:
    def read(name: str) -> Tensor:
        return weights[prefix + name].to(device)

    projections = [f"self_attn.{name}_proj" for name in "qkv"]
    return _Layer(
        attention_norm=read("input_layernorm.weight"),
        qkv=torch.cat([read(name + ".weight") for name in projections]),
        qkv_bias=torch.cat([read(name + ".bias") for name in projections]) if spec.qkv_bias else None,
        output=read("self_attn.o_proj.weight"),
        mlp_norm=read("post_attention_layernorm.weight"),
        gate_up=torch.cat([read("mlp.gate_proj.weight"), read("mlp.up_proj.weight")]),
        down=read("mlp.down_proj.weight"),
    )


def _rotate(vectors: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (i, i + head_dim / 2); `sin` carries the sign."""
    first, second = vectors.chunk(2, dim=-1)
    return torch.addcmul(vectors * cos, torch.cat((second, first), dim=-1), sin)


def _frequencies(spec: ModelSpec, factors: Tensor | None) -> Tensor:
    """Rotary frequencies [head_dim / 2], float32."""
    exponents = torch.arange(0, spec.head_dim, 2, dtype=torch.int64).float() / spec.head_dim
    frequencies = 1.0 / (spec.rope_theta**exponents)
    if factors is not None:
        return frequencies / factors.float()
    return frequencies if spec.rope_scaling is None else _stretch(frequencies, spec.rope_scaling)


def _stretch(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3: long wavelengths are stretched by `factor`, short ones kept, a linear blend between."""
    turns = scaling.original_positions * frequencies / (2 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return frequencies * (kept + (1.0 - kept) / scaling.factor)
