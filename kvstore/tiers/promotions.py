"""Promotions: parts of chains on their way from the disk to HOST.

    begin → slots are reserved, records are read into them, a window at a time
    landed → published in chain order, whatever order the disk answers in
    over   → all of it is on HOST, or what could be; nothing that was begun is left half way

Several promotions may want the same block: the first reads it, the others wait for it (as for a block that an
engine is just saving). A promotion that is given up goes on until nothing of it is under way: what lands in
order becomes readable, the rest of its slots are freed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvstore import _native
from kvstore._native import NONE, DiskEvent, SlotFormat
from kvstore.clock import Clock
from kvstore.memory import GroupMemory
from kvstore.tiers.host import HostTier

__all__ = ["OWNER", "Promotion", "Promotions"]

U32 = NDArray[np.uint32]
# Of one promotion at the disk: at 3 GB/s that is 10 ms of work, enough for the queue of any NVMe.
WINDOW_BYTES = 32 << 20
# The least that is asked for while more is under way: every question costs the loop a turn.
PART_BYTES = WINDOW_BYTES // 4
# Who reserves, in the ledger of a kept arena: no engine has this id.
OWNER = b"kvstore/the-disk"


@dataclass(slots=True, eq=False)
class Promotion:
    """One part of a chain.

    Attributes:
        nodes: (n,) in chain order.
        on_change: told after each change, on the loop.
        reached: leading nodes that are on HOST.
        stop: where it ends, at first n; lowered by a bad record, a full HOST, or whoever gives it up.
        slots: (n,) the slots that are being filled for it, NONE = not by us.
        issued: leading nodes that were asked for.
        landed: (n,) whether the bytes of a slot of ours are there and right.
        flying: slots of ours that the disk may still write to.
        reason: why `stop` was lowered.
        stalled: it was given up because nothing came.
        heard_s: when it last got further.
        told: (reached, stop) that `on_change` was told last.
    """

    nodes: U32
    shape: SlotFormat
    on_change: Callable[[Promotion], None]
    heard_s: float
    stop: int
    slots: U32
    landed: NDArray[np.bool_]
    reached: int = 0
    issued: int = 0
    flying: int = 0
    reason: str = ""
    stalled: bool = False
    told: tuple[int, int] = (0, 0)
    jobs: dict[int, U32] = field(default_factory=dict)
    """Job → the positions that it reads, in order."""

    @property
    def over(self) -> bool:
        """Nothing more will arrive."""
        return self.reached >= self.stop

    def cut(self, stop: int, reason: str) -> None:
        """It ends at `stop` (never before what was reached)."""
        if max(stop, self.reached) < self.stop:
            self.stop, self.reason = max(stop, self.reached), reason


class Promotions:
    """All of one trust group."""

    def __init__(self, memory: GroupMemory, host: HostTier, clock: Clock, stall_s: float) -> None:
        assert memory.disk is not None
        self._disk = memory.disk
        self._arena = memory.arena
        self._index = memory.index
        self._host = host
        self._clock = clock
        self._stall_s = stall_s
        self._promoted: list[U32] = []
        self._running: list[Promotion] = []
        self._by_job: dict[int, Promotion] = {}

    def __len__(self) -> int:
        return len(self._running)

    def slots(self) -> int:
        """HOST slots that are FILLING for promotions."""
        return sum(int((p.slots != NONE).sum()) for p in self._running)

    def check(self) -> None:
        """Raises RuntimeError when a count is off."""
        for promotion in self._running:
            flying = sum(len(positions) for positions in promotion.jobs.values())
            if flying != promotion.flying:
                raise RuntimeError(f"promotion: {flying} slots at the disk, {promotion.flying} counted")

    def take_promoted(self) -> NDArray[np.uint8]:
        """(n, 32) keys that were brought to HOST since the last call and are there now."""
        if not self._promoted:
            return np.empty((0, 32), np.uint8)
        nodes, self._promoted = np.concatenate(self._promoted), []
        return self._index.keys(nodes[self._host.readable(nodes)])

    def begin(self, nodes: U32, shape: SlotFormat, on_change: Callable[[Promotion], None]) -> Promotion:
        """Start to bring `nodes` to HOST; what is there already has been reached when this returns."""
        n = len(nodes)
        promotion = Promotion(
            nodes, shape, on_change, self._clock.now(), n, np.full(n, NONE, np.uint32), np.zeros(n, np.bool_)
        )
        self._running.append(promotion)
        self._advance(promotion)
        promotion.told = (promotion.reached, promotion.stop)
        self._forget_ended()
        return promotion

    def give_up(self, promotion: Promotion, reason: str) -> None:
        """Nobody waits for it any more: what is at the disk lands, nothing else is begun or told."""
        promotion.told = (promotion.reached, promotion.reached)
        self._stop(promotion, reason)
        self._forget_ended()

    def expire(self, before_s: float) -> None:
        """Stop those that got no further since `before_s`."""
        for promotion in self._running:
            if not promotion.over and promotion.heard_s < before_s:
                promotion.stalled = True
                self._stop(promotion, "the disk stalls")
        self._forget_ended()

    def close(self) -> None:
        """The disk is about to end: whoever waits goes on with what arrived."""
        for promotion in self._running:
            if not promotion.over:
                self._stop(promotion, "the daemon stops")
        self._forget_ended()

    def _stop(self, promotion: Promotion, reason: str) -> None:
        promotion.cut(promotion.reached, reason)
        for job in tuple(promotion.jobs):
            self._disk.cancel(job)
        self._settle(promotion)
        self._tell(promotion)

    # ---- progress ----------------------------------------------------------------------------------------

    def landed(self, event: DiskEvent) -> None:
        """Records were read, well or not."""
        promotion = self._by_job[event.job]
        waiting = promotion.jobs[event.job]
        for nodes, why in (
            (event.ok, ""),
            (event.corrupt, "rotten on the disk"),
            (event.failed, "unreadable"),
        ):
            if not len(nodes):
                continue
            came = np.isin(promotion.nodes[waiting], nodes)
            positions = waiting[came]
            waiting = waiting[~came]
            promotion.flying -= len(positions)
            if not why:
                promotion.landed[positions] = True
            else:
                promotion.cut(int(positions[0]), f"block {int(positions[0])} is {why}")
                self._free(promotion, positions)
        promotion.jobs[event.job] = waiting
        if event.last:
            del promotion.jobs[event.job], self._by_job[event.job]

    def go_on(self) -> None:
        """Publish what has landed, ask for more, tell whoever waits."""
        for promotion in tuple(self._running):
            before = promotion.reached
            self._advance(promotion)
            if promotion.reached > before:
                promotion.heard_s = self._clock.now()
            self._tell(promotion)
        self._forget_ended()

    def _tell(self, promotion: Promotion) -> None:
        """Whoever waits hears of every change but what it heard before, and of nothing after the end."""
        reached, stop = promotion.told
        if reached < stop and (promotion.reached, promotion.stop) != promotion.told:
            promotion.told = (promotion.reached, promotion.stop)
            promotion.on_change(promotion)

    def _advance(self, promotion: Promotion) -> None:
        self._publish(promotion)
        while not promotion.over and promotion.issued < promotion.stop:
            room = WINDOW_BYTES - promotion.flying * promotion.shape.slot_bytes
            count = min(promotion.stop - promotion.issued, room // promotion.shape.slot_bytes)
            if promotion.flying == 0:
                count = max(count, 1)  # a block larger than the window
            elif promotion.issued + count < promotion.stop and room < PART_BYTES:
                break
            if count <= 0 or not self._ask(promotion, promotion.issued + int(count)):
                break
            self._publish(promotion)  # what others have brought meanwhile needs no disk
        self._settle(promotion)

    def _ask(self, promotion: Promotion, to: int) -> bool:
        """Reserve slots up to block `to` and read into them; False when there is no more room now."""
        start = promotion.issued
        part = promotion.nodes[start : min(to, start + _native.KEYS_MAX)]
        parent = int(promotion.nodes[start - 1]) if start else self._index.parent(int(part[0]))
        keys, now_s = self._index.keys(part), self._clock.now()
        got = self._host.reserve(parent, keys, promotion.shape, now_s, self._stall_s, OWNER)
        mine = np.flatnonzero(got.slots != NONE)
        positions = (start + mine).astype(np.uint32)
        promotion.slots[positions] = got.slots[mine]
        promotion.issued += len(got.nodes)
        absent = np.flatnonzero(self._disk.readable(part[mine]) == 0)
        if len(absent):  # given up by the disk since the lookup
            first = int(absent[0])
            promotion.cut(int(positions[first]), "given up by the disk meanwhile")
            self._free(promotion, positions[first:])
            positions = positions[:first]
        if len(positions):
            nodes, slots = promotion.nodes[positions], promotion.slots[positions]
            job = self._disk.read(nodes, slots, promotion.shape)
            promotion.jobs[job] = positions
            promotion.flying += len(positions)
            self._by_job[job] = promotion
        if len(got.nodes) < len(part):
            if not promotion.flying and promotion.reached >= promotion.issued:
                promotion.cut(promotion.issued, "no room on HOST: everything there is pinned or being filled")
            return False
        return True

    def _publish(self, promotion: Promotion) -> None:
        """Make what has landed readable, from the front, and see what others have brought."""
        while promotion.reached < promotion.issued:
            at = promotion.reached
            here = at + self._host.leading(promotion.nodes[at : promotion.issued])
            theirs = np.flatnonzero(promotion.slots[at:here] != NONE)
            if len(theirs):  # READY by another's hand: ours can only lose
                here = at + int(theirs[0])
            if here > at:
                promotion.reached = here
                continue
            waiting = np.flatnonzero(~promotion.landed[at : promotion.issued])
            stop = at + int(waiting[0]) if len(waiting) else promotion.issued
            if stop == at:
                return
            nodes, slots = promotion.nodes[at:stop], promotion.slots[at:stop].copy()
            promotion.slots[at:stop] = NONE
            ready = self._host.publish(nodes, slots, promotion.shape, checked=True)
            self._promoted.append(nodes)
            if ready < stop - at:  # the block before it has left, or somebody was first and lost it again
                ready = self._host.leading(nodes)
                promotion.landed[at + ready : stop] = False
                promotion.cut(at + ready, "the block before it left HOST meanwhile")
            promotion.reached = at + ready
            if ready < stop - at:
                return

    def _settle(self, promotion: Promotion) -> None:
        """Once nothing is at the disk any more, free what landed behind the end: nobody will reach it."""
        if promotion.over and not promotion.flying:
            self._free(promotion, np.arange(promotion.issued, dtype=np.uint32))

    def _free(self, promotion: Promotion, positions: U32) -> None:
        held = positions[promotion.slots[positions] != NONE]
        self._host.abort(promotion.nodes[held], promotion.slots[held])
        promotion.slots[held] = NONE
        promotion.landed[held] = False

    def _forget_ended(self) -> None:
        self._running = [p for p in self._running if not p.over or p.flying]
