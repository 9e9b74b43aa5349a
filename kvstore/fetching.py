"""Fetches: a lease's blocks brought to where its engine can copy them, as they arrive.

What is on HOST is ready at once, the rest is promoted from the disk. A fetch ends when everything is there,
or with what arrived: a bad record, a stalling disk or a full HOST cost the blocks from there on, no more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from kvstore._native import SlotFormat
from kvstore.errors import BadRequest, NotFound
from kvstore.leases import Lease, LeaseState
from kvstore.tiers.host import HostTier
from kvstore.tiers.noop import NoDisk
from kvstore.tiers.nvme import NvmeTier
from kvstore.tiers.promotions import Promotion

__all__ = ["Fetches", "Fetching"]

OnProgress = Callable[["Fetching"], None]


class Fetching:
    """One fetch of blocks [start, stop) of a lease.

    Attributes:
        lease: whose blocks.
        start, ready: blocks [start, ready) can be copied now.
        stop: where it ends; lowered when the rest will not come.
        reason: why it was lowered.
    """

    def __init__(self, lease: Lease, start: int, stop: int, host: HostTier, shape: SlotFormat) -> None:
        self.lease = lease
        self.start = self.ready = start
        self.stop = stop
        self.reason = ""
        self._host = host
        self._shape = shape

    @property
    def over(self) -> bool:
        """Nothing more will come."""
        return self.ready >= self.stop

    def runs(self, start: int, stop: int) -> bytes:
        """Where blocks [start, stop), which are ready, lie: `_native.pack_slots`."""
        return self._host.runs(self.lease.nodes[start:stop], self._shape)


class Fetches:
    """All fetches of one trust group that have not ended."""

    def __init__(self, host: HostTier, nvme: NvmeTier | NoDisk) -> None:
        self._host = host
        self._nvme = nvme
        self._running: dict[int, tuple[Fetching, Promotion, OnProgress]] = {}

    def __len__(self) -> int:
        return len(self._running)

    def __iter__(self) -> Iterator[Fetching]:
        return iter([fetching for fetching, _, _ in self._running.values()])

    def begin(
        self, lease: Lease, start: int, stop: int, shape: SlotFormat, on_progress: OnProgress
    ) -> Fetching:
        """Bring blocks [start, stop) of a lease to HOST.

        Args:
            on_progress: called on the loop whenever more is ready, until the fetch is over; not by this call.

        Raises:
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
            raise BadRequest("fetch: this lease's was abandoned because the disk stalled; look up again")
        if not isinstance(self._nvme, NvmeTier):
            raise NotFound(f"fetch: block {fetching.ready} is not on HOST any more; compute from there on")
        if fetching.ready == start > 0 and not self._continues(int(lease.nodes[start - 1])):
            raise BadRequest(f"fetch.start: block {start - 1} is neither on HOST nor on NVME; start earlier")
        if lease.state is not LeaseState.FETCHING:
            lease.move(LeaseState.FETCHING)
        first = fetching.ready
        lease.brought = (first, first)

        def changed(promotion: Promotion) -> None:
            self._follow(fetching, promotion, first)
            on_progress(fetching)

        promotion = self._nvme.promote(lease.nodes[first:stop], shape, changed)
        self._running[lease.id] = (fetching, promotion, on_progress)
        self._follow(fetching, promotion, first)
        return fetching

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
        if fetching.over:
            self._running.pop(lease.id, None)
            if lease.state is LeaseState.FETCHING:
                lease.move(LeaseState.ABANDONED if promotion.stalled else LeaseState.DONE)

    def end(self, lease: Lease) -> None:
        """Its lease ends, released or revoked: whoever waits for the rest hears that it will not come."""
        running = self._running.pop(lease.id, None)
        if running is None or not isinstance(self._nvme, NvmeTier):
            return
        fetching, promotion, on_progress = running
        self._nvme.give_up(promotion, "its lease has ended")
        fetching.stop, fetching.reason = fetching.ready, promotion.reason
        on_progress(fetching)


def _pass_through(lease: Lease) -> None:
    if lease.state in (LeaseState.GRANTED, LeaseState.DONE):
        lease.move(LeaseState.FETCHING)
    if lease.state is LeaseState.FETCHING:
        lease.move(LeaseState.DONE)
