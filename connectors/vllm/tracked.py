"""What the scheduler's side remembers of one request, from its arrival to its end."""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from kvstore.types import Reuse, Tier

from .courier import Answer

__all__ = ["Tracked"]

_TRIES_MAX = 4
_PAUSE_S = 0.05  # after the first save that was dropped; doubled each time


@dataclass(slots=True, eq=False)
class Tracked:
    """One request.

    Attributes:
        request: vLLM's.
        reuse: how far its blocks may be shared; NONE: neither looked up nor saved.
        asked: a lookup under way, or its answer while it has not been used.
        asked_at: when, on the monotonic clock.
        answer: the lookup that the current offer, or load, relies on.
        offer: blocks [start, stop) that were offered to the engine.
        loading: they are being loaded.
        good: leading blocks of the offer that every rank which has ended could load.
        bad: positions in the chain whose stored bytes were wrong.
        may_offer: False after a load that failed: the engine would ask for ever (LAWS E22).
        relooks: lookups asked again because the device pool had changed.
        planned: leading blocks that are saved, known to the daemon, or on their way.
        closed: nothing more of it is saved.
        tries, not_before: of saves that were dropped.
        device: leading tokens that the engine itself held.
        hits: tokens loaded, by tier.
        reason: why nothing could be loaded, or why the daemon planned so.
        ended: the engine is done with it.
    """

    request: Any
    reuse: Reuse
    asked: Future[Answer] | None = None
    asked_at: float = 0.0
    answer: Answer | None = None
    offer: tuple[int, int] = (0, 0)
    loading: bool = False
    good: int = 0
    bad: set[int] = field(default_factory=set)
    may_offer: bool = True
    relooks: int = 0
    planned: int = 0
    closed: bool = False
    tries: int = 0
    not_before: float = 0.0
    device: int = 0
    hits: dict[Tier, int] = field(default_factory=dict)
    reason: str = ""
    ended: bool = False

    def retry(self, planned: int, reason: str) -> None:
        """Blocks from `planned` on were dropped: try again in a moment, a few times."""
        self.planned = min(self.planned, planned)
        self.tries += 1
        self.not_before = time.monotonic() + _PAUSE_S * 2**self.tries
        self.closed = self.closed or self.tries > _TRIES_MAX
        self.reason = self.reason or reason
