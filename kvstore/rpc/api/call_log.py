"""What is said about calls: a line for each at level debug, always for those that held the loop too long.

A stream may last for hours and a Lookup waits for its turn between slices; neither keeps anybody waiting.
What counts is the longest time for which a call held the loop without a pause.
"""

from __future__ import annotations

from collections.abc import Coroutine, Generator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from kvstore.clock import Clock
from kvstore.errors import STATUS, KVStoreError
from kvstore.rpc.request_log import RequestLog

__all__ = ["Call", "Steps"]

T = TypeVar("T")
# A lease's id opens it, so its beginning must do; of a renewal the first ones are told.
LEASE_DIGITS, LEASES_TOLD = 8, 4
TENANT_CHARS_MAX = 80


class Steps(Generic[T]):
    """Awaits a coroutine and times its steps.

    Attributes:
        longest_s: what it ran without a pause.
    """

    def __init__(self, work: Coroutine[Any, Any, T], clock: Clock) -> None:
        self._work = work
        self._clock = clock
        self.longest_s = 0.0

    def __await__(self) -> Generator[Any, Any, T]:
        work = self._work.__await__()
        step: Any = work.send
        value: Any = None
        while True:
            began_s = self._clock.now()
            try:
                waits_for = step(value)
            except StopIteration as end:
                result: T = end.value
                return result
            finally:
                self.longest_s = max(self.longest_s, self._clock.now() - began_s)
            try:
                step, value = work.send, (yield waits_for)
            except BaseException as error:  # noqa: BLE001  (the coroutine's to answer, a cancellation too)
                step, value = work.throw, error


@dataclass(slots=True)
class Call:
    """One call.

    Attributes:
        name: of the method.
        request, context: as the method got them.
        answer: what it gave, None for a stream.
        outcome: how it ended, in a word.
        status, reason: why it was refused. Not the error itself: its traceback leads back to this call, and
            that circle would keep all of it alive.
    """

    name: str
    request: Any
    context: Any
    answer: Any = None
    outcome: str = "cancelled"
    status: str = ""
    reason: str = ""

    def answered(self, answer: Any) -> None:
        """It gave its answer, or ended its stream."""
        self.answer = answer
        self.outcome = "stream" if answer is None else type(answer).__name__.lower()

    def refused(self, error: KVStoreError) -> None:
        """It ended with a status."""
        self.status, self.reason, self.outcome = STATUS[type(error)], str(error), "failed"

    def tell(self, requests: RequestLog, held_s: float) -> None:
        """It is over; `held_s` as in Steps."""
        if not requests.wants(held_s):
            return
        request = self.request
        tenant = getattr(request, "tenant", "") or getattr(getattr(request, "chain", None), "tenant", "")
        lease = getattr(request, "lease", b"") or getattr(self.answer, "lease", b"")
        leases = getattr(request, "leases", None) or [lease]
        facts: dict[str, object] = {
            "lease": ",".join(lease.hex()[:LEASE_DIGITS] for lease in leases[:LEASES_TOLD]),
            "answer": self.outcome,
        }
        if self.status:
            facts |= {"status": self.status, "reason": self.reason}
        who = {"peer": self.context.peer(), "tenant": tenant[:TENANT_CHARS_MAX]}
        requests.tell(who, f"grpc.{self.name.lower()}", facts, held_s)
