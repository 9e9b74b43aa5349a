"""Load: arena → device blocks, in chain order, as pieces become ready to be copied.

    hit's slots ─submit─▶ piece ┐
    fetch ─notice─▶ slots ─────▶ piece ├─ copied and verified by native threads ─▶ status per block
    …                          piece ┘

The first pieces are copied while later blocks are still read from the disk. A load of what is on HOST is one
piece, submitted at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

from kvstore import _native
from kvstore._native import Completion
from kvstore.client.core import Attachment, Core
from kvstore.client.effects import Job, Op
from kvstore.client.fetching import Arrived, fetch
from kvstore.client.reading import report
from kvstore.client.values import STATUS_NAMES, LoadResult
from kvstore.errors import KVStoreError, LimitExceeded, Unavailable

__all__ = ["Loading", "count_bad", "load"]

U32 = NDArray[np.uint32]
U8 = NDArray[np.uint8]
# Copies of one load at once. The copier does one after the other; more would only fill its queue, and what
# arrives meanwhile makes the next piece larger.
_PIECES_MAX = 8


@dataclass(frozen=True, slots=True)
class _Piece:
    """Blocks [start, stop) of a load, as one job of the copier."""

    job: int
    start: int
    stop: int


class Loading(Arrived):
    """A load, and how far it has come.

    Args:
        attachment: attach that it belongs to.
        lease: bad blocks are reported under this lease, 0 = by the caller; what is missing is fetched.
        first: position in the chain of the first block.
        keys: (n, 32) keys that the slots must hold.
        blocks: (n,) device blocks to fill.

    Attributes:
        refused: why it did not begin, "" = it has.
        pieces_max: copies at once.
    """

    pieces_max = _PIECES_MAX

    def __init__(
        self, core: Core, attachment: Attachment | None, lease: int, first: int, keys: U8, blocks: U32
    ) -> None:
        super().__init__(first)
        self.refused = ""
        self.lease, self.first = lease, first
        self.status = np.full(len(blocks), _native.DROPPED, np.uint8)
        self.bytes, self.seconds = 0, 0.0
        self.lost = False  # the daemon went away before all copies were seen to be good
        self._core, self._attachment = core, attachment
        self._keys, self._blocks = keys, blocks
        self._submitted = 0
        self._pieces: list[_Piece] = []  # submitted, their end not seen yet
        self._good = 0  # leading blocks whose end was seen, and good
        self._sure = 0  # leading blocks that were good while the daemon lived

    @staticmethod
    def never(core: Core, count: int, first: int, reason: str) -> Loading:
        """A load of `count` blocks that does not begin."""
        loading = Loading(core, None, 0, first, np.empty((0, 32), np.uint8), np.zeros(count, np.uint32))
        loading.refused = reason
        return loading

    @property
    def count(self) -> int:
        """Blocks asked for."""
        return len(self.status)

    @property
    def stop(self) -> int:
        """Position behind the last block."""
        return self.first + self.count

    # ---- any thread --------------------------------------------------------------------------------------

    def progress(self) -> int:
        """Leading blocks that are copied and verified."""
        reached = self._good
        for piece in tuple(self._pieces):
            if piece.start != reached:
                break  # a bad block lies before it
            reached += self._core.progress(piece.job)
        # In this order: what was good before the daemon was seen alive was copied from its own slots.
        if reached > self._sure and self._attachment is not None and not self._attachment.link.hung_up():
            self._sure = reached
        return self._sure

    def cancel(self) -> None:
        """Drop what has not begun."""
        self.unwanted = self.unwanted or "cancelled"
        for piece in tuple(self._pieces):
            self._core.cancel(piece.job)

    # ---- whoever drives the load ---------------------------------------------------------------------------

    def begin(self, reached: int, slots: U32) -> None:
        """Blocks up to `reached` are in `slots`: copy them. Raises BadRequest for what no copier takes."""
        self._core.counters.loads += 1
        self.add(reached, slots)
        self.refused = self._core.full if self.count else ""
        if not self.refused:
            try:
                self._submit()
            except (Unavailable, LimitExceeded) as error:
                self.refused = str(error)

    @property
    def _waits(self) -> bool:
        """What has come waits to be copied."""
        return self.reached > self.first + self._submitted and not self.unwanted

    def use(self) -> Op[None]:
        """Take what is copied, begin to copy what has come; waits where too much is under way."""
        self.progress()  # before the daemon can go away
        while self._pieces and self._ended(self._pieces[0]):
            yield from self.collect()
        if len(self._pieces) >= self.pieces_max and self._waits:
            yield from self.collect()
        self._submit()

    def _ended(self, piece: _Piece) -> bool:
        return self._core.progress(piece.job) == piece.stop - piece.start

    def _submit(self) -> None:
        """Everything that has come and is not under way, as one piece."""
        start, stop = self._submitted, self.reached - self.first
        if start == stop or self._attachment is None or self.unwanted:
            return
        slots = np.concatenate(self._parts)
        self._parts.clear()
        self._submit_piece(self._attachment, slots)

    def _submit_piece(self, attachment: Attachment, slots: U32) -> None:
        """The next blocks lie in `slots`."""
        start, stop = self._submitted, self._submitted + len(slots)
        keys = np.ascontiguousarray(self._keys[start:stop])
        job = self._core.submit_load(attachment, self._blocks[start:stop], slots, keys)
        self._submitted = stop
        self._pieces.append(_Piece(job, start, stop))
        self._cancel_unwanted(job)

    def _cancel_unwanted(self, job: int) -> None:
        if self.unwanted:  # cancel() came just before it could see this one
            self._core.cancel(job)

    def collect(self) -> Op[None]:
        """Await the end of the oldest piece."""
        core, piece = self._core, self._pieces[0]
        assert self._attachment is not None, "nothing is submitted without one"
        done = cast(Completion, (yield Job(piece.job, core.copy_deadline(), patient=True)))
        core.timings.note_copy("load", int(done.bytes), float(done.seconds))
        self.bytes += int(done.bytes)
        self.seconds += float(done.seconds)
        status = np.array(done.status, np.uint8)
        if self._attachment.link.hung_up():
            # The control entries that the copy was checked against may be those of a daemon that is gone:
            # another one may have handed the slots on meanwhile, and only the cells' sums would show it.
            self.lost = True
            status[max(0, self._sure - piece.start) :] = _native.DROPPED
        self.status[piece.start : piece.stop] = status
        wrong = np.flatnonzero(status != _native.OK)
        if self._good == piece.start:
            self._good += int(wrong[0]) if wrong.size else int(status.size)
        self._pieces.pop(0)
        if wrong.size and not self.unwanted:
            self.unwanted = "a block before it is bad"  # nothing behind it can be used

    def finish(self) -> Op[str]:
        """Copy the rest of what has come, await every copy; why something could not be copied."""
        reason = ""
        while self._pieces or self._waits:
            try:
                self._submit()
            except KVStoreError as error:
                reason = self.unwanted = str(error)
            if self._pieces:
                yield from self.collect()
        return reason


def load(core: Core, loading: Loading) -> Op[LoadResult]:
    """Fetch what is missing, copy it all, await the copies; report bad blocks, if there is a lease."""
    why = loading.refused
    if loading.count and not why:
        with core.under_way():
            if loading.reached < loading.stop:
                why = (yield from fetch(core, loading.lease, loading.stop, loading)).reason
            why = (yield from loading.finish()) or why
    if loading.lost:
        why = "the daemon went away"
    status = loading.status
    wrong = np.flatnonzero(status != _native.OK)
    good = int(wrong[0]) if wrong.size else loading.count
    core.counters.blocks_loaded += good
    if wrong.size:
        names = count_bad(core, status[wrong])
        rotten = np.flatnonzero((status == _native.STALE) | (status == _native.CORRUPT))
        if rotten.size and loading.lease and not loading.lost:
            yield from report(core, loading.lease, (rotten + loading.first).tolist())
            why = ""  # what was dropped, was dropped because of them
        why = why or names
    return LoadResult(good, status, loading.reached - loading.first, loading.bytes, loading.seconds, why)


def count_bad(core: Core, status: U8) -> str:
    """Count blocks that did not come; "2 stale, 1 dropped"."""
    values, counts = np.unique(status, return_counts=True)
    names = {STATUS_NAMES.get(int(v), "unknown"): int(c) for v, c in zip(values, counts, strict=True)}
    for name, count in names.items():
        core.counters.bad_blocks[name] = core.counters.bad_blocks.get(name, 0) + count
    return ", ".join(f"{count} {name}" for name, count in names.items())
