"""What bench.kill9 has handed to one directory, and what must still be there.

    offered ─save acknowledged─▶ acknowledged ─flush acknowledged─▶ flushed

A flush vouches for the chains that had been acknowledged when it was asked for, if the daemon let in every
block since its start (it says how many it did not).

Where a directory is so small that its segments are recycled, what was flushed may be evicted later. The
oldest segment goes first, and a chain goes whole when its beginning does. So a chain must be there as long as
less than `window_bytes` were written since its oldest block was. A third of the capacity leaves room for
everything else that takes space: records that are written again (a quarter of each segment at most), what
does not fit the end of a segment, and the three segments that a kill leaves half full (counted as written).

And what must not be there: a block of which no save ever began, or none since its namespace was dropped and
the daemon had acknowledged that.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstore.keys import KeyChain
from kvstore.types import BlockLayout

__all__ = ["KINDS", "Kind", "Ledger", "Offered", "State", "names"]

U32 = NDArray[np.uint32]
_HEADER_BYTES = 4096  # of a record, before the slot
_SEGMENTS_PER_KILL = 3


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of engine.

    Attributes:
        name: of its model.
        layout: of its blocks.
        blocks_max: longest chain.
        drops: its namespace is dropped now and then.
    """

    name: str
    layout: BlockLayout
    blocks_max: int
    drops: bool = False

    @property
    def record_bytes(self) -> int:
        """Of a block on the disk."""
        return self.layout.slot_bytes + _HEADER_BYTES


# Blocks of 16 KiB (24 on the disk) and of 256 KiB (264): chains of up to 1 and 8 MiB.
KINDS = (
    Kind("small", BlockLayout(1, 2, 256, "float32", 4), 64),
    Kind("large", BlockLayout(1, 8, 1024, "float32", 4), 32),
    Kind("dropped", BlockLayout(1, 2, 256, "float32", 4), 32, drops=True),
)


class State(enum.IntEnum):
    """How far a chain has come."""

    OFFERED = 0
    ACKNOWLEDGED = 1
    FLUSHED = 2


@dataclass(slots=True, eq=False)
class Offered:
    """A chain that was handed over, or began to be.

    Attributes:
        kind: of KINDS.
        tokens: of the chain, for chains that begin like it.
        chain: its keys.
        oldest_bytes: `Ledger.written_bytes` when its oldest block was offered first.
        state: how far it has come.
    """

    kind: Kind
    tokens: U32
    chain: KeyChain
    oldest_bytes: int
    state: State = State.OFFERED


def names(chain: KeyChain) -> list[bytes]:
    """Its keys."""
    keys: list[bytes] = chain.keys.view("V32").ravel().tolist()
    return keys


class Ledger:
    """Of one directory, over all rounds. Any thread may call.

    Args:
        segment_bytes: of the directory.
        window_bytes: see above; 0 = nothing is ever evicted.
    """

    def __init__(self, segment_bytes: int, window_bytes: int = 0) -> None:
        self._segment_bytes, self._window_bytes = segment_bytes, window_bytes
        self._lock = threading.Lock()
        self._chains: list[Offered] = []
        self._begun: dict[str, set[bytes]] = {kind.name: set() for kind in KINDS}
        self.written_bytes = 0

    @property
    def evicts(self) -> bool:
        """Whether blocks may leave the directory."""
        return bool(self._window_bytes)

    def offer(self, kind: Kind, tokens: U32, chain: KeyChain, like: Offered | None) -> Offered:
        """Before anything of it is handed over; `like`: a chain that it begins like."""
        with self._lock:
            oldest = self.written_bytes if like is None else like.oldest_bytes
            offered = Offered(kind, tokens, chain, oldest)
            self.written_bytes += len(chain) * kind.record_bytes
            self._chains.append(offered)
        return offered

    def begin(self, offered: Offered, start: int, stop: int) -> None:
        """Before these blocks of it are handed over: from now on they may be found."""
        with self._lock:
            self._begun[offered.kind.name].update(names(offered.chain)[start:stop])

    def acknowledge(self, offered: Offered) -> None:
        """Every block of it is readable, says the daemon."""
        with self._lock:
            offered.state = max(offered.state, State.ACKNOWLEDGED)

    def acknowledged(self) -> list[Offered]:
        """Those that a flush which is asked for now will vouch for."""
        with self._lock:
            return [offered for offered in self._chains if offered.state is State.ACKNOWLEDGED]

    def flush(self, chains: Sequence[Offered]) -> None:
        """They are on the medium, says the daemon."""
        with self._lock:
            for offered in chains:
                if offered.state is State.ACKNOWLEDGED:  # else dropped meanwhile
                    offered.state = State.FLUSHED

    def expect_drop(self, kind: Kind) -> None:
        """Its namespace is about to be dropped: nothing that it has need be there any more."""
        with self._lock:
            for offered in self._chains:
                if offered.kind is kind:
                    offered.state = State.OFFERED

    def dropped(self, kind: Kind) -> None:
        """The daemon has acknowledged that, and no save was under way: nothing of it may be there."""
        with self._lock:
            self._begun[kind.name].clear()

    def strays(self, kind: Kind, found: set[bytes]) -> set[bytes]:
        """Those of the keys that were found that must not be."""
        with self._lock:
            return found - self._begun[kind.name]

    def kill(self) -> None:
        """The daemon is gone; what was acknowledged and not flushed may be, too."""
        with self._lock:
            self.written_bytes += _SEGMENTS_PER_KILL * self._segment_bytes

    def forget_unflushed(self) -> None:
        """After a restart was looked at: what a later flush vouches for is what is saved from now on."""
        with self._lock:
            for offered in self._chains:
                if offered.state is State.ACKNOWLEDGED:
                    offered.state = State.OFFERED

    def must_be_there(self, offered: Offered) -> bool:
        """Whether it was flushed, and not so long ago that it may have been evicted."""
        if offered.state is not State.FLUSHED:
            return False
        age = self.written_bytes - offered.oldest_bytes
        return not self._window_bytes or age <= self._window_bytes

    def chains(self, kind: Kind) -> list[Offered]:
        """Every chain of that kind that was ever offered, oldest first."""
        with self._lock:
            return [offered for offered in self._chains if offered.kind is kind]
