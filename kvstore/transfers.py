"""Fillings: moves of bytes into arena slots, from reserve to publish or abort.

    reserve → FILLING ─ every cell is written → READY
                       └ every cell is written or given up, or no writer is left → FREE

A filling belongs to the processes that its engine had when the slots were reserved. Each has its say once: it
publishes its part, aborts it, or is known to write no more (quiesced, gone). Only when no part is open any
more are the slots freed (LAWS A1): a closed socket proves nothing, and one rank does not speak for another.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvstore._native import SlotFormat
from kvstore.errors import NotFound
from kvstore.types import Part

__all__ = ["Filling", "Fillings", "Handed", "mark"]


@dataclass(frozen=True, slots=True)
class Handed:
    """(n,) slots that were just handed out, the nodes they are for, and their generations."""

    nodes: NDArray[np.uint32]
    slots: NDArray[np.uint32]
    generations: NDArray[np.uint64]


@dataclass(slots=True)
class Filling:
    """Slots that processes of one engine are writing.

    Attributes:
        token: opaque.
        engine: id of the engine.
        session: session that reserved.
        shape: format of the block in a slot.
        nodes, slots: (n,) the slots to write, in chain order, and the nodes they are for.
        generations: (n,) of the slots: this hand-out of them and no other.
        writers: session → its cells, for each that may write or has written.
        waiting: those that have not had their say.
        covered: (layers, heads) cells that were written or given up. Of ranks with the same cells one writes
            (LAWS D17), so the first of them decides.
        blocks: slots that every rank so far has written; 0 once a part was given up.
        checked: every rank summed its cells on a CPU.
        drain: device blocks that become free when this filling ends (a demotion).
        copied: device blocks that stay but are pinned while they are copied (ancestors of a demotion).
        block_tokens: tokens in a block.
    """

    token: int
    engine: bytes
    session: int
    shape: SlotFormat
    nodes: NDArray[np.uint32]
    slots: NDArray[np.uint32]
    generations: NDArray[np.uint64]
    writers: dict[int, Part]
    waiting: set[int]
    covered: NDArray[np.bool_]
    blocks: int
    checked: bool = True
    drain: NDArray[np.uint32] = field(default_factory=lambda: np.empty(0, np.uint32))
    copied: NDArray[np.uint32] = field(default_factory=lambda: np.empty(0, np.uint32))
    block_tokens: int = 0

    @property
    def over(self) -> bool:
        """Nothing of it will be written any more: publish its first `blocks` slots, free the others."""
        return not self.waiting or bool(self.covered.all())

    def cover(self, session: int, blocks: int, checked: bool) -> None:
        """A rank has written its part of the first `blocks` slots, and writes no more.

        Raises:
            NotFound: the session was not there when the slots were reserved, or has quiesced since.
        """
        part = self.writers.get(session)
        if part is None:
            raise NotFound(
                f"token {self.token}: reserved before this session attached, or given up by quiesced"
            )
        mark(self.covered, part)
        self.waiting.discard(session)
        self.blocks = min(self.blocks, blocks)
        self.checked = self.checked and checked
        if not self.waiting and not self.covered.all():
            self.blocks = 0  # the other cells have no writer

    def leave(self, session: int) -> None:
        """A process writes no more: cells that nobody else holds are given up, unless it had its say."""
        self.writers.pop(session, None)
        if session not in self.waiting:
            return
        self.waiting.remove(session)
        held = self.covered.copy()
        for other in self.waiting:
            mark(held, self.writers[other])
        if not held.all():
            self.blocks = 0
            self.covered |= ~held


def mark(cells: NDArray[np.bool_], part: Part) -> None:
    """Set the cells of a part."""
    layers = slice(part.layer_start, part.layer_start + part.layers)
    cells[layers, part.head_start : part.head_start + part.heads] = True


class Fillings:
    """All fillings of one trust group."""

    def __init__(self) -> None:
        self._by_token: dict[int, Filling] = {}
        self._by_engine: dict[bytes, dict[int, Filling]] = {}
        self._slots = 0
        # At random, so that a token of a daemon that is gone never names a filling of this one.
        self.last_token = secrets.randbits(62)

    def __len__(self) -> int:
        return len(self._by_token)

    def __iter__(self) -> Iterator[Filling]:
        return iter(self._by_token.values())

    def begin(
        self,
        engine: bytes,
        session: int,
        shape: SlotFormat,
        handed: Handed,
        writers: Mapping[int, Part],
    ) -> Filling:
        """Record slots that were just reserved; `writers` may write them."""
        self.last_token += 1
        filling = Filling(
            self.last_token,
            engine,
            session,
            shape,
            handed.nodes,
            handed.slots,
            handed.generations,
            dict(writers),
            set(writers),
            np.zeros((shape.layers, shape.heads), np.bool_),
            len(handed.slots),
        )
        self._by_token[filling.token] = filling
        self._slots += len(filling.slots)
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

    def is_open(self, filling: Filling) -> bool:
        """Whether it has not ended."""
        return self._by_token.get(filling.token) is filling

    def end(self, filling: Filling) -> None:
        """Forget it (its slots were published or aborted)."""
        del self._by_token[filling.token]
        self._slots -= len(filling.slots)
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
        return self._slots
