"""HOST: slots of one arena. The engine's workers copy; the daemon decides, verifies and evicts."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from kvstore import _native
from kvstore._native import KEYS_MAX, NONE, Reserved, SlotFormat, Walk
from kvstore.memory import GroupMemory
from kvstore.types import Tier

__all__ = ["HostTier"]


class HostTier:
    """The arena of a trust group as a place for bytes."""

    tier = Tier.HOST

    def __init__(self, memory: GroupMemory) -> None:
        self._arena = memory.arena
        self._index = memory.index
        self._pool = memory.host
        self.corrupt_blocks = 0
        """Blocks dropped because their bytes no longer matched their sums."""
        self.dropped: dict[str, int] = {}
        """Blocks not kept or taken away, by reason, since start."""

    @property
    def pool(self) -> _native.HostPool:
        """The native pool, for device pools that must know what is on HOST."""
        return self._pool

    @property
    def capacity_bytes(self) -> int:
        """Size of the arena."""
        return self._arena.capacity_bytes

    def slots(self, nodes: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """(n,) READY slot of each node, or NONE."""
        return self._pool.slots(nodes)

    def holds(self, node: int) -> bool:
        """Whether the node's bytes are readable here; False for a node that is gone."""
        return bool(self._pool.slots(np.array([node], np.uint32))[0] != NONE)

    def match(self, walk: Walk) -> int:
        # As it was when the walk was made: the store asks before anything else happens.
        return self._pool.match(walk)

    def touch(self, node: int) -> None:
        """The chain that ends in `node` was used."""
        self._pool.touch(node)

    def readable(self, nodes: NDArray[np.uint32]) -> NDArray[np.bool_]:
        """(n,) whether each node's bytes are readable here."""
        ready: NDArray[np.bool_] = self._pool.slots(nodes) != NONE
        return ready

    def leading(self, nodes: NDArray[np.uint32]) -> int:
        """How many of the first nodes are readable here without a gap."""
        absent = np.flatnonzero(self._pool.slots(nodes) == NONE)
        return int(absent[0]) if len(absent) else len(nodes)

    def missing(self, node: int) -> NDArray[np.uint32]:
        """The blocks that HOST lacks above and including `node`, up to the nearest it has, in chain order."""
        return self._pool.missing(node)

    def keys(self) -> NDArray[np.uint8]:
        """(n, 32) keys of every readable block. Walks the whole pool: for snapshots."""
        return self._index.keys(self._pool.ready_nodes())

    def keys_in_parts(self) -> Iterator[NDArray[np.uint8]]:
        """keys() a part at a time; between two of them keys may come and go."""
        for slab in range(self._pool.slabs):
            nodes = self._pool.ready_nodes(slab, 1)
            for start in range(0, len(nodes), KEYS_MAX):
                part = nodes[start : start + KEYS_MAX]
                yield self._index.keys(part[self.readable(part)])

    def runs(self, nodes: NDArray[np.uint32], shape: SlotFormat) -> bytes:
        """Where the blocks of `nodes` lie, as `_native.pack_slots` packs it."""
        return _native.pack_slots(self._pool.slots(nodes), shape.slot_bytes // _native.PAGE_BYTES)

    def reserve(
        self,
        parent: int,
        keys: NDArray[np.uint8],
        shape: SlotFormat,
        now_s: float,
        stall_s: float,
        owner: bytes,
    ) -> Reserved:
        """FILLING slots for a chain after `parent`; makes room by evicting leaves (see the native stub).

        Args:
            owner: id of the engine whose processes will write.
        """
        return self._pool.reserve(parent, keys, shape, now_s, stall_s, owner)

    def publish(
        self, nodes: NDArray[np.uint32], slots: NDArray[np.uint32], shape: SlotFormat, checked: bool
    ) -> int:
        """Make filled slots readable; how many became so. The others were freed and counted."""
        crcs = _native.table_crcs(self._arena, shape, slots)
        return int(self._pool.publish(nodes, slots, crcs, shape.length, int(checked)).sum())

    def abort(self, nodes: NDArray[np.uint32], slots: NDArray[np.uint32]) -> None:
        """Free slots whose writer is known to be done."""
        if len(slots):
            self._pool.abort(nodes, slots)

    def forget(self, node: int) -> None:
        """Give back the slot of a block that nobody will miss (a layout proof's)."""
        self._pool.forget(node)

    def drop_if_corrupt(self, nodes: NDArray[np.uint32], shape: SlotFormat) -> int:
        """Verify the blocks of `nodes` and drop the rotten ones; how many those were.

        Cost: reads every byte of the blocks named; callers bound their number.
        """
        slots = self._pool.slots(nodes)
        held = slots != NONE
        nodes, slots = nodes[held], slots[held]
        if not len(nodes):
            return 0
        status = _native.verify_slots(self._arena, shape, slots, self._index.keys(nodes))
        rotten = [int(node) for node in nodes[status != _native.OK]]
        for node in rotten:  # rot is rare: one native call each is fine
            self._pool.drop(node)
        self.corrupt_blocks += len(rotten)
        return len(rotten)

    def drop(self, nodes: NDArray[np.uint32], reason: str) -> int:
        """Good bytes that nobody wants any more, counted under `reason`; how many blocks had some.

        Cost: one native call each, longer while many nodes are pinned; callers bound their number.
        """
        dropped = sum(self._pool.forget(node) for node in nodes.tolist())
        self.dropped[reason] = self.dropped.get(reason, 0) + dropped
        return dropped

    def ready_nodes(self) -> NDArray[np.uint32]:
        """Every node with bytes here. Walks the whole pool."""
        return self._pool.ready_nodes()

    def take_removed(self) -> NDArray[np.uint8]:
        for reason, count in self._pool.take_dropped().items():
            self.dropped[reason] = self.dropped.get(reason, 0) + count
        return self._pool.take_removed()

    def counts(self) -> dict[str, int]:
        return self._pool.counts()

    def check(self) -> None:
        self._pool.check()
