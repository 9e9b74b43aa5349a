"""What the scheduler's side remembers of one request, from its arrival to its end."""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from kvstore.client import Fetch
from kvstore.keys import KeyChain
from kvstore.types import Hit, Reuse, Tier

from .binding import Bound

__all__ = ["Answer", "Asked", "Keys", "Tracked", "by_tier", "first_of"]

_TRIES_MAX = 4
_PAUSE_S = 0.05  # after the first save that was dropped; doubled each time


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of a lookup.

    Attributes:
        hit: a lease that its asker has to give back, or None. Every block of its load range has a slot.
        chain: the request's keys; only with a hit.
        epoch: of the daemon that granted it.
        reason: why there is none, or why it is shorter than what the daemon knows.
        bindable: False: this request must not be saved either.
        fetched, missed: blocks that had to be brought from below HOST: those that came, and the others.
        fetch_s: how long that took.
        plan, asked_s: id of the daemon's plan, and when it was asked for one; 0 = there is none.
    """

    hit: Hit | None
    chain: KeyChain | None = None
    epoch: bytes = b""
    reason: str = ""
    bindable: bool = True
    fetched: int = 0
    missed: int = 0
    fetch_s: float = 0.0
    plan: int = 0
    asked_s: float = 0.0


class Asked(Future[Answer]):
    """A lookup under way, which may go on to fetch what it found.

    Attributes:
        until: on the monotonic clock: after it the request is computed without an answer.
        fetching: blocks are being brought, so the answer is not about to come.
        dropped: nobody waits for it any more.
    """

    def __init__(self, until: float) -> None:
        super().__init__()
        self.until = until
        self.fetching = False
        self.dropped = False
        self._fetch: Fetch | None = None

    def begin(self, fetch: Fetch) -> None:
        """The courier's side: this fetch ends when nobody wants the answer any more."""
        self._fetch = fetch
        if self.dropped:
            fetch.cancel()

    def drop(self) -> bool:
        """Nobody waits for it any more; False if it will be answered all the same."""
        self.dropped = True
        fetch = self._fetch
        if fetch is not None:
            fetch.cancel()
        return self.cancel()


@dataclass(slots=True)
class Keys:
    """Keys of a request so far, and what they bind."""

    bound: Bound
    chain: KeyChain


@dataclass(slots=True, eq=False)
class Tracked:
    """One request. `keys` belongs to the courier's thread, all else to the scheduler's.

    Attributes:
        request: vLLM's.
        reuse: how far its blocks may be shared; NONE: neither looked up nor saved.
        mode: of its plan: see `Wish.plan`.
        binding: what it carries beside tokens; None where that is nothing.
        keys: of its full blocks.
        asked: a lookup under way, or its answer while it has not been used.
        answer: the lookup that the current offer, or load, relies on.
        offer: blocks [start, stop) that were offered to the engine.
        loading: they are being loaded.
        loads: their tokens by tier.
        good: leading blocks of the offer that every rank which has ended could load.
        bad: positions in the chain whose stored bytes were wrong.
        may_offer: False after a load that failed: the engine would ask for ever (LAWS E22).
        relooks: lookups asked again because the device pool, or the daemon, had changed.
        epoch: boot epoch of the daemon that `planned` is about.
        planned: leading blocks that are saved, known to the daemon, or on their way.
        closed: nothing more of it is saved.
        tries, not_before: of saves that were dropped.
        device: leading tokens that the engine itself held when the request was first admitted.
        hits: tokens loaded then, by tier.
        reason: why nothing could be loaded, or why the daemon planned so.
        ended: the engine is done with it.
        arrived_s: on the monotonic clock.
        answered: its first token was scheduled.
        plan, asked_s: as in the answer that it was first admitted with.
    """

    request: Any
    reuse: Reuse
    mode: str = ""
    binding: Future[Bound] | None = None
    keys: Keys | None = None
    asked: Asked | None = None
    answer: Answer | None = None
    offer: tuple[int, int] = (0, 0)
    loading: bool = False
    loads: dict[Tier, int] = field(default_factory=dict)
    good: int = 0
    bad: set[int] = field(default_factory=set)
    may_offer: bool = True
    relooks: int = 0
    epoch: bytes = b""
    planned: int = 0
    closed: bool = False
    tries: int = 0
    not_before: float = 0.0
    device: int = 0
    hits: dict[Tier, int] = field(default_factory=dict)
    reason: str = ""
    ended: bool = False
    arrived_s: float = field(default_factory=time.monotonic)
    answered: bool = False
    plan: int = 0
    asked_s: float = 0.0

    @property
    def first_admission(self) -> bool:
        """Has it never been preempted? What it finds when it is resumed, it has perhaps computed itself."""
        return not self.request.num_preemptions

    def known_to(self, epoch: bytes, blocks: int = 0) -> None:
        """The daemon of this epoch has the first `blocks` blocks; another one may have none."""
        if epoch != self.epoch:
            self.epoch, self.planned, self.tries = epoch, 0, 0
        self.planned = max(self.planned, blocks)

    def retry(self, planned: int) -> None:
        """Blocks from `planned` on were dropped: try again in a moment, a few times."""
        self.planned = min(self.planned, planned)
        self.tries += 1
        self.not_before = time.monotonic() + _PAUSE_S * 2**self.tries
        self.closed = self.closed or self.tries > _TRIES_MAX


def by_tier(hit: Hit, start: int, stop: int, block_tokens: int) -> dict[Tier, int]:
    """Tokens of blocks [start, stop) by the tier that they come from."""
    counts: dict[Tier, int] = {}
    for span in hit.plan.spans:
        blocks = min(stop, span.stop) - max(start, span.start)
        # Where the device was thought to hold a block that it has lost, its copy on HOST is loaded.
        tier = Tier.HOST if span.tier is Tier.GPU else span.tier
        if blocks > 0:
            counts[tier] = counts.get(tier, 0) + blocks * block_tokens
    return counts


def first_of(hits: dict[Tier, int], tokens: int) -> dict[Tier, int]:
    """The first `tokens` of them."""
    kept = {}
    for tier, count in hits.items():
        if min(count, tokens) > 0:
            kept[tier] = min(count, tokens)
        tokens -= min(count, tokens)
    return kept
