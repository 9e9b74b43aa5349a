"""A process that fills one trust group's NVMe directory: `python disk_maker.py DIRECTORY BLOCKS END`.

END is how it ends: `close` in order, `kill` by SIGKILL when everything is on the medium, `hold` not before
its stdin does. It says "made" when the blocks are there.
"""

from __future__ import annotations

import hashlib
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from real_daemon import live_with_parent

from kvstore import _native
from kvstore._native import Arena, DiskDirectory, DiskPool, DiskSurvey, HostPool, Index, SlotFormat
from kvstore.testing.slots import cell_pattern, write_slot

__all__ = ["BLOCK_BYTES", "SHAPE", "Made", "key_of", "made"]

SHAPE = SlotFormat(2, 2, 4096)
BLOCK_BYTES = SHAPE.slot_bytes
SEGMENT_BYTES, CAPACITY_BYTES = 1 << 20, 8 << 20
WAIT_S = 60.0


def key_of(number: int) -> bytes:
    """Key of the n-th block of the chain."""
    return hashlib.blake2b(number.to_bytes(4, "little"), digest_size=32).digest()


class Made:
    """A directory with a chain of blocks, and whoever made it."""

    def __init__(self, path: Path, blocks: int, end: str) -> None:
        self.path = path
        self.blocks = blocks
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(path), str(blocks), end],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=live_with_parent,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "made\n"
        if end != "hold":
            assert self.process.wait(WAIT_S) == (0 if end == "close" else -signal.SIGKILL)

    def close(self) -> None:
        """Let the maker end."""
        self.process.kill()
        self.process.wait(WAIT_S)
        for end in (self.process.stdin, self.process.stdout):
            assert end is not None
            end.close()

    def content(self) -> dict[str, bytes]:
        """Of every file but the lock, which names its last holder."""
        return {file.name: file.read_bytes() for file in self.path.iterdir() if file.name != "lock"}

    def flip_block(self, number: int) -> None:
        """Rot: invert one byte of a block's first cell where it lies on the disk."""
        cell = cell_pattern(key_of(number), 0, 0, SHAPE.cell_bytes).tobytes()
        for file in self.path.glob("segment-*.kvs"):
            at = file.read_bytes().find(cell)
            if at >= 0:
                flip(file, at + 1234)
                return
        raise AssertionError(f"block {number} is on no segment")


def flip(file: Path, offset: int) -> None:
    """Invert one byte."""
    with file.open("r+b") as out:
        out.seek(offset)
        byte = out.read(1)[0]
        out.seek(offset)
        out.write(bytes([byte ^ 0xFF]))


def made(path: Path, blocks: int, end: str = "close") -> Made:
    """Make one in a process of its own."""
    return Made(path, blocks, end)


# ---- the process ------------------------------------------------------------------------------------------


def _fill(path: str, blocks: int) -> DiskPool:
    index, arena = Index(1 << 16), Arena.create("maker", 16 << 20)
    host = HostPool(index, arena, 2 << 20)
    directory = DiskDirectory.open(path, capacity_bytes=CAPACITY_BYTES, segment_bytes=SEGMENT_BYTES)
    survey = DiskSurvey(directory)
    survey.read(1)
    pool = DiskPool(index, arena, directory)
    pool.adopt(survey)
    keys = np.frombuffer(b"".join(map(key_of, range(blocks))), np.uint8).reshape(-1, 32)
    got = host.reserve(index.root(b"r" * 32), keys, SHAPE, 0.0, WAIT_S)
    for number, slot in enumerate(got.slots.tolist()):
        write_slot(arena, SHAPE, slot, key_of(number))
    sums = _native.table_crcs(arena, SHAPE, got.slots)
    assert host.publish(got.nodes, got.slots, sums, SHAPE.length, 1).all()
    _write(pool, got.nodes, got.slots)
    return pool


def _write(pool: DiskPool, nodes: NDArray[np.uint32], slots: NDArray[np.uint32]) -> None:
    begun = written = flush = 0
    while True:
        if begun < len(nodes):
            begun += pool.write(nodes[begun:], slots[begun:], SHAPE)[1]
        elif written == len(nodes) and not flush:
            flush = pool.flush()
        assert select.select([pool.eventfd], [], [], WAIT_S)[0], "the disk says nothing"
        for event in pool.pump():
            assert not event.error, os.strerror(event.error)
            written += len(event.ok)
            if event.kind == "flushed":
                return


def _main(path: str, blocks: str, end: str) -> None:
    pool = _fill(path, int(blocks))
    print("made", flush=True)
    if end == "hold":
        sys.stdin.read()
    if end == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    pool.close(WAIT_S)


if __name__ == "__main__":
    _main(*sys.argv[1:])
