"""A request on its way through the engine.

    from \\ to   WAITING   LOADING   RUNNING   DONE
    WAITING        –       begin       –      abort, no room
    LOADING     too long     –       ready    abort
    RUNNING     preempt      –         –      abort, last token, no room

WAITING holds no table; LOADING and RUNNING hold one; every way out of them passes `Tables.finish`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from .account import Account
from .request import FinishReason, Report, Request
from .sampler import Sampled, Sampler
from .tables import Joined, Reuse, Table

__all__ = ["Live", "Phase"]


class Phase(Enum):
    """Where a request stands."""

    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    DONE = "done"


_MOVES = {
    Phase.WAITING: {Phase.LOADING, Phase.DONE},
    Phase.LOADING: {Phase.WAITING, Phase.RUNNING, Phase.DONE},
    Phase.RUNNING: {Phase.WAITING, Phase.DONE},
    Phase.DONE: set[Phase](),
}


@dataclass(slots=True, eq=False)
class Live:
    """State of one unfinished request. `order` is its arrival: the smaller, the older.

    `computed` tokens of `tokens` have KV in the table's blocks. `account` says where it came from, over all
    admissions of the request.
    """

    request: Request
    order: int
    added_s: float
    tokens: list[int]
    reuse: Reuse
    sampler: Sampler | None
    phase: Phase = Phase.WAITING
    table: Table | None = None
    computed: int = 0
    account: Account = field(default_factory=Account)
    counted: bool = False
    preemptions: int = 0
    tied_tokens: int = 0
    first_token_s: float | None = None
    loading_since_s: float = 0.0
    no_room_since_s: float | None = None

    @property
    def pending(self) -> int:
        """Tokens without KV; one of them is the newest token of a decode."""
        return len(self.tokens) - self.computed

    @property
    def generated(self) -> int:
        """Tokens sampled so far."""
        return len(self.tokens) - len(self.request.prompt)

    def held(self) -> Table:
        """The table of a request that is LOADING or RUNNING."""
        if self.table is None:
            raise RuntimeError(f"request {self.request.id!r} is {self.phase.value} and holds no table")
        return self.table

    def move(self, phase: Phase) -> None:
        """Change phase. Raises RuntimeError for a step that the table above does not have."""
        if phase not in _MOVES[self.phase]:
            name = self.request.id
            raise RuntimeError(f"request {name!r} cannot go from {self.phase.value} to {phase.value}")
        self.phase = phase

    def begin_computing(self, block_tokens: int) -> None:
        """The table is ready: computing starts behind what it reuses.

        Raises:
            RuntimeError: the table reuses a part of a block, or the last token too.
        """
        reused = self.held().reused
        if reused % block_tokens or not 0 <= reused < len(self.tokens):
            raise RuntimeError(
                f"a table reuses {reused} of {len(self.tokens)} tokens; it may reuse whole blocks of "
                f"{block_tokens} tokens, but never the last token"
            )
        self.computed = reused
        self.counted = False
        self.move(Phase.RUNNING)

    def record_computed(self, count: int) -> None:
        """`count` more tokens have KV."""
        if not self.counted:  # the first chunk behind a reused prefix: only now it is sure to be used
            self.counted = True
            self.account.brought(0, self.held().reused_tokens)
        self.account.computed(self.computed, self.computed + count)
        self.computed += count

    def join(self, joined: Joined) -> None:
        """Computing has met what was loaded behind it."""
        self.account.brought(self.computed, joined.tokens)
        self.computed += sum(joined.tokens.values())

    def record_token(self, sampled: Sampled, now_s: float) -> None:
        """One more token of output."""
        self.tokens.append(sampled.token)
        self.tied_tokens += sampled.tied
        if self.first_token_s is None:
            self.first_token_s = now_s

    def report(self, reason: FinishReason, now_s: float) -> Report:
        """The account at the end."""
        size = len(self.request.prompt)
        return Report(
            request_id=self.request.id,
            prompt_tokens=size,
            reused=self.account.reused(size),
            fresh_tokens=self.account.fresh_tokens(size),
            recomputed_tokens=self.account.recomputed_tokens,
            ttft_s=None if self.first_token_s is None else self.first_token_s - self.added_s,
            total_s=now_s - self.added_s,
            tokens=tuple(self.tokens[size:]),
            finish_reason=reason,
            preemptions=self.preemptions,
            tied_tokens=self.tied_tokens,
            prefill_s=self._prefill_s(),
        )

    def _prefill_s(self) -> float | None:
        if self.first_token_s is None or self.preemptions:
            return None
        return max(0.0, self.first_token_s - self.loading_since_s)
