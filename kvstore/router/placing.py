"""What a front end asks of the router's core, and what it tells it in return.

    pick → sent → first_byte → finished       answered
    pick → sent → finished                    refused, died or timed out before its first byte
    pick → finished                           the caller left before anything was sent

`finished` is said exactly once for each ticket, whatever happens in between: `Flight` sees to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvstore.clock import Clock

__all__ = ["Flight", "Picker", "Placement", "Replica", "RouteRequest"]


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """One request, as far as a choice of replica needs to know it.

    Attributes:
        model: as the caller named it; "" = the caller named none.
        tokens: (n,) uint32 ids of the prompt; empty = unknown (embeddings instead of a text).
        exact: the ids are the engine's own; else pseudo-tokens, equal where the text is equal, that are
            only comparable among themselves.
        session: the same for the requests of one conversation.
        tenant: in whose name; "" where callers are not told apart.
        salt: what the engine is given as `cache_salt`; "" = none. A secret: it is in no log and no repr.
        slo_s: seconds until the first byte that the caller can live with; None = not said.
    """

    model: str
    tokens: NDArray[np.uint32]
    exact: bool
    session: str
    tenant: str = ""
    salt: str = ""
    slo_s: float | None = None

    def __repr__(self) -> str:
        return f"RouteRequest({self.model!r:.80}, {self.tokens.size} tokens, tenant {self.tenant!r:.80})"


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request goes.

    Attributes:
        replica: its name.
        url: where it listens, such as http://10.0.0.7:8000; paths are appended.
        expected_tokens: of the prompt that the core believes to be there already.
        reason: in a few words, for people.
        ticket: names this choice in what is told to the core from now on.
    """

    replica: str
    url: str
    expected_tokens: int
    reason: str
    ticket: int


@dataclass(frozen=True, slots=True)
class Replica:
    """One that the core knows.

    Attributes:
        name: as in a placement.
        url: as in a placement.
        up: whether requests are sent there just now.
    """

    name: str
    url: str
    up: bool


class Picker(Protocol):
    """The core. Every call takes microseconds and runs on the front end's event loop."""

    def pick(self, request: RouteRequest, avoid: frozenset[str]) -> Placement:
        """Choose a replica that is not in `avoid` (those that failed this very request).

        Raises:
            Unavailable: no replica may serve it.
        """
        ...

    def sent(self, ticket: int) -> None:
        """The request is on its way to its replica."""
        ...

    def first_byte(self, ticket: int, seconds: float) -> None:
        """The first byte of the answer's body came, so long after `sent`."""
        ...

    def finished(
        self,
        ticket: int,
        cached_tokens: int | None,
        prompt_tokens: int | None,
        output_tokens: int | None,
        ok: bool,
    ) -> None:
        """It is over; the ticket means nothing from now on.

        Args:
            ticket: of the placement.
            cached_tokens: of the prompt that the engine really reused; None = it did not say.
            prompt_tokens: of the prompt, as the engine counted; None = it did not say.
            output_tokens: generated; None = it did not say.
            ok: the replica is not to blame: it answered in full with a status below 500, or the caller left.
        """
        ...

    def replicas(self) -> Sequence[Replica]:
        """All that are known, for `/health` and `/v1/models`."""
        ...


class Flight:
    """A request between `pick` and `finished`: leaving the `with` block finishes it, exactly once.

    Args:
        picker: who gave the ticket.
        ticket: of the placement.
        clock: monotonic.
    """

    def __init__(self, picker: Picker, ticket: int, clock: Clock) -> None:
        self._picker = picker
        self._ticket = ticket
        self._clock = clock
        self._sent_s = clock.now()
        self.failed = False
        """Set it where the replica is to blame."""
        self._heard: tuple[int | None, int | None, int | None] = (None, None, None)

    def __enter__(self) -> Flight:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._picker.finished(self._ticket, *self._heard, not self.failed)

    def sent(self) -> None:
        """The request goes out now."""
        self._sent_s = self._clock.now()
        self._picker.sent(self._ticket)

    def first_byte(self) -> None:
        """The first byte of the body is here."""
        self._picker.first_byte(self._ticket, self._clock.now() - self._sent_s)

    def heard(self, cached_tokens: int | None, prompt_tokens: int | None, output_tokens: int | None) -> None:
        """What the engine says it took, as in `finished`."""
        self._heard = cached_tokens, prompt_tokens, output_tokens
