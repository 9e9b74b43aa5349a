"""Where a feed tells what a replica holds: one protocol, whether vLLM or a kvstore daemon is behind it.

    reset()    the truth begins anew: fill a second column; what was known so far goes on being asked
    …          stored, removed, cleared: changes of the column that is being filled
    ready()    it is complete: let it take the first one's place
    …          stored, removed, cleared: changes as they happen
    stale()    nothing is heard any more, or something was lost: what is known may be wrong from now on
    ready()    without a reset before it: it holds again

A feed calls from its event loop and never waits for a sink: calls must be short. A second reset() before
ready() throws the second column away. Events may repeat what is known; applying them again changes nothing.
"""

from __future__ import annotations

from typing import Protocol

from kvstore.router.kv_schema import Removed, Stored
from kvstore.types import Tier

__all__ = ["Sink"]


class Sink(Protocol):
    """Takes the events of one replica, in order."""

    def reset(self) -> None:
        """What follows is a new truth; it counts from `ready` on."""
        ...

    def stored(self, event: Stored) -> None:
        """Blocks became readable."""
        ...

    def removed(self, event: Removed) -> None:
        """Blocks left a tier."""
        ...

    def cleared(self, tier: Tier | None) -> None:
        """Nothing is left on a tier; None = on any."""
        ...

    def ready(self) -> None:
        """The new truth is complete, or (without a reset) the old one holds again."""
        ...

    def stale(self, reason: str) -> None:
        """What is known may be wrong until `ready`; `reason` in words, for a status page."""
        ...

    def lost(self, batches: int) -> None:
        """So many batches (1 at least) will never be heard; a reset follows where that can be repaired."""
        ...
