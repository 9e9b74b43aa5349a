"""How long the engine's steps take, for the daemon's prefill curve, and when requests got their first token.

A step is timed in the scheduler's process, from its orders to the arrival of its output: what a rank sees of
a GPU ends when work is queued. Steps run one behind the other, also where vLLM schedules the next one while
one runs, so a step begins when it was scheduled or when the one before it has ended, whichever is later:

    scheduled   1    2         3
    ended                1         2      3
    seconds     |---1----|----2----|--3---|

No step waits for a load: requests whose blocks are still coming are not in it.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvstore.client import Client
from kvstore.errors import BadRequest

from .tracked import Tracked

__all__ = ["Steps"]

# vLLM has two under way, one for each stage of a pipeline, or one; more were never answered.
_UNDER_WAY_MAX = 64


@dataclass(frozen=True, slots=True)
class _Step:
    """One that was scheduled at `begun_s`.

    Attributes:
        work: tokens of prompts, their area, decodes and their context, as `Client.note_prefill` has them;
            None = it is no measure of those.
        firsts: requests that get their first token by it.
    """

    number: int
    begun_s: float
    work: tuple[int, float, int, int] | None
    firsts: Sequence[Tracked]


class Steps:
    """Of one engine.

    Args:
        tenant: whose requests these are.
        clock: monotonic seconds.
    """

    def __init__(self, tenant: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.timed = True
        """False where steps overlap (pipeline parallel): then only first tokens are told."""
        self._tenant = tenant
        self._clock = clock
        self._client: Client | None = None
        self.load = (0, 0)
        """Sequences that decoded in the latest step, and the tokens of their contexts."""
        self._numbers = 0
        self._under_way: deque[_Step] = deque(maxlen=_UNDER_WAY_MAX)
        self._ended_s = -math.inf

    def serve(self, client: Client) -> None:
        """From now on there is somebody to tell."""
        self._client = client

    def begin(self, step: Any, tracked: Mapping[str, Tracked]) -> int:
        """vLLM has scheduled a step; its number, which its report has to bring back."""
        self._numbers += 1
        work = _work(step) if self.timed else None
        firsts = list(_firsts(step, tracked))
        if work is not None:
            self.load = work[2:]
        self._under_way.append(_Step(self._numbers, self._clock(), work, firsts))
        return self._numbers

    def end(self, number: int) -> None:
        """The output of a step has arrived."""
        now_s, gap = self._clock(), False
        while self._under_way and self._under_way[0].number < number:
            self._under_way.popleft()  # when that one ended was never told
            gap = True
        if not self._under_way or self._under_way[0].number != number:
            return
        step = self._under_way.popleft()
        seconds, self._ended_s = now_s - max(step.begun_s, self._ended_s), now_s
        if self._client is None:
            return
        # What a daemon counts must not cost a request.
        with contextlib.suppress(BadRequest):
            for one in step.firsts:
                self._note_first(self._client, one, now_s)
            if step.work is not None and not gap:
                tokens, area, decodes, context = step.work
                self._client.note_prefill(tokens, seconds, area, decodes, context)

    def _note_first(self, client: Client, tracked: Tracked, now_s: float) -> None:
        if tracked.ended:
            return
        prompt = int(tracked.request.num_prompt_tokens)
        reused = min(prompt, tracked.device + sum(tracked.hits.values()))
        client.note_request(self._tenant, now_s - tracked.arrived_s, prompt, reused)
        client.note_plan(tracked.plan, max(0.0, now_s - tracked.asked_s))


def _firsts(step: Any, tracked: Mapping[str, Tracked]) -> Iterable[Tracked]:
    """Requests whose prompt is complete with this step, each once."""
    for request_id, scheduled in step.num_scheduled_tokens.items():
        one = tracked.get(request_id)
        if one is None or one.answered:
            continue
        if one.request.num_computed_tokens + scheduled >= one.request.num_prompt_tokens:
            one.answered = True
            yield one


def _work(step: Any) -> tuple[int, float, int, int] | None:
    """A single token costs what a decode costs, also when it is the end of a prompt."""
    if not step.num_scheduled_tokens or step.scheduled_spec_decode_tokens or step.scheduled_encoder_inputs:
        return None
    tokens, area, decodes, context = 0, 0.0, 0, 0
    for request_id, start in _starts(step):
        count = step.num_scheduled_tokens.get(request_id, 0)
        if count > 1:
            tokens += count
            area += count * (start + count / 2)
        elif count:
            decodes += 1
            context += start + 1
    return tokens, area, decodes, context


def _starts(step: Any) -> Iterable[tuple[str, int]]:
    """The requests of a step, and how many tokens of each are there already."""
    for new in step.scheduled_new_reqs:
        yield new.req_id, new.num_computed_tokens
    cached = step.scheduled_cached_reqs
    yield from zip(cached.req_ids, cached.num_computed_tokens, strict=True)
