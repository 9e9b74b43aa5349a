"""Memory that is in use moves to huge pages; what it holds, and what is hardly used, stays as it is."""

from __future__ import annotations

import mmap
import os
import re
from pathlib import Path

import numpy as np
import pytest

from kvstore.heap import collapse_heap

MIB = 1 << 20
ALL = 1 << 20  # pieces: a test process may have more memory than a daemon starts with


def kib(kind: str, address: int) -> int:
    """A figure of the mapping that holds this address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        span = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if span:
            inside = int(span[1], 16) <= address < int(span[2], 16)
        elif inside and line.startswith(kind + ":"):
            return int(line.split()[1])
    raise AssertionError(f"no {kind} of a mapping at {address:x}")


@pytest.fixture
def mapped() -> mmap.mmap:
    """16 MiB of private memory, untouched, of which the kernel makes no huge pages by itself."""
    memory = mmap.mmap(-1, 16 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    return memory


@pytest.mark.skipif(
    tuple(map(int, os.uname().release.split(".")[:2])) < (6, 1), reason="MADV_COLLAPSE came with Linux 6.1"
)
def test_used_memory_moves_and_keeps_its_bytes(mapped: mmap.mmap) -> None:
    area = np.frombuffer(mapped, np.uint8)
    area[:] = np.arange(area.size, dtype=np.uint64).astype(np.uint8)
    before = area.copy()
    assert kib("AnonHugePages", area.ctypes.data + 8 * MIB) == 0
    mapped.madvise(mmap.MADV_HUGEPAGE)
    assert collapse_heap(ALL) >= 6
    assert kib("AnonHugePages", area.ctypes.data + 8 * MIB) >= 12 << 10
    assert (area == before).all()


def test_no_more_pieces_than_asked_for_are_looked_at(mapped: mmap.mmap) -> None:
    area = np.frombuffer(mapped, np.uint8)
    area[:] = 1
    mapped.madvise(mmap.MADV_HUGEPAGE)
    assert collapse_heap(2) <= 2


@pytest.mark.skipif(
    "[always]" in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text(),
    reason="the kernel makes huge pages by itself",
)
def test_memory_that_is_hardly_used_does_not_grow() -> None:
    area = np.frombuffer(mmap.mmap(-1, 16 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
    area[8 * MIB :: 64 << 10] = 1  # a page in sixteen
    used = kib("Rss", area.ctypes.data + 8 * MIB)
    collapse_heap(ALL)
    assert kib("Rss", area.ctypes.data + 8 * MIB) <= used + 4
