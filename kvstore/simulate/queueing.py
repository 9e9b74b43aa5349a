"""N replicas that compute prompts one after the other: where a policy sends them, and how long they wait.

One prefill rate P for all replicas, chosen so that load = Σ input tokens / (N · P · duration). A replica
computes the tokens of a prompt that it does not hold, in the order in which requests came; decoding takes
none of its time, and only decides how long a request counts as in flight. A replica holds K blocks, LRU,
touched tail-first. It has the blocks of a request from the moment it was sent there: requests begin in that
order, so whoever comes later finds them computed.

The router sees queues and requests in flight as they are, and blocks through its view, whose events come late
by `lag_s`. What is reused is decided by what the replica really holds.
"""

from __future__ import annotations

import heapq
import math
import struct
from collections import deque
from dataclasses import dataclass
from random import Random

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import BadRequest
from kvstore.policy.routing.base import TIERS, Ask, Fleet, Policy, random_ties
from kvstore.policy.routing.universal import UniversalPrefix
from kvstore.simulate.lru import BlockLru
from kvstore.simulate.views import View
from kvstore.simulate.workload import Workload

__all__ = ["QueueSettings", "Served", "prefill_rate", "serve"]

# `Ask.head` is a digest of so many leading blocks: the one that everybody shares, and one that tells apart.
_HEAD_BLOCKS = 2


@dataclass(frozen=True, slots=True)
class QueueSettings:
    """The fleet.

    Attributes:
        replicas: 1 at least.
        capacity_blocks: of each.
        load: above 0; from 1 / (1 − reuse) on queues grow for ever.
        lag_s: seconds from a change of a replica's blocks to the router's knowing of it.
        decode_s_per_token: how long a request stays in flight for each token of its answer.
        seed: of ties.

    Raises:
        BadRequest: names the field.
    """

    replicas: int = 8
    capacity_blocks: int = 5859
    load: float = 0.9
    lag_s: float = 0.0
    decode_s_per_token: float = 0.03
    seed: int = 1

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise BadRequest(f"replicas: need 1 at least, got {self.replicas}")
        if self.capacity_blocks < 1:
            raise BadRequest(f"capacity: need 1 block at least, got {self.capacity_blocks}")
        if not 0 < self.load < math.inf:
            raise BadRequest(f"load: need more than 0, and finite, got {self.load}")
        for field in ("lag_s", "decode_s_per_token"):
            if not 0 <= getattr(self, field) < math.inf:
                raise BadRequest(f"{field}: need 0 at least, and finite, got {getattr(self, field)}")


@dataclass(frozen=True, slots=True)
class Served:
    """What became of m requests on n replicas.

    Attributes:
        replica: (m,) where each went.
        reused_tokens: (m,) tokens that the replica held.
        predicted_tokens: (m,) tokens that the router thought it held.
        ttft_s: (m,) seconds from arrival to the end of its prefill.
        assigned, evictions: (n,) requests, and blocks that left.
        skew_max: of cumulative assignments, the most at any time.
    """

    replica: NDArray[np.int64]
    reused_tokens: NDArray[np.int64]
    predicted_tokens: NDArray[np.int64]
    ttft_s: NDArray[np.float64]
    assigned: NDArray[np.int64]
    evictions: NDArray[np.int64]
    skew_max: int


def prefill_rate(workload: Workload, settings: QueueSettings) -> float:
    """P in tokens per second, so that the load is what it should be.

    Raises:
        BadRequest: all requests come at once.
    """
    duration_s = float(workload.arrivals_s[-1] - workload.arrivals_s[0])
    if not duration_s:
        raise BadRequest("trace: all requests come at the same moment; a load needs a duration")
    return float(workload.input_tokens.sum()) / (settings.replicas * settings.load * duration_s)


def serve(
    workload: Workload,
    policy: Policy,
    view: View,
    settings: QueueSettings,
    prefill_tokens_per_s: float | None = None,
) -> Served:
    """Send every request where the policy says. 12,000 requests to 8 replicas take about a second.

    Args:
        policy: a fresh one.
        view: a fresh one, of as many replicas.
        prefill_tokens_per_s: P; None = from the load.
    """
    rate = prefill_tokens_per_s or prefill_rate(workload, settings)
    replicas = _Replicas(settings, rate, workload.block_tokens)
    universal, ties = UniversalPrefix(), random_ties(Random(settings.seed))
    late: deque[tuple[float, int, list[int], list[int]]] = deque()
    count, block_tokens = len(workload), workload.block_tokens
    target, reused, predicted = (np.zeros(count, np.int64) for _ in range(3))
    ttft_s = np.zeros(count)
    for number, ids in enumerate(workload.chains):
        now_s, tokens = float(workload.arrivals_s[number]), int(workload.input_tokens[number])
        while late and late[0][0] <= now_s:
            at_s, where, stored, removed = late.popleft()
            view.served(where, stored, removed, at_s)
        matched = np.minimum(view.matched_blocks(ids, now_s) * block_tokens, tokens)
        shared = min(tokens, universal.leading(ids) * block_tokens)
        ask = Ask(tokens, workload.sessions[number], _head(ids), None, shared)
        replica = policy.pick(ask, replicas.fleet(matched, now_s), ties).replica
        view.routed(replica, ids, now_s)
        universal.observe(ids)
        predicted[number], target[number] = matched[replica], replica
        reused[number] = min(tokens, replicas.held[replica].match(ids) * block_tokens)
        touched = replicas.held[replica].touch(ids)
        fresh_s = (tokens - int(reused[number])) / rate
        answer_s = int(workload.output_tokens[number]) * settings.decode_s_per_token
        ttft_s[number] = replicas.add(replica, now_s, fresh_s, answer_s, len(touched.removed))
        if settings.lag_s:
            late.append((now_s + settings.lag_s, replica, touched.stored, touched.removed))
        else:
            view.served(replica, touched.stored, touched.removed, now_s)
    return Served(target, reused, predicted, ttft_s, replicas.assigned, replicas.evictions, replicas.skew_max)


def _head(ids: tuple[int, ...]) -> bytes:
    first = ids[:_HEAD_BLOCKS]
    return struct.pack(f"<{len(first)}q", *first)


class _Replicas:
    """Their queues, and what they hold."""

    def __init__(self, settings: QueueSettings, rate: float, block_tokens: int) -> None:
        count = settings.replicas
        self.held = [BlockLru(settings.capacity_blocks) for _ in range(count)]
        self.assigned = np.zeros(count, np.int64)
        self.evictions = np.zeros(count, np.int64)
        self.skew_max = 0
        self._blocks = np.zeros(count, np.int64)
        self._in_flight = np.zeros(count, np.int64)
        self._free_s = np.full(count, -math.inf)
        self._ends: list[tuple[float, int]] = []
        self._names = tuple(f"replica-{number}" for number in range(count))
        self._capacity = np.full(count, settings.capacity_blocks, np.int64)
        self._rate = np.full(count, rate)
        self._tier_s = np.zeros((count, len(TIERS)))
        self._block_tokens = block_tokens

    def fleet(self, matched_tokens: NDArray[np.int64], now_s: float) -> Fleet:
        """As the router sees it now. Nobody decodes here, so no running request holds blocks for long."""
        while self._ends and self._ends[0][0] <= now_s:
            self._in_flight[heapq.heappop(self._ends)[1]] -= 1
        return Fleet(
            self._names,
            np.repeat(matched_tokens[:, None], len(TIERS), axis=1),
            self.assigned,
            self._in_flight,
            np.maximum(self._free_s - now_s, 0.0),
            self._blocks,
            self._capacity,
            self._capacity,
            self._rate,
            self._tier_s,
            self._block_tokens,
        )

    def add(self, replica: int, now_s: float, fresh_s: float, answer_s: float, evicted: int) -> float:
        """A request was sent there. Returns its seconds to the first token."""
        done_s = max(float(self._free_s[replica]), now_s) + fresh_s
        self._free_s[replica] = done_s
        heapq.heappush(self._ends, (done_s + answer_s, replica))
        self._in_flight[replica] += 1
        self.assigned[replica] += 1
        self._blocks[replica] = len(self.held[replica])
        self.evictions[replica] += evicted
        self.skew_max = max(self.skew_max, int(self.assigned.max() - self.assigned.min()))
        return done_s - now_s
