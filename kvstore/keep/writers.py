"""Which processes may be writing to a kept arena: a table in shared memory, true at every instant.

A row is made before a session is told of the arena, and goes when the process is known to write no more.
Beside it the keeper holds the process's pidfd under the row's name. So after a crash: no row, no writer; a
row without a pidfd is a process whose end nobody can see.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["ROWS_MAX", "Row", "WriterTable"]

# daemon.sessions_max is at most 65,536; as many again may be left from the daemon before.
ROWS_MAX = 1 << 17
_ROW = struct.Struct("<QQ16s")  # session last-written: 0 = no row
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@dataclass(frozen=True, slots=True)
class Row:
    """One process that may write.

    Attributes:
        number: place in the table.
        boot: of the daemon that it attached to.
        session: its number there, from 1.
        engine: 16 bytes.
    """

    number: int
    boot: int
    session: int
    engine: bytes

    @property
    def name(self) -> str:
        """Of its pidfd at the keeper."""
        return f"peer.{self.boot:016x}.{self.session}"


class WriterTable:
    """The rows.

    Args:
        fd: of a table that an earlier daemon has left (not kept), or -1 for a new one.

    Raises:
        ValueError: fd is not such a table.
    """

    def __init__(self, fd: int = -1) -> None:
        size = ROWS_MAX * _ROW.size
        if fd < 0:
            self.fd = os.memfd_create("kvstore-writers", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self.fd, size)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
        else:
            if os.fstat(fd).st_size != size or fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
                raise ValueError("not a table of writers of this version")
            self.fd = os.dup(fd)
        self._map = mmap.mmap(self.fd, size)
        self.boot = int.from_bytes(os.urandom(8), "little")
        self._used = {row.number for row in self._scan()}
        self._free = 0  # below it, every row is in use or in _given_back
        self._given_back: list[int] = []

    def rows(self) -> list[Row]:
        """Every process that may write."""
        return [row for number in sorted(self._used) if (row := self._row(number)) is not None]

    def add(self, session: int, engine: bytes) -> Row | None:
        """A row for a session of this boot, None when the table is full."""
        number = self._given_back.pop() if self._given_back else self._next()
        if number >= ROWS_MAX:
            return None
        self._used.add(number)
        row = Row(number, self.boot, session, engine)
        # In the order boot, engine, session: cut short anywhere, there is no row.
        at = number * _ROW.size
        self._map[at : at + 8] = self.boot.to_bytes(8, "little")
        self._map[at + 16 : at + 32] = engine
        self._map[at + 8 : at + 16] = session.to_bytes(8, "little")
        return row

    def remove(self, row: Row) -> None:
        """The process writes no more. Idempotent."""
        if row.number in self._used and self._row(row.number) == row:
            at = row.number * _ROW.size
            self._map[at + 8 : at + 16] = bytes(8)
            self._used.discard(row.number)
            self._given_back.append(row.number)

    def close(self) -> None:
        """Unmap; the rows stay for whoever holds the descriptor."""
        self._map.close()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _next(self) -> int:
        while self._free < ROWS_MAX and self._free in self._used:
            self._free += 1
        self._free += 1
        return self._free - 1

    def _row(self, number: int) -> Row | None:
        boot, session, engine = _ROW.unpack_from(self._map, number * _ROW.size)
        return Row(number, boot, session, engine) if session else None

    def _scan(self) -> Iterator[Row]:
        """Rows of an adopted table, without making pages of its holes."""
        at, size = 0, ROWS_MAX * _ROW.size
        while at < size:
            try:
                start = os.lseek(self.fd, at, os.SEEK_DATA)
            except OSError:
                return  # nothing but holes from here on
            at = os.lseek(self.fd, start, os.SEEK_HOLE)
            for number in range(start // _ROW.size, at // _ROW.size):
                row = self._row(number)
                if row is not None:
                    yield row
