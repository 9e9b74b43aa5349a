"""Which replica holds which leading blocks of a prompt: the native index, and where its facts come from.

A replica's blocks are known in one of two ways:

  told      a feed (`Sink`) tells what it stores and removes: exact, as fresh as its events
  assumed   nobody tells; what was sent there is assumed to stay, an LRU of as many blocks as it can hold

Where a feed is in doubt (it was never heard, or something may be missing) what is assumed counts beside what
was told. In all cases what is being sent right now counts as held for some seconds, so that a burst of one
new prompt does not scatter before its first block is stored. Those are hints in two small indexes that take
turns: the older one is cleared when the younger is as old as a hint may be, so each lives for one to two
such spans.

Every chain has one name here, whatever hash an engine uses: see `chain_names.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstore._native import EngineBlocks, PrefixLru, RouterIndex
from kvstore.clock import Clock
from kvstore.errors import BadRequest
from kvstore.router.chain_names import ChainNames
from kvstore.router.kv_schema import Removed, Stored
from kvstore.types import Tier

__all__ = ["HINT_S", "Holdings", "Prefixes"]

Names = NDArray[np.uint64]

HINT_S = 2.0
# Prompts sent within two spans of hints; 64 B each block.
_HINT_BLOCKS_MAX = 1 << 18
_HINTS_MAX = 1 << 14
REPLICAS_MAX = 320
# What is told, what is told anew, what is assumed.
_COLUMNS = 3
COLUMN_OF: Mapping[Tier, int] = {
    Tier.GPU: 0,
    Tier.HOST: 1,
    Tier.NVME: 2,
    Tier.PEER: 3,
    Tier.REMOTE: 3,
}
# An engine names more blocks than its device holds: those on lower tiers keep their names, too.
_ENGINE_BLOCKS_PER_BLOCK = 4


@dataclass(slots=True)
class _Hints:
    """One span's worth, and what was put into it: removing that empties it again."""

    index: RouterIndex
    put: list[tuple[int, Names]]


class Prefixes:
    """Of one deployment: replicas with the same model, tokenizer and block size.

    Args:
        names: how chains are named.
        nodes_max: distinct blocks known at a time, over all replicas: the cap of the index's memory.
        replicas_max: replicas at a time, 1 to 320; each takes up to three columns.
        clock: monotonic.

    Raises:
        BadRequest: names the argument.
    """

    def __init__(self, names: ChainNames, nodes_max: int, replicas_max: int, clock: Clock) -> None:
        if not 1 <= replicas_max <= REPLICAS_MAX:
            raise BadRequest(f"replicas_max: need 1 to {REPLICAS_MAX}, got {replicas_max}")
        self.names = names
        self.index = RouterIndex(nodes_max, _COLUMNS * replicas_max)
        self._hints = [_Hints(RouterIndex(_HINT_BLOCKS_MAX, replicas_max), []) for _ in range(2)]
        self._turned_s = clock.now()
        self._clock = clock

    def join(self, capacity_blocks: int, *, told: bool) -> Holdings:
        """A new replica, which holds nothing yet.

        Raises:
            BadRequest: capacity_blocks is below 1.
        """
        if capacity_blocks < 1:
            raise BadRequest(f"capacity_blocks: need 1 at least, got {capacity_blocks}")
        numbers = {hints.index.add_replica() for hints in self._hints}
        assert len(numbers) == 1, "a replica has the same column in both"
        return Holdings(self, numbers.pop(), capacity_blocks, told)

    def matched_blocks(self, chain: Names, holdings: Sequence[Holdings]) -> NDArray[np.int64]:
        """(n, 4) leading blocks of the chain that each replica holds on the tiers 0..t.

        Hints count for the device. Some 10 µs for a thousand blocks.
        """
        self._turn()
        known = self.index.find(chain, 8)
        found: NDArray[np.int64] = known[[each.column for each in holdings]].astype(np.int64)
        doubted = [place for place, each in enumerate(holdings) if each.doubt]
        if doubted:
            assumed = known[[holdings[place].assumed_column for place in doubted]]
            found[doubted] = np.maximum(found[doubted], assumed)
        for hints in self._hints:
            if hints.put:
                hinted = hints.index.find(chain, 8)
                np.maximum(found, hinted[[each.hint_column for each in holdings]], out=found)
        return found

    def hint(self, holdings: Holdings, chain: Names) -> None:
        """These blocks will soon be on that replica's device."""
        self._turn()
        hints = self._hints[0]
        if len(chain) and len(hints.put) < _HINTS_MAX:
            hints.index.stored(holdings.hint_column, 0, chain, 8)
            hints.put.append((holdings.hint_column, chain))

    def _turn(self) -> None:
        if self._clock.now() - self._turned_s < HINT_S:
            return
        self._turned_s = self._clock.now()
        young, old = self._hints
        for column, chain in old.put:
            old.index.removed(column, 0, chain, 8)
        old.put.clear()
        self._hints = [old, young]


class Holdings:
    """What one replica holds: the `Sink` of its feed, or the LRU that stands for it.

    Attributes:
        column, assumed_column: of the index: what was told, what is assumed; the same where nobody tells.
        hint_column: of the hints.
        capacity_blocks: of its device.
        told: a feed tells.
        doubt: why what is known may be wrong; "" = it holds.
        lost_batches: of events, for good.
        stored_blocks, orphaned_blocks: told so far; those whose parent nobody has told of cannot be found.
    """

    def __init__(self, prefixes: Prefixes, hint_column: int, capacity_blocks: int, told: bool) -> None:
        self._prefixes = prefixes
        self._index = prefixes.index
        self.hint_column = hint_column
        self.capacity_blocks = capacity_blocks
        self.told = told
        self.assumed_column = self._index.add_replica()
        self.column = self._index.add_replica() if told else self.assumed_column
        self._engine = self._new_engine()
        self._next: tuple[int, EngineBlocks] | None = None  # column and names of the truth that is being told
        self._assumed = PrefixLru(capacity_blocks)
        self.doubt = "nothing was told yet" if told else ""
        self.lost_batches = 0
        self.stored_blocks = 0
        self.orphaned_blocks = 0

    def _new_engine(self) -> EngineBlocks:
        return EngineBlocks(_ENGINE_BLOCKS_PER_BLOCK * self.capacity_blocks)

    def blocks(self) -> NDArray[np.int64]:
        """(4,) blocks by tier: as told, or, in doubt, what is assumed where that is more."""
        told = self._index.blocks(self.column)
        return np.maximum(told, self._index.blocks(self.assumed_column)) if self.doubt else told

    def assume(self, chain: Names) -> None:
        """A prompt is computed there."""
        if not len(chain):
            return
        kept = chain[: self.capacity_blocks]
        gone = self._assumed.touch(kept)
        self._index.stored(self.assumed_column, 0, kept, 8)
        if len(gone):
            self._index.removed(self.assumed_column, 0, gone, 8)

    def forget(self) -> None:
        """The replica may have been started anew: what was assumed of it is gone."""
        self._assumed.clear()
        self._index.cleared(self.assumed_column)

    # ---- Sink ----------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """See `Sink`: what is known goes on being asked until `ready`."""
        self._drop_next()
        self._next = (self._index.add_replica(), self._new_engine())

    def stored(self, event: Stored) -> None:
        """See `Sink`."""
        column, engine = self._next or (self.column, self._engine)
        tier = COLUMN_OF[event.tier]
        chain = self._prefixes.names.of_event(event, engine, tier)
        count = len(event)
        self.stored_blocks += count
        self.orphaned_blocks += count - len(chain) // 8
        if chain:
            self._index.stored(column, tier, chain, 8)
        gone = engine.take_evicted(tier)
        if gone:
            self._index.removed(column, tier, gone, 8)

    def removed(self, event: Removed) -> None:
        """See `Sink`."""
        column, engine = self._next or (self.column, self._engine)
        tier = COLUMN_OF[event.tier]
        chain = self._prefixes.names.of_removal(event, engine, tier)
        if chain:
            self._index.removed(column, tier, chain, 8)

    def cleared(self, tier: Tier | None) -> None:
        """See `Sink`."""
        column, engine = self._next or (self.column, self._engine)
        number = -1 if tier is None else COLUMN_OF[tier]
        self._index.cleared(column, number)
        engine.clear(number)

    def ready(self) -> None:
        """See `Sink`."""
        if self._next is not None:
            old = self.column
            (self.column, self._engine), self._next = self._next, None
            self._index.remove_replica(old)
        self.doubt = ""

    def stale(self, reason: str) -> None:
        """See `Sink`."""
        self.doubt = reason

    def lost(self, batches: int) -> None:
        """See `Sink`."""
        self.lost_batches += batches

    def _drop_next(self) -> None:
        if self._next is not None:
            self._index.remove_replica(self._next[0])
            self._next = None
