"""Up to where in the log the roots of a dropped namespace are forgotten, now and by every later start."""

from __future__ import annotations

from pathlib import Path

from kvstore._native import DiskPool
from kvstore.disk_drops import DiskDrops
from kvstore.tiers.nvme_counters import NvmeCounters

__all__ = ["DropMarks"]


class DropMarks:
    """Of one trust group's disk. A mark is a segment's sequence number and a page of it."""

    def __init__(self, disk: DiskPool, drops: DiskDrops, counters: NvmeCounters) -> None:
        self._disk = disk
        self._drops = drops
        self._counters = counters

    def now(self) -> tuple[int, int]:
        """Where the log stands."""
        return self._disk.mark

    def forgotten(self) -> tuple[int, int]:
        """A mark behind all that was dropped so far: evacuations carry blocks past an earlier one."""
        return self._disk.forgotten

    def drop_before(self, roots: set[int], mark: tuple[int, int], reason: str) -> int:
        """Drop all that these roots have before `mark`; how many. Looks at every record, in one go: rare."""
        dropped = self._disk.forget_before([(root, *mark) for root in roots])
        self._counters.dropped[reason] += dropped
        return dropped

    def file(self, roots: list[bytes], mark: tuple[int, int]) -> tuple[Path, bytes]:
        """What must be written, and where, so that a restart does not bring back what these roots had before
        `mark`."""
        return self._drops.file(roots, mark, self._disk.oldest_sequence)
