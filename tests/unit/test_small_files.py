"""Atomic replacement of small files: whole old or whole new content, whatever happens."""

from __future__ import annotations

import asyncio
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvstore.small_files import FILE_BYTES_MAX, read_small, write_atomic


@contextmanager
def disk_of(size_bytes: int) -> Iterator[None]:
    """No file grows beyond this: what a full disk looks like to a writer."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


def test_a_file_is_replaced_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "learnt.json"
    asyncio.run(write_atomic(path, b"one"))
    asyncio.run(write_atomic(path, b"two, longer"))
    assert asyncio.run(read_small(path)) == b"two, longer"
    assert [entry.name for entry in tmp_path.iterdir()] == ["learnt.json"]
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_full_disk_keeps_the_old_content(tmp_path: Path) -> None:
    path = tmp_path / "learnt.json"
    asyncio.run(write_atomic(path, b"old"))
    with disk_of(4096), pytest.raises(OSError, match="File too large"):
        asyncio.run(write_atomic(path, b"x" * 100_000))
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["learnt.json"], (
        "half of the new content takes no room"
    )


def test_a_missing_directory_is_an_error_of_the_system(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        asyncio.run(write_atomic(tmp_path / "absent" / "learnt.json", b"x"))
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(NotADirectoryError):
        asyncio.run(write_atomic(tmp_path / "file" / "learnt.json", b"x"))


def test_a_place_without_permission_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / ".learnt.json.new").symlink_to(tmp_path / "victim")
    (tmp_path / "victim").write_bytes(b"precious")
    with pytest.raises(OSError, match="symbolic link"):
        asyncio.run(write_atomic(tmp_path / "learnt.json", b"x"))  # a planted link is not followed
    assert (tmp_path / "victim").read_bytes() == b"precious"
    with pytest.raises(OSError, match="/proc"):
        asyncio.run(write_atomic(Path("/proc/learnt.json"), b"x"))  # nobody, not even root, makes files there


def test_lengths_are_bounded(tmp_path: Path) -> None:
    path = tmp_path / "big"
    with pytest.raises(ValueError, match="file_bytes_max"):
        asyncio.run(write_atomic(path, b"x" * (FILE_BYTES_MAX + 1)))
    path.write_bytes(b"x" * (FILE_BYTES_MAX + 1))
    with pytest.raises(OSError, match="longer than"):
        asyncio.run(read_small(path))


WRITER = """
import asyncio, sys
from pathlib import Path
from kvstore.small_files import write_atomic

async def forever():
    number = 0
    while True:
        number += 1
        await write_atomic(Path(sys.argv[1]), b"%d," % number + b"x" * 20_000 + b",%d" % number)
        print(number, flush=True)

asyncio.run(forever())
"""


def test_a_writer_killed_anywhere_leaves_whole_content(tmp_path: Path) -> None:
    path = tmp_path / "learnt.json"
    for round_ in range(5):
        with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            for _ in range(1 + 7 * round_):
                told = int(writer.stdout.readline())
            writer.kill()
        first, body, last = path.read_bytes().split(b",")
        assert (first, body) == (last, b"x" * 20_000)
        assert int(first) >= told, "what was reported as written is there"
