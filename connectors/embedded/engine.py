"""Continuous batching with chunked prefill over whatever `Tables` hands out."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

from .batch import Segment
from .live import Live
from .model import Model
from .request import FinishReason, InvalidRequest, Output, Report, Request, StepTime, check_request
from .sampler import Sampled, Sampler, sample_greedy
from .scheduler import EngineLimits, Scheduler, Work
from .tables import Tables

__all__ = ["Engine", "EngineLimits"]


def _nap() -> None:
    time.sleep(0.0005)


class Engine:
    """Runs requests to their end. One thread; `step` is one forward pass.

    Args:
        model: computes over its own KV memory; the blocks of `tables` are ids in it.
        tables: who owns the blocks. `close` closes it.
        limits: every bound.
        clock: seconds, monotonic.
        idle: called by `generate` when a step found nothing to do (loads in flight, no room yet).

    Raises:
        ValueError: `tables` and the model's memory disagree about blocks.
    """

    def __init__(
        self,
        model: Model,
        tables: Tables,
        limits: EngineLimits | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        idle: Callable[[], None] = _nap,
    ) -> None:
        if tables.block_tokens != model.memory.block_tokens:
            raise ValueError(
                f"tables have blocks of {tables.block_tokens} tokens, memory of {model.memory.block_tokens}"
            )
        if tables.capacity_blocks > model.memory.blocks:
            raise ValueError(f"tables name {tables.capacity_blocks} blocks, memory has {model.memory.blocks}")
        self.model, self.tables, self.limits = model, tables, limits or EngineLimits()
        self.steps = 0
        self.step_times: deque[StepTime] = deque(maxlen=self.limits.step_times_max)
        self._clock, self._idle = clock, idle
        self._scheduler = Scheduler(tables, self.limits, clock)
        self._live: dict[str, Live] = {}
        self._arrivals = 0
        self._closed = False

    @property
    def unfinished(self) -> int:
        """Requests added and not reported yet."""
        return len(self._live)

    def add(self, request: Request) -> bool:
        """Queue a request. False: the queue is full; step, then try again.

        Raises:
            InvalidRequest: it can never be served, or its id is in use; the field is named.
        """
        if self._closed:
            raise RuntimeError("the engine is closed")
        self._check(request)
        if request.id in self._live:
            raise InvalidRequest("id", f"{request.id!r} is in use by an unfinished request")
        if len(self._live) >= self.limits.queue_max:
            return False
        greedy = request.temperature == 0.0
        live = Live(
            request=request,
            order=self._arrivals,
            added_s=self._clock(),
            tokens=list(request.prompt),
            reuse=request.reuse,
            sampler=None if greedy else Sampler(request.temperature, request.top_p, request.seed),
        )
        self._arrivals += 1
        self._live[request.id] = live
        self._scheduler.add(live)
        return True

    def abort(self, request_id: str) -> Report | None:
        """End a request wherever it stands, between steps. None: no unfinished request has this id."""
        live = self._live.get(request_id)
        return None if live is None else self._end(live, "abort")

    def step(self) -> list[Output]:
        """At most one forward pass. Empty: nothing was ready, or only parts of prompts were computed.

        What the model or `tables` raises passes through; no request advances then.
        """
        self.tables.poll()
        starved = self._scheduler.without_room()
        ended = [Output(live.request.id, None, self._end(live, "no_room")) for live in starved]
        work = self._scheduler.choose()
        if not work:
            return ended
        started_s = self._clock()
        logits = self.model.forward([_segment(item) for item in work])
        sampled = _sample([item.live for item in work if item.samples], logits)
        now_s = self._clock()
        self.steps += 1
        self.step_times.append(_step_time(work, now_s - started_s))
        self.tables.computed(self.step_times[-1])
        advanced = [self._advance(item, sampled.get(item.live.order), now_s) for item in work]
        return ended + [output for output in advanced if output is not None]

    def generate(self, requests: Iterable[Request]) -> list[Report]:
        """Run these requests to their end; reports come in their order.

        Raises:
            InvalidRequest: one of them can never be served (nothing is started then).
            RuntimeError: the engine has other unfinished requests, whose outputs would be lost.
        """
        wanted = list(requests)
        if self._live:
            raise RuntimeError(f"{len(self._live)} requests are unfinished; step the engine until they end")
        for request in wanted:
            self._check(request)
        if len({request.id for request in wanted}) < len(wanted):
            raise InvalidRequest("id", "two of the requests have the same id")
        queue, reports = deque(wanted), dict[str, Report]()
        try:
            while queue or self._live:
                while queue and self.add(queue[0]):
                    queue.popleft()
                steps_before = self.steps
                for output in self.step():
                    if output.report is not None:
                        reports[output.request_id] = output.report
                if self.steps == steps_before and self._live:
                    self._idle()
        finally:
            for request_id in list(self._live):
                self.abort(request_id)
        return [reports[request.id] for request in wanted]

    def close(self) -> None:
        """Abort what is unfinished and close the tables. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for request_id in list(self._live):
            self.abort(request_id)
        self.tables.close()

    def _check(self, request: Request) -> None:
        check_request(request, self.model.spec, self.tables.block_tokens, self.tables.capacity_blocks)

    def _advance(self, item: Work, sampled: Sampled | None, now_s: float) -> Output | None:
        """Book one request's part of a step that was computed."""
        live, size = item.live, self.tables.block_tokens
        full_before = live.computed // size
        live.record_computed(item.count)
        if live.computed // size > full_before:
            self.tables.filled(live.held(), live.tokens, live.computed)
        if sampled is None:
            return None
        live.record_token(sampled, now_s)
        reason = self._finished(live, sampled.token)
        return Output(live.request.id, sampled.token, None if reason is None else self._end(live, reason))

    def _finished(self, live: Live, token: int) -> FinishReason | None:
        request = live.request
        if token in request.stop_ids or (token in self.model.spec.eos_ids and not request.ignore_eos):
            return "stop"
        return "length" if live.generated >= request.max_new_tokens else None

    def _end(self, live: Live, reason: FinishReason) -> Report:
        del self._live[live.request.id]
        self._scheduler.remove(live)
        report = live.report(reason, self._clock())
        self.tables.ended(report)
        return report


def _segment(item: Work) -> Segment:
    live, start = item.live, item.live.computed
    return Segment(live.tokens[start : start + item.count], start, live.held().blocks, item.samples)


def _sample(lives: Sequence[Live], logits: Tensor) -> dict[int, Sampled]:
    """The next token of each of these requests, by its order; rows of `logits` are theirs."""
    drawn = [(row, live.order, live.sampler) for row, live in enumerate(lives) if live.sampler is not None]
    sampled = {order: sampler.sample(logits[row]) for row, order, sampler in drawn}
    greedy = [row for row, live in enumerate(lives) if live.sampler is None]
    if greedy:
        for row, choice in zip(greedy, sample_greedy(logits[greedy]), strict=True):
            sampled[lives[row].order] = choice
    return sampled


def _step_time(work: Sequence[Work], seconds: float) -> StepTime:
    """A single token costs what a decode costs, also when it is the end of a prompt."""
    chunks = [(item.live.computed, item.count) for item in work if item.count > 1]
    decodes = [item.live.computed + 1 for item in work if item.count == 1]
    return StepTime(
        prefill_tokens=sum(count for _, count in chunks),
        prefill_area=sum(count * (start + count / 2) for start, count in chunks),
        decodes=len(decodes),
        decode_context=sum(decodes),
        seconds=seconds,
    )
