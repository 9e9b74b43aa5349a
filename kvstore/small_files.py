"""Small files of the daemon, read and written without blocking the loop.

aiofiles hands each operation to a thread: some 0.1 ms, nothing beside a slow disk that would hold up every
engine. Block bytes never go this way (README, "Decisions").
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from pathlib import Path

import aiofiles
import aiofiles.os

__all__ = ["FILE_BYTES_MAX", "read_small", "write_atomic"]

# A configuration of 1,000 tenants is 100 KiB; what is longer is not ours.
FILE_BYTES_MAX = 1 << 20
_MODE = 0o600


async def read_small(path: Path) -> bytes:
    """The whole content.

    Raises:
        OSError: it cannot be read, or (EFBIG) is longer than FILE_BYTES_MAX.
    """
    async with aiofiles.open(path, "rb") as file:
        data = await file.read(FILE_BYTES_MAX + 1)
    if len(data) > FILE_BYTES_MAX:
        raise OSError(errno.EFBIG, f"longer than {FILE_BYTES_MAX} bytes", str(path))
    return data


async def write_atomic(path: Path, data: bytes) -> None:
    """Replace a file: whenever the machine stops, it has the whole old or the whole new content.

    Written beside it, synced, renamed, and the directory synced. One writer at a time.

    Raises:
        OSError: nothing was changed; what was written of the new content is gone.
        ValueError: more than FILE_BYTES_MAX.
    """
    if len(data) > FILE_BYTES_MAX:
        raise ValueError(f"{len(data)} bytes are over file_bytes_max = {FILE_BYTES_MAX}")
    beside = path.with_name(f".{path.name}.new")  # left over from a crash, it is overwritten
    try:
        async with aiofiles.open(beside, "wb", opener=_open_private) as file:
            await file.write(data)
            await file.flush()
            await asyncio.to_thread(os.fsync, file.fileno())
        await aiofiles.os.replace(beside, path)
    except BaseException:  # a cancelled writer leaves nothing half written either
        with contextlib.suppress(OSError):
            await aiofiles.os.unlink(beside)
        raise
    await asyncio.to_thread(_sync_directory, path.parent)


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, _MODE)


def _sync_directory(path: Path) -> None:
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
