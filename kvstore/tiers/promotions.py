"""Promotions: parts of chains on their way from the disk to HOST.

    begin → slots are reserved, records are read into them, a window at a time
    landed → published in chain order (piece by piece: promotion.py), whatever order the disk answers in
    over   → all of it is on HOST, or what could be; nothing that was begun is left half way

Several promotions may want the same block: the first reads it, the others wait for it (as for a block that an
engine is just saving). A promotion that is given up asks for nothing more. While others wait for what it has
under way that goes on; else it is cancelled as far as the disk has not begun. What lands in order becomes
readable, the rest of its slots are freed once nothing is under way, and whoever came to wait for these
meanwhile reads them himself.

Each tells what it has learnt of the disk's speed once (`on_transfer`). For experiments the disk may be made
slower than it is: kvstore/tiers/pacing.py.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvstore._native import KEYS_MAX, NONE, DiskEvent, SlotFormat
from kvstore.clock import Clock
from kvstore.memory import GroupMemory
from kvstore.policy.rates import Transfer
from kvstore.tiers.alarms import Alarm, Alarms
from kvstore.tiers.host import HostTier
from kvstore.tiers.measured import Measured
from kvstore.tiers.pacing import Pacing
from kvstore.tiers.promotion import Promotion

__all__ = ["OWNER", "Promotions"]

U32 = NDArray[np.uint32]
# Of one promotion at the disk: at 3 GB/s that is 10 ms of work, enough for the queue of any NVMe.
WINDOW_BYTES = 32 << 20
# The least that is asked for while more is under way: every question costs the loop a turn.
PART_BYTES = WINDOW_BYTES // 4
# A disk that is made slower wakes the loop no more often: what comes within a millisecond comes together.
PACE_S = 0.001
_NO_ROOM = "no room on HOST: everything there is pinned or being filled"
# Who reserves, in the ledger of a kept arena: no engine has this id.
OWNER = b"kvstore/the-disk"


class Promotions:
    """All of one trust group."""

    def __init__(
        self, memory: GroupMemory, host: HostTier, clock: Clock, stall_s: float, alarms: Alarms
    ) -> None:
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
        self._pacing = Pacing[Promotion]()
        self._pace: Alarm | None = None
        self._alarms, self._brought_bytes = alarms, 0
        self._freed = False
        self.on_transfer: Callable[[Transfer], None] = _nothing_learnt
        """Called once for each promotion that read something, before its end is told to anybody."""
        self.on_lag: Callable[[str], None] = _nothing_learnt
        """Called with the reason when a promotion is abandoned."""
        self.on_due: Callable[[], None] = _nothing
        """Called when what was held back has arrived: it has to come to `go_on`."""

    def __len__(self) -> int:
        return len(self._running)

    def slots(self) -> int:
        """HOST slots that are FILLING for promotions."""
        return sum(int((p.slots != NONE).sum()) for p in self._running)

    def check(self) -> None:
        """Raises RuntimeError when a count is off."""
        for promotion in self._running:
            flying = sum(len(positions) for positions in promotion.jobs.values())
            flying += self._pacing.held(promotion)
            if flying != promotion.flying:
                raise RuntimeError(f"promotion: {flying} slots at the disk, {promotion.flying} counted")

    def ahead_bytes(self, size_bytes: int) -> int:
        """What a promotion of that size would have in its way now: reads take turns, so no more of each
        that is under way than it asks for itself."""
        return sum(min(promotion.left_bytes, size_bytes) for promotion in self._running)

    def take_promoted(self) -> NDArray[np.uint8]:
        """(n, 32) keys that were brought to HOST since the last call and are there now."""
        if not self._promoted:
            return np.empty((0, 32), np.uint8)
        nodes, self._promoted = np.concatenate(self._promoted), []
        return self._index.keys(nodes[self._host.readable(nodes)])

    def begin(
        self, nodes: U32, shape: SlotFormat, on_change: Callable[[Promotion], None], pieces: U32 | None = None
    ) -> Promotion:
        """Start to bring `nodes` to HOST; what is there already has been reached when this returns."""
        n, now_s = len(nodes), self._clock.now()
        ahead = self.ahead_bytes(n * shape.length)
        measured = Measured(now_s, shape.length, ahead, self._brought_bytes)
        promotion = Promotion(
            nodes, shape, on_change, now_s, n, np.full(n, NONE, np.uint32), np.zeros(n, np.bool_), measured
        )
        if pieces is not None:
            promotion.pieces = pieces
        self._running.append(promotion)
        self._advance(promotion)
        promotion.told = (promotion.reached, promotion.stop)
        self._forget_ended()
        return promotion

    def give_up(self, promotion: Promotion, reason: str) -> None:
        """Nobody waits for it any more: what is at the disk lands, nothing else is begun or told."""
        promotion.told = (promotion.reached, promotion.reached)
        self._stop(promotion, reason)
        self._hand_over()
        self._forget_ended()

    def shorten(self, promotion: Promotion, stop: int, reason: str) -> None:
        """Nobody waits for `stop` and what is behind: it is cancelled as far as the disk has not begun."""
        if promotion.over or stop <= promotion.reached:
            self.give_up(promotion, reason)
            return
        promotion.cut(stop, reason)
        promotion.told = (promotion.reached, promotion.stop)
        for job, positions in promotion.jobs.items():
            if len(positions) and int(positions[0]) >= stop:
                self._disk.cancel(job)

    def abandon(self, promotion: Promotion, reason: str) -> None:
        """It lags: whoever waits goes on with what arrived; the rest as for `give_up`."""
        if not promotion.over:
            promotion.abandoned = True
            self._stop(promotion, reason)
            self._hand_over()
        self._forget_ended()

    def expire(self, before_s: float) -> None:
        """Stop those that got no further since `before_s`."""
        for promotion in self._running:
            if not promotion.over and promotion.heard_s < before_s:
                promotion.abandoned = True
                self._stop(promotion, "the disk stalls")
        self._hand_over()
        self._forget_ended()

    def close(self) -> None:
        """The disk is about to end: whoever waits goes on with what arrived."""
        for promotion in self._running:
            if not promotion.over:
                self._stop(promotion, "the daemon stops")
        self._forget_ended()

    def _stop(self, promotion: Promotion, reason: str) -> None:
        left = promotion.flying + max(0, promotion.stop - promotion.issued)
        promotion.cut(promotion.reached, reason)
        if promotion.abandoned and not promotion.measured.over:
            blocks, now_s = promotion.measured.blocks + left, self._clock.now()
            self._learn(promotion.measured.gave_up(blocks, self._brought_bytes, now_s))
            self.on_lag(reason)
        self._cancel_unwanted()
        self._settle(promotion)
        self._tell(promotion)

    def _cancel_unwanted(self) -> None:
        for promotion in self._running:
            ending = promotion.over and promotion.flying > 0 and not promotion.cancelled
            if ending and not self._wanted(promotion):
                promotion.cancelled = True
                for job in tuple(promotion.jobs):
                    self._disk.cancel(job)
                held = self._pacing.drop(promotion)
                promotion.flying -= len(held)
                self._free(promotion, held)
                self._settle(promotion)

    def _wanted(self, promotion: Promotion) -> bool:
        """Whether somebody waits for what this one, which is over, has under way."""
        ours = promotion.nodes[promotion.slots != NONE]
        for other in self._running:
            if not other.over:
                theirs = other.slots[other.reached : other.issued] == NONE
                if np.isin(other.nodes[other.reached : other.issued][theirs], ours).any():
                    return True
        return False

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
            if why:
                promotion.flying -= len(positions)
                promotion.cut(int(positions[0]), f"block {int(positions[0])} is {why}")
                self._free(promotion, positions)
            elif self._pacing.idle:
                self._arrived(promotion, positions)
            elif promotion.cancelled:
                promotion.flying -= len(positions)
                self._free(promotion, positions)
            else:
                self._pacing.put(promotion, positions, promotion.shape.length, self._clock.now())
        promotion.jobs[event.job] = waiting
        if event.last:
            del promotion.jobs[event.job], self._by_job[event.job]

    def _arrived(self, promotion: Promotion, positions: U32) -> None:
        promotion.flying -= len(positions)
        promotion.landed[positions] = True
        self._brought_bytes += len(positions) * promotion.shape.length
        promotion.measured.came(len(positions), self._clock.now())

    def set_limits(self, limit_bytes_per_s: float, added_latency_s: float) -> None:
        """Make the disk slower than it is, from now on; zeros: no more. Holds for what is held back too."""
        self._pacing.set_limits(limit_bytes_per_s, added_latency_s, self._clock.now())
        self._set_pace()

    def _set_pace(self) -> None:
        """Be woken when the next of what is held back is due; too early does no harm."""
        next_s = self._pacing.next_s()
        if next_s is None:
            return
        at_s, pace = max(next_s, self._clock.now() + PACE_S), self._pace
        if pace is not None and pace.ring is not None:
            if pace.at_s <= at_s:
                return
            pace.cancel()
        self._pace = self._alarms.set(at_s, self.on_due)

    def go_on(self) -> None:
        """Publish what has landed, ask for more, tell whoever waits."""
        for promotion, positions in self._pacing.take(self._clock.now()):
            self._arrived(promotion, positions)
        self._hand_over()
        for promotion in tuple(self._running):
            before = promotion.reached
            self._advance(promotion)
            if promotion.reached > before:
                promotion.heard_s = self._clock.now()
            self._tell(promotion)
        self._cancel_unwanted()
        self._hand_over()
        self._set_pace()
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
        most = min(to, start + KEYS_MAX, promotion.piece_stop(start)) - start
        got = self._read(promotion, start, start + most)
        promotion.issued += got
        if got < most:
            if not promotion.flying and promotion.reached >= promotion.issued:
                promotion.cut(promotion.issued, _NO_ROOM)
            return False
        return True

    def _read(self, promotion: Promotion, start: int, stop: int) -> int:
        """Read blocks [start, stop) that nobody else is bringing; of how many leading ones it is known now
        who does. None of them is ours yet."""
        part = promotion.nodes[start:stop]
        parent, keys, now_s = self._index.parent(int(part[0])), self._index.keys(part), self._clock.now()
        got = self._host.reserve(parent, keys, promotion.shape, now_s, self._stall_s, OWNER)
        mine = np.flatnonzero(got.slots != NONE)
        positions = (start + mine).astype(np.uint32)
        promotion.slots[positions] = got.slots[mine]
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
        return len(got.nodes)

    def _hand_over(self) -> None:
        """What one gave up, another may have been waiting for: it reads that itself now."""
        if not self._freed:
            return
        self._freed = False
        for promotion in self._running:
            if not promotion.over:
                self._take_over(promotion)

    def _take_over(self, promotion: Promotion) -> None:
        at, to = promotion.reached, min(promotion.issued, promotion.stop)
        waiting = ~promotion.landed[at:to] & (promotion.slots[at:to] == NONE)
        waiting &= ~self._host.readable(promotion.nodes[at:to])
        positions = at + np.flatnonzero(waiting)
        for run in promotion.runs(positions.astype(np.uint32)):
            for part in np.split(run, np.arange(KEYS_MAX, len(run), KEYS_MAX)):
                if not len(part) or int(part[0]) >= promotion.stop:
                    return
                got = self._read(promotion, int(part[0]), int(part[-1]) + 1)
                if got < len(part):
                    promotion.cut(int(part[got]), _NO_ROOM)

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
        """Once nothing is at the disk any more, say what that took, and free what landed behind the end:
        nobody will reach it."""
        if promotion.flying:
            return
        if promotion.issued >= promotion.stop and not promotion.measured.over:
            self._learn(promotion.measured.ended(self._brought_bytes, whole=promotion.whole))
        if promotion.over:
            self._free(promotion, np.arange(promotion.issued, dtype=np.uint32))

    def _learn(self, transfer: Transfer | None) -> None:
        if transfer is not None:
            self.on_transfer(transfer)

    def _free(self, promotion: Promotion, positions: U32) -> None:
        held = positions[promotion.slots[positions] != NONE]
        self._host.abort(promotion.nodes[held], promotion.slots[held])
        promotion.slots[held] = NONE
        promotion.landed[held] = False
        self._freed = self._freed or bool(len(held))

    def _forget_ended(self) -> None:
        self._running = [p for p in self._running if not p.over or p.flying]


def _nothing() -> None:
    """Nobody holds anything back."""


def _nothing_learnt(_: object) -> None:
    """Nobody learns."""
