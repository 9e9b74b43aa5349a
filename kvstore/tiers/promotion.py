"""One part of a chain on its way from the disk to HOST: see kvstore/tiers/promotions.py.

Its nodes come in chain order, or in pieces, each in chain order: then the pieces are brought one after
another, and what is said of chain order holds inside of each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvstore._native import SlotFormat
from kvstore.tiers.measured import Measured

__all__ = ["Promotion"]

U32 = NDArray[np.uint32]


@dataclass(slots=True, eq=False)
class Promotion:
    """One part of a chain.

    Attributes:
        nodes: (n,) in chain order, or piece by piece.
        on_change: told after each change, on the loop.
        reached: leading nodes that are on HOST.
        stop: where it ends, at first n; lowered by a bad record, a full HOST, or whoever gives it up.
        slots: (n,) the slots that are being filled for it, NONE = not by us.
        issued: leading nodes that were asked for.
        landed: (n,) whether the bytes of a slot of ours are there and right.
        flying: slots of ours that have not arrived: the disk may still write to them, or they are held back.
        measured: what it teaches of the disk.
        reason: why `stop` was lowered.
        abandoned: it was given up because the disk stalled or lagged.
        heard_s: when it last got further.
        cancelled: what it has at the disk is not wanted by anybody.
        told: (reached, stop) that `on_change` was told last.
        pieces: ascending, the positions at which another piece begins; the first begins at 0.
    """

    nodes: U32
    shape: SlotFormat
    on_change: Callable[[Promotion], None]
    heard_s: float
    stop: int
    slots: U32
    landed: NDArray[np.bool_]
    measured: Measured
    reached: int = 0
    issued: int = 0
    flying: int = 0
    reason: str = ""
    abandoned: bool = False
    cancelled: bool = False
    told: tuple[int, int] = (0, 0)
    pieces: U32 = field(default_factory=lambda: np.empty(0, np.uint32))
    jobs: dict[int, U32] = field(default_factory=dict)
    """Job → the positions that it reads, in order."""

    @property
    def over(self) -> bool:
        """Nothing more will arrive."""
        return self.reached >= self.stop

    @property
    def whole(self) -> bool:
        """Nothing has lowered its end."""
        return self.stop == len(self.nodes)

    @property
    def left_bytes(self) -> int:
        """What the disk has still to bring for it."""
        return (max(0, self.stop - self.issued) + self.flying) * self.shape.length

    def piece_stop(self, position: int) -> int:
        """Where the piece that `position` is in ends."""
        behind = int(np.searchsorted(self.pieces, position, "right"))
        return int(self.pieces[behind]) if behind < len(self.pieces) else len(self.nodes)

    def runs(self, positions: U32) -> list[U32]:
        """Ascending positions, cut wherever the chain does not go on from one to the next."""
        ends = (np.diff(positions) != 1) | np.isin(positions[1:], self.pieces)
        return np.split(positions, np.flatnonzero(ends) + 1)

    def cut(self, stop: int, reason: str) -> None:
        """It ends at `stop` (never before what was reached)."""
        if max(stop, self.reached) < self.stop:
            self.stop, self.reason = max(stop, self.reached), reason
