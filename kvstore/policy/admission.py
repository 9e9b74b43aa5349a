"""Which blocks are written to the disk: everything as long as the write budget affords it, else the best.

    bucket   the budget: a day's worth at most, full at the start, refilled all the time. In any window no
             more is let in than a day's worth and what was refilled meanwhile.
    loose    everything is let in. Ends when more was offered within an hour than an hour's refill and the
             bucket pay for.
    tight    the best offers are, as many as the refill pays for and the bucket if it is to last an hour more.
             Ends when what is offered fits the refill alone.

An offer is worth the seconds of computing that it is predicted to save, per byte, times the share of such
blocks that are used again. There are two kinds: blocks that nobody has hit yet, and those that somebody has.
Their shares are learned from what is seen. Of a kind that is hardly ever used again (a scan) a trickle is let
in while the budget is tight, whatever is left of it: to learn when that changes.

Between the two states lies a wide gap, and all that is known fades: the rate of offers within minutes, their
mix after an eighth of a day's budget was offered, the shares after some thousand blocks. So nothing is kept
out for ever, and memory is bounded: a few hundred numbers.

When not to use it: where writing costs nothing. A budget of 0 lets everything in.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass

from kvstore.policy.fading import PRIOR_AGAIN, PRIOR_FIRST, Kind, Mix, Rate
from kvstore.policy.history import Hits

__all__ = ["Admission", "AdmissionCounts", "Offer", "Refusal", "Tally"]

_DAY_S, _HOUR_S = 86_400.0, 3_600.0
# A fall of the rate is believed within minutes, a rise when it has lasted: a burst is no flood.
_FALL_S = 300.0
# Of a day's budget: kept in the bucket for the best when it is tight, 45 minutes of refill.
_RESERVE = 1 / 32
# Of a day's budget: after so many bytes were offered the mix of before counts 1/e.
_MIX = 1 / 8
# Of a day's budget: what an offer should not exceed, or it would have to wait until the bucket has that much.
_PIECE = 1 / 256
_UNLIMITED = 1 << 62

# Worth is told apart in steps of 2^(1/4), 19 %: from 2^-64 (a nanosecond for 16 GB) to 2^16 seconds a byte.
_STEPS = 4
_STEP_MIN, _STEP_MAX = -64 * _STEPS, 16 * _STEPS
_POOR = _STEP_MIN - 1
# A kind of which less than one in 64 is used again gets a sixteenth of the refill at most.
_POOR_REUSE = 1 / 64
_TRICKLE = 1 / 16

_SECONDS_BLOCKS = 4_096.0


class Refusal(enum.StrEnum):
    """Why a block was not written."""

    BUDGET = "budget"  # nothing is left in the bucket
    VALUE = "value"  # others are worth more
    QUEUE = "queue"  # the disk is behind: nvme.write_queue_bytes
    DISK = "disk"  # the disk refuses
    SIZE = "size"  # it fits no segment, or what it continues is not there
    QUOTA = "quota"  # its tenant has as much as it may


@dataclass(frozen=True, slots=True)
class Offer:
    """A part of a chain that could be written.

    Attributes:
        blocks, bytes: at least 1 each.
        seconds: predicted time to compute them; None or 0 = nothing is known: they count as average blocks.
        reused: somebody has hit them.
    """

    blocks: int
    bytes: int
    seconds: float | None
    reused: bool


@dataclass(slots=True)
class Tally:
    """Totals since the start."""

    blocks: int = 0
    bytes: int = 0

    def add(self, blocks: int, size_bytes: int) -> None:
        """Count some more, or (negative) fewer."""
        self.blocks += blocks
        self.bytes += size_bytes


@dataclass(frozen=True, slots=True)
class AdmissionCounts:
    """What was decided, and what the next decision rests on.

    Attributes:
        offered, admitted, refused: totals; offered = admitted + all refused.
        tight: whether only the best are let in.
        threshold: seconds saved per byte from which on offers are let in, of those just there some; 0 = all.
        budget_bytes_per_day: 0 = no limit.
        bucket_bytes: could be written at once. Negative: the disk wrote more than was asked for.
        reuse_first, reuse_again: share that is hit, of blocks that nobody had hit before, that somebody had.
    """

    offered: Tally
    admitted: Tally
    refused: Mapping[Refusal, Tally]
    tight: bool
    threshold: float
    budget_bytes_per_day: int
    bucket_bytes: float
    reuse_first: float
    reuse_again: float


@dataclass(slots=True)
class _Bar:
    """What a tight budget lets in: everything above a step, and of the step itself a part."""

    step: int = _POOR - 1
    part: float = 1.0
    credit: float = 0.0  # bytes of that part that were not let in yet


class Admission:
    """The write budget of one trust group.

    Args:
        budget_bytes_per_day: 0 = no limit.
        now_s: of a monotonic clock; one that goes back stands still.
    """

    def __init__(self, budget_bytes_per_day: int, now_s: float) -> None:
        self._budget = budget_bytes_per_day
        self._bucket = float(budget_bytes_per_day)
        self._now_s = now_s
        self._slow, self._fast = Rate(_HOUR_S, now_s), Rate(_FALL_S, now_s)
        self._mix = Mix()
        self._kinds = {False: Kind(PRIOR_FIRST), True: Kind(PRIOR_AGAIN)}
        self._seconds_per_block = 0.0
        self._tight = False
        self._bar = _Bar()
        self._offered, self._admitted = Tally(), Tally()
        self._refused = {reason: Tally() for reason in Refusal}

    # ---- questions ---------------------------------------------------------------------------------------

    @property
    def piece_bytes_max(self) -> int:
        """Offer more than this in parts, first blocks first: a part is let in or not as a whole."""
        return max(1, int(self._budget * _PIECE)) if self._budget else _UNLIMITED

    @property
    def admitted_blocks(self) -> int:
        """Since the start."""
        return self._admitted.blocks

    @property
    def refused_blocks(self) -> int:
        """For whatever reason, since the start."""
        return sum(tally.blocks for tally in self._refused.values())

    def refused_by_reason(self) -> dict[str, int]:
        """Blocks since the start, every reason named."""
        return {str(reason): tally.blocks for reason, tally in self._refused.items()}

    def counts(self) -> AdmissionCounts:
        """Totals and state, as of the last call that named a time."""
        lowest = not self._budget or not self._tight or self._bar.step < _STEP_MIN
        return AdmissionCounts(
            Tally(self._offered.blocks, self._offered.bytes),
            Tally(self._admitted.blocks, self._admitted.bytes),
            {reason: Tally(tally.blocks, tally.bytes) for reason, tally in self._refused.items()},
            self._tight,
            0.0 if lowest else 2.0 ** (self._bar.step / _STEPS),
            self._budget,
            self._bucket,
            self._kinds[False].reuse,
            self._kinds[True].reuse,
        )

    def report(self) -> dict[str, object]:
        """`counts()`, JSON-ready."""
        counts = self.counts()
        return {
            "offered_blocks": counts.offered.blocks,
            "offered_bytes": counts.offered.bytes,
            "admitted_blocks": counts.admitted.blocks,
            "admitted_bytes": counts.admitted.bytes,
            "refused": self.refused_by_reason(),
            "refused_bytes": {str(reason): tally.bytes for reason, tally in counts.refused.items()},
            "tight": counts.tight,
            "threshold_s_per_byte": counts.threshold,
            "budget_bytes_per_day": counts.budget_bytes_per_day,
            "bucket_bytes": int(counts.bucket_bytes),
            "reuse_first": round(counts.reuse_first, 4),
            "reuse_again": round(counts.reuse_again, 4),
        }

    # ---- decisions ---------------------------------------------------------------------------------------

    def admits(self, offer: Offer, now_s: float) -> bool:
        """Decide about an offer; what is let in is paid for. Some 10 µs.

        Raises:
            ValueError: an offer of nothing.
        """
        if offer.blocks < 1 or offer.bytes < 1:
            raise ValueError(f"offer: need at least one block and one byte, got {offer}")
        self._advance(now_s)
        kind = self._kinds[offer.reused]
        kind.offered.see(offer.blocks)
        self._offered.add(offer.blocks, offer.bytes)
        reason = self._decided(offer, kind) if self._budget else None
        if reason is not None:
            self._refused[reason].add(offer.blocks, offer.bytes)
            return False
        kind.admitted.see(offer.blocks)
        self._admitted.add(offer.blocks, offer.bytes)
        if self._budget:
            self._bucket -= offer.bytes
        return True

    def refused(self, reason: Refusal, blocks: int, size_bytes: int) -> None:
        """Blocks that the tier refused without asking."""
        self._offered.add(blocks, size_bytes)
        self._refused[reason].add(blocks, size_bytes)

    def give_back(self, reason: Refusal, blocks: int, size_bytes: int) -> None:
        """Blocks that were let in and will not be written after all: nothing was paid, nothing waits."""
        self._slow.take_back(size_bytes)
        self._fast.take_back(size_bytes)
        self._admitted.add(-blocks, -size_bytes)
        self._refused[reason].add(blocks, size_bytes)
        self._bucket = min(float(self._budget), self._bucket + size_bytes)

    def wrote(self, size_bytes: int, now_s: float) -> None:
        """The disk wrote so much by itself, copying what is to stay: others wait until that is paid."""
        self._advance(now_s)
        self._bucket = max(-float(self._budget), self._bucket - size_bytes)

    def hit(self, hits: Hits) -> None:
        """Blocks that had been offered were hit, on HOST or on the disk."""
        for reused, blocks, admitted in (
            (False, hits.first, hits.first_admitted),
            (True, hits.again, hits.again_admitted),
        ):
            self._kinds[reused].offered.hit(blocks)
            self._kinds[reused].admitted.hit(admitted)

    def set_budget(self, budget_bytes_per_day: int, now_s: float) -> None:
        """Another budget from now on; the bucket stays as full as it is."""
        self._advance(now_s)
        full = self._bucket / self._budget if self._budget else 1.0
        self._budget, self._bucket = budget_bytes_per_day, full * budget_bytes_per_day

    # ---- inside ------------------------------------------------------------------------------------------

    def _advance(self, now_s: float) -> None:
        passed_s = max(0.0, now_s - self._now_s)
        self._now_s = max(now_s, self._now_s)
        self._bucket = min(float(self._budget), self._bucket + self._budget / _DAY_S * passed_s)

    def _decided(self, offer: Offer, kind: Kind) -> Refusal | None:
        if offer.bytes > self._budget:  # never: it must not count as something that waits
            return Refusal.BUDGET
        self._slow.add(offer.bytes, self._now_s)
        self._fast.add(offer.bytes, self._now_s)
        offered_per_s = min(self._slow.per_s(), self._fast.per_s())
        self._turn(offered_per_s)
        if self._tight:
            self._set_bar(offered_per_s)
        # Only now: what is rare must not keep itself out by being counted.
        step = self._step(offer, kind.reuse)
        self._mix.add(step, offer.bytes, self._budget * _MIX)
        if self._tight and not self._clears(step, offer.bytes):
            return Refusal.VALUE
        return None if offer.bytes <= self._bucket else Refusal.BUDGET

    def _step(self, offer: Offer, reuse: float) -> int:
        """Worth of an offer, and what blocks cost on average."""
        seconds = offer.seconds or 0.0
        if 0.0 < seconds < math.inf:
            stays = math.exp(-offer.blocks / _SECONDS_BLOCKS) if self._seconds_per_block else 0.0
            self._seconds_per_block = self._seconds_per_block * stays + seconds / offer.blocks * (1 - stays)
        else:
            seconds = offer.blocks * (self._seconds_per_block or 1.0)
        if reuse < _POOR_REUSE:
            return _POOR
        worth = math.log2(seconds) + math.log2(reuse) - math.log2(offer.bytes)
        return min(max(math.floor(worth * _STEPS), _STEP_MIN), _STEP_MAX)

    def _turn(self, offered_per_s: float) -> None:
        """Loose or tight: see the top of this file."""
        hour = self._budget * _HOUR_S / _DAY_S
        offered = offered_per_s * _HOUR_S
        if offered <= hour:
            self._tight = False
        elif offered > hour + max(0.0, self._bucket - self._budget * _RESERVE):
            self._tight = True

    def _set_bar(self, offered_per_s: float) -> None:
        """The lowest step at which the bytes above it do not cost more than can be afforded."""
        refill = self._budget / _DAY_S
        afford = max(0.0, refill + (self._bucket - self._budget * _RESERVE) / _HOUR_S)
        above = 0.0
        for step in sorted(self._mix.shares, reverse=True):
            rate = self._mix.shares[step] / self._mix.total * offered_per_s
            room = min(afford - above, refill * _TRICKLE) if step == _POOR else afford - above
            if rate > room:
                self._bar.step, self._bar.part = step, room / rate
                return
            above += rate
        self._bar.step, self._bar.part = _POOR - 1, 1.0

    def _clears(self, step: int, size_bytes: int) -> bool:
        bar = self._bar
        if step != bar.step:
            return step > bar.step
        # Part of the step: each offer adds its share, whoever finds something left takes its whole size.
        bar.credit = min(float(size_bytes), bar.credit + bar.part * size_bytes)
        if bar.credit <= 0.0:
            return False
        bar.credit -= size_bytes
        return True
