"""What a routing policy sees of the world, and what it answers. Pure: no loop, no wire, no clock.

The live router and `kvstore simulate` run the same policies. Whoever asks builds a `Fleet` of the replicas
that may serve *now* (those that drain or are down are not in it), so a policy never has to ask who is alive.
Per-replica values are parallel arrays; position i means the same replica in all of them and nothing between
two calls: whatever a policy remembers, it remembers by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import BadRequest

__all__ = [
    "TIERS",
    "Ask",
    "Choice",
    "Fleet",
    "Policy",
    "Ties",
    "first_tie",
    "lowest",
    "random_ties",
]

# Columns of `Fleet.matched_tokens` and `tier_s_per_token`.
TIERS = ("GPU", "HOST", "NVME", "REMOTE")

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

Ties = Callable[[Ints], int]
"""One of several equally good replicas: (k,) ascending positions, k >= 1 → one of them."""

# Scores that differ by less than this share are equal: sums of seconds in another order are.
_EQUAL = 1e-9


@dataclass(frozen=True, slots=True)
class Ask:
    """One request.

    Attributes:
        tokens: of the prompt, 1 at least.
        session: id of the conversation; "" = none.
        head: digest of the first tokens of the prompt, the same number for all requests; b"" = none.
        slo_s: seconds to the first token that the caller wants; None = as soon as possible.
        universal_tokens: leading tokens that nearly every request shares (`UniversalPrefix` finds them).
    """

    tokens: int
    session: str = ""
    head: bytes = b""
    slo_s: float | None = None
    universal_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Fleet:
    """The n replicas that may serve this request, n >= 1.

    Attributes:
        names: (n,) ids that stay with a replica for its life. What is hashed is the name: a replica that
            leaves moves only its own sessions.
        matched_tokens: (n, 4) tokens of this prompt, nested: column t is the longest prefix all of whose
            blocks lie in the tiers 0..t of `TIERS`. Rows do not decrease.
        assigned: (n,) requests ever sent there. One that joins late starts from the least of the others.
        in_flight: (n,) requests sent there that have not ended.
        queue_s: (n,) predicted seconds until it would begin with this request.
        blocks: (n,) blocks that it holds: its footprint.
        free_blocks: (n,) blocks that no running request references: free ones, and idle ones that can be
            evicted. `capacity_blocks` where a replica does not tell.
        capacity_blocks: (n,) blocks that it can hold.
        prefill_tokens_per_s: (n,) above 0.
        tier_s_per_token: (n, 4) seconds to obtain one matched token from each tier; 0 for GPU.
        block_tokens: tokens in a block.
    """

    names: tuple[str, ...]
    matched_tokens: Ints
    assigned: Ints
    in_flight: Ints
    queue_s: Floats
    blocks: Ints
    free_blocks: Ints
    capacity_blocks: Ints
    prefill_tokens_per_s: Floats
    tier_s_per_token: Floats
    block_tokens: int = 16

    def __len__(self) -> int:
        return len(self.names)

    @property
    def longest_tokens(self) -> Ints:
        """(n,) the longest prefix on any tier of each."""
        return self.matched_tokens[:, -1]

    def check(self) -> None:
        """For tests and edges: everything above, as far as it can be looked at. O(n).

        Raises:
            BadRequest: names the field.
        """
        count, wide = len(self.names), len(TIERS)
        if not count or len(set(self.names)) != count:
            raise BadRequest("fleet.names: need at least one replica, and no name twice")
        for field in ("matched_tokens", "tier_s_per_token"):
            if getattr(self, field).shape != (count, wide):
                raise BadRequest(f"fleet.{field}: need {count} × {wide} values")
        for field in (
            "assigned",
            "in_flight",
            "queue_s",
            "blocks",
            "free_blocks",
            "capacity_blocks",
            "prefill_tokens_per_s",
        ):
            values = getattr(self, field)
            if values.shape != (count,) or not np.all(values >= 0) or not np.all(np.isfinite(values)):
                raise BadRequest(f"fleet.{field}: need {count} finite values of 0 at least")
        if np.any(np.diff(self.matched_tokens, axis=1) < 0) or np.any(self.matched_tokens < 0):
            raise BadRequest("fleet.matched_tokens: rows must not decrease; column t counts the tiers 0..t")
        if not np.all(self.prefill_tokens_per_s > 0):
            raise BadRequest("fleet.prefill_tokens_per_s: need more than 0")
        if not np.all(self.tier_s_per_token >= 0):  # NaN too
            raise BadRequest("fleet.tier_s_per_token: need 0 at least")


@dataclass(frozen=True, slots=True)
class Choice:
    """Where a request goes.

    Attributes:
        replica: position in the fleet that was asked about.
        score_s: (n,) what was compared, in seconds, the smallest best; None where no seconds were compared.
        reason: one clause, for people and logs; holds nothing of the prompt.
    """

    replica: int
    score_s: Floats | None = None
    reason: str = ""


class Policy(Protocol):
    """One way to choose. It looks at nothing but its arguments and what it remembers of earlier ones."""

    @property
    def name(self) -> str:
        """As on the command line."""

    def pick(self, ask: Ask, fleet: Fleet, ties: Ties) -> Choice:
        """A replica of the fleet for this request. A few array operations: some 10 to 60 µs at n = 8."""


def first_tie(equal: Ints) -> int:
    """The smallest position. For golden numbers only: a fleet that always did this would send every miss to
    one replica."""
    return int(equal[0])


def random_ties(random: Random) -> Ties:
    """By lot; what routers use."""

    def pick(equal: Ints) -> int:
        return int(equal[0]) if len(equal) == 1 else int(equal[random.randrange(len(equal))])

    return pick


def lowest(values: Ints | Floats, among: Ints | None = None) -> Ints:
    """Positions of the smallest value, ascending; sums of seconds within rounding count as equal.

    Args:
        values: (n,) 0 at least; infinity = not this one.
        among: only these positions.
    """
    if among is None:
        least = values.min()
        return np.flatnonzero(values <= least + abs(least) * _EQUAL)
    chosen = values[among]
    least = chosen.min()
    result: Ints = among[chosen <= least + abs(least) * _EQUAL]
    return result
