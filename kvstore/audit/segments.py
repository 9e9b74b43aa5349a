"""Bytes that lie in the segment files of a trust group whose daemon runs, found by reading the files.

A daemon holds the lock of its directory, so that nobody else opens it as a disk (`DiskDirectory`); but to
read a file needs no lock. The header of every record holds its whole key, its parent's and its root's
(native/src/record.h): a key that is on the disk is in a file's bytes.

Only files that were written since a moment are read: token ids of an audit are random, so that no file from
before can hold a key of them. The moment is a time stamp of the files themselves, not of a clock of ours.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvstore.audit.probe import Secret

__all__ = ["Scan", "Segments"]

_SEGMENTS = "segment-*.kvs"
# A page cache's worth of reading ahead, and small beside any daemon's memory.
CHUNK_BYTES = 8 << 20
# Some seconds of any NVMe. A daemon that has just been given a new directory writes all of it once.
SCAN_BYTES_MAX = 4 << 30


@dataclass(frozen=True, slots=True)
class Scan:
    """What was found.

    Attributes:
        found: of the secrets searched for, by name, how many times each lies there.
        files: that were read.
        read_bytes: of them.
        left_files: that were written in that time and not read, because SCAN_BYTES_MAX were.
    """

    found: dict[str, int] = field(default_factory=dict)
    files: int = 0
    read_bytes: int = 0
    left_files: int = 0


@dataclass(frozen=True, slots=True)
class _File:
    path: Path
    written_ns: int
    size_bytes: int


class Segments:
    """The segment files of one directory, from now on.

    Args:
        folder: of one trust group.

    Raises:
        OSError: it cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # Later writes have this stamp or a later one: stamps may be coarse, but they never go back.
        self._since_ns = max((file.written_ns for file in self._files()), default=0)

    def _files(self) -> list[_File]:
        found = []
        # Not a glob: of a folder that may not be read that is empty, and no error.
        for path in sorted(self.folder.iterdir()):
            if not path.match(_SEGMENTS):
                continue
            try:
                facts = path.stat()
            except FileNotFoundError:  # recycled meanwhile
                continue
            found.append(_File(path, facts.st_mtime_ns, facts.st_size))
        return found

    def search(self, secrets: Sequence[Secret]) -> Scan:
        """Look for raw bytes in all that was written since this object was made, the newest files first.

        Args:
            secrets: of each the first form is looked for.

        Cost: reads those files once, SCAN_BYTES_MAX at most; some 0.1 s of a core for every 128 MiB and ten
            things that are looked for.

        Raises:
            OSError: a file cannot be read.
        """
        files = [file for file in self._files() if file.written_ns >= self._since_ns]
        files.sort(key=lambda file: file.written_ns, reverse=True)
        found: dict[str, int] = {}
        read_files, read_bytes = 0, 0
        for file in files:
            if read_bytes and read_bytes + file.size_bytes > SCAN_BYTES_MAX:
                break
            read_bytes += _count(file.path, secrets, found)
            read_files += 1
        return Scan(found, read_files, read_bytes, len(files) - read_files)


def _count(path: Path, secrets: Iterable[Secret], found: dict[str, int]) -> int:
    """Add what one file holds to `found`; bytes read."""
    needles = [(secret.what, secret.forms[0]) for secret in secrets]
    overlap = max((len(needle) for _, needle in needles), default=1) - 1
    size_bytes, kept = 0, b""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        while data := os.read(fd, CHUNK_BYTES):
            size_bytes += len(data)
            window = kept + data
            for what, needle in needles:
                times = window.count(needle)  # what was kept is too short to hold one of them
                if times:
                    found[what] = found.get(what, 0) + times
            kept = window[-overlap:] if overlap else b""
        # Nobody serves from the page cache what the daemon reads past it.
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
    return size_bytes
