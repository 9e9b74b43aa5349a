"""Fetches: a lease's blocks brought to where its engine can copy them, as they arrive.

What is on HOST is ready at once, the rest is promoted from the disk. A fetch ends when everything is there,
or with what arrived: a bad record, a stalling disk or a full HOST cost the blocks from there on, no more.

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
from kvstore.leases import Lease, LeaseState
from kvstore.policy.planned import Watch
from kvstore.tiers.alarms import Alarm
from kvstore.tiers.host import HostTier
from kvstore.tiers.noop import NoDisk
from kvstore.tiers.nvme import NvmeTier
from kvstore.tiers.promotion import Promotion

__all__ = ["Fetches", "Fetching", "Watch"]

OnProgress = Callable[["Fetching"], None]


class Fetching:
    """One fetch of blocks [start, stop) of a lease.

    Attributes:
        lease: whose blocks.
        start, ready: blocks [start, ready) can be copied now.
        stop: where it ends; lowered when the rest will not come.
        reason: why it was lowered.
        lagged: it was given up by its `Watch`.
    """

    def __init__(self, lease: Lease, start: int, stop: int, host: HostTier, shape: SlotFormat) -> None:
        self.lease = lease
        self.start = self.ready = start
        self.stop = stop
        self.reason = ""
        self.lagged = False
        self._host = host
        self._shape = shape

    @property
    def over(self) -> bool:
        """Nothing more will come."""
        return self.ready >= self.stop

    def runs(self, start: int, stop: int) -> bytes:
        """Where blocks [start, stop), which are ready, lie: `_native.pack_slots`."""
        return self._host.runs(self.lease.nodes[start:stop], self._shape)


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
        most = max(lease.host, lease.disk)
        if not 0 <= start <= stop <= most:
            raise BadRequest(
                f"fetch: [{start}, {stop}) is not inside the {most} blocks held on HOST and NVME"
            )
        if lease.id in self._running:
            raise BadRequest("fetch: one of this lease is under way; wait for its end")
        fetching = Fetching(lease, start, stop, self._host, shape)
        fetching.ready += self._host.leading(lease.nodes[start:stop])
        if fetching.over:
            _pass_through(lease)
            return fetching
        if lease.state is LeaseState.ABANDONED:
            raise BadRequest(
                "fetch: this lease's was abandoned because the disk stalled or lagged; look up again"
            )
        if not isinstance(self._nvme, NvmeTier):
            raise NotFound(f"fetch: block {fetching.ready} is not on HOST any more; compute from there on")
        if fetching.ready == start > 0 and not self._continues(int(lease.nodes[start - 1])):
            raise BadRequest(f"fetch.start: block {start - 1} is neither on HOST nor on NVME; start earlier")
        began_s = self._nvme.alarms.clock.now()
        if watch is not None:
            began_s = max(began_s, watch.from_s)
        due_s = began_s + watch.due_s(fetching.ready - start) if watch is not None else math.inf
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

    def _look_at(self, due_s: float, running: _Running, nvme: NvmeTier) -> None:
        if due_s < math.inf:
            running.alarm = nvme.alarms.set(due_s, lambda: self._look(running, nvme))

    def _look(self, running: _Running, nvme: NvmeTier) -> None:
        """The lag rule fires, unless more has arrived since this moment was computed."""
        nvme.pump()  # what has come and was not told yet counts
        fetching, watch = running.fetching, running.watch
        if fetching.over or watch is None:
            return
        arrived, now_s = fetching.ready - fetching.start, nvme.alarms.clock.now()
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
        fetching.stop = first + promotion.stop
        fetching.ready = min(first + promotion.reached, fetching.stop)
        fetching.reason = promotion.reason
        lease.brought = (first, fetching.ready)
        lease.host = max(lease.host, fetching.ready)
        lease.short = fetching.reason
        if fetching.over:
            running = self._running.pop(lease.id, None)
            if running is not None and running.alarm is not None:
                running.alarm.cancel()
            if lease.state is LeaseState.FETCHING:
                lease.move(LeaseState.ABANDONED if promotion.abandoned else LeaseState.DONE)

    def end(self, lease: Lease) -> None:
        """Its lease ends, released or revoked: whoever waits for the rest hears that it will not come."""
        running = self._running.pop(lease.id, None)
        if running is None or not isinstance(self._nvme, NvmeTier):
            return
        if running.alarm is not None:
            running.alarm.cancel()
        fetching, promotion = running.fetching, running.promotion
        self._nvme.give_up(promotion, "its lease has ended")
        fetching.stop, fetching.reason = fetching.ready, promotion.reason
        running.on_progress(fetching)


def _pass_through(lease: Lease) -> None:
    if lease.state in (LeaseState.GRANTED, LeaseState.DONE):
        lease.move(LeaseState.FETCHING)
    if lease.state is LeaseState.FETCHING:
        lease.move(LeaseState.DONE)
