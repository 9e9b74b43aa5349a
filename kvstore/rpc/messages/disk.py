"""Messages about the NVMe tier as a whole; its blocks travel like any others."""

from __future__ import annotations

from kvstore.rpc.messages.base import Message

__all__ = ["Flush", "Flushed"]


class Flush(Message, tag="flush", frozen=True):
    """Bring what the disks have accepted to the medium. Reply, when that is done or cannot be: Flushed."""


class Flushed(Message, tag="flushed", frozen=True):
    """How it went, over all trust groups.

    Attributes:
        blocks, bytes: readable on NVME now.
        refused: blocks that were not let in since the daemon started (budget, queue, a disk that refused):
            they were never meant to outlive it.
        seconds: how long it took.
        error: why not everything that was accepted is on the medium; empty = it is, and survives from now on.
    """

    blocks: int
    bytes: int
    refused: int
    seconds: float
    error: str
