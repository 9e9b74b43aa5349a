"""Hybrid: the longest match among replicas that are not too far ahead of the least loaded."""

from __future__ import annotations

import enum

import numpy as np

from kvstore.errors import BadRequest
from kvstore.policy.routing.base import Ask, Choice, Fleet, Ties, lowest

__all__ = ["Hybrid", "Skew"]


class Skew(enum.StrEnum):
    """What must not run ahead.

    In-flight skew is the better guard: cumulative skew punishes a replica for ever for what it has long
    answered, and sends everything to one that has just joined.
    """

    ASSIGNED = "assigned"
    IN_FLIGHT = "in_flight"


class Hybrid:
    """Affinity inside a window of load: of those with at most `max_skew` more than the least, before this
    request is counted, the longest match; equal matches go to the least assigned.

    When not to use it: where prompts differ in length. It counts requests, and a window of requests means
    milliseconds or minutes; `scored` compares seconds. A window that is too tight throws affinity away.

    Args:
        max_skew: 0 at least.
        of: what is compared.

    Raises:
        BadRequest: max_skew is negative.
    """

    name = "hybrid"

    def __init__(self, max_skew: int = 1, of: Skew = Skew.ASSIGNED) -> None:
        if max_skew < 0:
            raise BadRequest(f"max_skew: need 0 at least, got {max_skew}")
        self.max_skew = max_skew
        self.of = of

    def pick(self, ask: Ask, fleet: Fleet, ties: Ties) -> Choice:
        """See `Policy`."""
        load = fleet.assigned if self.of is Skew.ASSIGNED else fleet.in_flight
        near = np.flatnonzero(load <= load.min() + self.max_skew)
        matched = fleet.longest_tokens
        longest = near[matched[near] == matched[near].max()]
        replica = ties(lowest(fleet.assigned, longest))
        reason = f"{matched[replica]} tokens matched, the most of {len(near)} within {self.max_skew}"
        return Choice(replica, reason=reason)
