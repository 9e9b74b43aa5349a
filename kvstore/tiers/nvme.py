"""NVME: records in segment files. Native threads move the bytes; this file says which, and when.

    offer     blocks that became readable on HOST: what the disk lacks of their chain is written, if admission
              lets it in (kvstore/tiers/disk_offers.py, then disk_writes.py)
    promote   records → FILLING slots → READY on HOST (kvstore/tiers/promotions.py); what each teaches of the
              disk's speed goes to `on_transfer`
    flush     everything accepted is on the medium

Everything happens on the event loop, in answer to `pump` (the disk has done something), `tick` (time has
passed) and `alarms` (a moment has come). A disk that fails costs misses, never an error of a request.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator

import numpy as np
import structlog
from numpy.typing import NDArray

from kvstore._native import KEYS_MAX, DiskEvent, DiskPool, SlotFormat, Walk
from kvstore.clock import Clock
from kvstore.config import NvmeConfig
from kvstore.memory import GroupMemory
from kvstore.policy.admission import Admission, Refusal
from kvstore.policy.rates import Transfer
from kvstore.tiers.alarms import Alarms
from kvstore.tiers.disk_offers import Chain, Offers
from kvstore.tiers.disk_writes import DiskWrites, Flushed, Lost
from kvstore.tiers.drop_marks import DropMarks
from kvstore.tiers.host import HostTier
from kvstore.tiers.nvme_counters import NvmeCounters
from kvstore.tiers.promotion import Promotion
from kvstore.tiers.promotions import Promotions
from kvstore.types import Tier

__all__ = ["Flushed", "NvmeTier"]

log = structlog.get_logger()

U32 = NDArray[np.uint32]
# After an error of the disk it is left alone for so long, twice as long each time, until something succeeds.
_REST_S, _REST_MAX_S = 0.5, 60.0
# A piece that the disk has no room for pins its chain: where that is about as long as the disk is large,
# nothing can leave for it, ever. Longer than any segment takes to be emptied.
_STUCK_S = 5.0
# After a file could not be made the tier goes on with those that it has, and tries again then.
_GROW_S = 60.0
# What was refused is offered again when it is hit, but no more often: that walks the chain, 0.1 ms a thousand
# blocks, on the path of a lookup.
_REOFFER_S = 0.02


class NvmeTier:
    """The disk of one trust group as a place for bytes.

    Args:
        memory: of the group, with its disk.
        host: where blocks come from and go to.
        config: limits; replaced when the configuration is reloaded.
        clock: monotonic.
        admission: what is worth writing.
        fill_stall_s: `daemon.stall_s`: a slot that others fill for longer may be filled by us too.
    """

    tier = Tier.NVME
    configured = True

    def __init__(
        self,
        memory: GroupMemory,
        host: HostTier,
        config: NvmeConfig,
        clock: Clock,
        admission: Admission,
        fill_stall_s: float,
    ) -> None:
        assert memory.disk is not None
        assert memory.directory is not None
        assert memory.drops is not None
        self._disk: DiskPool = memory.disk
        self._directory = memory.directory
        self._index = memory.index
        self._host = host
        self._clock = clock
        self.config = config
        self.admission = admission
        self.counters = NvmeCounters()
        self.marks = DropMarks(memory.disk, memory.drops, self.counters)
        self._reoffer_s = 0.0
        self.trouble = ""
        """Why the disk is left alone at the moment, "" = it is not."""
        self._rest_s, self._resume_s = _REST_S, 0.0
        self._grow_s: float | None = None
        self._progress, self._stepped_s = (0, 0), clock.now()
        self.dropping = asyncio.Lock()
        """Held by whoever writes down what was dropped: one at a time."""
        self._writes = DiskWrites(memory, host)
        self.offers = Offers(host, self._writes, admission, clock, self._queue_bytes_max())
        self.alarms = Alarms(clock)
        self._promotions = Promotions(memory, host, clock, fill_stall_s, self.alarms)
        self._promotions.set_limits(config.limit_bytes_per_s, config.added_latency_s)
        self._promotions.on_due = self.pump
        self.on_change: Callable[[], None] = _nothing
        """Called after bytes came or went: the group moves that into its event log."""
        if memory.disk_error:
            self._fail(memory.disk_error)

    # ---- questions ---------------------------------------------------------------------------------------

    @property
    def eventfd(self) -> int:
        """Readable while `pump` has something to do."""
        return self._disk.eventfd

    def match(self, walk: Walk) -> int:
        """Leading blocks of the walk that are on HOST or here."""
        return self._disk.match(walk)

    def pins(self) -> int:
        """Pins that this tier holds in the index."""
        return len(self._writes)

    def filling_slots(self) -> int:
        """HOST slots that the disk is filling."""
        return self._promotions.slots()

    @property
    def promotions(self) -> int:
        """Promotions under way."""
        return len(self._promotions)

    @property
    def queued_bytes(self) -> int:
        """Accepted, and not on the disk yet."""
        return self._writes.queued_bytes

    def counts(self) -> dict[str, int]:
        return self._disk.counts()

    @property
    def io(self) -> str:
        """uring or threads."""
        return self._disk.io

    @property
    def memory_bytes(self) -> int:
        """What its tables take."""
        return self._disk.memory_bytes + self.offers.history.memory_bytes

    def keys(self) -> NDArray[np.uint8]:
        """(n, 32) keys of every readable block. Walks everything: for snapshots."""
        return self._index.keys(self._disk.nodes())

    def keys_in_parts(self) -> Iterator[NDArray[np.uint8]]:
        """keys() a part at a time; between two of them keys may come and go."""
        for segment in range(self._disk.segments):
            nodes = self._disk.nodes(segment, 1)
            for start in range(0, len(nodes), KEYS_MAX):
                part = nodes[start : start + KEYS_MAX]
                yield self._index.keys(part[self._disk.readable(part) != 0])

    def nodes_in_parts(self) -> Iterator[U32]:
        """Every node that is readable or on its way here, a segment at a time."""
        for segment in range(self._disk.segments):
            yield self._disk.nodes(segment, 1, coming=True)

    def present(self, nodes: U32) -> NDArray[np.bool_]:
        """(n,) whether each node is readable or on its way here."""
        there: NDArray[np.bool_] = self._disk.present(nodes) != 0
        return there

    def readable(self, nodes: U32) -> NDArray[np.bool_]:
        """(n,) whether each node's bytes are readable here."""
        ready: NDArray[np.bool_] = self._disk.readable(nodes) != 0
        return ready

    def take_removed(self) -> NDArray[np.uint8]:
        dropped = self._disk.take_dropped()
        if dropped["reinserted_bytes"]:
            self.admission.wrote(dropped["reinserted_bytes"], self._clock.now())
        self.counters.dropped.update(dropped)
        return self._disk.take_removed()

    def take_stored(self) -> NDArray[np.uint8]:
        """(n, 32) keys whose bytes came since the last call."""
        return self._disk.take_stored()

    def take_promoted(self) -> NDArray[np.uint8]:
        """(n, 32) keys that came to HOST from here since the last call and are there now."""
        return self._promotions.take_promoted()

    def observe(self, on_transfer: Callable[[Transfer], None], on_lag: Callable[[str], None]) -> None:
        """Tell what each promotion that ends teaches of this disk's speed, and why one was abandoned."""
        self._promotions.on_transfer, self._promotions.on_lag = on_transfer, on_lag

    def ahead_bytes(self, size_bytes: int) -> int:
        """What a promotion of that size would share the disk with, as `Transfer.ahead_bytes` counts it."""
        return self._promotions.ahead_bytes(size_bytes)

    def give_up(self, promotion: Promotion, reason: str) -> None:
        """Nobody waits for a promotion any more."""
        self._promotions.give_up(promotion, reason)

    def shorten(self, promotion: Promotion, stop: int, reason: str) -> None:
        """See Promotions.shorten."""
        self._promotions.shorten(promotion, stop, reason)

    def abandon(self, promotion: Promotion, reason: str) -> None:
        """A promotion lags: whoever waits goes on with what arrived."""
        self._promotions.abandon(promotion, reason)

    def check(self) -> None:
        self._disk.check()
        self._promotions.check()
        self._writes.check()

    # ---- writing -----------------------------------------------------------------------------------------

    def touch(self, nodes: U32) -> bool:
        """A chain, from its first block on, was used now. True: some of it was not let in; offer it again."""
        self._disk.touch(nodes)
        hits = self.offers.history.hit(nodes)
        self.admission.hit(hits)
        refused = hits.first + hits.again - hits.first_admitted - hits.again_admitted
        now_s = self._clock.now()
        if not refused or now_s < self._reoffer_s:
            return False
        self._reoffer_s = now_s + _REOFFER_S
        return True

    def offer(self, node: int, shape: SlotFormat, seconds_per_block: float | None, *, reused: bool) -> None:
        """The chain that ends in `node` is readable on HOST: write what the disk lacks of it.

        Args:
            seconds_per_block: predicted time to compute one, None when nothing is known yet.
            reused: it was found by a lookup, not just saved.
        """
        chain = Chain(node, shape, seconds_per_block, reused)
        if self.trouble:
            self.offers.refuse(chain, Refusal.DISK)
        else:
            self.offers.add(chain)

    def _queue_bytes_max(self) -> int:
        # What waits cannot be evicted: a quarter of HOST at most, whatever the configuration says.
        return min(self.config.write_queue_bytes, self._host.capacity_bytes // 4)

    def flush(self, answer: Callable[[Flushed], None]) -> None:
        """Call `answer` when what was offered by now is on the medium, was refused, or cannot be written."""
        self.offers.when_decided(lambda: self._writes.flush(answer))

    # ---- reading -----------------------------------------------------------------------------------------

    def promote(
        self, nodes: U32, shape: SlotFormat, on_change: Callable[[Promotion], None], pieces: U32 | None = None
    ) -> Promotion:
        """Bring a part of a chain to HOST; its blocks before `nodes[0]`, and before each piece, are there.

        The caller's lease keeps the chain. See kvstore/tiers/promotions.py.
        """
        promotion = self._promotions.begin(nodes, shape, on_change, pieces)
        self.on_change()  # making room may have evicted
        return promotion

    # ---- what ended --------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Take what the disk has done, and let everything that waited for it go on."""
        for event in self._disk.pump():
            if event.kind == "written":
                self._written(event)
            elif event.kind == "read":
                self._read(event)
            elif event.kind == "flushed":
                self._writes.flushed(event)
            if event.kind == "not_made":
                self._cannot_grow(event.error)
            elif event.error and event.kind != "read":  # one bad sector is no reason to leave the disk alone
                self._fail(event.error)
        self._writes.go_on()
        self.offers.go_on()
        self._promotions.go_on()
        self.on_change()

    def _written(self, event: DiskEvent) -> None:
        self.counters.written += len(event.ok)
        self.counters.written_bytes += event.bytes
        self.counters.write_failed += len(event.failed)
        if len(event.ok):
            self._rest_s = _REST_S
        self._writes.written(event)
        self._give_back(Refusal.DISK, self._writes.take_failed())
        self._give_back(Refusal.SIZE, self._writes.take_unfit())

    def _give_back(self, reason: Refusal, lost: Lost) -> None:
        if lost.blocks:
            self.admission.give_back(reason, lost.blocks, lost.bytes)

    def _read(self, event: DiskEvent) -> None:
        self.counters.read += len(event.ok)
        self.counters.read_bytes += event.bytes
        self.counters.read_failed += len(event.failed)
        self.counters.corrupt += len(event.corrupt)
        if len(event.corrupt):
            log.warning("rotten blocks on the disk; they are computed again", blocks=len(event.corrupt))
        self._promotions.landed(event)

    def _cannot_grow(self, error: int) -> None:
        if not self._disk.counts()["file_bytes"]:
            self._fail(error)
            return
        reason = os.strerror(error)
        self.counters.errors[reason] += 1
        if self._grow_s is None:
            fix = "make room on it, or lower nvme.capacity_bytes"
            log.warning("no file for more blocks", reason=reason, again_in_s=_GROW_S, fix=fix)
        self._grow_s = self._clock.now() + _GROW_S

    def _fail(self, error: int) -> None:
        reason = os.strerror(error)
        self.counters.errors[reason] += 1
        if not self.trouble:
            fix = "make room on it, or look at the kernel's log; the daemon goes on without and tries again"
            log.error("the disk refuses", reason=reason, again_in_s=self._rest_s, fix=fix)
            self._resume_s = self._clock.now() + self._rest_s
            self._rest_s = min(2 * self._rest_s, _REST_MAX_S)
        self.trouble = reason
        self._writes.give_up_waiting()
        self._give_back(Refusal.DISK, self._writes.take_failed())
        self.offers.refuse_all(Refusal.DISK)

    def tick(self) -> None:
        """Time has passed: end promotions that stall, try a disk again that was left alone."""
        self.alarms.ring()
        now_s = self._clock.now()
        if self.promotions:  # what arrived a moment before the disk began to stall is told by nothing else
            self.pump()
        self._promotions.expire(now_s - self.config.stall_s)
        if self.trouble and now_s >= self._resume_s:
            self.trouble = ""
            self._disk.resume()
            self._writes.go_on()
        if self._grow_s is not None and now_s >= self._grow_s:
            self._grow_s = None
            self._disk.resume()
        self._end_if_stuck(now_s)

    def _end_if_stuck(self, now_s: float) -> None:
        # Files that leave one after the other: the capacity was lowered, and writes wait for the end of that.
        progress = (self._writes.steps, self._disk.counts()["file_bytes"])
        if not self._writes.waiting or progress != self._progress:
            self._progress, self._stepped_s = progress, now_s
        elif now_s >= self._stepped_s + _STUCK_S:
            self._stepped_s = now_s
            self._writes.give_up_first()
            lost = self._writes.take_failed()
            fix = "raise nvme.capacity_bytes: the chains that are being written fill all of it"
            log.warning("the disk has no room for a chain", blocks=lost.blocks, fix=fix)
            self._give_back(Refusal.QUEUE, lost)

    # ---- what must not stay ------------------------------------------------------------------------------

    def drop(self, nodes: U32, reason: str) -> int:
        """Good bytes that nobody wants any more, with all below them; how many blocks those were."""
        before = self._disk.counts()["records"]
        for node in nodes.tolist():
            self._disk.forget(node)
        dropped = before - self._disk.counts()["records"]
        self.counters.dropped[reason] += dropped
        return dropped

    def reconfigure(self, config: NvmeConfig) -> None:
        """Limits of a reloaded configuration hold from now on."""
        self.config = config
        self.offers.queue_bytes_max = self._queue_bytes_max()
        self.admission.set_budget(config.budget_bytes_per_day, self._clock.now())
        self._promotions.set_limits(config.limit_bytes_per_s, config.added_latency_s)

    def close(self, timeout_s: float) -> None:
        """Seal what is being filled, if the time allows; end every promotion."""
        self._promotions.close()
        self.offers.refuse_all(Refusal.QUEUE)
        self._disk.close(timeout_s)
        self._directory.close()
        self.on_change = self._promotions.on_due = _nothing  # no cycle keeps an arena mapped
        self.observe(_unheard, _unheard)
        self._writes.close()


def _nothing() -> None:
    """Nobody wants to know."""


def _unheard(_: object) -> None:
    """Nobody wants to know."""
