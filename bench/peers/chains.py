"""Chains of block hashes that bench.routing_index plants in every index it measures: the same for all.

Half of the blocks are in chains of 8,000, half in chains of 1,000. A chain belongs to one worker; another one
holds its first half, so that an answer has two parts.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["LENGTHS", "Chain", "Event", "chains", "events"]

LENGTHS = (1000, 8000)
_HASH_BITS = 63


@dataclass(frozen=True, slots=True)
class Chain:
    """One prompt that is there.

    Attributes:
        hashes: of its blocks.
        owner, half_owner: workers that hold all of it, and the first half.
    """

    hashes: list[int]
    owner: int
    half_owner: int


@dataclass(frozen=True, slots=True)
class Event:
    """Blocks [start, stop) of a chain were stored by a worker."""

    chain: Chain
    worker: int
    start: int
    stop: int

    @property
    def parent(self) -> int | None:
        """Hash of the block before."""
        return self.chain.hashes[self.start - 1] if self.start else None

    @property
    def hashes(self) -> list[int]:
        """Of its blocks."""
        return self.chain.hashes[self.start : self.stop]


def chains(blocks: int, workers: int, seed: int) -> list[Chain]:
    """Of at least so many blocks."""
    source = random.Random(seed)
    made: list[Chain] = []
    for length in LENGTHS:
        for _ in range(-(-blocks // (len(LENGTHS) * length))):
            hashes = [source.getrandbits(_HASH_BITS) | 1 for _ in range(length)]
            worker = source.randrange(workers)
            made.append(Chain(hashes, worker, (worker + 1) % workers))
    source.shuffle(made)
    return made


def events(planted: list[Chain], event_blocks: int, mixed: bool) -> Iterator[Event]:
    """What plants them, in events of so many blocks.

    Args:
        mixed: every chain grows by one event, in random order, then again: blocks of a chain lie far apart
            then. Else one chain after the other.
    """
    source = random.Random(0)
    starts = range(0, max(len(chain.hashes) for chain in planted), event_blocks) if mixed else [-1]
    for start in starts:
        for chain in source.sample(planted, len(planted)) if mixed else planted:
            length = len(chain.hashes)
            for at in range(start, start + 1) if mixed else range(0, length, event_blocks):
                for worker, stop in ((chain.owner, length), (chain.half_owner, length // 2)):
                    if at < stop:
                        yield Event(chain, worker, at, min(at + event_blocks, stop))
