"""Which requests hold blocks, and what the next step computes.

Decodes come first (one token each), the rest of the token budget goes to chunks of prompts, oldest first.
When a table cannot grow, the youngest request gives up its blocks and waits again, with what it generated as
part of its prompt. The oldest always advances, so the whole does.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass

from .live import Live, Phase
from .tables import Tables, blocks_for

__all__ = ["EngineLimits", "Scheduler", "Work"]


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Every bound of an engine.

    Attributes:
        batch_max: requests that hold blocks at once.
        batched_tokens_max: tokens of one step, so also the largest chunk of a prompt; at least batch_max.
        queue_max: unfinished requests in all; `Engine.add` returns False beyond.
        split_tokens_min: the smallest chunk of a prompt whose tail is loading, unless less is left. A chunk
            ends where computing is expected to meet the load; what still lies between them takes another one.
        load_s_max: a table not ready for so long is given up and its request computed without reuse.
        room_s_max: a request that finds no room for so long while nothing else runs ends with "no_room".
        yield_s_max: how long a preempted request's blocks may take to come back before another is preempted.
        step_times_max: length of the record of steps.
    """

    batch_max: int = 16
    batched_tokens_max: int = 512
    queue_max: int = 1_024
    split_tokens_min: int = 32
    load_s_max: float = 30.0
    room_s_max: float = 60.0
    yield_s_max: float = 0.1
    step_times_max: int = 4_096

    def __post_init__(self) -> None:
        for field in ("batch_max", "batched_tokens_max", "queue_max", "split_tokens_min", "step_times_max"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} is {getattr(self, field)}; at least 1 is needed")
        for field in ("load_s_max", "room_s_max", "yield_s_max"):
            if not getattr(self, field) >= 0:
                raise ValueError(f"{field} is {getattr(self, field)}; it must not be negative")
        if self.batched_tokens_max < self.batch_max:
            raise ValueError(
                f"batched_tokens_max ({self.batched_tokens_max}) is below batch_max ({self.batch_max}): "
                "a full batch could not decode in one step"
            )


@dataclass(frozen=True, slots=True)
class Work:
    """The next `count` pending tokens of one request."""

    live: Live
    count: int

    @property
    def samples(self) -> bool:
        """Whether the request's newest token is among them, so that another one follows."""
        return self.count == self.live.pending


class Scheduler:
    """Moves requests between waiting, loading and running. Each table it begins, it finishes once."""

    def __init__(self, tables: Tables, limits: EngineLimits, clock: Callable[[], float]) -> None:
        self._tables, self._limits, self._clock = tables, limits, clock
        self._waiting: list[Live] = []  # both lists by arrival, oldest first
        self._active: list[Live] = []
        self._yield_until_s = clock()

    def add(self, live: Live) -> None:
        """Take up a waiting request. Costs O(log waiting), and a move for each younger one."""
        insort(self._waiting, live, key=_order)

    def remove(self, live: Live) -> None:
        """Forget a request in any phase and give its blocks back."""
        if live.phase is Phase.WAITING:
            self._waiting.remove(live)
        else:
            self._release(live)
        live.move(Phase.DONE)

    def choose(self) -> list[Work]:
        """What the next step computes: decodes first, at most `batched_tokens_max` tokens. May be empty.

        Begins, grows and finishes tables on the way.
        """
        self._join_tails()
        decodes, starved = self._decodes()
        if not starved:  # what the youngest gave up is not for the next in the queue
            self._admit()
        self._take_ready()
        taken = {item.live.order for item in decodes}
        return decodes + self._chunks(self._limits.batched_tokens_max - len(decodes), taken)

    def without_room(self) -> list[Live]:
        """Requests that had nobody to wait for and found no room for longer than `room_s_max`."""
        limit_s = self._clock() - self._limits.room_s_max
        asking = [live for live in [*self._active, *self._waiting[:1]] if live.no_room_since_s is not None]
        return [live for live in asking if (live.no_room_since_s or 0.0) <= limit_s]

    def _join_tails(self) -> None:
        for live in self._active:
            if live.phase is Phase.RUNNING and live.held().tail_tokens:
                joined = self._tables.join(live.held(), live.computed)
                if joined is not None:
                    live.join(joined)

    def _decodes(self) -> tuple[list[Work], bool]:
        """Decodes that have room, and whether there was one that had none at first."""
        work, starved = [], False
        for live in list(self._active):
            if live.phase is not Phase.RUNNING or live.pending != 1:
                continue
            if self._missing_blocks(live) > 0 and not self._grow(live):
                starved = True
                # Only younger requests are preempted, so whoever is in `work` already stays.
                if not self._make_room(live):
                    continue
            work.append(Work(live, 1))
        return work, starved

    def _make_room(self, live: Live) -> bool:
        """Take the youngest request's blocks, which may be `live` itself, and grow the table of `live`."""
        now_s = self._clock()
        if len(self._active) == 1:
            self._note_no_room(live)
            return False
        if now_s < self._yield_until_s:
            return False
        victim = self._active[-1]
        self._preempt(victim)
        if victim is live:
            return False
        if self._grow(live):
            return True
        # Copies from the victim's blocks end first. Preempting one more each step would empty the batch.
        self._yield_until_s = now_s + self._limits.yield_s_max
        return False

    def _grow(self, live: Live) -> bool:
        if not self._tables.grow(live.held(), self._missing_blocks(live)):
            return False
        live.no_room_since_s = None
        return True

    def _missing_blocks(self, live: Live) -> int:
        return blocks_for(len(live.tokens), self._tables.block_tokens) - len(live.held().blocks)

    def _admit(self) -> None:
        while self._waiting and len(self._active) < self._limits.batch_max:
            live = self._waiting[0]
            table = self._tables.begin(live.request.id, live.tokens, live.reuse, self._ahead_of(live))
            if table is None:
                if not self._active:
                    self._note_no_room(live)
                return
            self._waiting.pop(0)
            live.table, live.loading_since_s, live.no_room_since_s = table, self._clock(), None
            live.move(Phase.LOADING)
            insort(self._active, live, key=_order)

    def _ahead_of(self, live: Live) -> int:
        """Prompt tokens that are computed before the first of a request's, as far as is known."""
        ahead = 0
        for one in self._active:
            if one.order >= live.order or (one.phase is Phase.RUNNING and one.pending <= 1):
                continue
            table = one.held()
            if one.phase is Phase.LOADING:  # those that had nothing to load go on in this very step
                ahead += len(one.tokens) - table.reused if self._tables.ready(table) else 0
            elif table.tail_tokens:
                ahead += min(one.pending, self._tables.head_left(table, one.computed))
            else:
                ahead += one.pending
        return ahead

    def _take_ready(self) -> None:
        for live in list(self._active):
            if live.phase is not Phase.LOADING:
                continue
            if self._tables.ready(live.held()):
                live.begin_computing(self._tables.block_tokens)
            elif self._clock() - live.loading_since_s > self._limits.load_s_max:
                live.reuse = "none"
                self._requeue(live)

    def _chunks(self, budget: int, taken: set[int]) -> list[Work]:
        work = []
        for live in self._active:
            if live.phase is not Phase.RUNNING or live.order in taken or self._missing_blocks(live) > 0:
                continue
            if budget == 0:
                break
            count = self._claimed(live, min(live.pending, budget))
            if count:  # else a block is just being copied, or its tail about to be joined
                work.append(Work(live, count))
                budget -= count
        return work

    def _claimed(self, live: Live, count: int) -> int:
        """Of the next tokens, those that may be computed in this step."""
        table = live.held()
        if not table.tail_tokens:
            return count
        most = max(self._limits.split_tokens_min, self._tables.head_left(table, live.computed))
        wanted = live.computed + min(count, most)
        return self._tables.claim(table, live.computed, wanted) - live.computed

    def _preempt(self, live: Live) -> None:
        live.preemptions += 1
        self._requeue(live)

    def _requeue(self, live: Live) -> None:
        self._release(live)
        live.move(Phase.WAITING)
        self.add(live)

    def _release(self, live: Live) -> None:
        self._active.remove(live)
        table, live.table, live.computed = live.held(), None, 0
        self._tables.finish(table)

    def _note_no_room(self, live: Live) -> None:
        if live.no_room_since_s is None:
            live.no_room_since_s = self._clock()


def _order(live: Live) -> int:
    return live.order
