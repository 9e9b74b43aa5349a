"""Memory that is in use moves to huge pages; what it holds, and what is hardly used, stays as it is."""

from __future__ import annotations

import mmap
import re
from pathlib import Path

import numpy as np
import pytest

from kvstore.heap import collapse_heap

MIB = 1 << 20


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
def area() -> np.ndarray:
    """16 MiB of private memory, untouched."""
    return np.frombuffer(mmap.mmap(-1, 16 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)


def test_used_memory_moves_and_keeps_its_bytes(area: np.ndarray) -> None:
    area[:] = np.arange(area.size, dtype=np.uint64).astype(np.uint8)
    before = area.copy()
    made = collapse_heap()
    enabled = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    if "[never]" not in enabled:
        assert made > 0
        assert kib("AnonHugePages", area.ctypes.data + 8 * MIB) >= 12 << 10
    assert (area == before).all()


def test_memory_that_is_hardly_used_does_not_grow(area: np.ndarray) -> None:
    area[8 * MIB :: 64 << 10] = 1  # a page in sixteen
    used = kib("Rss", area.ctypes.data + 8 * MIB)
    collapse_heap()
    assert kib("Rss", area.ctypes.data + 8 * MIB) <= used + 4
