"""What the embedded engine tells the daemon: who its blocks are, and where their cells lie."""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from kvstore.client import Client, Limits, PagedLayout, PoolSpec
from kvstore.types import BlockLayout, Namespace, Part

from .kv_memory import KVMemory
from .spec import ModelSpec
from .store_tables import StoreTables
from .weights import fingerprint

__all__ = ["PagedCells", "connect", "identity"]


def identity(
    spec: ModelSpec, memory: KVMemory, model: Path, weights: str = ""
) -> tuple[Namespace, BlockLayout]:
    """Namespace and layout of this engine's blocks.

    Args:
        spec: the model.
        memory: its KV memory.
        model: file or directory of the weights; also holds the tokenizer.
        weights: fingerprint, computed from `model` when empty (reads every byte).
    """
    # Everything that the weights do not say and that changes a byte of KV: rope, norms, head counts, …
    arithmetic = hashlib.blake2b(repr(sorted(asdict(spec).items())).encode(), digest_size=16).hexdigest()
    attention = f"causal; rope_theta={spec.rope_theta:g}; spec={arithmetic}"
    layout = BlockLayout(
        layers=spec.layers,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        dtype=str(memory.dtype).removeprefix("torch."),
        block_tokens=memory.block_tokens,
        attention=attention,
    )
    digest = weights or fingerprint(model)
    namespace = Namespace(
        model=model.stem,
        weights=digest,
        tokenizer=_tokenizer_digest(model) or digest,
        adapter="none",
        attention=attention,
        kv_dtype=layout.dtype,
        layout=layout.fingerprint,
        block_tokens=str(layout.block_tokens),
    )
    return namespace, layout


def _tokenizer_digest(model: Path) -> str:
    """Digest of the tokenizer's files; "" where they lie inside the weights (GGUF) or are missing."""
    if not model.is_dir():
        return ""
    state = hashlib.blake2b(digest_size=16)
    names = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "chat_template.jinja")
    found = [model / name for name in names if (model / name).is_file()]
    for file in found:
        state.update(file.name.encode() + file.read_bytes())
    return state.hexdigest() if found else ""


class PagedCells:
    """`kvstore.client.KVMemory` over the engine's KV memory: all layers, all heads, one process."""

    def __init__(self, memory: KVMemory, layout: BlockLayout) -> None:
        self._memory = memory
        self.layout = layout
        self.part = Part.whole(layout)
        self.blocks = memory.blocks

    def paged(self) -> PagedLayout:
        """A cell is one contiguous piece: [K|V][token][dim]."""
        memory = self._memory
        return PagedLayout(
            np.array([[base] for base in memory.bases], np.uint64),
            blocks=memory.blocks,
            heads=memory.kv_heads,
            block_stride=memory.block_stride_bytes,
            head_stride=memory.head_stride_bytes,
            piece_stride=memory.cell_bytes,
            piece_bytes=memory.cell_bytes,
            pieces=1,
        )

    def read_cell(self, block: int, layer: int, head: int) -> bytes:
        return self._memory.read_cell(block, layer, head)

    def write_cell(self, block: int, layer: int, head: int, data: bytes) -> None:
        self._memory.write_cell(block, layer, head, data)


def connect(
    socket: str | Path,
    spec: ModelSpec,
    memory: KVMemory,
    model: Path,
    *,
    idle_max: int | None = None,
    tenant: str = "default",
    weights: str = "",
    limits: Limits | None = None,
) -> StoreTables:
    """Block tables over the daemon at `socket`, which owns the engine's device pool from now on.

    The daemon may be absent: the engine then runs uncached until one appears. The last block of `memory`
    stays out of the pool: the layout proof of a later attach writes to it while the engine computes.

    Args:
        idle_max: most idle blocks kept on the device (`l2_blocks_max`); None = all.
    """
    if memory.device != torch.device("cpu"):
        raise ValueError(f"device: {memory.device} is not supported by this version; use cpu")
    namespace, layout = identity(spec, memory, model, weights)
    pool = memory.blocks - 1
    client = Client(
        socket,
        namespace,
        PagedCells(memory, layout),
        tenants=(tenant,),
        pool=PoolSpec("owned", pool, pool if idle_max is None else idle_max),
        scratch_block=pool,
        limits=limits,
    )
    return StoreTables(client, pool, memory.block_tokens, tenant)
