"""Writes: parts of chains on their way from HOST to the disk, and flushes that wait for them.

add    → the chain is pinned, so that its slots stay as they are
go_on  → the disk is told of what waits, in order, as far as it takes it
ended  → unpinned; whoever waits for a flush is answered when the medium has everything
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import structlog
from numpy.typing import NDArray

from kvstore._native import KEYS_MAX, NONE, DiskEvent, SlotFormat
from kvstore.memory import GroupMemory
from kvstore.tiers.host import HostTier

__all__ = ["DiskWrites", "Flushed", "Lost"]

log = structlog.get_logger()

U32 = NDArray[np.uint32]
_STOPS = "the daemon stops"


@dataclass(frozen=True, slots=True)
class Flushed:
    """Answer to a flush: what the disk has made of everything accepted before it.

    Attributes:
        blocks: readable on the disk now.
        error: why not everything is on the medium, "" = it is.
    """

    blocks: int
    error: str = ""


@dataclass(slots=True)
class Lost:
    """Blocks that were let in and did not get to the disk."""

    blocks: int = 0
    bytes: int = 0

    def add(self, blocks: int, shape: SlotFormat) -> None:
        """Count some more."""
        self.blocks += blocks
        self.bytes += blocks * shape.slot_bytes


@dataclass(slots=True, eq=False)
class _Piece:
    """A part of a chain on its way to the disk.

    Attributes:
        nodes: in chain order; the last one's pin keeps all of their slots.
        begun: leading nodes that the disk has been told of.
        jobs: of the disk, under way.
        failed: nodes that it refused.
    """

    nodes: U32
    shape: SlotFormat
    begun: int = 0
    jobs: int = 0
    failed: int = 0

    @property
    def pinned(self) -> int:
        return int(self.nodes[-1])

    @property
    def size_bytes(self) -> int:
        return len(self.nodes) * self.shape.slot_bytes

    @property
    def over(self) -> bool:
        return not self.jobs and self.begun == len(self.nodes)


@dataclass(slots=True, eq=False)
class _Flush:
    """Somebody who waits for pieces, and then for the medium."""

    waiting: set[_Piece]
    answer: Callable[[Flushed], None]
    failed: int = 0


class DiskWrites:
    """All of one trust group."""

    def __init__(self, memory: GroupMemory, host: HostTier) -> None:
        assert memory.disk is not None
        self._disk = memory.disk
        self._index = memory.index
        self._host = host
        self._queue: deque[_Piece] = deque()
        self._coming = np.zeros(1024, np.bool_)  # by node: it is in a piece
        self._pieces: set[_Piece] = set()
        self._by_job: dict[int, _Piece] = {}
        self._flushes: list[_Flush] = []
        self._flushing: dict[int, _Flush] = {}
        self.queued_bytes = 0
        """Added, and not on the disk yet."""
        self.steps = 0
        """How often the disk took something or was done with something."""
        self._unfit, self._failed = Lost(), Lost()

    def __len__(self) -> int:
        return len(self._pieces)

    def check(self) -> None:
        """Raises RuntimeError when a count is off."""
        queued = sum(piece.size_bytes for piece in self._pieces)
        if queued != self.queued_bytes:
            raise RuntimeError(f"{queued} bytes wait for the disk, {self.queued_bytes} are counted")
        if sum(piece.jobs for piece in self._pieces) != len(self._by_job):
            raise RuntimeError("writes: jobs under way are miscounted")

    def lacking(self, node: int) -> U32:
        """The blocks above and including `node` that the disk lacks and nothing here brings, chain order."""
        missing = self._disk.missing(node)
        if not len(missing):
            return missing
        self._grow(int(missing.max()) + 1)
        return missing[~self._coming[missing]]

    def add(self, nodes: U32, shape: SlotFormat) -> None:
        """Write these blocks, a part of a chain whose beginning is on the disk or on its way there."""
        piece = _Piece(nodes, shape)
        self._grow(int(nodes.max()) + 1)
        self._coming[nodes] = True
        self._index.pin(piece.pinned)
        self._pieces.add(piece)
        self.queued_bytes += piece.size_bytes
        self._queue.append(piece)
        if len(self._queue) == 1:
            self.go_on()

    def _grow(self, size: int) -> None:
        if size > len(self._coming):
            coming = np.zeros(max(size, 2 * len(self._coming)), np.bool_)
            coming[: len(self._coming)] = self._coming
            self._coming = coming

    def go_on(self) -> None:
        """Tell the disk of what waits."""
        while self._queue and self._tell(self._queue[0]):
            piece = self._queue.popleft()
            self._end_if_over(piece)

    @property
    def waiting(self) -> bool:
        """Whether there is something that the disk has not taken yet."""
        return bool(self._queue)

    def give_up_waiting(self) -> None:
        """What the disk does not know of yet is not written: HOST would be pinned as long as it rests."""
        while self._queue:
            self._give_up_first()

    def give_up_first(self) -> None:
        """The oldest piece finds no room: perhaps because it pins what would have to leave for it."""
        self._give_up_first()
        self.go_on()

    def _give_up_first(self) -> None:
        piece = self._queue.popleft()
        left = len(piece.nodes) - piece.begun
        piece.failed += left
        self._failed.add(left, piece.shape)
        piece.begun = len(piece.nodes)
        self._end_if_over(piece)

    def _tell(self, piece: _Piece) -> bool:
        """Whether the disk knows all of it now; False: it has no room, its next word lets us go on."""
        while piece.begun < len(piece.nodes):
            rest = piece.nodes[piece.begun : piece.begun + KEYS_MAX]
            slots = self._host.slots(rest)
            gone = np.flatnonzero(slots == NONE)  # rot was found on HOST meanwhile
            held = int(gone[0]) if len(gone) else len(rest)
            try:
                job, accepted = self._disk.write(rest[:held], slots[:held], piece.shape)
            except ValueError as error:
                log.debug("not written to the disk", blocks=len(rest), reason=str(error))
                self._unfit.add(len(piece.nodes) - piece.begun, piece.shape)
                piece.begun = len(piece.nodes)
                return True
            if job:
                self._by_job[job] = piece
                piece.jobs += 1
            piece.begun += accepted
            self.steps += accepted > 0
            if accepted < held:
                return False
            if held < len(rest):  # nothing behind it can follow
                piece.begun = len(piece.nodes)
        return True

    def written(self, event: DiskEvent) -> None:
        """Records were written, or refused."""
        piece = self._by_job[event.job]
        self.steps += 1
        piece.failed += len(event.failed)
        self._failed.add(len(event.failed), piece.shape)
        if event.last:
            del self._by_job[event.job]
            piece.jobs -= 1
            self._end_if_over(piece)

    def _end_if_over(self, piece: _Piece) -> None:
        if not piece.over or piece not in self._pieces:
            return
        self._pieces.remove(piece)
        self._coming[piece.nodes] = False
        self.queued_bytes -= piece.size_bytes
        self._index.unpin(piece.pinned)
        for flush in tuple(self._flushes):
            if piece in flush.waiting:
                flush.waiting.remove(piece)
                flush.failed += piece.failed
                self._sync_if_written(flush)

    def take_unfit(self) -> Lost:
        """Blocks that fit no segment, or continue what was not written, since the last call."""
        lost, self._unfit = self._unfit, Lost()
        return lost

    def take_failed(self) -> Lost:
        """Blocks that the disk refused, since the last call."""
        lost, self._failed = self._failed, Lost()
        return lost

    # ---- flush -------------------------------------------------------------------------------------------

    def flush(self, answer: Callable[[Flushed], None]) -> None:
        """Call `answer` when everything added by now is on the medium, or cannot be."""
        flush = _Flush(set(self._pieces), answer)
        self._flushes.append(flush)
        self._sync_if_written(flush)

    def _sync_if_written(self, flush: _Flush) -> None:
        if not flush.waiting:
            self._flushes.remove(flush)
            self._flushing[self._disk.flush()] = flush

    def flushed(self, event: DiskEvent) -> None:
        """The medium has everything, or says that it has not."""
        flush = self._flushing.pop(event.job)
        error = os.strerror(event.error) if event.error else ""
        if flush.failed and not error:
            error = f"{flush.failed} blocks could not be written"
        flush.answer(Flushed(self._disk.counts()["records"], error))

    def close(self) -> None:
        """The disk has ended."""
        for piece in self._pieces:
            self._index.unpin(piece.pinned)
        waiting, self._flushes = [*self._flushes, *self._flushing.values()], []
        self._flushing, self._pieces, self._by_job = {}, set(), {}
        self._queue.clear()
        self.queued_bytes = 0
        for flush in waiting:
            flush.answer(Flushed(0, _STOPS))
