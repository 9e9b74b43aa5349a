"""Requests in time, with the blocks of their prompts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Workload"]


@dataclass(frozen=True, slots=True)
class Workload:
    """m requests in the order of arrival, m >= 1.

    Attributes:
        arrivals_s: (m,) from 0 on, not falling.
        input_tokens, output_tokens: (m,).
        chains: (m,) ids of each prompt's blocks in order, the last one perhaps not full; an id stands for its
            block and all before it.
        sessions: (m,) id of the conversation.
        block_tokens: tokens in a full block.
        sha256: of the file; "" = made up.
    """

    arrivals_s: NDArray[np.float64]
    input_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    chains: tuple[tuple[int, ...], ...]
    sessions: tuple[str, ...]
    block_tokens: int
    sha256: str = ""

    def __len__(self) -> int:
        return len(self.chains)

    def first(self, count: int) -> Workload:
        """The first requests alone."""
        return Workload(
            self.arrivals_s[:count],
            self.input_tokens[:count],
            self.output_tokens[:count],
            self.chains[:count],
            self.sessions[:count],
            self.block_tokens,
            self.sha256,
        )

    def filled_at(self, blocks: int) -> int:
        """How many requests come before this many distinct blocks have: until then a fleet of that size has
        room for everything, and what it computes is warm-up. All of them where so many never come."""
        seen: set[int] = set()
        for number, chain in enumerate(self.chains):
            seen.update(chain)
            if len(seen) > blocks:
                return number
        return len(self)
