"""What scheduler and workers of one engine tell each other, step by step. Plain values: they are pickled."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvstore.client import Reservation

__all__ = ["LoadOrder", "SaveOrder", "Saved", "StepOrders", "StepReport"]

U32 = NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """Fill device blocks from the arena, in chain order.

    Attributes:
        request: id of the request that waits for it.
        epoch: boot epoch of the daemon that named the slots.
        slots: (n,) arena slots.
        keys: (n, 32) keys that they must hold.
        blocks: per KV group (n,) device blocks, 0 = that group does not need this one.
    """

    request: str
    epoch: bytes
    slots: U32
    keys: NDArray[np.uint8]
    blocks: tuple[U32, ...]


@dataclass(frozen=True, slots=True)
class SaveOrder:
    """Copy device blocks into slots that were reserved for them.

    Attributes:
        save: number of the save; every bank of every rank answers with it once.
        reservation: slots, one per block.
        blocks: per KV group (n,) device blocks.
    """

    save: int
    reservation: Reservation
    blocks: tuple[U32, ...]


@dataclass
class StepOrders(KVConnectorMetadata):  # type: ignore[misc]
    """From the scheduler to every rank, with each step.

    Attributes:
        loads, saves: begin these.
        idle: the step computes nothing, so a rank may wait a moment for what is about to end.
        step: its number.
    """

    loads: list[LoadOrder] = field(default_factory=list)
    saves: list[SaveOrder] = field(default_factory=list)
    idle: bool = False
    step: int = 0


@dataclass(slots=True)
class Saved:
    """How a save ended, as far as ranks have answered.

    Attributes:
        banks: how many have.
        ready: blocks that became readable, told by the bank that wrote last.
        dropped: most blocks that one of them could not write.
    """

    banks: int
    ready: int
    dropped: int


@dataclass
class StepReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """From a rank to the scheduler.

    Attributes:
        saves: by number of the save.
        bad: request → positions, counted from the load's first block, whose stored bytes are wrong.
        loaded: request → leading blocks that are good; the least of all ranks counts.
        reasons: request → why its load came short.
        step: number of the step that has ended.
    """

    saves: dict[int, Saved] = field(default_factory=dict)
    bad: dict[str, set[int]] = field(default_factory=dict)
    loaded: dict[str, int] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    step: int = 0

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StepReport:
        """Both ranks' reports as one."""
        assert isinstance(other, StepReport)
        for number, theirs in other.saves.items():
            mine = self.saves.get(number)
            if mine is None:
                self.saves[number] = theirs
                continue
            mine.banks += theirs.banks
            mine.ready += theirs.ready
            mine.dropped = max(mine.dropped, theirs.dropped)
        for request, positions in other.bad.items():
            self.bad.setdefault(request, set()).update(positions)
        for request, good in other.loaded.items():
            self.loaded[request] = min(good, self.loaded.get(request, good))
        for request, reason in other.reasons.items():
            self.reasons.setdefault(request, reason)
        self.step = max(self.step, other.step)
        return self
