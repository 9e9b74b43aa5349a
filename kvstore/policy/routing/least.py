"""Least: fewest requests in flight."""

from __future__ import annotations

from kvstore.policy.routing.base import Ask, Choice, Fleet, Ties, lowest

__all__ = ["Least"]


class Least:
    """The replica with the fewest requests in flight, ties by lot.

    When not to use it: with several routers that do not see each other's requests (all of them send to the
    same idle replica at once; power of two does not), and whenever prompts share prefixes.
    """

    name = "least"

    def pick(self, ask: Ask, fleet: Fleet, ties: Ties) -> Choice:
        """See `Policy`."""
        replica = ties(lowest(fleet.in_flight))
        return Choice(replica, reason=f"{fleet.in_flight[replica]} in flight, the fewest")
