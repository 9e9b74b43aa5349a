"""What the store answers: values, never exceptions, for a miss, a drop or a busy pool."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstore.leases import Lease
from kvstore.transfers import Filling
from kvstore.types import FetchPlan

__all__ = ["Match", "Published", "Reservation"]


@dataclass(frozen=True, slots=True)
class Match:
    """Answer to a lookup (`rpc.messages.Found` on the wire).

    Attributes:
        lease: None when nothing matched.
        known: blocks of the chain in the index.
        gap_stop: [known, gap_stop) was not asked about.
        digest: of the matched keys.
        plan: what to load.
        runs: where the blocks of the plan's load range lie, packed; empty while a second trip is due.
        refused: nothing was looked up, because the tenant asks too often or holds too much; "" = it was.
    """

    lease: Lease | None
    known: int
    gap_stop: int
    digest: int
    plan: FetchPlan
    runs: bytes
    refused: str = ""


@dataclass(frozen=True, slots=True)
class Reservation:
    """Answer to a reserve. `busy` is not empty when nothing was reserved for want of room."""

    filling: Filling | None
    slots: NDArray[np.uint32]
    filled: int
    elsewhere: int
    dropped: int
    reason: str = ""
    busy: str = ""


@dataclass(frozen=True, slots=True)
class Published:
    """Answer to a publish; `pending` = other ranks have not written their part yet."""

    ready: int
    dropped: int
    pending: bool
