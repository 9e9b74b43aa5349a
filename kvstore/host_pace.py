"""A limited HOST: blocks that lie there, or come there, are let out of it one after another.

For experiments (`host.limit_bytes_per_s`, `host.added_latency_s`): kvstore/tiers/pacing.py. What a fetch
shows of it is learnt as HOST's speed; what clients say of their copies is that of memory, and does not count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import structlog

from kvstore.fetches import Fetching
from kvstore.policy.planned import Watch
from kvstore.policy.rates import Transfer
from kvstore.tiers.alarms import Alarm, Alarms
from kvstore.tiers.measured import SECONDS_MAX, Measured
from kvstore.tiers.pacing import Pacing
from kvstore.tiers.promotion import Promotion
from kvstore.tiers.promotions import PACE_S

__all__ = ["HostPace", "OnProgress", "Running"]

log = structlog.get_logger()

OnProgress = Callable[[Fetching], None]


@dataclass(slots=True)
class Running:
    """A fetch that waits: for the disk, or for HOST where that is limited.

    Attributes:
        began_s: when the lag rule's clock started.
        measured: what it shows of a limited HOST.
        promotion: what the disk brings for it; None = nothing, and after its end.
        alarm: of the lag rule.
        paced: blocks that were let out, or wait in the pacing.
    """

    fetching: Fetching
    on_progress: OnProgress
    watch: Watch | None
    began_s: float
    measured: Measured
    promotion: Promotion | None = None
    alarm: Alarm | None = None
    paced: int = 0

    @property
    def held(self) -> bool:
        """A limit of HOST is what it waits for."""
        return self.fetching.came > self.fetching.arrived

    @property
    def promoting(self) -> Promotion | None:
        """What the disk still brings for it."""
        promotion = self.promotion
        return None if promotion is None or promotion.over else promotion


class HostPace:
    """Of one trust group.

    Args:
        alarms: somebody rings them.
        let: called for a fetch with the blocks that may be copied in all.
    """

    def __init__(self, alarms: Alarms, let: Callable[[Running, int], None]) -> None:
        self._alarms = alarms
        self._let = let
        self._pacing = Pacing[Running]()
        self._alarm: Alarm | None = None
        self._bytes = 0
        self.on_transfer: Callable[[Transfer], None] = _nothing_learnt
        """Called once for each fetch that had to wait for HOST alone."""

    @property
    def limited(self) -> bool:
        """Nothing of HOST is ready at once."""
        return not self._pacing.idle

    def set_limits(self, limit_bytes_per_s: float, added_latency_s: float) -> None:
        """From now on, also for fetches under way; zeros: none."""
        self._pacing.set_limits(limit_bytes_per_s, added_latency_s, self._alarms.clock.now())
        self._set_alarm()

    def measure(self, fetching: Fetching, others: Iterable[Running]) -> Measured:
        """For a fetch that begins beside others."""
        waiting = (other.fetching for other in others if other.held)
        ahead = sum(min(one.came - one.arrived, fetching.came) * one.shape.length for one in waiting)
        return Measured(self._alarms.clock.now(), fetching.shape.length, ahead, self._bytes)

    def hold(self, running: Running) -> None:
        """What has come and was neither let out nor held waits from now on."""
        fetching = running.fetching
        if fetching.came > running.paced:
            fresh = np.arange(running.paced, fetching.came, dtype=np.uint32)
            self._pacing.put(running, fresh, fetching.shape.length, self._alarms.clock.now())
            running.paced = fetching.came
            self._set_alarm()

    def drop(self, running: Running) -> None:
        """It waits for nothing any more, however it has ended; what it showed is learnt."""
        self._pacing.drop(running)
        fetching, measured = running.fetching, running.measured
        if running.promotion is None and measured.blocks and not measured.over:
            whole = fetching.came == fetching.stop - fetching.start == measured.blocks
            learnt = measured.ended(self._bytes, whole=whole)
            if learnt is not None:
                self.on_transfer(learnt)

    def lagged(self, running: Running) -> None:
        """It is given up because HOST was late."""
        fetching, now_s = running.fetching, self._alarms.clock.now()
        blocks = fetching.stop - fetching.start
        learnt = running.measured.gave_up(blocks, self._bytes, now_s)
        if learnt is None:  # not even one came: so long at least for each
            seconds = min(blocks * (now_s - running.measured.began_s), SECONDS_MAX)
            learnt = Transfer(blocks * fetching.shape.length, 0, seconds, given_up=True)
        self.on_transfer(learnt)

    def let_out(self) -> None:
        """Blocks whose time has come."""
        now_s = self._alarms.clock.now()
        for running, positions in self._pacing.take(now_s):
            running.measured.came(len(positions), now_s)
            self._bytes += len(positions) * running.fetching.shape.length
            try:
                self._let(running, running.fetching.arrived + len(positions))
            # A bug of ours costs one fetch: the blocks of the others are out of the pacing already.
            except Exception:
                log.exception("bug", fetch=running.fetching.lease.id)
        self._set_alarm()

    def _set_alarm(self) -> None:
        """Be woken when the next block may be let out; not for each that comes within a millisecond."""
        next_s = self._pacing.next_s()
        if next_s is None:
            return
        at_s, alarm = max(next_s, self._alarms.clock.now() + PACE_S), self._alarm
        if alarm is not None and alarm.ring is not None:
            if alarm.at_s <= at_s:
                return
            alarm.cancel()
        self._alarm = self._alarms.set(at_s, self.let_out)

    def close(self) -> None:
        """Nobody is woken, and nobody is known, any more: no cycle keeps an arena mapped."""
        if self._alarm is not None:
            self._alarm.cancel()
        self._let = _nobody


def _nobody(_: Running, __: int) -> None:
    """Its group is closed."""


def _nothing_learnt(_: Transfer) -> None:
    """Nobody wants to know."""
