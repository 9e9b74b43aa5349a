"""Bytes between the arena and the wire: copied and verified by native threads, never on the loop.

The server is to the store what an engine is: its "paged memory" is a buffer of dense canonical blocks, filled
from READY slots by the same checked load (fingerprint, generation, sums; LAWS A4, A5) and stored into FILLING
slots by the same summing copy that engines use.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstore._native import Arena, Copier, PagedLayout, SlotFormat
from kvstore.errors import LimitExceeded
from kvstore.types import BlockLayout

__all__ = ["Buffer", "Copies"]

# Whole blocks that one copy brings: enough to keep the wire busy, and some 0.2 ms of one thread.
BATCH_BYTES = 2 << 20
# Of the smallest blocks: reserving so many slots, and evicting for them, holds the loop for about 1 ms.
BATCH_BLOCKS_MAX = 1024


@dataclass(slots=True, eq=False)
class Buffer:
    """Room for a few blocks, [block][layer][head][cell] without padding.

    Attributes:
        bytes: (blocks × block_bytes,) uint8.
        blocks: how many fit.
        block_bytes: of each.
        paged: the same memory as a copier sees it.
        job: the copy that runs on it, if one does.
    """

    bytes: NDArray[np.uint8]
    blocks: int
    block_bytes: int
    paged: PagedLayout
    job: asyncio.Future[NDArray[np.uint8]] | None = None


class Copies:
    """Copy threads and buffers of one gRPC server.

    Args:
        threads: that copy.
        buffer_bytes_max: of all buffers together.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, threads: int, buffer_bytes_max: int) -> None:
        self._loop = loop
        self._copier = Copier(threads)
        self._buffer_bytes_max = buffer_bytes_max
        self._buffer_bytes = 0
        self._running: dict[int, Buffer] = {}  # keeps the memory of a copy that nobody awaits any more
        loop.add_reader(self._copier.eventfd, self._collect)

    def buffer(self, layout: BlockLayout, blocks: int) -> Buffer:
        """Room for one batch of a stream of `blocks` blocks.

        Raises:
            LimitExceeded: grpc.buffer_bytes_max are in use by other streams.
        """
        size, cell = layout.block_bytes, layout.cell_bytes
        count = max(1, min(blocks, BATCH_BYTES // size, BATCH_BLOCKS_MAX))
        if self._buffer_bytes + count * size > self._buffer_bytes_max:
            raise LimitExceeded(
                f"stream: {count * size} bytes are more than is left of grpc.buffer_bytes_max = "
                f"{self._buffer_bytes_max}; try again when other streams have ended"
            )
        memory = np.empty(count * size, np.uint8)
        head = memory.ctypes.data
        row = layout.kv_heads * cell
        bases = (head + row * np.arange(layout.layers, dtype=np.uint64)).reshape(-1, 1)
        paged = PagedLayout(
            bases.astype(np.uint64),
            blocks=count,
            heads=layout.kv_heads,
            block_stride=size,
            head_stride=cell,
            piece_stride=cell,
            piece_bytes=cell,
            pieces=1,
        )
        self._buffer_bytes += len(memory)
        return Buffer(memory, count, size, paged)

    def give_back(self, buffer: Buffer) -> None:
        """The stream ended; the memory is free once no copy runs on it."""

        def free() -> None:
            self._buffer_bytes -= len(buffer.bytes)

        self.after(buffer, free)

    # ---- copies ------------------------------------------------------------------------------------------

    async def load(
        self,
        buffer: Buffer,
        arena: Arena,
        shape: SlotFormat,
        slots: NDArray[np.uint32],
        keys: NDArray[np.uint8],
    ) -> NDArray[np.uint8]:
        """READY slots into the buffer from its first block on; (n,) status of each (see the native stub)."""
        blocks = np.arange(len(slots), dtype=np.uint32)
        job = self._copier.load(arena, shape, buffer.paged, blocks, slots, keys)
        return await self._finish(buffer, job)

    async def store(
        self,
        buffer: Buffer,
        arena: Arena,
        shape: SlotFormat,
        blocks: NDArray[np.uint32],
        slots: NDArray[np.uint32],
        generations: NDArray[np.uint64],
    ) -> NDArray[np.uint8]:
        """Blocks of the buffer into FILLING slots, summed on the way; (n,) status of each."""
        job = self._copier.store(arena, shape, buffer.paged, blocks, slots, generations)
        return await self._finish(buffer, job)

    async def _finish(self, buffer: Buffer, job: int) -> NDArray[np.uint8]:
        buffer.job = self._loop.create_future()
        self._running[job] = buffer
        return await asyncio.shield(buffer.job)  # a cancelled stream does not stop its copy

    def _collect(self) -> None:
        for done in self._copier.completions():
            buffer = self._running.pop(done.job)
            assert buffer.job is not None, "a copy without a future"
            buffer.job.set_result(done.status)

    def after(self, buffer: Buffer, then: Callable[[], None]) -> None:
        """Call `then` when no copy runs on the buffer: now, or at the end of the one that does."""
        if buffer.job is None or buffer.job.done():
            then()
        else:
            buffer.job.add_done_callback(lambda _: then())

    async def close(self) -> None:
        """Join every copy and whatever waits for one."""
        self._copier.close()
        self._loop.remove_reader(self._copier.eventfd)
        self._collect()
        await asyncio.sleep(0)  # callbacks of the copies that just ended
