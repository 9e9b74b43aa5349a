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
from collections.abc import Iterator

import numpy as np

from kvstore._native import SlotFormat
from kvstore.errors import BadRequest, NotFound
from kvstore.fetches import Fetching, TailFetching
from kvstore.host_pace import HostPace, OnProgress, Running
from kvstore.leases import Lease, LeaseState
from kvstore.policy.planned import Watch
from kvstore.tiers.alarms import Alarms
from kvstore.tiers.host import HostTier
from kvstore.tiers.noop import NoDisk
from kvstore.tiers.nvme import NvmeTier
from kvstore.tiers.promotion import Promotion

__all__ = ["Fetches", "Fetching", "TailFetching", "Watch"]


class Fetches:
    """All fetches of one trust group that have not ended.

    Args:
        alarms: somebody rings them: the disk's where there is one.
    """

    def __init__(self, host: HostTier, nvme: NvmeTier | NoDisk, alarms: Alarms) -> None:
        self._host = host
        self._nvme = nvme
        self.alarms = alarms
        self._running: dict[int, Running] = {}
        self.pace = HostPace(alarms, self._let_out)

    def __len__(self) -> int:
        return len(self._running)

    def __iter__(self) -> Iterator[Fetching]:
        return iter([running.fetching for running in self._running.values()])

    def close(self) -> None:
        """Nobody hears of anything any more."""
        self.pace.close()
        for running in tuple(self._running.values()):
            self._forget(running)

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
        if first < stop or self.pace.limited:
            _check_not_abandoned(lease)
        if first < stop:
            if not isinstance(self._nvme, NvmeTier):
                raise NotFound(f"fetch: block {first} is not on HOST any more; compute from there on")
            if first == start > 0 and not self._continues(int(lease.nodes[start - 1])):
                raise BadRequest(
                    f"fetch.start: block {start - 1} is neither on HOST nor on NVME; start earlier"
                )
        due_s = math.inf if watch is None else watch.due_s(0 if self.pace.limited else fetching.came)
        running = self._made(fetching, on_progress, watch)
        if fetching.over:
            _pass_through(lease)
            return fetching
        if lease.state is not LeaseState.FETCHING:
            lease.move(LeaseState.FETCHING)
        if first < stop:
            assert isinstance(self._nvme, NvmeTier)
            fetching.brings(first)

            def changed(promotion: Promotion) -> None:
                self._follow(running, promotion, first)
                on_progress(fetching)

            running.promotion = self._nvme.promote(lease.nodes[first:stop], shape, changed)
        self._starts(running, first)
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
        absent, nvme = stop - start - fetching.came, self._nvme
        if absent or self.pace.limited:
            _check_not_abandoned(lease)
        lease.tail = fetching.tail
        if absent and not isinstance(nvme, NvmeTier):
            fetching.start = stop - fetching.came
            fetching.reason = f"block {fetching.start - 1} is not on HOST any more"
        running = self._made(fetching, on_progress, None)
        if fetching.over:
            _pass_through(lease)
            return fetching
        if lease.state is not LeaseState.FETCHING:
            lease.move(LeaseState.FETCHING)
        if absent and isinstance(nvme, NvmeTier):

            def changed(promotion: Promotion) -> None:
                told = fetching.ready, fetching.end
                self._follow(running, promotion, start)
                if (fetching.ready, fetching.end) != told:  # else it is only a part of a piece
                    on_progress(fetching)

            running.promotion = nvme.promote(fetching.nodes(), shape, changed, fetching.pieces)
        self._starts(running, start)
        return fetching

    def _made(self, fetching: Fetching, on_progress: OnProgress, watch: Watch | None) -> Running:
        """What is on HOST is ready at once where that is not limited."""
        began_s = self.alarms.clock.now()
        if watch is not None:
            began_s = max(began_s, watch.from_s)
        measured = self.pace.measure(fetching, self._running.values())
        running = Running(fetching, on_progress, watch, began_s, measured)
        if not self.pace.limited:
            self._let(running)
        return running

    def _starts(self, running: Running, first: int) -> None:
        """From now on it is heard of; `first`: of the promotion."""
        self._running[running.fetching.lease.id] = running
        if running.promotion is not None:
            self._follow(running, running.promotion, first)
        elif self.pace.limited:
            self._let(running)

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

    def _follow(self, running: Running, promotion: Promotion, first: int) -> None:
        running.fetching.follow(first, promotion)
        running.fetching.lease.short = running.fetching.reason
        self._let(running)
        self._end_if_over(running)

    def _let(self, running: Running) -> None:
        """What has come can be copied, as soon as a limit of HOST allows."""
        if self.pace.limited:
            self.pace.hold(running)
        else:
            running.paced = running.fetching.came
            running.fetching.let(running.fetching.came)

    def _let_out(self, running: Running, count: int) -> None:
        """A limit of HOST lets so many blocks of a fetch out in all."""
        fetching = running.fetching
        if self._running.get(fetching.lease.id) is not running:
            return  # ended by what another one was told just now
        if not fetching.here(count):
            self._cut(running, "a block that it waited for was dropped")
            return
        fetching.let(count)
        self._end_if_over(running)
        running.on_progress(fetching)

    def _end_if_over(self, running: Running) -> None:
        fetching, promotion = running.fetching, running.promotion
        lease = fetching.lease
        if not fetching.over:
            return
        abandoned = promotion is not None and promotion.abandoned
        self._forget(running)
        if lease.state is LeaseState.FETCHING:
            lease.move(LeaseState.ABANDONED if abandoned else LeaseState.DONE)

    def _forget(self, running: Running) -> None:
        self._running.pop(running.fetching.lease.id, None)
        self.pace.drop(running)
        if running.alarm is not None:
            running.alarm.cancel()
        running.promotion = None  # it knows who follows it: no cycle keeps an arena mapped

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
            wanted, promotion = fetching.enough(start), running.promoting
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

    def _look_at(self, due_s: float, running: Running) -> None:
        if due_s < math.inf:
            running.alarm = self.alarms.set(due_s, lambda: self._look(running))

    def _look(self, running: Running) -> None:
        """The lag rule fires, unless more has arrived since this moment was computed."""
        if isinstance(self._nvme, NvmeTier):
            self._nvme.pump()  # what has come and was not told yet counts
        self.pace.let_out()
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
        if running.held:  # by HOST: the disk has done its part
            self.pace.lagged(running)
            self._cut(running, reason)
        elif (promotion := running.promoting) is not None:
            assert isinstance(self._nvme, NvmeTier)
            self._nvme.abandon(promotion, reason)

    def _cut(self, running: Running, reason: str) -> None:
        """Whoever waits goes on with what was let out of HOST."""
        fetching, lease = running.fetching, running.fetching.lease
        if (promotion := running.promoting) is not None:
            assert isinstance(self._nvme, NvmeTier)
            self._nvme.give_up(promotion, reason)
        fetching.cut(reason)
        lease.short = reason
        self._not_hit(running)
        self._end_if_over(running)
        running.on_progress(fetching)

    def _not_hit(self, running: Running) -> None:
        """What HOST holds back of a fetch that ends is not loaded."""
        fetching = running.fetching
        if not isinstance(fetching, TailFetching):
            fetching.lease.host = min(fetching.lease.host, fetching.ready)

    def end(self, lease: Lease) -> None:
        """Its lease ends, released or revoked: whoever waits for the rest hears that it will not come."""
        running = self._running.get(lease.id)
        if running is None:
            return
        if running.held:
            self._not_hit(running)
        reason, promotion = "its lease has ended", running.promoting
        self._forget(running)
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
