"""The naive twin of a place for blocks: a dictionary with no limit, no pins and no native code.

As long as nothing is removed it says what a store may answer at most; fed with the store's own removals it
says what the store must answer exactly.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["ModelStore"]


class ModelStore:
    """Which keys are readable, and after which parent each comes."""

    def __init__(self) -> None:
        self._roots: set[bytes] = set()
        self._parent: dict[bytes, bytes] = {}
        self._readable: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._readable)

    def __contains__(self, key: bytes) -> bool:
        return key in self._readable

    def add_root(self, root: bytes) -> None:
        """Chains may begin at `root`."""
        self._roots.add(root)

    def publish(self, parent: bytes, keys: Sequence[bytes]) -> int:
        """Make keys readable, parents first; how many became so.

        A key whose parent is neither a root nor readable is not kept, and neither is what follows it.

        Raises:
            ValueError: a key is known after another parent.
        """
        fresh = 0
        for key in keys:
            if self._parent.setdefault(key, parent) != parent:
                raise ValueError(f"key {key.hex()[:16]}: known after another parent")
            if parent not in self._roots and parent not in self._readable:
                break
            fresh += key not in self._readable
            self._readable.add(key)
            parent = key
        return fresh

    def remove(self, keys: Iterable[bytes]) -> None:
        """Bytes left (evicted, rotten)."""
        self._readable.difference_update(keys)

    def match(self, root: bytes, keys: Sequence[bytes]) -> int:
        """Leading keys of a chain that are readable."""
        if root not in self._roots:
            return 0
        for count, key in enumerate(keys):
            if key not in self._readable:
                return count
        return len(keys)

    def keys(self) -> set[bytes]:
        """Every readable key."""
        return set(self._readable)

    def stranded(self) -> set[bytes]:
        """Readable keys whose parent is not: bytes that no lookup can reach."""
        return {
            key
            for key in self._readable
            if self._parent[key] not in self._roots and self._parent[key] not in self._readable
        }
