"""Round-robin: one after the other. Knows nothing, and is what everything else is measured against."""

from __future__ import annotations

import numpy as np

from kvstore.policy.routing.base import Ask, Choice, Fleet, Ties

__all__ = ["RoundRobin"]


class RoundRobin:
    """The next replica after the one before, in the order of the fleet.

    When not to use it: whenever prompts share anything. Eight replicas each compute what one has.
    """

    name = "round_robin"

    def __init__(self) -> None:
        self._last = ""  # by name: the fleet may have changed since

    def pick(self, ask: Ask, fleet: Fleet, ties: Ties) -> Choice:
        """See `Policy`. If the one before has left, whoever was assigned least is next."""
        if self._last in fleet.names:
            replica = (fleet.names.index(self._last) + 1) % len(fleet)
        else:
            replica = ties(np.flatnonzero(fleet.assigned == fleet.assigned.min()))
        self._last = fleet.names[replica]
        return Choice(replica, reason="its turn")
