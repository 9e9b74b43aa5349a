"""Hot prefixes: one that many ask for gets more replicas, as long as the next one gains more than it costs.

    gain    requests it would take during a lease · seconds of queue that each is spared
    cost    computing the prefix once more there, and again for what it pushes out of a full replica

A new replica is a *lease*: it takes its share of the prefix's requests, is renewed by them while the traffic
needs so many replicas, and ends otherwise. After that the requests go to the others, and its blocks age out.
The request that begins a lease computes the prefix where it lands; no bytes move.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvstore.clock import Clock
from kvstore.errors import BadRequest
from kvstore.policy.routing.base import Ask, Choice, Fleet, Policy, Ties, lowest

__all__ = ["LEASE_S", "HotReplicas"]

LEASE_S = 30.0
_HEADS_MAX = 1024
# Who has nearly as much of a prompt as the one that has most of it, has its prefix.
_HOLDS = 0.9
# So busy may a set of replicas be before it needs one more.
_BUSY_MAX = 0.7


@dataclass(slots=True)
class _Head:
    rate_per_s: float = 0.0
    seen_s: float = 0.0
    home: str = ""
    leases: dict[str, float] = field(default_factory=dict)  # name → when it ends


class HotReplicas:
    """Another policy, which it overrules where a prefix has, or needs, more than one replica.

    When not to use it: over policies that do not look at prefixes.

    Args:
        inner: for everything else.
        clock: monotonic.
        lease_s: life of a replica without need.

    Raises:
        BadRequest: lease_s is not above 0.
    """

    def __init__(self, inner: Policy, clock: Clock, lease_s: float = LEASE_S) -> None:
        if not 0 < lease_s < math.inf:
            raise BadRequest(f"lease_s: need seconds above 0, got {lease_s}")
        self.inner = inner
        self.name = inner.name
        self._clock = clock
        self._lease_s = lease_s
        self._heads: dict[bytes, _Head] = {}
        self.granted = 0
        """Leases, since start."""

    @property
    def live(self) -> int:
        """Leases now."""
        now_s = self._clock.now()
        return sum(until > now_s for head in self._heads.values() for until in head.leases.values())

    def pick(self, ask: Ask, fleet: Fleet, ties: Ties) -> Choice:
        """See `Policy`."""
        if not ask.head:
            return self.inner.pick(ask, fleet, ties)
        now_s = self._clock.now()
        head = self._seen(ask.head, now_s)
        reach = fleet.longest_tokens
        best = int(reach.max())
        if best <= ask.universal_tokens:  # nobody has it: one will
            return self.inner.pick(ask, fleet, ties)
        holds = reach >= best * _HOLDS
        if not any(held and name == head.home for held, name in zip(holds, fleet.names, strict=True)):
            head.home = fleet.names[int(reach.argmax())]
        service_s = float((ask.tokens - best) / fleet.prefill_tokens_per_s[holds].max())
        self._renew(head, service_s, now_s)
        joins = self._joins(head, best, fleet, holds)
        if joins is not None:
            name = fleet.names[joins]
            head.leases[name] = now_s + self._lease_s
            self.granted += 1
            return Choice(
                joins, reason=f"hot prefix of {best} tokens: a replica more, {len(head.leases) + 1} now"
            )
        members = self._members(head, fleet, holds)
        if len(members) < 2:
            return self.inner.pick(ask, fleet, ties)
        waits_s = fleet.queue_s + (ask.tokens - reach) / fleet.prefill_tokens_per_s
        return Choice(ties(lowest(waits_s, members)), waits_s, f"hot prefix: one of {len(members)} replicas")

    def _seen(self, key: bytes, now_s: float) -> _Head:
        """One more request for it; rates follow the last lease's time or so."""
        head = self._heads.pop(key, None) or _Head(seen_s=now_s)
        stays = math.exp(-(now_s - head.seen_s) / self._lease_s)
        head.rate_per_s = head.rate_per_s * stays + 1 / self._lease_s
        head.seen_s = now_s
        self._heads[key] = head  # the youngest is last
        if len(self._heads) > _HEADS_MAX:
            del self._heads[next(iter(self._heads))]
        return head

    def _renew(self, head: _Head, service_s: float, now_s: float) -> None:
        """The oldest leases, as many as the traffic needs beside the home; what is over is forgotten."""
        head.leases = {name: until for name, until in head.leases.items() if until > now_s}
        needed = math.ceil(head.rate_per_s * service_s / _BUSY_MAX) - 1
        for name in list(head.leases)[: max(0, needed)]:
            head.leases[name] = now_s + self._lease_s

    def _joins(self, head: _Head, tokens: int, fleet: Fleet, holds: NDArray[np.bool_]) -> int | None:
        """Position of a replica whose lease would gain more than it costs."""
        if holds.all():
            return None
        others = np.flatnonzero(~holds)
        other = int(others[fleet.queue_s[others].argmin()])
        spared_s = (float(fleet.queue_s[holds].min()) - float(fleet.queue_s[other])) / 2
        requests = head.rate_per_s * self._lease_s / (int(holds.sum()) + 1)
        filled = min(1.0, float(fleet.blocks[other] / max(1, fleet.capacity_blocks[other])))
        cost_s = tokens / float(fleet.prefill_tokens_per_s[other]) * (1 + filled)
        return other if requests * spared_s > cost_s else None

    def _members(self, head: _Head, fleet: Fleet, holds: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Positions of the home and of those with a lease that really have it. (0,) without any lease."""
        if not head.leases:
            return np.empty(0, np.int64)
        mine = np.array([name == head.home or name in head.leases for name in fleet.names])
        return np.flatnonzero(mine & holds)
