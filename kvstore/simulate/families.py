"""Whole prefixes by name, sent one after the other: a model small enough to check by hand.

A family is a prefix of some tokens, all of it held or none of it. A replica holds a number of families, LRU.
No time passes and no request ends: a replica's load is what it was assigned beyond the least assigned one.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import BadRequest
from kvstore.policy.routing.base import TIERS, Ask, Fleet, Policy, Ties

__all__ = ["FamilyRun", "FamilySettings", "run_families"]

REPLICAS_MAX = 4096
FAMILY_TOKENS_MAX = 1 << 24


@dataclass(frozen=True, slots=True)
class FamilySettings:
    """The fleet.

    Attributes:
        lengths: tokens of each family.
        replicas: n, 1 at least.
        capacity: families that each holds, 1 at least.
        seconds_per_request: what each request that a replica is ahead costs the next one.
        prefill_tokens_per_s: for `scored`, which compares seconds.

    Raises:
        BadRequest: names the option.
    """

    lengths: Mapping[str, int]
    replicas: int = 3
    capacity: int = 2
    seconds_per_request: float = 1.0
    prefill_tokens_per_s: float = 1000.0

    def __post_init__(self) -> None:
        if not 1 <= self.replicas <= REPLICAS_MAX:
            raise BadRequest(f"--replicas: need 1 to {REPLICAS_MAX}, got {self.replicas}")
        if self.capacity < 1:
            raise BadRequest(f"--capacity: need 1 at least, got {self.capacity}")
        if not 0 <= self.seconds_per_request < math.inf:
            raise BadRequest(f"--seconds-per-request: need 0 at least, got {self.seconds_per_request}")
        if not 0 < self.prefill_tokens_per_s < math.inf:
            raise BadRequest(f"--prefill-tokens-per-s: need more than 0, got {self.prefill_tokens_per_s}")
        for name, tokens in self.lengths.items():
            if not 1 <= tokens <= FAMILY_TOKENS_MAX:
                raise BadRequest(f"--lengths: {name}: need 1 to {FAMILY_TOKENS_MAX} tokens, got {tokens}")


@dataclass(frozen=True, slots=True)
class FamilyRun:
    """What became of the requests.

    Attributes:
        input_tokens: of all requests.
        hits, reused_tokens: requests that found their family, and its tokens.
        warm_up_tokens: computed because that replica had never seen that family; all of them fall away in
            steady state, so they say nothing about it.
        lost_tokens: computed again after an eviction: what steady state goes on paying.
        evictions: families that left.
        assigned: (n,) requests.
        skew, skew_max: most minus least assigned: at the end, and the most at any time.
        queue_penalty_s: Σ of max(0, assigned[target] − least) before the increment, × seconds_per_request.
    """

    input_tokens: int
    hits: int
    reused_tokens: int
    warm_up_tokens: int
    lost_tokens: int
    evictions: int
    assigned: tuple[int, ...]
    skew: int
    skew_max: int
    queue_penalty_s: float

    def json(self) -> dict[str, Any]:
        """JSON-ready."""
        steady = self.input_tokens - self.warm_up_tokens
        return {
            "input_tokens": self.input_tokens,
            "hits": self.hits,
            "reused_tokens": self.reused_tokens,
            "reuse": self.reused_tokens / self.input_tokens,
            "reuse_without_warm_up": self.reused_tokens / steady if steady else None,
            "warm_up_tokens": self.warm_up_tokens,
            "lost_tokens": self.lost_tokens,
            "evictions": self.evictions,
            "assigned": list(self.assigned),
            "skew": self.skew,
            "skew_max": self.skew_max,
            "queue_penalty_s": self.queue_penalty_s,
        }


def run_families(requests: Sequence[str], policy: Policy, settings: FamilySettings, ties: Ties) -> FamilyRun:
    """Send every request where the policy says.

    Args:
        requests: names of families, in order.
        policy: a fresh one.

    Raises:
        BadRequest: no request, or a family without a length.
    """
    if not requests:
        raise BadRequest("--requests: need one family at least")
    for name in requests:
        if name not in settings.lengths:
            raise BadRequest(f"--lengths: {name!r:.40} is requested and has none; say {name:.40}=TOKENS")
    count = settings.replicas
    held: list[OrderedDict[str, None]] = [OrderedDict() for _ in range(count)]
    seen: set[tuple[int, str]] = set()
    assigned = np.zeros(count, np.int64)
    hits = reused = warm_up = evictions = ahead = skew_max = 0
    for name in requests:
        tokens = settings.lengths[name]
        ask = Ask(tokens, session=name, head=name.encode())
        replica = policy.pick(ask, _fleet(settings, held, assigned, name), ties).replica
        ahead += int(assigned[replica] - assigned.min())
        assigned[replica] += 1
        skew_max = max(skew_max, int(assigned.max() - assigned.min()))
        mine = held[replica]
        if name in mine:
            hits, reused = hits + 1, reused + tokens
        elif (replica, name) not in seen:
            warm_up += tokens
        seen.add((replica, name))
        mine[name] = None
        mine.move_to_end(name)
        if len(mine) > settings.capacity:
            mine.popitem(last=False)
            evictions += 1
    total = sum(settings.lengths[name] for name in requests)
    return FamilyRun(
        input_tokens=total,
        hits=hits,
        reused_tokens=reused,
        warm_up_tokens=warm_up,
        lost_tokens=total - reused - warm_up,
        evictions=evictions,
        assigned=tuple(assigned.tolist()),
        skew=int(assigned.max() - assigned.min()),
        skew_max=skew_max,
        queue_penalty_s=ahead * settings.seconds_per_request,
    )


def _fleet(
    settings: FamilySettings, held: Sequence[Mapping[str, None]], assigned: NDArray[np.int64], name: str
) -> Fleet:
    lengths, count = settings.lengths, settings.replicas
    matched = np.array([lengths[name] if name in mine else 0 for mine in held], np.int64)
    ahead = assigned - assigned.min()
    capacity = np.full(count, settings.capacity * max(lengths.values()), np.int64)
    return Fleet(
        names=tuple(f"replica-{number}" for number in range(count)),
        matched_tokens=np.repeat(matched[:, None], len(TIERS), axis=1),
        assigned=assigned,
        in_flight=ahead,
        queue_s=ahead * settings.seconds_per_request,
        blocks=np.array([sum(lengths[each] for each in mine) for mine in held], np.int64),
        free_blocks=capacity,
        capacity_blocks=capacity,
        prefill_tokens_per_s=np.full(count, settings.prefill_tokens_per_s),
        tier_s_per_token=np.zeros((count, len(TIERS))),
        block_tokens=1,
    )
