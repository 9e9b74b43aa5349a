"""Messages about what was decided: reload or recompute."""

from __future__ import annotations

from kvstore.rpc.messages.base import Message

__all__ = ["Explain", "Explained"]


class Explain(Message, tag="explain", frozen=True):
    """Why was a request reloaded or recomputed? Tools hear of every tenant's, others of their own.

    Reply: Explained.

    Attributes:
        request: the engine's name for it, or the number of its lease; "" = the latest that was planned.
    """

    request: str


class Explained(Message, tag="explained", frozen=True):
    """JSON text: the decision, its outcome, what changed since, and "words", sentences for a person."""

    json: str
