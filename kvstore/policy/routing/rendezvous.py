"""Rendezvous hashing: who owns a key, so that a replica that leaves or joins moves only its own keys.

Every (key, replica) pair has a weight that nobody else's coming or going changes, and the heaviest replica
owns the key (Thaler and Ravishankar, 1998). No ring, no virtual nodes, nothing to rebuild.
"""

from __future__ import annotations

import functools
import hashlib

import numpy as np
from numpy.typing import NDArray

__all__ = ["owners", "weights"]

# Fleets that are remembered: one per set of replicas that was ever up together, mostly one.
_FLEETS_MAX = 64


@functools.lru_cache(maxsize=_FLEETS_MAX)
def _ids(names: tuple[str, ...]) -> NDArray[np.uint64]:
    ids = np.array([_hash(name.encode()) for name in names], np.uint64)
    ids.flags.writeable = False
    return ids


def _hash(raw: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little")


def weights(names: tuple[str, ...], key: bytes) -> NDArray[np.uint64]:
    """(n,) the weight of each replica for this key. Some 10 µs for a fleet that was seen before.

    Args:
        names: of the replicas, in any order.
        key: any bytes, say a digest or the id of a conversation.
    """
    # The finalizer of splitmix64 over the two hashes: every bit of the input moves half of the output.
    mixed = _ids(names) ^ np.uint64(_hash(key))
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    result: NDArray[np.uint64] = mixed ^ (mixed >> np.uint64(31))
    return result


def owners(names: tuple[str, ...], key: bytes, count: int) -> NDArray[np.int64]:
    """Positions of the `count` heaviest, the owner first; fewer where there are fewer replicas.

    The first r of r + 1 owners are the r owners: a key that becomes popular keeps those it has.
    """
    order = np.argsort(weights(names, key))[::-1]
    result: NDArray[np.int64] = order[:count].astype(np.int64)
    return result
