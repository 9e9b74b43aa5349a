"""Drops that a restart must not undo: a record lies in its segment until that is recycled.

For every root that was dropped a small file beside the segments says up to where in the log. The next start
forgets those records; a line is gone when no segment is so old any more.

    {"format": "kvstore-dropped", "version": 1, "roots": [["ROOT IN HEX", sequence, page], …]}
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from kvstore._native import NONE, DiskPool, Index

__all__ = ["DiskDrops"]

FILE_NAME = "dropped.json"
_FORMAT, _VERSION = "kvstore-dropped", 1
# 90 bytes each, and a small file has 1 MiB at most.
ROOTS_MAX = 8192

_Root = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
_Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class _File(msgspec.Struct, forbid_unknown_fields=True):
    format: str
    version: int
    roots: Annotated[list[tuple[_Root, _Number, _Number]], msgspec.Meta(max_length=ROOTS_MAX)]


class DiskDrops:
    """The drops of one trust group's directory.

    Args:
        folder: of the segments.

    Raises:
        ValueError: the file is no such thing; deleting it brings back what was dropped.
        OSError: it cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE_NAME
        self._marks: dict[str, tuple[int, int]] = {}
        if not self._path.exists():
            return
        fix = "restore it, or delete it (what was dropped comes back then)"
        try:
            file = msgspec.json.decode(self._path.read_bytes(), type=_File)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{self._path}: {error}; {fix}") from None
        if (file.format, file.version) != (_FORMAT, _VERSION):
            raise ValueError(f"{self._path}: not {_FORMAT} version {_VERSION}; {fix}")
        self._marks = {root: (sequence, page) for root, sequence, page in file.roots}

    def apply(self, disk: DiskPool, index: Index) -> int:
        """Forget what was dropped before this start; how many blocks. Once, when the pool has its records."""
        nodes = ((index.find(bytes.fromhex(root)), mark) for root, mark in self._marks.items())
        return disk.forget_before([(node, *mark) for node, mark in nodes if node != NONE])

    def file(self, roots: list[bytes], mark: tuple[int, int], oldest_sequence: int) -> tuple[Path, bytes]:
        """What these roots had before `mark` was dropped: the file that says so, for whoever writes it.

        Args:
            oldest_sequence: of the segments that are there; older lines go.
        """
        self._marks = {root: at for root, at in self._marks.items() if at[0] >= oldest_sequence}
        self._marks |= dict.fromkeys((root.hex() for root in roots), mark)
        lines = [(root, *at) for root, at in self._marks.items()][-ROOTS_MAX:]
        return self._path, msgspec.json.encode(_File(_FORMAT, _VERSION, lines))
