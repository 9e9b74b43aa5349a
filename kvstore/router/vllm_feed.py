"""What one vLLM engine holds, from its KV events: gaps are replayed, restarts noticed, and no recovery loops.

    state      meaning                                           leaves it
    beginning  nothing is known yet                              a replay from 0 that reached its end
    following  every batch up to `applied` was applied           a gap, a restart, silence
    doubtful   something may be missing; the sink is stale       a verified replay; the next batch in sequence
    broken     something is missing                              a verified replay; or, when replays fail, the
                                                                 next batch begins a new truth

A sequence alone does not tell a gap from a process that was started anew and has counted as far. So a replay
begins with the batch that was applied last: if the publisher has another one of that number (other time
stamp), or none, its process is another, and the truth begins anew at 0. The same question is asked when a
connection comes back, before anything that came through it is applied (what waited is thrown away: the replay
has it), and after `probe_s` without a word: it finds what PUB dropped at the end of a burst.

Recovery is bounded thrice: `attempts` replays that bring nothing new and REPLAYS_MAX at all, then the feed
waits for events; and whenever a truth was thrown away, or a replay had nothing to add to a gap, the next
recovery waits for a pause that doubles, so that two engines on one address cannot keep it busy. A batch that
cannot be read is lost once, not replayed.
"""

from __future__ import annotations

import asyncio
import enum
import math
from typing import Any

import structlog
import zmq
from zmq.asyncio import Context, Poller
from zmq.utils.monitor import parse_monitor_message

from kvstore.clock import Clock, MonotonicClock
from kvstore.router.feeding import FeedCounts, FeedTimes, Truth
from kvstore.router.kv_schema import BadEvent, Batch, Cleared, Stored, decode_batch
from kvstore.router.sink import Sink
from kvstore.router.vllm_wire import Silent, VllmSource, WireBatch, batch_of, replayed, subscribed

__all__ = ["VllmFeed"]

log = structlog.get_logger()

REPLAYS_MAX = 64  # of one recovery: each that brings something may be followed by another
_TURN_BATCHES = 16  # applied before others on the loop have their turn
# Layer groups whose blocks a prefix needs all of. Others leave blocks out of their window and say so.
_WHOLE = ("", "full_attention", "mla_attention", "sink_full_attention", "unknown")


class _Outcome(enum.Enum):
    """How one replay ended."""

    WHOLE = enum.auto()  # everything that the publisher has is applied
    AGAIN = enum.auto()  # it was cut short, or the truth begins anew
    SILENT = enum.auto()


class VllmFeed:
    """Follows one publisher; `run` in a task of its own, cancelled to end it.

    Args:
        source: where it publishes.
        sink: told what it holds.
        times: patience.
        clock: for pauses.
        context: shared with other feeds (one thread of libzmq's for all); None = one of its own.
    """

    def __init__(
        self,
        source: VllmSource,
        sink: Sink,
        times: FeedTimes | None = None,
        clock: Clock | None = None,
        context: Context | None = None,
    ) -> None:
        self._source = source
        self._sink = sink
        self._times = times or FeedTimes()
        self._clock = clock or MonotonicClock()
        self._context = context
        self.counts = FeedCounts()
        self._truth = Truth(sink)
        self._applied: int | None = -1  # None: the next batch begins a new truth
        self._ts_s = math.nan  # of the batch that was applied last
        self._live = -1  # highest sequence that was published since the last restart
        self._broken = False
        self._pause_s = self._times.pause_s
        self._trouble_s = -math.inf
        self._not_before_s = -math.inf
        self._probe_at_s = math.inf
        self._others: set[int] = set()  # layer groups that are not _WHOLE

    @property
    def doubt(self) -> str:
        """Why what is known may be wrong, "" = it holds."""
        return self._truth.doubt

    @property
    def applied(self) -> int | None:
        """Sequence of the last batch that was applied, −1 before the first, None when it is lost."""
        return self._applied

    async def run(self) -> None:
        """Until cancelled. An error of the sink ends it, nothing that a publisher sends does."""
        context = self._context or Context()
        sub, monitor = subscribed(context, self._source)
        poller = Poller()
        poller.register(sub, zmq.POLLIN)
        poller.register(monitor, zmq.POLLIN)
        try:
            while True:
                await poller.poll(self._wait_ms())
                await self._hear_monitor(context, sub, monitor)
                await self._hear_batches(context, sub, monitor)
                await self._look_after(context)
        finally:
            sub.disable_monitor()
            monitor.close(linger=0)
            sub.close(linger=0)
            if self._context is None:
                context.destroy(linger=0)

    def _wait_ms(self) -> int:
        until_s = min(self._probe_at_s, self._not_before_s if self._broken else math.inf)
        return round(1000 * min(3600.0, max(0.0, until_s - self._clock.now()))) + 1

    # ---- what comes in ------------------------------------------------------------------------------------

    async def _hear_monitor(self, context: Context, sub: Any, monitor: Any) -> None:
        """Connections come and go."""
        connected = None
        while (frames := await _now(monitor)) is not None:
            connected = parse_monitor_message(frames)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
        if connected is False:
            self._truth.question("the publisher is away")
        elif connected:
            await self._connected(context, sub)

    async def _connected(self, context: Context, sub: Any) -> None:
        if self._source.replay:
            while await _now(sub) is not None:
                pass
            await self._recover(context)
            # What was published between the end of the replay and the start of the subscription.
            self._probe_at_s = self._clock.now() + min(1.0, self._times.probe_s)
        elif self.counts.resets == 0:
            self._begin_anew()
            self._truth.hold()
        else:
            self._applied = None

    async def _hear_batches(self, context: Context, sub: Any, monitor: Any) -> None:
        heard = 0
        while heard < 16 * _TURN_BATCHES and (frames := await _now(sub)) is not None:
            if monitor.get(zmq.EVENTS) & zmq.POLLIN:
                return  # of which connection this is, is not known
            heard += 1
            batch = batch_of(frames, self._source.topic)
            if batch is None:
                self.counts.bad += 1
            else:
                await self._hear(context, batch)
            if heard % _TURN_BATCHES == 0:
                await asyncio.sleep(0)
        if heard:
            self._probe_at_s = self._clock.now() + self._times.probe_s if self._source.replay else math.inf

    async def _hear(self, context: Context, batch: WireBatch) -> None:
        restarted = batch.sequence <= self._live
        self._live = batch.sequence
        if self._applied is None:
            self._begin_at(batch)
        elif self._broken:
            pass  # it is replayed with what is missing; see _look_after
        elif not restarted and batch.sequence == self._applied + 1:
            self._apply(batch)
            self._truth.hold()
        elif not restarted and batch.sequence <= self._applied:
            self.counts.duplicates += 1
        else:
            self.counts.gaps += 1
            self._broken = True
            await self._mend(context, batch, restarted)

    async def _mend(self, context: Context, batch: WireBatch, restarted: bool) -> None:
        """A gap: everything up to this batch, or a new truth with it."""
        if self._clock.now() < self._not_before_s:
            self._truth.question("events were lost; the next try comes after a pause")
            return
        if not self._source.replay:
            self._lose(batch.sequence if restarted else batch.sequence - (self._applied or 0) - 1)
            self._begin_at(batch)
            return
        resets, batches = self.counts.resets, self.counts.batches
        if not await self._recover(context) or self._applied is None:
            return
        if self.counts.batches == batches:  # somebody else's batch: not worth a replay each time
            self._trouble()
        if batch.sequence > self._applied and self.counts.resets == resets:  # its own replay has not got it
            self._lose(batch.sequence - self._applied - 1)
            self._begin_at(batch)

    async def _look_after(self, context: Context) -> None:
        """What is due although nothing came: the next try of a recovery, or a probe."""
        now_s = self._clock.now()
        if self._broken and self._applied is not None and now_s >= self._not_before_s:
            if not await self._recover(context):
                self._applied = None
        elif now_s >= self._probe_at_s:
            if self._applied is None:
                self._begin_anew()
            await self._recover(context)
            pause_s = self._pause_s if self.doubt else 0.0
            self._probe_at_s = self._clock.now() + max(self._times.probe_s, pause_s)

    # ---- recovery -----------------------------------------------------------------------------------------

    async def _recover(self, context: Context) -> bool:
        """Replays until nothing is missing; False when they fail, and events have to come first."""
        if self._applied is None or not self._source.replay:
            return False
        fruitless, retry_s = 0, self._times.retry_s
        for _ in range(REPLAYS_MAX):
            before = self.counts.batches
            outcome = await self._replay(context)
            if outcome is _Outcome.WHOLE:
                self._broken = False
                self._truth.hold()
                return True
            fruitless = 0 if self.counts.batches > before else fruitless + 1
            if fruitless >= self._times.attempts:
                break
            if outcome is _Outcome.SILENT:
                await asyncio.sleep(retry_s)
                retry_s *= 2
        self._truth.question("the replay socket does not give what is missing")
        self._trouble()
        if self._broken or self._truth.filling:
            self._applied = None
        return False

    async def _replay(self, context: Context) -> _Outcome:
        """One replay, from the batch that was applied last on."""
        assert self._applied is not None
        self.counts.replays += 1
        if not self.counts.resets:
            self._begin_anew()
        proven = self._applied < 0
        turn = 0
        answer = replayed(context, self._source, max(0, self._applied), self._times.answer_s)
        try:
            async for batch in answer:
                if not proven and batch.sequence == self._applied:
                    if self._is_another(batch):
                        return self._restarted()
                    proven = True
                if batch.sequence <= self._applied:
                    continue
                if batch.sequence > self._applied + 1 and self._applied >= 0 and proven:
                    return _Outcome.AGAIN  # a hole in the replay
                if not proven or batch.sequence > self._applied + 1:
                    self._begin_after(batch.sequence - 1)
                    proven = True
                self._apply(batch)
                turn += 1
                if turn % _TURN_BATCHES == 0:
                    await asyncio.sleep(0)
        except Silent:
            return _Outcome.SILENT
        finally:
            await answer.aclose()
        return _Outcome.WHOLE if proven else self._restarted()

    def _is_another(self, batch: WireBatch) -> bool:
        """Whether the publisher has something else than we have had under this number."""
        try:
            ts_s = decode_batch(batch.payload).ts_s
        except BadEvent:
            return False
        return ts_s != self._ts_s and not math.isnan(self._ts_s)

    def _restarted(self) -> _Outcome:
        log.info("a publisher of KV events was started anew", endpoint=self._source.publish)
        self._begin_anew()
        self._trouble()
        return _Outcome.AGAIN

    # ---- the sink -----------------------------------------------------------------------------------------

    def _begin_anew(self) -> None:
        """A new truth, from sequence 0 on."""
        self._applied, self._ts_s, self._live = -1, math.nan, -1
        self._broken = False
        self._others.clear()
        self.counts.resets += 1
        self._truth.begin()

    def _begin_after(self, sequence: int) -> None:
        """The publisher's buffer does not reach back: a new truth, of what it still has after `sequence`."""
        assert self._applied is not None
        self._lose(sequence - self._applied)
        if self._applied >= 0:
            self._begin_anew()
            self._trouble()
        self._applied = sequence

    def _begin_at(self, batch: WireBatch) -> None:
        """A new truth that consists of what comes from this batch on."""
        self._begin_anew()
        self._trouble()
        self._live = batch.sequence
        self._apply(batch)
        self._truth.hold()

    def _apply(self, batch: WireBatch) -> None:
        self._applied = batch.sequence
        self.counts.batches += 1
        try:
            decoded = decode_batch(batch.payload)
        except BadEvent as error:
            self._ts_s = math.nan
            self.counts.bad += 1
            self._lose(1)
            log.warning("a batch of KV events cannot be read", reason=str(error))
            return
        self._ts_s = decoded.ts_s
        self.counts.skipped += decoded.skipped
        self._tell(decoded)

    def _tell(self, batch: Batch) -> None:
        for event in batch.events:
            if isinstance(event, Cleared):
                self._sink.cleared(event.tier)
            elif isinstance(event, Stored):
                if event.kind not in _WHOLE:
                    self._others.add(event.group)
                elif event.group not in self._others:
                    self._sink.stored(event)
            elif event.group not in self._others:
                self._sink.removed(event)

    def _lose(self, batches: int) -> None:
        if batches > 0:
            self.counts.lost += batches
            self._sink.lost(batches)

    def _trouble(self) -> None:
        """The next recovery may cost what this one did: it waits."""
        now_s, times = self._clock.now(), self._times
        calm = now_s - self._trouble_s > times.pause_max_s
        self._pause_s = times.pause_s if calm else min(times.pause_max_s, 2 * self._pause_s)
        self._trouble_s, self._not_before_s = now_s, now_s + self._pause_s


async def _now(socket: Any) -> list[bytes] | None:
    """A message that is there already."""
    try:
        frames: list[bytes] = await socket.recv_multipart(zmq.DONTWAIT)
    except zmq.Again:
        return None
    return frames
