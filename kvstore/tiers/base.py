"""What the store asks of every place that holds block bytes."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvstore._native import Walk
from kvstore.types import Tier

__all__ = ["Place"]


class Place(Protocol):
    """A tier as the store sees it: a question, a report, a self-check."""

    tier: Tier

    def match(self, walk: Walk) -> int:
        """Leading blocks of the walk whose bytes are readable here. No side effect."""
        ...

    def take_removed(self) -> NDArray[np.uint8]:
        """(n, 32) keys whose bytes left since the last call."""
        ...

    def counts(self) -> dict[str, int]:
        """Units by state, for status and metrics."""
        ...

    def check(self) -> None:
        """Every law that this place can check alone.

        Raises:
            RuntimeError: names the first that is broken.
        """
        ...
