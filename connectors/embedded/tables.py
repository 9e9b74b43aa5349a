"""Block tables: who decides which blocks a request gets, and which of them already hold its KV.

The engine asks through `Tables` and knows nothing of tiers. What each side may rely on:

- `begin` names blocks for the whole of `tokens`, reused blocks first. The engine never writes into a block of
  the reused prefix, so those may be shared with other tables.
- Reuse is whole blocks and at most `len(tokens) − 1` tokens: the last is always computed, for its logits.
- A table may be split: its head is ready, and its tail, up to `tail_tokens`, is loading. The engine then
  computes from the front, each chunk only as far as it has claimed; where they meet, `join` names the rest.
  What it has claimed is its own, anything else may be written to at any time.
- Until `ready` is True the engine leaves the table's blocks alone, and `reused_tokens` may change.
- The engine computes only with ready tables, and calls nothing of `Tables` while the model computes.
- Each table that `begin` returned is finished exactly once: at the end, on abort (also while it loads), on
  preemption. Its blocks may come back later (copies from them end first): `grow` says False until then.
- `filled` gets the engine's own list, which goes on growing: what lies before `computed` stays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from .request import Report, StepTime

__all__ = ["Joined", "LocalTables", "Reuse", "Table", "Tables", "blocks_for"]

Reuse = Literal["none", "own", "group"]


@dataclass(slots=True)
class Table:
    """Blocks of one request, in order of position. `handle` belongs to the Tables that made it.

    `tail_tokens`: until `join`, what lies before this many tokens is loading from its end; 0 = nothing is.
    """

    blocks: list[int]
    reused_tokens: dict[str, int] = field(default_factory=dict)
    handle: object = None
    tail_tokens: int = 0

    @property
    def reused(self) -> int:
        """Tokens at the front whose KV is in the blocks without having been computed now."""
        return sum(self.reused_tokens.values())


@dataclass(frozen=True, slots=True)
class Joined:
    """A tail was loaded right behind what is computed: so many tokens by the tier they came from."""

    tokens: Mapping[str, int]


class Tables(Protocol):
    """Allocates block tables. All calls come from one thread.

    No call waits for a load or a save. `begin`, `grow`, `finish` and `poll` may ask a daemon and, where idle
    blocks have to leave the device first, copy those down: bounded by the deadlines and rounds of the client.
    """

    @property
    def block_tokens(self) -> int:
        """Tokens per block."""

    @property
    def capacity_blocks(self) -> int:
        """The most blocks that one table could ever have, when nothing else runs."""

    def begin(
        self, request_id: str, tokens: Sequence[int], reuse: Reuse, ahead_tokens: int = 0
    ) -> Table | None:
        """Blocks for all of `tokens`. None: no room now, ask again later (nothing was taken).

        Args:
            ahead_tokens: of earlier prompts, which are computed before its first.
        """

    def ready(self, table: Table) -> bool:
        """Whether loads into the table have ended. True is final, and so is `reused_tokens` then.

        A load that fails is not an error: `reused_tokens` shrinks to what arrived.
        """

    def claim(self, table: Table, computed: int, wanted: int) -> int:
        """The engine wants to compute tokens [computed, wanted): up to where it may, now and for ever.

        Less than wanted only while a tail is loading; `computed` = nothing: ask again at the next step.
        """

    def head_left(self, table: Table, computed: int) -> int:
        """Tokens from `computed` to where computing is expected to meet the tail; very many = to no tail."""

    def join(self, table: Table, computed: int) -> Joined | None:
        """Whether a tail was loaded that begins behind these tokens. It is part of the table from now on."""

    def grow(self, table: Table, blocks: int) -> bool:
        """Append this many fresh blocks to `table.blocks`. False: no room, nothing changed."""

    def filled(self, table: Table, tokens: Sequence[int], computed: int) -> None:
        """KV of `tokens[:computed]` is in the blocks now. Called whenever another block became full."""

    def finish(self, table: Table) -> None:
        """The engine is done with the table and will not touch its blocks again."""

    def computed(self, step: StepTime) -> None:
        """A step has ended: what it computed and how long it took. For statistics; costs next to nothing."""

    def ended(self, report: Report) -> None:
        """A request has ended: its account. For statistics; costs next to nothing."""

    def poll(self) -> None:
        """Once per step, before anything else: take up what happened meanwhile."""

    def close(self) -> None:
        """After the last table was finished. Idempotent."""


def blocks_for(tokens: int, block_tokens: int) -> int:
    """Blocks that hold this many tokens."""
    return -(-tokens // block_tokens)


class LocalTables:
    """A free list and no reuse: the uncached oracle, and what an engine falls back to without a daemon.

    Raises:
        ValueError: blocks or block_tokens is not positive.
    """

    def __init__(self, blocks: int, block_tokens: int) -> None:
        if blocks < 1 or block_tokens < 1:
            raise ValueError(f"blocks ({blocks}) and block_tokens ({block_tokens}) must be at least 1")
        self._block_tokens, self._blocks = block_tokens, blocks
        self._free = list(range(blocks - 1, -1, -1))
        self._out: set[int] = set()

    @property
    def block_tokens(self) -> int:
        return self._block_tokens

    @property
    def capacity_blocks(self) -> int:
        return self._blocks

    @property
    def free_blocks(self) -> int:
        """Blocks that no table holds."""
        return len(self._free)

    def begin(
        self, request_id: str, tokens: Sequence[int], reuse: Reuse, ahead_tokens: int = 0
    ) -> Table | None:
        taken = self._take(blocks_for(len(tokens), self._block_tokens))
        return None if taken is None else Table(blocks=taken)

    def ready(self, table: Table) -> bool:
        return True

    def claim(self, table: Table, computed: int, wanted: int) -> int:
        return wanted

    def head_left(self, table: Table, computed: int) -> int:
        return 0

    def join(self, table: Table, computed: int) -> Joined | None:
        return None

    def grow(self, table: Table, blocks: int) -> bool:
        taken = self._take(blocks)
        if taken is None:
            return False
        table.blocks.extend(taken)
        return True

    def filled(self, table: Table, tokens: Sequence[int], computed: int) -> None:
        """Nothing is kept."""

    def finish(self, table: Table) -> None:
        """Raises RuntimeError when a block of the table is not out, as after a second finish."""
        if not self._out.issuperset(table.blocks):
            raise RuntimeError("a table was finished twice, or holds blocks that were never handed out")
        self._out.difference_update(table.blocks)
        self._free.extend(reversed(table.blocks))
        table.blocks = []

    def computed(self, step: StepTime) -> None:
        """Nobody to tell."""

    def ended(self, report: Report) -> None:
        """Nobody to tell."""

    def poll(self) -> None:
        """Nothing happens meanwhile."""

    def close(self) -> None:
        """Nothing to give back."""

    def _take(self, count: int) -> list[int] | None:
        if count > len(self._free):
            return None
        taken = [self._free.pop() for _ in range(count)]
        self._out.update(taken)
        return taken
