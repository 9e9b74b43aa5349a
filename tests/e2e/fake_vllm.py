"""A publisher that speaks as vLLM's does, on the test's own loop; everything goes wrong on demand."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import deque
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zmq
from zmq.asyncio import Context

from kvstore.router.kv_schema import Removed, Stored
from kvstore.router.vllm_wire import VllmSource
from kvstore.types import Tier

__all__ = ["FakeVllm", "TruthSink"]

_END = b"\xff" * 8
_times = itertools.count(1)


class FakeVllm:
    """Sequences from 0, a buffer, a PUB and a ROUTER socket. `start` it; `stop` and `start` is a restart.

    Args:
        folder: of its two sockets.
        buffer: batches that a replay reaches back.

    Attributes:
        truth: blocks that are readable.
        mute: replays are not answered.
        hide: sequences that no replay tells.
    """

    def __init__(self, folder: Path, buffer: int = 10_000) -> None:
        self.source = VllmSource(f"ipc://{folder}/pub", f"ipc://{folder}/rep")
        self._buffer_max = buffer
        self._context: Any = None
        self._task: asyncio.Task[None] | None = None
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer)
        self.sequence = 0
        self.truth: set[int] = set()
        self.mute = False
        self.hide: set[int] = set()
        self.asked: list[int] = []

    def start(self, *, forget: bool = True) -> None:
        """Bind; a new process has an empty cache and counts from 0, `forget=False` is the old one again."""
        if forget:
            self._buffer.clear()
            self.sequence, self.truth = 0, set()
        self._context = Context()
        self._pub = self._context.socket(zmq.PUB, socket_class=zmq.Socket)
        self._router = self._context.socket(zmq.ROUTER)
        self._router.set(zmq.SNDHWM, 0)
        self._pub.bind(self.source.publish)
        self._router.bind(self.source.replay)
        self._task = asyncio.get_running_loop().create_task(self._serve())

    async def stop(self) -> None:
        """As if it were killed."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None
            self._context.destroy(linger=0)

    async def _serve(self) -> None:
        while True:
            frames = await self._router.recv_multipart()
            start = int.from_bytes(frames[2], "big")
            self.asked.append(start)
            if self.mute:
                continue
            for sequence, payload in tuple(self._buffer):
                if sequence >= start and sequence not in self.hide:
                    await self._router.send_multipart(
                        (frames[0], b"", b"", sequence.to_bytes(8, "big"), payload)
                    )
            await self._router.send_multipart((frames[0], b"", b"", _END, b""))

    # ---- what happens to its cache ------------------------------------------------------------------------

    def store(self, *blocks: int, lose: bool = False) -> None:
        """Blocks of four tokens become readable."""
        tokens = [block % 1000 for block in blocks for _ in range(4)]
        self.publish(["BlockStored", list(blocks), None, tokens, 4, None, "GPU"], lose=lose)
        self.truth.update(blocks)

    def remove(self, *blocks: int, lose: bool = False) -> None:
        """Blocks leave."""
        self.publish(["BlockRemoved", list(blocks), "GPU"], lose=lose)
        self.truth.difference_update(blocks)

    def clear(self) -> None:
        """Everything leaves."""
        self.publish(["AllBlocksCleared"])
        self.truth.clear()

    def publish(self, *events: Any, lose: bool = False) -> None:
        """One batch of events as they are; `lose`: no subscriber hears of it."""
        self.publish_raw(msgspec.msgpack.encode([float(next(_times)), list(events), 0]), lose=lose)

    def publish_raw(self, payload: bytes, *, lose: bool = False, sequence: int | None = None) -> None:
        """One batch of any bytes, by default with the next sequence."""
        if sequence is None:
            sequence, self.sequence = self.sequence, self.sequence + 1
            self._buffer.append((sequence, payload))
        if not lose:
            self._pub.send_multipart((b"", sequence.to_bytes(8, "big"), payload))


class TruthSink:
    """Two columns of plain sets, and a diary."""

    def __init__(self) -> None:
        self.known: set[int | bytes] = set()
        self._next: set[int | bytes] | None = None
        self.diary: list[str] = []
        self.doubt = "new"
        self.lost_batches = 0

    @property
    def _column(self) -> set[int | bytes]:
        return self.known if self._next is None else self._next

    def reset(self) -> None:
        self.diary.append("reset")
        self._next = set()

    def stored(self, event: Stored) -> None:
        self._column.update(names(event))

    def removed(self, event: Removed) -> None:
        self._column.difference_update(names(event))

    def cleared(self, tier: Tier | None) -> None:
        self.diary.append("cleared")
        self._column.clear()

    def ready(self) -> None:
        self.diary.append("ready")
        if self._next is not None:
            self.known, self._next = self._next, None
        self.doubt = ""

    def stale(self, reason: str) -> None:
        assert reason
        self.diary.append("stale")
        self.doubt = reason

    def lost(self, batches: int) -> None:
        assert batches > 0
        self.lost_batches += batches


def names(event: Stored | Removed) -> list[int] | list[bytes]:
    """vLLM's integers, or our keys."""
    if event.width == 8:
        found: list[int] = np.frombuffer(event.hashes, np.uint64).tolist()
        return found
    return [event.hashes[at : at + event.width] for at in range(0, len(event.hashes), event.width)]
