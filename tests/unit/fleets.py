"""Fleets for tests of routing: what a test does not say is the same for all replicas."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvstore.policy.routing.base import Fleet

__all__ = ["fleet"]

# Units of the other arrays: so many tokens a second, so many blocks of 16 tokens.
RATE, CAPACITY = 10_000.0, 10_000


def fleet(matched: Sequence[int] | Sequence[Sequence[int]], **given: object) -> Fleet:
    """Of as many replicas as there are matches.

    Args:
        matched: (n,) tokens, all on the device, or (n, 4) nested by tier.
        given: fields of `Fleet`, as sequences or one number for all.
    """
    rows = np.array([[m] * 4 if isinstance(m, int) else list(m) for m in matched], np.int64)
    count = len(rows)

    def ints(name: str, default: int) -> np.ndarray:
        return np.broadcast_to(np.array(given.pop(name, default), np.int64), (count,)).copy()

    def floats(name: str, default: float) -> np.ndarray:
        return np.broadcast_to(np.array(given.pop(name, default), float), (count,)).copy()

    made = Fleet(
        names=tuple(given.pop("names", [f"replica-{at}" for at in range(count)])),
        matched_tokens=rows,
        assigned=ints("assigned", 0),
        in_flight=ints("in_flight", 0),
        queue_s=floats("queue_s", 0.0),
        blocks=ints("blocks", 0),
        free_blocks=ints("free_blocks", CAPACITY),
        capacity_blocks=ints("capacity_blocks", CAPACITY),
        prefill_tokens_per_s=floats("prefill_tokens_per_s", RATE),
        tier_s_per_token=np.broadcast_to(
            np.array(given.pop("tier_s_per_token", [0.0] * 4), float), (count, 4)
        ).copy(),
        block_tokens=given.pop("block_tokens", 16),
    )
    assert not given, f"no such field: {given}"
    made.check()
    return made
