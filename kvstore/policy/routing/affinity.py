"""Affinity: the longest match wins, whatever the load."""

from __future__ import annotations

from kvstore.policy.routing.base import Ask, Choice, Fleet, Ties, lowest

__all__ = ["Affinity"]


class Affinity:
    """The replica with the longest match; equal matches, and misses, go to the least assigned.

    Shown for comparison. When not to use it: in production. One block that every request shares makes the
    first replica that has it the longest match of all of them, and the rest of the fleet idles.
    """

    name = "affinity"

    def pick(self, ask: Ask, fleet: Fleet, ties: Ties) -> Choice:
        """See `Policy`."""
        matched = fleet.longest_tokens
        longest = lowest(matched.max() - matched)
        replica = ties(lowest(fleet.assigned, longest))
        return Choice(replica, reason=f"{matched[replica]} tokens matched, the most")
