"""The router half of kvstore._native (its stub only: at run time everything is in kvstore._native).

Keys, hashes and fingerprints are `Packed`: bytes, or a C-contiguous array of integers `width` wide or of
bytes; of each key the first eight bytes count. Results that go on into another call are bytes. Each table
belongs to one thread.
"""

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "ROUTER_KEYS_MAX",
    "ROUTER_TOKENS_MAX",
    "EngineBlocks",
    "PrefixLru",
    "RouterIndex",
    "token_fingerprints",
    "unpack_hashes",
    "unpack_tokens",
]

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]
Packed = bytes | bytearray | memoryview | NDArray[np.integer]

ROUTER_KEYS_MAX: int
"""Keys in one call; ValueError above."""
ROUTER_TOKENS_MAX: int

class RouterIndex:
    """Which replica holds which block in GPU (0), HOST (1), NVME (2), REMOTE (3) (native/src/router_index.h).

    replicas_max: at most 1,024. Memory: 60 bytes a block with up to 64, 24 more for every further 64 … 256.
    """
    def __init__(self, nodes_max: int, replicas_max: int = 64) -> None: ...
    def add_replica(self) -> int:
        """The lowest free column. ValueError when all are in use."""
    def remove_replica(self, replica: int) -> None: ...
    def stored(self, replica: int, tier: int, keys: Packed, width: int = 8) -> int:
        """Keys in chain order; how many of them are new there."""
    def removed(self, replica: int, tier: int, keys: Packed, width: int = 8) -> int:
        """How many of them were there."""
    def cleared(self, replica: int, tier: int = -1) -> int:
        """One tier, or all (-1); how many blocks that were, each tier counted. One pass through all nodes."""
    def touch(self, keys: Packed, width: int = 8) -> int:
        """A chain is used: it leaves last, its tail before its head. How many of the keys are known."""
    def find(self, keys: Packed, width: int = 8) -> I32:
        """(replicas, 4): column t = leading blocks that the replica holds in tiers 0 to t; a row for each."""
    def find_bisected(self, keys: Packed, width: int = 8) -> I32:
        """The same by O(log n) looks, for chains without holes; a hole may be overlooked."""
    def blocks(self, replica: int) -> I64: ...  # (4,) by tier
    def keys_of(self, replica: int, tier: int) -> U64:
        """Fingerprints in no order; one pass through all nodes."""
    nodes: int
    nodes_max: int
    replicas_max: int
    evicted: int
    """Nodes that left for want of room."""
    memory_bytes: int
    def check(self) -> None:
        """RuntimeError names the law that does not hold."""

class PrefixLru:
    """What a replica without events is assumed to hold (native/src/prefix_lru.h). Keys of 8 bytes."""
    def __init__(self, capacity: int) -> None: ...
    def __len__(self) -> int: ...
    def match(self, keys: Packed) -> int:
        """Leading keys that are there. Touches nothing."""
    def touch(self, keys: Packed) -> U64:
        """The chain is used, and there now as far as there is room; what left for it."""
    def drop(self, keys: Packed) -> int:
        """How many of them were there."""
    def clear(self) -> None: ...
    def check(self) -> None: ...
    capacity: int
    memory_bytes: int

class EngineBlocks:
    """What one engine's block hashes mean in our fingerprints (native/src/engine_blocks.h)."""
    def __init__(self, blocks_max: int) -> None: ...
    def __len__(self) -> int: ...
    def stored(
        self,
        parent: int | bytes | None,
        hashes: Packed,
        width: int,
        tokens: Packed,
        block_tokens: int,
        seed: int,
        extra: bytes = b"",
        tier: int = 0,
    ) -> bytes:
        """Fingerprints (8 bytes each) of blocks that continue the parent's; b"" where it is not known.

        tokens: uint32, exactly the blocks'; none = the hashes must be known from another tier (others are
        orphans). extra: bound into the first block of a chain. Follow it with take_evicted().
        """
    def removed(self, hashes: Packed, width: int, tier: int = 0) -> bytes:
        """Fingerprints that have no hash left on the tier; unknown hashes are passed over."""
    def take_evicted(self, tier: int = 0) -> bytes:
        """Fingerprints that left the tier for want of room, or by a hash that got other tokens."""
    def clear(self, tier: int = -1) -> None: ...
    def check(self) -> None: ...
    blocks_max: int
    orphans: int
    evicted: int
    memory_bytes: int

def token_fingerprints(
    tokens: Packed, block_tokens: int, seed: int, extra: bytes = b"", parent: int = 0
) -> U64:
    """Chained fingerprints of full blocks of uint32 tokens, never 0; not cryptographic, of no fixed format.

    extra: counts only where a chain begins (parent 0). Cost: 10 ns a block of 16.
    """

def unpack_tokens(data: bytes | bytearray | memoryview) -> bytes:
    """A msgpack array of unsigned integers → uint32, little-endian."""

def unpack_hashes(data: bytes | bytearray | memoryview) -> bytes:
    """A msgpack array of block hashes (64-bit integers, or 8 to 64 bytes each) → 8 bytes each."""
