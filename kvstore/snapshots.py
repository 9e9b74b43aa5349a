"""Everything readable now, in parts: a new subscriber of a million blocks holds nobody else up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstore.group import Group
from kvstore.types import Tier

__all__ = ["SnapshotPart", "snapshot_parts"]


@dataclass(frozen=True, slots=True)
class SnapshotPart:
    """Some of the keys that are readable on one tier; `engine` is b"" unless the tier is GPU."""

    tier: Tier
    engine: bytes
    keys: NDArray[np.uint8]


def snapshot_parts(group: Group) -> Iterator[SnapshotPart]:
    """At most KEYS_MAX keys at a time; the caller may let others run between two parts.

    Note `group.events.sequence` before the first part: the parts, and then every event after that sequence
    applied to them, give the truth, although keys come and go in between: a key that came is told by a part,
    by an event, or by both; one that left is told by an event.
    """
    for keys in group.host.keys_in_parts():
        yield SnapshotPart(Tier.HOST, b"", keys)
    for keys in group.nvme.keys_in_parts():
        yield SnapshotPart(Tier.NVME, b"", keys)
    for engine in list(group.engines.values()):
        for keys in engine.device.keys_in_parts():
            yield SnapshotPart(Tier.GPU, engine.id, keys)
