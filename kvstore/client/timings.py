"""What a client has measured and not told yet: kept in memory, sent in place of a heartbeat.

Nothing of it is worth a round trip of its own, and a request must not wait for it. So it is only noted where
it happens, and the background, which has to say something every half heartbeat anyway, says this.
"""

from __future__ import annotations

import threading
from collections import deque
from itertools import islice

from kvstore.rpc.messages import TIMINGS_MAX, StepRow, Timings

__all__ = ["Outbox"]

# Kept while no daemon is there: the newest so many requests and steps, 1 MB at most.
KEPT_MAX = 4096
# Of steps that only decode: the daemon learns from no more of them, and counts none. Older ones are no loss.
DECODES_MAX = 256


class Outbox:
    """Timings that wait to be sent. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: deque[tuple[str, float, int, int]] = deque()
        self._prefills: deque[StepRow] = deque()
        self._decodes: deque[StepRow] = deque(maxlen=DECODES_MAX)
        self._copies: dict[str, tuple[int, int, float]] = {}
        self._plans: deque[tuple[int, float]] = deque(maxlen=TIMINGS_MAX)
        self._lost = 0

    def note_plan(self, plan: int, seconds: float) -> None:
        """A plan was carried out."""
        with self._lock:
            self._plans.append((plan, seconds))

    def note_request(self, tenant: str, ttft_s: float, prompt_tokens: int, reused_tokens: int) -> None:
        """A request got its first token."""
        with self._lock:
            self._requests.append((tenant, ttft_s, prompt_tokens, reused_tokens))
            if len(self._requests) > KEPT_MAX:
                self._requests.popleft()
                self._lost += 1

    def note_step(self, step: StepRow) -> None:
        """A step of the engine ended."""
        with self._lock:
            if not step[0]:
                self._decodes.append(step)
                return
            self._prefills.append(step)
            if len(self._prefills) > KEPT_MAX:
                self._prefills.popleft()
                self._lost += 1

    def note_copy(self, kind: str, size_bytes: int, seconds: float) -> None:
        """A copy job ended: "load", "store" or "demote"."""
        with self._lock:
            copies, total_bytes, total_s = self._copies.get(kind, (0, 0, 0.0))
            self._copies[kind] = (copies + 1, total_bytes + size_bytes, total_s + seconds)

    def take(self) -> Timings | None:
        """The next message, None when there is nothing to tell. What it holds is forgotten here."""
        with self._lock:
            waiting = (self._requests, self._prefills, self._decodes, self._copies, self._plans)
            if not (any(waiting) or self._lost):
                return None
            requests = list(islice(self._requests, TIMINGS_MAX))
            prefills = list(islice(self._prefills, TIMINGS_MAX - len(self._decodes)))
            steps = [*self._decodes, *prefills]
            self._decodes.clear()
            for _ in requests:
                self._requests.popleft()
            for _ in prefills:
                self._prefills.popleft()
            copies, self._copies = self._copies, {}
            plans = list(self._plans)
            self._plans.clear()
            lost, self._lost = self._lost, 0
        transfers = [(kind, *sums) for kind, sums in sorted(copies.items())]
        return Timings(requests, steps, transfers, lost, plans)

    def lose(self, message: Timings) -> None:
        """A message did not arrive, as far as is known: it is counted, not sent twice."""
        with self._lock:
            prefills = sum(1 for step in message.steps if step[0])
            self._lost += len(message.requests) + prefills + message.lost
