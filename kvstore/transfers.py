"""Fillings: moves of bytes into arena slots, from reserve to publish or abort.

    reserve → FILLING ─ every rank's part covered → publish → READY
                       └ abort, or the writers are known to be done → FREE

A filling belongs to an engine, because any process of it may write. It is freed only when the engine says so
or when all its processes are gone (LAWS A1): a closed socket proves neither.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvstore._native import SlotFormat
from kvstore.errors import NotFound
from kvstore.types import Part

__all__ = ["Filling", "Fillings"]


@dataclass(slots=True)
class Filling:
    """Slots that one engine is writing.

    Attributes:
        token: opaque.
        engine: id of the engine.
        session: session that reserved.
        shape: format of the block in a slot.
        nodes, slots: (n,) the slots to write, in chain order, and the nodes they are for.
        covered: (layers, heads) cells that some rank has written.
        blocks: slots that every rank so far has written.
        checked: every rank summed its cells on a CPU.
        drain: device blocks that become free when this filling ends (a demotion).
        copied: device blocks that stay but are pinned while they are copied (ancestors of a demotion).
    """

    token: int
    engine: bytes
    session: int
    shape: SlotFormat
    nodes: NDArray[np.uint32]
    slots: NDArray[np.uint32]
    covered: NDArray[np.bool_]
    blocks: int
    checked: bool = True
    drain: NDArray[np.uint32] = field(default_factory=lambda: np.empty(0, np.uint32))
    copied: NDArray[np.uint32] = field(default_factory=lambda: np.empty(0, np.uint32))

    def cover(self, part: Part, blocks: int, checked: bool) -> bool:
        """A rank has written its part of the first `blocks` slots; whether all cells are covered now."""
        self.covered[
            part.layer_start : part.layer_start + part.layers, part.head_start : part.head_start + part.heads
        ] = True
        self.blocks = min(self.blocks, blocks)
        self.checked = self.checked and checked
        return bool(self.covered.all())


class Fillings:
    """All fillings of one trust group."""

    def __init__(self) -> None:
        self._by_token: dict[int, Filling] = {}
        self._by_engine: dict[bytes, dict[int, Filling]] = {}
        self._last_token = 0

    def __len__(self) -> int:
        return len(self._by_token)

    def __iter__(self) -> Iterator[Filling]:
        return iter(self._by_token.values())

    def begin(
        self,
        engine: bytes,
        session: int,
        shape: SlotFormat,
        nodes: NDArray[np.uint32],
        slots: NDArray[np.uint32],
    ) -> Filling:
        """Record slots that were just reserved."""
        self._last_token += 1
        covered = np.zeros((shape.layers, shape.heads), np.bool_)
        filling = Filling(self._last_token, engine, session, shape, nodes, slots, covered, len(slots))
        self._by_token[filling.token] = filling
        self._by_engine.setdefault(engine, {})[filling.token] = filling
        return filling

    def get(self, engine: bytes, token: int) -> Filling:
        """The filling, if it is this engine's.

        Raises:
            NotFound: unknown, ended, or another engine's.
        """
        filling = self._by_engine.get(engine, {}).get(token)
        if filling is None:
            raise NotFound(
                f"token {token}: no filling of this engine (published, aborted, or never reserved)"
            )
        return filling

    def end(self, filling: Filling) -> None:
        """Forget it (its slots were published or aborted)."""
        del self._by_token[filling.token]
        mine = self._by_engine[filling.engine]
        del mine[filling.token]
        if not mine:
            del self._by_engine[filling.engine]

    def of_engine(self, engine: bytes) -> list[Filling]:
        """Fillings that processes of this engine may be writing."""
        return list(self._by_engine.get(engine, {}).values())

    def count(self, engine: bytes) -> int:
        """How many fillings this engine has open."""
        return len(self._by_engine.get(engine, {}))

    def slots(self) -> int:
        """Slots in all of them."""
        return sum(len(filling.slots) for filling in self._by_token.values())
