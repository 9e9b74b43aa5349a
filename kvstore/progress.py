"""How far slow work has come, for whoever shows it."""

from __future__ import annotations

from typing import Protocol

__all__ = ["ARENA", "READING", "SEGMENTS", "ShowProgress"]

ARENA = "arena"
"""Pages of the arena that were touched, blocks of a kept one that were verified."""
READING = "disk"
"""Bytes of an NVMe directory that were read."""
SEGMENTS = "segments"
"""Bytes of segment files that were written for the first time."""


class ShowProgress(Protocol):
    """Told now and then, from any thread, and once more at the end, with done >= total."""

    def __call__(self, group: str, done: int, total: int, what: str = ARENA) -> None:
        """`done` of `total` bytes of one kind of work, `what`, of one trust group."""
