"""Slots that processes of an earlier daemon's time may still be writing (LAWS A1, A7).

Such a slot stays FILLING, for a stand-in node that nobody can look up. It belongs to an engine, as it did;
when every process that the engine had then is gone, or has attached again and said `quiesced`, it is freed.
So a stopped engine keeps its own slots out of use and nobody else's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from kvstore import _native
from kvstore._native import KEYS_MAX, Adopted, SlotFormat
from kvstore.group import Group
from kvstore.tiers.promotions import OWNER
from kvstore.transfers import Handed
from kvstore.types import Part

__all__ = ["DISK_SETTLES_S", "DISK_WRITER", "begin", "former_id", "writer_done"]

# Nothing of a stand-in is ever published, so its shape is of no meaning.
_SHAPE = SlotFormat(1, 1, 1)
# Who may write to slots that a daemon's disk was filling when it was killed: reads that the kernel still has
# under way end by themselves, within the block layer's timeout (30 s).
DISK_WRITER, DISK_SETTLES_S = 0, 60.0
_WHOLE = Part(0, 1, 0, 1)


def former_id(engine: bytes) -> bytes:
    """An engine id that no living engine has (theirs are 16 bytes)."""
    return b"former:" + engine


def begin(group: Group, adopted: Adopted, writers: Mapping[bytes, Iterable[int]]) -> None:
    """Register the FILLING slots of an adopted arena; those that nobody can be writing are freed at once.

    Args:
        writers: engine id → numbers of its processes that may write.
    """
    slots, nodes = adopted.slots, adopted.nodes
    if not len(slots):
        return
    owners, owner_of = np.unique(adopted.owners, axis=0, return_inverse=True)
    for number, owner in enumerate(owners):
        engine, mine = owner.tobytes(), np.flatnonzero(owner_of.reshape(-1) == number)
        parts = dict.fromkeys(writers.get(engine, (DISK_WRITER,) if engine == OWNER else ()), _WHOLE)
        for start in range(0, len(mine), KEYS_MAX):
            some = mine[start : start + KEYS_MAX]
            generations = _native.slot_generations(group.arena, slots[some])
            handed = Handed(nodes[some], slots[some], generations)
            filling = group.fillings.begin(former_id(engine), 0, _SHAPE, handed, parts)
            filling.blocks = 0
            if filling.over:
                group.finish_filling(filling)


def writer_done(group: Group, engine: bytes, writer: int) -> int:
    """A process writes no more; how many slots that freed."""
    freed = 0
    for filling in group.fillings.of_engine(former_id(engine)):
        filling.leave(writer)
        if filling.over:
            freed += len(filling.slots)
            group.finish_filling(filling)
    return freed
