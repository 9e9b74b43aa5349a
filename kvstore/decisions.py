"""What was decided for the latest requests of a trust group, what came of it, and how good predictions were.

    planned(asked, decision) ─→ remembered ──ended(plan, outcome), once or in parts──→ known how it went
                                           ──DECISIONS_MAX later ones──→ forgotten

Counts outlive what is forgotten: they are since the start. Nothing here does I/O, waits or locks: it belongs
to the daemon's event loop, and a request costs two calls of some µs.
"""

from __future__ import annotations

import math
import secrets
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

from kvstore.meters import Histogram
from kvstore.policy.reload import Choice, Decision
from kvstore.types import Tier

__all__ = [
    "DECISIONS_MAX",
    "ERROR_BOUNDS",
    "REGRET_BOUNDS_S",
    "Asked",
    "Decisions",
    "Outcome",
    "Recorded",
    "TrustChange",
    "found",
]

# 20 s at 50 requests a second. One is 1.5 KiB (the reason and three predictions are most of it): 1.5 MiB.
DECISIONS_MAX = 1024
# Trust is lost once a disappointment and regained three probes later at the earliest: minutes, 200 B each.
TRUST_CHANGES_MAX = 64
# Engines choose the names of their requests; a name of vLLM has 36 characters and a prefix.
NAME_CHARS_MAX = 200
# Most requests regret nothing: they have a bound of their own.
REGRET_BOUNDS_S = (0.0, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
# actual / predicted: 1 is in the middle.
ERROR_BOUNDS = (0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0, 10.0)
_SECONDS_MAX = 1e9


@dataclass(frozen=True, slots=True)
class Asked:
    """Which request it was.

    Attributes:
        at_s: when it was planned, of the group's monotonic clock.
        lease: id of the lease on the match, 0 where there is none.
        tenant: whose request.
        namespace: short name of it, for people: the model.
        prompt_tokens: of the request.
        blocks: of the match, by the tier that held them; a tier with none may be missing.
        request: the engine's own name for it, "" where it tells none; NAME_CHARS_MAX of it are kept.
        engine: its id; names are its own.
    """

    at_s: float
    lease: int
    tenant: str
    namespace: str
    prompt_tokens: int
    blocks: tuple[tuple[Tier, int], ...]
    request: str = ""
    engine: bytes = b""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What happened; None = not told (yet).

    Attributes:
        seconds: from the plan until the prompt's KV was complete, comparable with `Decision.predicted_s`.
        loaded_blocks: that arrived.
        abandoned_s: when the lag rule gave the load up, in seconds since it began.
        why: what ended the load early, one clause; "" = nothing did.

    Raises:
        ValueError: names the field.
    """

    seconds: float | None = None
    loaded_blocks: int | None = None
    abandoned_s: float | None = None
    why: str = ""

    def __post_init__(self) -> None:
        for name, value in (("seconds", self.seconds), ("abandoned_s", self.abandoned_s)):
            if value is not None and not 0.0 <= value <= _SECONDS_MAX:  # NaN too
                raise ValueError(f"{name}: need 0 to {_SECONDS_MAX:g} seconds, got {value!r}")
        if self.loaded_blocks is not None and self.loaded_blocks < 0:
            raise ValueError(f"loaded_blocks: need 0 at least, got {self.loaded_blocks!r}")

    def plus(self, later: Outcome) -> Outcome:
        """This, and what only the later one knows: what was told once is not changed."""
        return Outcome(
            later.seconds if self.seconds is None else self.seconds,
            later.loaded_blocks if self.loaded_blocks is None else self.loaded_blocks,
            later.abandoned_s if self.abandoned_s is None else self.abandoned_s,
            self.why or later.why,
        )


@dataclass(slots=True)
class Recorded:
    """One plan.

    Attributes:
        id: in the order in which they were made, from a random start.
        outcome: None = nobody has said anything yet.
    """

    id: int
    asked: Asked
    decision: Decision
    outcome: Outcome | None = None

    @property
    def predicted_s(self) -> float | None:
        """Of what was chosen; None = there was nothing to predict it from."""
        return self.decision.predicted_s[self.decision.choice]

    @property
    def best_other_s(self) -> float | None:
        """The least that was predicted of the other choices; None = nothing was."""
        choice, predicted = self.decision.choice, self.decision.predicted_s
        others = [s for other, s in predicted.items() if other is not choice and s is not None]
        return min(others, default=None)

    @property
    def regret_s(self) -> float | None:
        """Seconds longer than the best other choice was predicted to take, 0 at least; None = not known."""
        actual_s = None if self.outcome is None else self.outcome.seconds
        if actual_s is None or self.best_other_s is None:
            return None
        return max(0.0, actual_s - self.best_other_s)

    @property
    def error(self) -> float | None:
        """actual / predicted; None = one of them is not known, or nothing was predicted to take time."""
        actual_s = None if self.outcome is None else self.outcome.seconds
        if actual_s is None or not self.predicted_s:
            return None
        return actual_s / self.predicted_s


@dataclass(frozen=True, slots=True)
class TrustChange:
    """Requests may wait for a source again, or no longer.

    Attributes:
        at_s: of the group's clock.
        source: for people, e.g. "NVME" or "PEER node7".
        trusted: from now on.
        reason: why it is doubted, one clause.
    """

    at_s: float
    source: str
    trusted: bool
    reason: str = ""


class Decisions:
    """The memory of one trust group.

    Attributes:
        plans: how many there were, by choice.
        regret, error: of those whose seconds were told, by choice: see `Recorded`.
        changes: the latest of trust, oldest first.
    """

    def __init__(self) -> None:
        self.plans = dict.fromkeys(Choice, 0)
        self.regret = {choice: Histogram(REGRET_BOUNDS_S) for choice in Choice}
        self.error = {choice: Histogram(ERROR_BOUNDS) for choice in Choice}
        self.changes: deque[TrustChange] = deque(maxlen=TRUST_CHANGES_MAX)
        # Random, as tokens are: engines outlive a daemon, and what they tell then is about another's plans.
        self._first_id = self._last_id = secrets.randbelow(1 << 48)
        self._ring: list[Recorded | None] = [None] * DECISIONS_MAX
        self._of_lease: dict[int, int] = {}
        self._of_request: dict[tuple[bytes, str, str], int] = {}

    def __len__(self) -> int:
        return min(self._last_id - self._first_id, DECISIONS_MAX)

    # ---- what happens ------------------------------------------------------------------------------------

    def planned(self, asked: Asked, decision: Decision) -> int:
        """Remember a plan and forget the oldest; its id.

        An engine may ask again for a request whose plan it could not carry out: that replaces the plan, as
        long as nobody has told how long it took, and counts once.
        """
        again = self._again(asked)
        if again is None:
            self._last_id += 1
        plan = self._last_id if again is None else again.id
        old = self._ring[plan % DECISIONS_MAX]
        if old is not None:
            self._forget(old)
        if again is not None:
            self.plans[again.decision.choice] -= 1
        if len(asked.request) > NAME_CHARS_MAX or len(asked.namespace) > NAME_CHARS_MAX:
            asked = replace(
                asked,
                request=asked.request[:NAME_CHARS_MAX],
                namespace=asked.namespace[:NAME_CHARS_MAX],
            )
        self._ring[plan % DECISIONS_MAX] = Recorded(plan, asked, decision)
        if asked.lease:
            self._of_lease[asked.lease] = plan
        if asked.request:
            self._of_request[asked.engine, asked.tenant, asked.request] = plan
        self.plans[decision.choice] += 1
        return plan

    def _again(self, asked: Asked) -> Recorded | None:
        """The plan that this one replaces."""
        if not asked.request:
            return None
        name = asked.engine, asked.tenant, asked.request[:NAME_CHARS_MAX]
        record = self.plan(self._of_request.get(name, 0))
        told = record is not None and record.outcome is not None and record.outcome.seconds is not None
        return None if told else record

    def _forget(self, record: Recorded) -> None:
        asked = record.asked
        if self._of_lease.get(asked.lease) == record.id:
            del self._of_lease[asked.lease]
        name = asked.engine, asked.tenant, asked.request
        if self._of_request.get(name) == record.id:
            del self._of_request[name]

    def ended(self, plan: int, outcome: Outcome) -> bool:
        """Say what came of a plan, or another part of it: a fetch, the engine and a release each know some.

        Its seconds count once, when they are told first.

        Returns:
            False: it is not remembered any more; nothing was counted.
        """
        record = self.plan(plan)
        if record is None:
            return False
        known = record.outcome
        record.outcome = outcome if known is None else known.plus(outcome)
        if outcome.seconds is None or (known is not None and known.seconds is not None):
            return True
        choice = record.decision.choice
        if record.regret_s is not None:
            self.regret[choice].observe(record.regret_s)
        if record.error is not None and math.isfinite(record.error):
            self.error[choice].observe(record.error)
        return True

    def carried_out(self, plan: int, engine: bytes, seconds: float) -> bool:
        """An engine tells how long a plan of its own took. False: it is not remembered, or another's."""
        record = self.plan(plan)
        return record is not None and record.asked.engine == engine and self.ended(plan, Outcome(seconds))

    def trust_changed(self, change: TrustChange) -> None:
        """A source lost trust, or has it again."""
        self.changes.append(change)

    # ---- questions ---------------------------------------------------------------------------------------

    def plan(self, plan: int) -> Recorded | None:
        """The plan with this id; None = forgotten, or there never was one."""
        record = self._ring[plan % DECISIONS_MAX]
        return record if record is not None and record.id == plan else None

    def of_lease(self, lease: int) -> int | None:
        """Id of the latest plan that was made for a lease; None = none is remembered."""
        return self._of_lease.get(lease)

    def last(self) -> Recorded | None:
        """The latest."""
        return self.plan(self._last_id)

    def recent(self, count: int = DECISIONS_MAX) -> Iterator[Recorded]:
        """The latest so many, newest first."""
        for plan in range(self._last_id, self._last_id - min(count, len(self)), -1):
            record = self.plan(plan)
            if record is not None:
                yield record

    def find(self, name: str) -> Recorded | None:
        """The latest plan of a request by the engine's name for it, else by the number of its lease.

        Looks at all that are remembered, 0.2 ms: for people, not for requests.
        """
        return found(self.recent(), name)


def found(records: Iterator[Recorded], name: str) -> Recorded | None:
    """The first of these whose request has this name, else whose name continues it after a dash (as vLLM's
    do), else the first whose lease has this number."""
    name, longer, of_lease = name[:NAME_CHARS_MAX], None, None
    for record in records:
        request, lease = record.asked.request, record.asked.lease
        if request == name:
            return record
        if longer is None and name and request.startswith(f"{name}-"):
            longer = record
        if of_lease is None and lease and str(lease) == name:
            of_lease = record
    return longer or of_lease
