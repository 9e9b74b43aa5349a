"""Full blocks on their way to the daemon: pinned, reserved, copied, acknowledged, unpinned (LAWS E20).

    begin ─touch─▶ RESERVING ─slots─▶ DUE ─next step's orders─▶ COPYING ─every bank of every rank─▶ freed
                        └─ nothing to write, or dropped ────────────────────────────────────────────▶ freed

A pin is one more reference to a block in vLLM's own pool: its request may end or be preempted meanwhile, and
the block still is not handed out. Pins are few (a share of the pool), because a pool whose blocks all wait
for copies would stop the engine.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.client import Reservation

from .courier import Courier
from .messages import Saved, SaveOrder
from .metrics import Tally
from .tracked import Tracked

__all__ = ["Saves"]

U32 = NDArray[np.uint32]
_BLOCKS_MAX = 1024  # of one save; below what one message to the daemon may name


@dataclass(slots=True)
class _Save:
    """Blocks [start, stop) of one request."""

    number: int
    tracked: Tracked
    start: int
    stop: int
    ids: tuple[U32, ...]  # device blocks per group
    pinned: list[Any]
    reserved: Future[Reservation]
    answer: Saved = field(default_factory=lambda: Saved(0, 0, 0))


class Saves:
    """Pins and their ends.

    Args:
        courier: reserves the slots.
        share: of the pool's blocks that may be pinned; at least one block always may.
        banks: answers that end a save: banks × ranks.
        tally: counts.
    """

    def __init__(self, courier: Courier, share: float, banks: int, tally: Tally) -> None:
        self._courier = courier
        self._share = share
        self._banks = banks
        self._tally = tally
        self._pool: Any = None
        self._pins_max = 0
        self._pins = 0
        self._reserving: dict[int, _Save] = {}
        self._copying: dict[int, _Save] = {}
        self._numbers = itertools.count(1)

    def bind(self, pool: Any) -> None:
        """vLLM's block pool."""
        self._pool = pool
        self._pins_max = max(1, int(pool.num_gpu_blocks * self._share))

    @property
    def pins(self) -> int:
        """Blocks that are pinned now."""
        return self._pins

    def begin(self, tracked: Tracked, tables: Sequence[Sequence[int]], full: int) -> None:
        """Pin and reserve what is new of a request's first `full` blocks, as far as pins reach.

        Args:
            tables: the request's block table of each KV group.
        """
        start = tracked.planned
        room = (self._pins_max - self._pins) // len(tables) or int(not self._pins)  # one block always may
        stop = min(full, start + room, start + _BLOCKS_MAX)
        if stop <= start or self._pool is None:
            return
        ids = tuple(np.asarray(table[start:stop], np.uint32) for table in tables)
        gaps = [int(np.flatnonzero(one == 0)[0]) for one in ids if not one.all()]
        if gaps:  # a window has passed over it: what follows would have no parent
            tracked.closed = True
            stop = start + min(gaps)
            ids = tuple(one[: stop - start] for one in ids)
            if stop == start:
                return
        pinned = list(map(self._pool.blocks.__getitem__, np.concatenate(ids).tolist()))
        self._pool.touch(pinned)
        self._pins += len(pinned)
        tracked.planned = stop
        reserved = self._courier.reserve(tracked, start, stop)
        number = next(self._numbers)
        self._reserving[number] = _Save(number, tracked, start, stop, ids, pinned, reserved)

    def due(self) -> list[SaveOrder]:
        """Saves whose slots are known by now."""
        if not self._reserving:
            return []
        orders = []
        for number, save in list(self._reserving.items()):
            if not save.reserved.done():
                continue
            del self._reserving[number]
            if save.reserved.exception() is not None:
                self._end(save, kept=0)
                continue
            got = save.reserved.result()
            self._tally.add("known_blocks", got.filled + got.elsewhere)
            if not got.token:  # all of it is known, or nothing could be had
                self._end(save, kept=len(got.slots))
                continue
            self._copying[number] = save
            orders.append(SaveOrder(number, got, tuple(one[: len(got.slots)] for one in save.ids)))
        return orders

    def answered(self, number: int, answer: Saved) -> None:
        """Some ranks have copied, or could not."""
        save = self._copying.get(number)
        if save is None:
            return
        total = save.answer
        total.banks += answer.banks
        total.ready += answer.ready
        total.dropped = max(total.dropped, answer.dropped)
        if total.banks >= self._banks:
            del self._copying[number]
            self._tally.add("saved_blocks", total.ready)
            self._end(save, kept=save.stop - save.start - total.dropped)

    def _end(self, save: _Save, kept: int) -> None:
        self._pool.free_blocks(reversed(save.pinned))
        self._pins -= len(save.pinned)
        lost = save.stop - save.start - kept
        if lost <= 0:
            return
        if save.tracked.ended:
            self._tally.add("dropped_blocks", lost)
        else:
            save.tracked.retry(save.start + kept)

    def pending(self) -> bool:
        """Does the engine have to go on stepping for a save to end?"""
        return self._pins > 0

    def close(self) -> None:
        """The engine ends: slots that nobody will write are given up."""
        for save in self._reserving.values():
            if save.reserved.done() and save.reserved.exception() is None:
                self._courier.abort(save.reserved.result())
