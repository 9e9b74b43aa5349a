"""Offers: chains on HOST that the disk may want. Decided in order, as the queue has room.

    add     a chain, by its last block; what the disk lacks of it is found when its turn comes
    go_on   admission decides, a part at a time, beginnings first; what is let in goes to the queue

A burst of saves is faster than a disk: what finds the queue full waits here, by name only (HOST may evict it
meanwhile, and then it is counted as refused).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstore._native import SlotFormat
from kvstore.clock import Clock
from kvstore.policy.admission import Admission, Offer, Refusal
from kvstore.policy.history import History
from kvstore.tiers.disk_writes import DiskWrites
from kvstore.tiers.host import HostTier

__all__ = ["Chain", "Offers"]

U32 = NDArray[np.uint32]
# Chains that wait, some 100 bytes each; beyond it the oldest is refused.
OFFERS_MAX = 8192


@dataclass(slots=True)
class Chain:
    """What is offered.

    Attributes:
        node: its last block.
        seconds_per_block: predicted time to compute one, None while nothing is known.
        reused: it was found by a lookup, not just saved.
        rest: what is still to be decided, None = not looked at yet.
    """

    node: int
    shape: SlotFormat
    seconds_per_block: float | None
    reused: bool
    rest: U32 | None = None


class Offers:
    """Those of one trust group.

    Args:
        queue_bytes_max: how much may wait for the disk.
    """

    def __init__(
        self,
        host: HostTier,
        writes: DiskWrites,
        admission: Admission,
        clock: Clock,
        queue_bytes_max: int,
    ) -> None:
        self._host = host
        self._writes = writes
        self._admission = admission
        self._clock = clock
        self.queue_bytes_max = queue_bytes_max
        self.may_write: Callable[[int, int], bool] = _may
        """Whether so many bytes of the chain with this node could be within the quota of whose they are."""
        self.wrote: Callable[[int, int], bool] = _may
        """They were admitted: pay for them. False: the quota has no room after all."""
        self._waiting: deque[Chain] = deque()
        self._first = 0  # number of the first that waits
        self._then: deque[tuple[int, Callable[[], None]]] = deque()
        self.history = History()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, chain: Chain) -> None:
        """Offer a chain; decided at once if there is room."""
        if len(self._waiting) >= OFFERS_MAX:
            self.refuse(self._waiting[0], Refusal.QUEUE)
            self._pop()
        self._waiting.append(chain)
        if len(self._waiting) == 1:
            self.go_on()

    def go_on(self) -> None:
        """Decide about what waits, as far as there is room."""
        while self._waiting and self._decide(self._waiting[0]):
            self._pop()

    def refuse_all(self, reason: Refusal) -> None:
        """The disk is left alone: nothing waits for it."""
        while self._waiting:
            self.refuse(self._waiting[0], reason)
            self._pop()

    def when_decided(self, then: Callable[[], None]) -> None:
        """Call `then` once everything that waits now has been decided."""
        if self._waiting:
            self._then.append((self._first + len(self._waiting), then))
        else:
            then()

    def _pop(self) -> None:
        self._waiting.popleft()
        self._first += 1
        while self._then and self._then[0][0] <= self._first:
            self._then.popleft()[1]()

    def _decide(self, chain: Chain) -> bool:
        """Whether all of it is decided; False: the queue is full."""
        if chain.rest is None:
            chain.rest = self._writes.lacking(chain.node) if self._host.holds(chain.node) else chain.rest
        size = chain.shape.slot_bytes
        while chain.rest is not None and len(chain.rest):
            room = (self.queue_bytes_max - self._writes.queued_bytes) // size
            if room < 1 and self._writes.queued_bytes:
                return False
            part = chain.rest[: max(1, min(room, self._admission.piece_bytes_max // size))]
            if self._host.leading(part) < len(part):  # evicted while it waited
                self.refuse(chain, Refusal.QUEUE)
                return True
            if not self.may_write(int(part[0]), len(part) * size):
                self.refuse(chain, Refusal.QUOTA)
                return True
            if not self._admits(chain, part):
                return True  # what follows would have nothing to continue
            if not self.wrote(int(part[0]), len(part) * size):
                self._admission.give_back(Refusal.QUOTA, len(part), len(part) * size)
                return True
            self._writes.add(part, chain.shape)
            chain.rest = chain.rest[len(part) :]
        return True

    def _admits(self, chain: Chain, part: U32) -> bool:
        seconds = None if chain.seconds_per_block is None else chain.seconds_per_block * len(part)
        offer = Offer(len(part), len(part) * chain.shape.slot_bytes, seconds, chain.reused)
        admitted = self._admission.admits(offer, self._clock.now())
        self.history.offered(part, reused=chain.reused, admitted=admitted)
        return admitted

    def refuse(self, chain: Chain, reason: Refusal) -> None:
        """Not written: what the disk lacks of it is counted."""
        if chain.rest is None and self._host.holds(chain.node):
            chain.rest = self._writes.lacking(chain.node)
        if chain.rest is not None and len(chain.rest):
            self._admission.refused(reason, len(chain.rest), len(chain.rest) * chain.shape.slot_bytes)
            self.history.offered(chain.rest, reused=chain.reused, admitted=False)


def _may(_: int, __: int) -> bool:
    """Nobody has a quota."""
    return True
