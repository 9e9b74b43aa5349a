"""The place that holds nothing: stands in where a tier is not configured, and as the oracle of "uncached"."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from kvstore._native import SlotFormat, Walk
from kvstore.types import Tier

__all__ = ["NoDisk", "NoTier"]


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


class NoDisk:
    """No NVME tier is configured: nothing is offered, found, or under way."""

    tier = Tier.NVME
    configured = False

    def match(self, walk: Walk) -> int:
        return 0

    def touch(self, nodes: NDArray[np.uint32]) -> bool:
        return False

    def offer(self, node: int, shape: SlotFormat, seconds_per_block: float | None, *, reused: bool) -> None:
        pass

    def pins(self) -> int:
        return 0

    def filling_slots(self) -> int:
        return 0

    def keys(self) -> NDArray[np.uint8]:
        return np.empty((0, 32), np.uint8)

    def keys_in_parts(self) -> Iterator[NDArray[np.uint8]]:
        return iter(())

    def nodes_in_parts(self) -> Iterator[NDArray[np.uint32]]:
        return iter(())

    def readable(self, nodes: NDArray[np.uint32]) -> NDArray[np.bool_]:
        return np.zeros(len(nodes), np.bool_)

    def drop(self, nodes: NDArray[np.uint32], reason: str) -> int:
        return 0

    def take_removed(self) -> NDArray[np.uint8]:
        return np.empty((0, 32), np.uint8)

    take_stored = take_promoted = take_removed

    def counts(self) -> dict[str, int]:
        return {}

    def tick(self) -> None:
        pass

    def check(self) -> None:
        pass

    def close(self, timeout_s: float) -> None:
        pass
