"""An engine without a model: real client, real native copies, device memory made of numpy.

Every block holds bytes that only its key may hold, so one wrong byte anywhere shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore._native import PagedLayout
from kvstore.client import Client, Limits, LoadResult, PoolSpec
from kvstore.keys import KeyChain
from kvstore.testing import cell_pattern
from kvstore.testing.driver import namespace_of
from kvstore.types import BlockLayout, Hit, Namespace, Part, Reuse, SaveResult

__all__ = ["BIG", "SMALL", "DeviceMemory", "FakeEngine"]

# 8 KiB a block: 170 slots to a slab of 2 MiB.
SMALL = BlockLayout(layers=2, kv_heads=2, head_dim=64, dtype="float32", block_tokens=4)
# 260 KiB in a slot, 7 to a slab: an arena of 16 MiB holds 56.
BIG = BlockLayout(layers=4, kv_heads=4, head_dim=512, dtype="float32", block_tokens=4)
LIMITS = Limits(call_s=30.0, attach_s=60.0, copy_s=60.0, retry_s=0.01, retry_max_s=0.05, refused_s=600.0)


class DeviceMemory:
    """Paged KV memory `[layer, block, head, cell byte]`.

    Args:
        lie: hand out strides that are not the memory's own (heads of a block swapped).
    """

    def __init__(
        self, layout: BlockLayout, blocks: int, *, part: Part | None = None, lie: bool = False
    ) -> None:
        self.layout = layout
        self.part = part or Part.whole(layout)
        self.blocks = blocks
        self.cells = np.zeros((self.part.layers, blocks, self.part.heads, layout.cell_bytes), np.uint8)
        self._lie = lie

    def paged(self) -> PagedLayout:
        """Where the cells lie."""
        bases = [[self.cells[layer].ctypes.data] for layer in range(self.part.layers)]
        head_stride = self.cells.strides[2]
        if self._lie:
            bases = [[base[0] + (self.part.heads - 1) * head_stride] for base in bases]
        return PagedLayout(
            np.array(bases, np.uint64),
            blocks=self.blocks - 1 if self._lie else self.blocks,
            heads=self.part.heads,
            block_stride=self.cells.strides[1],
            head_stride=head_stride,
            piece_stride=self.layout.cell_bytes,
            piece_bytes=self.layout.cell_bytes,
            pieces=1,
            layer_start=self.part.layer_start,
            head_start=self.part.head_start,
        )

    def read_cell(self, block: int, layer: int, head: int) -> bytes:
        return self.cells[layer - self.part.layer_start, block, head - self.part.head_start].tobytes()

    def write_cell(self, block: int, layer: int, head: int, data: bytes) -> None:
        at = layer - self.part.layer_start, block, head - self.part.head_start
        self.cells[at] = np.frombuffer(data, np.uint8)

    def fill(self, blocks: Sequence[int], keys: NDArray[np.uint8]) -> None:
        """Block i gets the bytes of key i."""
        for block, key in zip(blocks, keys, strict=True):
            for row in range(self.part.layers):
                for column in range(self.part.heads):
                    layer, head = row + self.part.layer_start, column + self.part.head_start
                    self.cells[row, block, column] = cell_pattern(
                        key.tobytes(), layer, head, self.layout.cell_bytes
                    )

    def wrong(self, blocks: Sequence[int], keys: NDArray[np.uint8]) -> list[int]:
        """Positions of blocks that do not hold the bytes of their key."""
        found = []
        for position, (block, key) in enumerate(zip(blocks, keys, strict=True)):
            expected = [
                [cell_pattern(key.tobytes(), layer, head, self.layout.cell_bytes) for head in self._heads()]
                for layer in range(self.part.layer_start, self.part.layer_start + self.part.layers)
            ]
            if not np.array_equal(self.cells[:, block], np.array(expected)):
                found.append(position)
        return found

    def _heads(self) -> range:
        return range(self.part.head_start, self.part.head_start + self.part.heads)


class FakeEngine:
    """A client over device memory, and the things that tests do with both.

    Args:
        model: name in the namespace; tests that share a daemon use different ones.
        blocks: device blocks; one more is kept for the layout proof.
    """

    def __init__(
        self,
        socket: Path,
        *,
        model: str = "model",
        layout: BlockLayout = SMALL,
        blocks: int = 128,
        tenant: str = "default",
        reuse: Reuse = Reuse.OWN,
        limits: Limits = LIMITS,
        lie: bool = False,
        pool: PoolSpec | None = None,
        identity: dict[str, str] | None = None,
    ) -> None:
        self.memory = DeviceMemory(layout, blocks + 1 + lie, lie=lie)
        self.blocks = blocks
        self.tenant, self.reuse = tenant, reuse
        namespace = Namespace.parse({**namespace_of(layout, model), **(identity or {})})
        self.client = Client(
            socket, namespace, self.memory, tenants=(tenant,), limits=limits, scratch_block=blocks, pool=pool
        )

    def attached(self, timeout_s: float = 60.0) -> FakeEngine:
        """Wait until the daemon has accepted us."""
        assert self.client.wait_attached(timeout_s), self.client.refusal
        self.client.poll()
        return self

    def close(self) -> None:
        """Leave in order."""
        self.client.close()

    def chain(self, seed: int, blocks: int, *, tail: int | None = None) -> KeyChain:
        """A chain of `blocks`; from block `tail` on its tokens differ from those of the same seed."""
        size = self.memory.layout.block_tokens
        tokens = np.random.default_rng(seed).integers(0, 1 << 32, blocks * size, dtype=np.uint32)
        if tail is not None:
            tokens[tail * size :] ^= np.uint32(0x5A5A5A5A)
        chain = self.client.chain(tokens, self.tenant, self.reuse)
        assert chain is not None, "no root: detached, or reuse is not allowed"
        return chain

    def save(self, chain: KeyChain, start: int = 0, stop: int | None = None) -> SaveResult:
        """Put the blocks' bytes into device memory and hand them over, a device memory full at a time."""
        stop = len(chain) if stop is None else stop
        parts = []
        for at in range(start, stop, self.blocks):
            until = min(stop, at + self.blocks)
            blocks = np.arange(until - at, dtype=np.uint32)
            self.memory.fill(blocks.tolist(), chain.keys[at:until])
            result = self.client.save(chain, at, until, blocks).wait()
            assert result is not None, "a save did not end"
            parts.append(result)
        reason = next((part.reason for part in parts if part.reason), "")
        sums = [
            sum(getattr(part, name) for part in parts) for name in ("ready", "filled", "elsewhere", "dropped")
        ]
        return SaveResult(*sums, reason)

    def saved(self, seed: int, blocks: int) -> KeyChain:
        """A chain that is on HOST now."""
        chain = self.chain(seed, blocks)
        assert self.save(chain) == SaveResult(blocks, 0, 0, 0)
        return chain

    def matched(self, chain: KeyChain) -> int:
        """Length of the match; nothing stays pinned."""
        found = self.client.lookup(chain)
        if not isinstance(found, Hit):
            return 0
        self.client.release(found.lease)
        return found.blocks

    def hit(self, chain: KeyChain) -> Hit:
        """A lookup that must match."""
        found = self.client.lookup(chain)
        assert isinstance(found, Hit), found
        return found

    def load(self, hit: Hit, chain: KeyChain) -> LoadResult:
        """Load a hit; whatever the result calls good must be the right bytes."""
        start, stop = hit.plan.load_start, hit.plan.load_stop
        assert stop - start <= self.blocks, "more than the device memory holds"
        blocks = np.arange(stop - start, dtype=np.uint32)
        self.memory.cells[:, : len(blocks)] = 0
        result = self.client.load(hit, blocks).wait()
        assert result is not None, "a load did not end"
        good = result.good
        assert self.memory.wrong(blocks[:good].tolist(), chain.keys[start : start + good]) == []
        return result

    def restored(self, chain: KeyChain) -> int:
        """Look up, load, verify, release: leading blocks that came back right."""
        found = self.client.lookup(chain)
        if not isinstance(found, Hit):
            return 0
        good = self.load(found, chain).good
        self.client.release(found.lease)
        return good

    def flip(self, slot: int, offset: int = 0) -> None:
        """Rot: invert one byte of a slot at rest, through this process's own mapping of the arena."""
        attachment = self.client._core.attachment
        assert attachment is not None
        assert attachment.arena is not None
        attachment.arena.view(slot, offset + 1)[offset] ^= 0xFF

    def arena(self) -> Any:
        """This process's mapping."""
        attachment = self.client._core.attachment
        assert attachment is not None
        return attachment.arena
