"""A split: the tail of a match is loading, from its last block down, while its head is computed.

    begin    StoreTables begins the load of everything that the device lacks, descending; but what leads on
             HOST, if there is more below, is loaded first, which takes no time
    claim    before each chunk the engine claims its blocks; the load claims what it is about to copy
    join     they have met: what was loaded follows what was computed, and all of it is committed

Chunks of the head end where the two are expected to meet: as the plan predicts it, behind that by the pace of
both so far. Where they do meet is found, not planned: a load that is faster than predicted gets further down,
one that is slower, fails or stalls leaves more to compute. Until then nothing behind the computed part has a
key on the device, so nobody can match it. A block is written by one of the two only: kvstore/client/tails.py.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from kvstore.types import Choice, Hit, Span, Tier

if TYPE_CHECKING:
    from kvstore.client import Table, TailLoad

__all__ = ["Split", "by_tier", "part"]


@dataclass(frozen=True, slots=True)
class Split:
    """Of one table.

    Attributes:
        hit: what is loaded, at most.
        load: the load; it ends by itself where computing meets it.
        generation: attach that it belongs to.
        planned: first block to load, by the plan: where the two meet, if it is a plan to split.
        began_s: on the monotonic clock.
    """

    hit: Hit
    load: TailLoad
    generation: int
    planned: int
    began_s: float = field(default_factory=time.monotonic)

    @property
    def stop(self) -> int:
        """Behind the last block of the tail."""
        return self.hit.plan.load_stop

    def head_left(self, computed: int, block_tokens: int, token_s: float) -> int:
        """Tokens from `computed` on until computing meets the load, at the pace of both so far.

        Args:
            token_s: to compute one token; 0 = not known.
        """
        lowest = self.load.lowest
        gap, left = max(0, lowest * block_tokens - computed), self.planned * block_tokens - computed
        # What has been told of a load is late by what computing leaves it of the cores: the plan comes first.
        if left > 0 and self.hit.plan.choice is Choice.SPLIT:
            return min(left, gap)
        loaded = (self.stop - lowest) * block_tokens
        if not (loaded and token_s):
            return gap // 2
        load_s = (time.monotonic() - self.began_s) / loaded
        return int(gap * load_s / (load_s + token_s))


def part(hit: Hit, table: Table, start: int, stop: int) -> Hit:
    """The same hit for the load of blocks [start, stop), as the table, newer than it, says where they are."""
    here = min(max(table.load_stop, start), stop)
    below = [span for span in hit.plan.spans if span.tier not in (Tier.GPU, Tier.HOST)]
    spans = [Span(Tier.HOST, start, here)]
    spans += [replace(span, start=max(here, span.start)) for span in below if span.stop > here]
    plan = replace(hit.plan, load_start=start, load_stop=stop, spans=tuple(spans))
    first = start - table.load_start
    return replace(hit, plan=plan, slots=table.slots[first : first + stop - start])


def by_tier(hit: Hit, start: int, stop: int) -> dict[Tier, int]:
    """Blocks [start, stop) of a hit's load range by the tier they came from."""
    counts: dict[Tier, int] = {}
    for span in hit.plan.spans:
        blocks = min(stop, span.stop) - max(start, span.start)
        if blocks > 0:
            counts[span.tier] = counts.get(span.tier, 0) + blocks
    # What was on the device or on HOST when it was looked up, and is not now, has come from NVME.
    counts[Tier.NVME] = counts.get(Tier.NVME, 0) + stop - start - sum(counts.values())
    return {tier: blocks for tier, blocks in counts.items() if blocks}
