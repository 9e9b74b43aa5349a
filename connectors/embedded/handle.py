"""What StoreTables knows of one table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvstore.keys import KeyChain
from kvstore.types import Hit, Reuse

from .splitting import Split

if TYPE_CHECKING:
    from kvstore.client import Load, Save

__all__ = ["Handle"]


@dataclass(slots=True)
class Handle:
    """What StoreTables knows of one table.

    Attributes:
        tokens: the tokens that the table is for, as far as known.
        chain: keys of those tokens' full blocks, None when nothing may be reused or no daemon was there.
        full: leading blocks that hold valid KV.
        lease: of the table, 0 when it was allocated here.
        generation: attach that the lease belongs to.
        committed: of those, leading blocks whose keys the daemon knows.
        saved: leading blocks handed to a save (or on HOST before).
        behind: a save is still owed: one was put off, or a new daemon has not got these blocks.
        sound: after a load with a bad block, leading blocks whose bytes are verified; only those are
            committed, and nothing is saved (LAWS A4). None: no block was bad (some may never have come).
        load: the load under way.
        loading: what it loads.
        split: the tail that is loading while what lies before it is computed.
        skip: [start, stop) blocks that a tail brought: they are not saved again.
        saves: under way, oldest first, and their first blocks.
        again: from here on some were just being filled by somebody, who may have given up: the last save asks
            once more. Where computing meets a tail, that is the tail's own fetch.
        finished: only the saves keep the table alive.
    """

    tokens: Sequence[int]
    reuse: Reuse
    chain: KeyChain | None
    full: int = 0
    lease: int = 0
    generation: int = 0
    committed: int = 0
    saved: int = 0
    behind: bool = False
    sound: int | None = None
    load: Load | None = None
    loading: Hit | None = None
    split: Split | None = None
    skip: tuple[int, int] = (0, 0)
    saves: list[tuple[int, Save]] = field(default_factory=list)
    again: int | None = None
    finished: bool = False

    def unsaved(self, stop: int) -> list[tuple[int, int]]:
        """Ranges of the first `stop` blocks that are to be saved."""
        if self.sound is not None:
            return []
        before = (self.saved, min(stop, self.skip[0]))
        behind = (max(self.saved, self.skip[1]), stop)
        return [(start, last) for start, last in (before, behind) if start < last]

    def may_commit(self, chain: KeyChain | None, stop: int) -> int:
        """Of the first `stop` blocks, those that have keys and bytes to stand for."""
        keys = len(chain) if chain is not None else 0
        return min(stop, keys) if self.sound is None else min(stop, keys, self.sound)
