"""Fetches: a lease's blocks brought to where its engine can copy them, as they arrive.

What is on HOST is ready at once, the rest is promoted from the disk. A fetch ends when everything is there,
or with what arrived: a bad record, a stalling disk or a full HOST cost the blocks from there on, no more.

    begin        [start, ready) can be copied, `ready` ascends to `stop`
    begin_tail   [ready, stop) can be copied, `ready` descends to `start`: for an engine that computes the
                 first blocks meanwhile, and says `enough` where the two meet

A tail comes in pieces, the last first. Inside of a piece blocks become readable in chain order, behind a
block that only the disk has; so a piece is told of as a whole, and lost as a whole.

A fetch may be watched by the lag rule (kvstore/policy/lag.py): at the moment at which the rule fires it is
given up, unless so much has arrived meanwhile that it fires later; then it is looked at again at that moment.
Asking costs nothing while blocks arrive.

For experiments HOST may be made slower than it is: then nothing is ready at once, and whatever is, or comes,
on HOST is let out block by block (kvstore/tiers/pacing.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from kvstore._native import SlotFormat
from kvstore.errors import BadRequest, NotFound
from kvstore.fetches import Fetching, TailFetching
from kvstore.leases import Lease, LeaseState
from kvstore.policy.planned import Watch
from kvstore.policy.rates import Transfer
from kvstore.tiers.alarms import Alarm, Alarms
from kvstore.tiers.host import HostTier
from kvstore.tiers.measured import SECONDS_MAX, Measured
from kvstore.tiers.noop import NoDisk
from kvstore.tiers.nvme import NvmeTier
from kvstore.tiers.pacing import Pacing
from kvstore.tiers.promotion import Promotion
from kvstore.tiers.promotions import PACE_S

__all__ = ["Fetches", "Fetching", "TailFetching", "Watch"]

OnProgress = Callable[["Fetching"], None]


@dataclass(slots=True)
class _Running:
    """A fetch that waits: for the disk, or for HOST where that is limited."""

    fetching: Fetching
    on_progress: OnProgress
    watch: Watch | None
    began_s: float
    measured: Measured
    promotion: Promotion | None = None
    alarm: Alarm | None = None
    paced: int = 0
    """Blocks that were handed to the pacing of HOST."""

    @property
    def promoting(self) -> Promotion | None:
        """What the disk still brings for it."""
        promotion = self.promotion
        return None if promotion is None or promotion.over else promotion


class Fetches:
    """All fetches of one trust group that have not ended.

    Args:
        alarms: somebody rings them: the disk's where there is one.
    """

    def __init__(self, host: HostTier, nvme: NvmeTier | NoDisk, alarms: Alarms) -> None:
        self._host = host
        self._nvme = nvme
        self.alarms = alarms
        self._running: dict[int, _Running] = {}
        self._pacing = Pacing[_Running]()
        self._pace: Alarm | None = None
        self.on_transfer: Callable[[Transfer], None] = _nothing_learnt
        """Called once for each fetch that had to wait for HOST alone."""

    def __len__(self) -> int:
        return len(self._running)

    def __iter__(self) -> Iterator[Fetching]:
        return iter([running.fetching for running in self._running.values()])

    @property
    def limited(self) -> bool:
        """Nothing of HOST is ready at once."""
        return not self._pacing.idle

    def set_limits(self, limit_bytes_per_s: float, added_latency_s: float) -> None:
        """Make HOST slower than it is, from now on; zeros: no more. Holds for fetches under way, too."""
        self._pacing.set_limits(limit_bytes_per_s, added_latency_s, self.alarms.clock.now())
        self._set_pace()

    # ---- beginning ---------------------------------------------------------------------------------------

    def begin(
        self,
        lease: Lease,
        start: int,
        stop: int,
        shape: SlotFormat,
        on_progress: OnProgress,
        watch: Watch | None = None,
    ) -> Fetching:
        """Bring blocks [start, stop) of a lease to HOST.

        Args:
            on_progress: called on the loop whenever more is ready, until the fetch is over; not by this call.
            watch: gives up what is late; None = nobody minds, short of `nvme.stall_s`.

        Raises:
            ValueError: a prediction of `watch` is no number of seconds; nothing was begun.
            BadRequest: outside the match, not continuing what is on HOST, or a fetch of it is under way.
            NotFound: a block has left HOST and is nowhere else.
        """
        self._may_begin(lease, start, stop)
        fetching = Fetching(lease, start, stop, self._host, shape)
        first = start + fetching.came
        if first < stop:
            _check_not_abandoned(lease)
            if not isinstance(self._nvme, NvmeTier):
                raise NotFound(f"fetch: block {first} is not on HOST any more; compute from there on")
            if first == start > 0 and not self._continues(int(lease.nodes[start - 1])):
                raise BadRequest(
                    f"fetch.start: block {start - 1} is neither on HOST nor on NVME; start earlier"
                )
        due_s = math.inf if watch is None else watch.due_s(0 if self.limited else fetching.came)
        running = self._run(fetching, on_progress, watch)
        if fetching.over:
            _pass_through(lease)
            return fetching
        self._starts(running)
        if first < stop:
            assert isinstance(self._nvme, NvmeTier)
            fetching.brings(first)

            def changed(promotion: Promotion) -> None:
                self._follow(running, promotion, first)
                on_progress(fetching)

            running.promotion = self._nvme.promote(lease.nodes[first:stop], shape, changed)
            self._follow(running, running.promotion, first)
        if not fetching.over:
            self._look_at(running.began_s + due_s, running)
        return fetching

    def begin_tail(
        self, lease: Lease, start: int, stop: int, shape: SlotFormat, on_progress: OnProgress
    ) -> TailFetching:
        """Bring blocks [start, stop) of a lease to HOST, the last ones first.

        Args:
            on_progress: as for `begin`.

        Raises:
            BadRequest: outside the match, a fetch of it is under way, or the one before was abandoned.
        """
        self._may_begin(lease, start, stop)
        fetching = TailFetching(lease, start, stop, self._host, shape)
        absent = stop - start - fetching.came
        if absent:
            _check_not_abandoned(lease)
        lease.tail = fetching.tail
        nvme = self._nvme
        if absent and not isinstance(nvme, NvmeTier):
            fetching.start, fetching.reason = (
                stop - fetching.came,
                f"block {start + absent - 1} is not on HOST any more",
            )
        running = self._run(fetching, on_progress, None)
        if fetching.over:
            _pass_through(lease)
            return fetching
        self._starts(running)
        if absent and isinstance(nvme, NvmeTier):

            def changed(promotion: Promotion) -> None:
                told = fetching.ready, fetching.end
                self._follow(running, promotion, start)
                if (fetching.ready, fetching.end) != told:  # else it is only a part of a piece
                    on_progress(fetching)

            running.promotion = nvme.promote(fetching.nodes(), shape, changed, fetching.pieces)
            self._follow(running, running.promotion, start)
        return fetching

    def _run(self, fetching: Fetching, on_progress: OnProgress, watch: Watch | None) -> _Running:
        """What is on HOST is ready, as far as that is not limited."""
        began_s = now_s = self.alarms.clock.now()
        if watch is not None:
            began_s = max(began_s, watch.from_s)
        measured = Measured(now_s, fetching.shape.length, 0, 0)
        running = _Running(fetching, on_progress, watch, began_s, measured)
        self._let(running)
        return running

    def _starts(self, running: _Running) -> None:
        lease = running.fetching.lease
        if lease.state is not LeaseState.FETCHING:
            lease.move(LeaseState.FETCHING)
        self._running[lease.id] = running

    def _may_begin(self, lease: Lease, start: int, stop: int) -> None:
        most = max(lease.host, lease.disk)
        if not 0 <= start <= stop <= most:
            raise BadRequest(
                f"fetch: [{start}, {stop}) is not inside the {most} blocks held on HOST and NVME"
            )
        if lease.id in self._running:
            raise BadRequest("fetch: one of this lease is under way; wait for its end")

    def _continues(self, node: int) -> bool:
        """Whether a block may be published behind this one."""
        return self._host.holds(node) or bool(self._nvme.readable(np.array([node], np.uint32))[0])

    # ---- progress ----------------------------------------------------------------------------------------

    def _follow(self, running: _Running, promotion: Promotion, first: int) -> None:
        running.fetching.follow(first, promotion)
        running.fetching.lease.short = running.fetching.reason
        self._let(running)
        self._end_if_over(running)

    def _let(self, running: _Running) -> None:
        """What has come can be copied, as soon as a limit of HOST allows."""
        fetching = running.fetching
        if not self.limited:
            fetching.let(fetching.came)
        elif fetching.came > running.paced:
            fresh = np.arange(running.paced, fetching.came, dtype=np.uint32)
            self._pacing.put(running, fresh, fetching.shape.length, self.alarms.clock.now())
            running.paced = fetching.came
            self._set_pace()

    def _let_out(self) -> None:
        """Blocks that a limit of HOST has held back until now."""
        now_s = self.alarms.clock.now()
        for running, positions in self._pacing.take(now_s):
            fetching = running.fetching
            if self._running.get(fetching.lease.id) is not running:
                continue  # ended by what the one before has told
            fetching.let(fetching.arrived + len(positions))
            running.measured.came(len(positions), now_s)
            self._end_if_over(running)
            running.on_progress(fetching)
        self._set_pace()

    def _set_pace(self) -> None:
        """Be woken when the next block may be let out; not for each that comes within a millisecond."""
        next_s = self._pacing.next_s()
        if next_s is not None:
            if self._pace is not None:
                self._pace.cancel()
            self._pace = self.alarms.set(max(next_s, self.alarms.clock.now() + PACE_S), self._let_out)

    def _end_if_over(self, running: _Running) -> None:
        fetching, promotion = running.fetching, running.promotion
        lease = fetching.lease
        if not fetching.over:
            return
        self._forget(running)
        if promotion is None and running.measured.blocks and not running.measured.over:
            size = running.measured.blocks * fetching.shape.length
            learnt = running.measured.ended(size, whole=not fetching.reason)
            if learnt is not None:
                self.on_transfer(learnt)
        if lease.state is LeaseState.FETCHING:
            abandoned = promotion is not None and promotion.abandoned
            lease.move(LeaseState.ABANDONED if abandoned else LeaseState.DONE)

    def _forget(self, running: _Running) -> None:
        self._running.pop(running.fetching.lease.id, None)
        self._pacing.drop(running)
        if running.alarm is not None:
            running.alarm.cancel()

    # ---- ending early ------------------------------------------------------------------------------------

    def enough(self, lease: Lease, start: int) -> None:
        """No block of a lease's tail below `start` is used: it ends there, and counts as loaded from there.

        Raises:
            BadRequest: nothing of it was fetched from its end.
        """
        if lease.tail is None:
            raise BadRequest("enough: no descending fetch of this lease has begun")
        running = self._running.get(lease.id)
        if running is not None and isinstance(running.fetching, TailFetching):
            fetching = running.fetching
            wanted = fetching.enough(start)
            promotion = running.promoting
            if promotion is not None:
                assert isinstance(self._nvme, NvmeTier)
                if fetching.over:
                    self._nvme.give_up(promotion, "computing has met it")
                else:
                    self._nvme.shorten(promotion, wanted, "computing will meet it")
            if fetching.over:
                self._forget(running)
                lease.move(LeaseState.DONE)
                running.on_progress(fetching)
        lease.tail.used_from(start)

    def _look_at(self, due_s: float, running: _Running) -> None:
        if due_s < math.inf:
            running.alarm = self.alarms.set(due_s, lambda: self._look(running))

    def _look(self, running: _Running) -> None:
        """The lag rule fires, unless more has arrived since this moment was computed."""
        if isinstance(self._nvme, NvmeTier):
            self._nvme.pump()  # what has come and was not told yet counts
        fetching, watch = running.fetching, running.watch
        if fetching.over or watch is None:
            return
        arrived, now_s = fetching.arrived, self.alarms.clock.now()
        due_s = running.began_s + watch.due_s(arrived)
        if now_s < due_s:
            self._look_at(due_s, running)
            return
        fetching.lagged, fetching.lease.lagged_s = True, now_s - running.began_s
        reason = (
            f"it lagged: {arrived} of {fetching.stop - fetching.start} blocks had come after "
            f"{now_s - running.began_s:.3g} s; to load all was predicted to take {watch.rule.load_s:.3g} s, "
            f"to compute them {watch.rule.recompute_s:.3g} s"
        )
        promotion = running.promoting
        if promotion is not None:
            assert isinstance(self._nvme, NvmeTier)
            self._nvme.abandon(promotion, reason)
        if not fetching.over:  # HOST holds it back
            self._cut(running, reason)

    def _cut(self, running: _Running, reason: str) -> None:
        """Whoever waits goes on with what was let out of HOST."""
        fetching, lease = running.fetching, running.fetching.lease
        if running.promotion is None:
            blocks, now_s = fetching.stop - fetching.start, self.alarms.clock.now()
            learnt = running.measured.gave_up(blocks, 0, now_s)
            if learnt is None:  # not even one: so long at least for each
                seconds = min(blocks * (now_s - running.measured.began_s), SECONDS_MAX)
                learnt = Transfer(blocks * fetching.shape.length, 0, seconds, given_up=True)
            self.on_transfer(learnt)
        fetching.cut(reason)
        lease.short = reason
        lease.host = min(lease.host, fetching.ready)  # the rest is no hit
        self._end_if_over(running)
        running.on_progress(fetching)

    def end(self, lease: Lease) -> None:
        """Its lease ends, released or revoked: whoever waits for the rest hears that it will not come."""
        running = self._running.get(lease.id)
        if running is None:
            return
        self._forget(running)
        reason, promotion = "its lease has ended", running.promoting
        if promotion is not None:
            assert isinstance(self._nvme, NvmeTier)
            self._nvme.give_up(promotion, reason)
            reason = promotion.reason
        running.fetching.cut(reason)
        running.on_progress(running.fetching)


def _check_not_abandoned(lease: Lease) -> None:
    if lease.state is LeaseState.ABANDONED:
        raise BadRequest(
            "fetch: this lease's was abandoned because the disk stalled or lagged; look up again"
        )


def _pass_through(lease: Lease) -> None:
    if lease.state in (LeaseState.GRANTED, LeaseState.DONE):
        lease.move(LeaseState.FETCHING)
    if lease.state is LeaseState.FETCHING:
        lease.move(LeaseState.DONE)


def _nothing_learnt(_: Transfer) -> None:
    """Nobody wants to know."""
