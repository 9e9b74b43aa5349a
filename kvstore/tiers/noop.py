"""The place that holds nothing: stands in where a tier is not configured, and as the oracle of "uncached"."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from kvstore._native import Walk
from kvstore.types import Tier

__all__ = ["NoTier"]


class NoTier:
    """Matches nothing, loses nothing."""

    kind = "none"

    def __init__(self, tier: Tier) -> None:
        self.tier = tier

    def match(self, walk: Walk) -> int:
        return 0

    def blocks_of(self, nodes: NDArray[np.uint32]) -> NDArray[np.uint32]:
        return np.full(len(nodes), 0xFFFFFFFF, np.uint32)

    def keys(self) -> NDArray[np.uint8]:
        return np.empty((0, 32), np.uint8)

    def keys_in_parts(self) -> Iterator[NDArray[np.uint8]]:
        return iter(())

    def touch(self, node: int) -> None:
        pass

    def take_removed(self) -> NDArray[np.uint8]:
        return np.empty((0, 32), np.uint8)

    def take_stored(self) -> NDArray[np.uint8]:
        return np.empty((0, 32), np.uint8)

    def counts(self) -> dict[str, int]:
        return {"free": 0, "mapped": 0, "idle": 0, "draining": 0}

    def close(self) -> None:
        pass

    def closing(self) -> Iterator[None]:
        return iter(())

    def check(self) -> None:
        pass
