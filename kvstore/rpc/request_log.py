"""What is said about requests: each at level debug, slow ones always."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import structlog

from kvstore.clock import Clock
from kvstore.rpc.messages import Failed

__all__ = ["RequestLog"]

log = structlog.get_logger()

# One message holds the loop; longer than this and every other engine has waited noticeably.
SLOW_S = 0.005


class RequestLog:
    """One per daemon. Costs two readings of the clock a request while the level is above debug.

    Attributes:
        every: log each request (level debug).
        slow: message → how often handling it took longer than SLOW_S.
    """

    def __init__(self, clock: Clock, *, every: bool) -> None:
        self.clock = clock
        self.every = every
        self.slow: dict[str, int] = {}

    def ended(self, who: Mapping[str, object], request: int, body: Any, answer: Any, began_s: float) -> None:
        """A message was handled.

        Args:
            who: session, engine and tenant.
            request: id of its frame.
            body, answer: messages; of their fields only lease and token numbers are told.
            began_s: when handling it began.
        """
        seconds = self.clock.now() - began_s
        if not self.wants(seconds):
            return
        facts: dict[str, object] = {
            "request": request,
            "lease": getattr(body, "lease", 0) or getattr(answer, "lease", 0),
            "answer": type(answer).__name__.lower(),
        }
        if isinstance(answer, Failed):
            facts |= {"status": answer.status, "reason": answer.message}
        self.tell(who, type(body).__name__.lower(), facts, seconds)

    def wants(self, seconds: float) -> bool:
        """Whether to tell of a message that held the loop for so long."""
        return self.every or seconds > SLOW_S

    def tell(
        self, who: Mapping[str, object], message: str, facts: Mapping[str, object], seconds: float
    ) -> None:
        """Write the line of one message: a warning, and counted, when it held the loop too long.

        Args:
            who: sent it.
            message: its kind; of a bounded number, they are labels of a metric.
            facts: what there is to say beside it.
            seconds: that it held the loop.
        """
        facts = {"message": message, **facts, "ms": round(seconds * 1e3, 3)}
        if seconds > SLOW_S:
            self.slow[message] = self.slow.get(message, 0) + 1
            log.warning("slow message", **who, **facts)
        else:
            log.debug("request", **who, **facts)
