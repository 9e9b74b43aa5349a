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
from kvstore.tiers.alarms import Alarm
from kvstore.tiers.host import HostTier
from kvstore.tiers.noop import NoDisk
from kvstore.tiers.nvme import NvmeTier
from kvstore.tiers.promotion import Promotion

__all__ = ["Fetches", "Fetching", "TailFetching", "Watch"]

OnProgress = Callable[["Fetching"], None]


@dataclass(slots=True)
class _Running:
    """A fetch that waits for the disk."""

    fetching: Fetching
    promotion: Promotion
    on_progress: OnProgress
    watch: Watch | None
    began_s: float
    alarm: Alarm | None = None


class Fetches:
    """All fetches of one trust group that have not ended."""

    def __init__(self, host: HostTier, nvme: NvmeTier | NoDisk) -> None:
        self._host = host
        self._nvme = nvme
        self._running: dict[int, _Running] = {}

    def __len__(self) -> int:
        return len(self._running)

    def __iter__(self) -> Iterator[Fetching]:
        return iter([running.fetching for running in self._running.values()])

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
        fetching.ready += self._host.leading(lease.nodes[start:stop])
        if fetching.over:
            _pass_through(lease)
            return fetching
        _check_not_abandoned(lease)
        if not isinstance(self._nvme, NvmeTier):
            raise NotFound(f"fetch: block {fetching.ready} is not on HOST any more; compute from there on")
        if fetching.ready == start > 0 and not self._continues(int(lease.nodes[start - 1])):
            raise BadRequest(f"fetch.start: block {start - 1} is neither on HOST nor on NVME; start earlier")
        began_s = self._nvme.alarms.clock.now()
        if watch is not None:
            began_s = max(began_s, watch.from_s)
        due_s = began_s + watch.due_s(fetching.arrived) if watch is not None else math.inf
        if lease.state is not LeaseState.FETCHING:
            lease.move(LeaseState.FETCHING)
        first = fetching.ready
        lease.brought = (first, first)

        def changed(promotion: Promotion) -> None:
            self._follow(fetching, promotion, first)
            on_progress(fetching)

        promotion = self._nvme.promote(lease.nodes[first:stop], shape, changed)
        running = self._running[lease.id] = _Running(fetching, promotion, on_progress, watch, began_s)
        self._follow(fetching, promotion, first)
        if not fetching.over:
            self._look_at(due_s, running, self._nvme)
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
        if not fetching.over:
            _check_not_abandoned(lease)
        lease.tail = fetching.tail
        if fetching.over:
            _pass_through(lease)
            return fetching
        if not isinstance(self._nvme, NvmeTier):
            fetching.cut(f"block {fetching.ready - 1} is not on HOST any more")
            _pass_through(lease)
            return fetching
        if lease.state is not LeaseState.FETCHING:
            lease.move(LeaseState.FETCHING)

        def changed(promotion: Promotion) -> None:
            told = fetching.ready, fetching.end
            self._follow(fetching, promotion, start)
            if (fetching.ready, fetching.end) != told:  # else it is only a part of a piece
                on_progress(fetching)

        began_s = self._nvme.alarms.clock.now()
        promotion = self._nvme.promote(fetching.nodes(), shape, changed, fetching.pieces)
        self._running[lease.id] = _Running(fetching, promotion, on_progress, None, began_s)
        self._follow(fetching, promotion, start)
        return fetching

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
            assert isinstance(self._nvme, NvmeTier)
            if fetching.over:
                self._forget(lease)
                self._nvme.give_up(running.promotion, "computing has met it")
                lease.move(LeaseState.DONE)
                running.on_progress(fetching)
            else:
                self._nvme.shorten(running.promotion, wanted, "computing will meet it")
        lease.tail.used_from(start)

    def _may_begin(self, lease: Lease, start: int, stop: int) -> None:
        most = max(lease.host, lease.disk)
        if not 0 <= start <= stop <= most:
            raise BadRequest(
                f"fetch: [{start}, {stop}) is not inside the {most} blocks held on HOST and NVME"
            )
        if lease.id in self._running:
            raise BadRequest("fetch: one of this lease is under way; wait for its end")

    def _look_at(self, due_s: float, running: _Running, nvme: NvmeTier) -> None:
        if due_s < math.inf:
            running.alarm = nvme.alarms.set(due_s, lambda: self._look(running, nvme))

    def _look(self, running: _Running, nvme: NvmeTier) -> None:
        """The lag rule fires, unless more has arrived since this moment was computed."""
        nvme.pump()  # what has come and was not told yet counts
        fetching, watch = running.fetching, running.watch
        if fetching.over or watch is None:
            return
        arrived, now_s = fetching.arrived, nvme.alarms.clock.now()
        due_s = running.began_s + watch.due_s(arrived)
        if now_s < due_s:
            self._look_at(due_s, running, nvme)
            return
        fetching.lagged, fetching.lease.lagged_s = True, now_s - running.began_s
        nvme.abandon(
            running.promotion,
            f"it lagged: {arrived} of {fetching.stop - fetching.start} blocks had come after "
            f"{now_s - running.began_s:.3g} s; to load all was predicted to take {watch.rule.load_s:.3g} s, "
            f"to compute them {watch.rule.recompute_s:.3g} s",
        )

    def _continues(self, node: int) -> bool:
        """Whether a block may be published behind this one."""
        return self._host.holds(node) or bool(self._nvme.readable(np.array([node], np.uint32))[0])

    def _follow(self, fetching: Fetching, promotion: Promotion, first: int) -> None:
        lease = fetching.lease
        fetching.follow(first, promotion)
        lease.short = fetching.reason
        if fetching.over:
            self._forget(lease)
            if lease.state is LeaseState.FETCHING:
                lease.move(LeaseState.ABANDONED if promotion.abandoned else LeaseState.DONE)

    def _forget(self, lease: Lease) -> _Running | None:
        running = self._running.pop(lease.id, None)
        if running is not None and running.alarm is not None:
            running.alarm.cancel()
        return running

    def end(self, lease: Lease) -> None:
        """Its lease ends, released or revoked: whoever waits for the rest hears that it will not come."""
        running = self._forget(lease)
        if running is None or not isinstance(self._nvme, NvmeTier):
            return
        fetching, promotion = running.fetching, running.promotion
        self._nvme.give_up(promotion, "its lease has ended")
        fetching.cut(promotion.reason)
        running.on_progress(fetching)


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
