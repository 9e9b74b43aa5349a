"""Power of two choices: of two replicas drawn by lot, the less loaded (Mitzenmacher, 2001)."""

from __future__ import annotations

import numpy as np

from kvstore.policy.routing.base import Ask, Choice, Fleet, Ties, lowest

__all__ = ["PowerOfTwo"]


class PowerOfTwo:
    """Draws two replicas with `ties`, takes the one with fewer requests in flight.

    Good where loads are seen late or by many routers: nobody can stampede the one idle replica. When not to
    use it: whenever prompts share prefixes; it is as blind to them as round-robin.
    """

    name = "power_of_two"

    def pick(self, ask: Ask, fleet: Fleet, ties: Ties) -> Choice:
        """See `Policy`."""
        everybody = np.arange(len(fleet))
        one = ties(everybody)
        others = np.delete(everybody, one)
        pair = np.array(sorted({one, ties(others)})) if len(others) else everybody
        replica = ties(lowest(fleet.in_flight, pair))
        return Choice(replica, reason=f"{fleet.in_flight[replica]} in flight, the fewer of two")
