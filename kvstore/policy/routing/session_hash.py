"""Session hash: a conversation stays where it began."""

from __future__ import annotations

from kvstore.policy.routing.base import Ask, Choice, Fleet, Ties, lowest
from kvstore.policy.routing.rendezvous import owners

__all__ = ["SessionHash"]


class SessionHash:
    """The owner of the conversation by rendezvous hashing; of the prompt's head where there is no id.

    Needs no index and no events: nothing to lose, nothing to lag. When not to use it: it is blind to load.
    On the conversation trace it finds all the reuse there is and waits twice as long as `scored`, because
    long conversations meet on one replica by chance.
    """

    name = "session_hash"

    def pick(self, ask: Ask, fleet: Fleet, ties: Ties) -> Choice:
        """See `Policy`. A request with neither id nor head goes where the fewest are in flight."""
        if ask.session:
            replica = int(owners(fleet.names, b"session " + ask.session.encode(), 1)[0])
            return Choice(replica, reason="owns the conversation")
        if ask.head:
            return Choice(int(owners(fleet.names, b"head " + ask.head, 1)[0]), reason="owns the head")
        return Choice(ties(lowest(fleet.in_flight)), reason="no conversation named, fewest in flight")
