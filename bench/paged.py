"""Paged KV memory and a daemon beside it, for benchmarks: no model, everything else is real."""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from bench.limits import huge_memory
from kvstore._native import PagedLayout
from kvstore.client import Client, Limits
from kvstore.types import BlockLayout, Namespace, Part

__all__ = ["BenchDaemon", "PagedMemory", "client_of", "layout_of", "namespace_of"]

_START_S = 120.0
_PR_SET_PDEATHSIG = 1


def layout_of(block_bytes: int) -> BlockLayout:
    """Blocks of 16 tokens with 8 KV heads of 128 in bfloat16, as in Llama 3: 64 KiB a layer.

    2 MiB is all 32 layers; fewer layers give the smaller blocks. Below 64 KiB: one head.
    """
    if block_bytes >= 64 << 10:
        return BlockLayout(block_bytes // (64 << 10), 8, 128, "bfloat16", 16)
    return BlockLayout(1, 1, block_bytes // 64, "bfloat16", 16)


def namespace_of(layout: BlockLayout) -> Namespace:
    """Some identity."""
    return Namespace("bench", "w", "t", "none", "rope", layout.dtype, layout.fingerprint, "16")


class PagedMemory:
    """KV memory as attention kernels have it: [layer][block][K, V][head][token][dim], head-contiguous.

    Args:
        layout: shape of a block.
        blocks: how many.
    """

    def __init__(self, layout: BlockLayout, blocks: int) -> None:
        self.layout = layout
        self.part = Part.whole(layout)
        self.blocks = blocks
        self.plane_bytes = layout.cell_bytes // 2
        self.row_bytes = layout.kv_heads * layout.cell_bytes
        self.flat = huge_memory(layout.layers * blocks * self.row_bytes)
        self.cells = self.flat.reshape(layout.layers, blocks, 2, layout.kv_heads, self.plane_bytes)

    def paged(self) -> PagedLayout:
        """Where the cells lie."""
        bases = np.array([[plane.ctypes.data for plane in row[0]] for row in self.cells], np.uint64)
        return PagedLayout(
            bases,
            blocks=self.blocks,
            heads=self.layout.kv_heads,
            block_stride=self.row_bytes,
            head_stride=self.plane_bytes,
            piece_stride=self.plane_bytes,
            piece_bytes=self.plane_bytes,
            pieces=1,
        )

    def read_cell(self, block: int, layer: int, head: int) -> bytes:
        """K then V of one head."""
        return self.cells[layer, block, :, head].tobytes()

    def write_cell(self, block: int, layer: int, head: int, data: bytes) -> None:
        """Set them."""
        self.cells[layer, block, :, head] = np.frombuffer(data, np.uint8).reshape(2, -1)

    def fill(self, seed: int) -> None:
        """Random bytes everywhere; the same 64 MiB again and again, but each block gets other ones."""
        words = self.flat.view(np.uint64)
        piece = np.random.default_rng(seed).integers(0, 1 << 63, min(words.size, 8 << 20), np.uint64)
        for number, start in enumerate(range(0, words.size, piece.size)):
            part = words[start : start + piece.size]
            np.add(piece[: part.size], np.uint64(number), out=part)

    def block(self, block: int) -> NDArray[np.uint8]:
        """The bytes of one block, copied."""
        return np.ascontiguousarray(self.cells[:, block])


def client_of(socket: Path, memory: PagedMemory, *, threads: int = 1, populate_threads: int = 1) -> Client:
    """A client that is attached.

    Raises:
        SystemExit: the daemon does not want it.
    """
    limits = Limits(call_s=30.0, attach_s=120.0, copy_s=120.0, populate_threads=populate_threads)
    client = Client(socket, namespace_of(memory.layout), memory, copy_threads=threads, limits=limits)
    if not client.wait_attached(_START_S):
        reason = client.refusal
        client.close()
        raise SystemExit(f"no daemon at {socket}: {reason}")
    return client


class BenchDaemon:
    """`kvstore serve` as a process of its own.

    Args:
        folder: for the socket and the log.
        settings: table.key → value.
    """

    def __init__(self, folder: Path, settings: Mapping[str, object]) -> None:
        self.socket = folder / "kvstore.sock"
        every = {"daemon.socket": self.socket, "daemon.log_level": "warning", **settings}
        flags = [word for key, value in every.items() for word in ("--set", f"{key}={value}")]
        with (folder / "daemon.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kvstore", "serve", *flags],
                stdout=log,
                stderr=log,
                preexec_fn=_end_with_parent,
            )
        self.pid = self._process.pid

    def __enter__(self) -> BenchDaemon:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(30)


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
