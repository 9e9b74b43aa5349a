"""What is told to a service manager that reads late, or was replaced."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from kvstore.keep import datagrams
from kvstore.keep.datagrams import WAITING_MAX
from kvstore.keep.systemd import SystemdStore

MANY = 2000  # more than net.unix.max_dgram_qlen


class SlowReader:
    """A notify socket that is read when the test says so."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "n"
        self.bind()

    def bind(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self.sock.bind(str(self.path))

    def close(self) -> None:
        self.sock.close()
        self.path.unlink()

    async def read(self, count: int) -> list[str]:
        """Names in the order in which they came; what a descriptor says must be its name."""
        loop, names = asyncio.get_running_loop(), []
        readable = asyncio.Event()
        loop.add_reader(self.sock.fileno(), readable.set)
        try:
            async with asyncio.timeout(60.0):
                while len(names) < count:
                    try:
                        data, fds, _, _ = socket.recv_fds(self.sock, 4096, 8)
                    except BlockingIOError:
                        readable.clear()
                        await readable.wait()
                        continue
                    lines = dict(line.partition("=")[::2] for line in data.decode().split("\n"))
                    names.append(lines["FDNAME"])
                    for fd in fds:
                        assert os.pread(fd, 100, 0).decode() == names[-1]
                        os.close(fd)
        finally:
            loop.remove_reader(self.sock.fileno())
        return names


@pytest.fixture
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlowReader]:
    slow = SlowReader(tmp_path_factory.mktemp("s"))
    yield slow
    slow.close()


def put(store: SystemdStore, name: str) -> None:
    fd = os.memfd_create("text", os.MFD_CLOEXEC)
    os.write(fd, name.encode())
    store.put({name: fd})
    os.close(fd)


def open_fds() -> int:
    """After what earlier tests left to the collector is gone."""
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_a_slow_systemd_does_not_hold_the_loop_and_hears_everything(reader: SlowReader) -> None:
    store = SystemdStore({"NOTIFY_SOCKET": str(reader.path)})
    before = open_fds()
    store.serve(asyncio.get_running_loop())
    names = [f"peer.{number}" for number in range(MANY)]
    began_s = time.monotonic()
    for name in names[:100]:
        put(store, name)
    store.drop(names[100:])
    assert time.monotonic() - began_s < 1.0, "one that waited for it would have waited a second a word"
    assert await reader.read(MANY) == names
    put(store, "last")
    assert await reader.read(1) == ["last"]
    store.leave()
    assert open_fds() == before


async def test_what_it_does_not_read_is_bounded_and_an_end_does_not_wait_for_ever(
    reader: SlowReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datagrams, "_CALL_S", 0.01)
    store = SystemdStore({"NOTIFY_SOCKET": str(reader.path)})
    before = open_fds()
    store.serve(asyncio.get_running_loop())
    with capture_logs() as lines:
        store.drop(f"peer.{number}" for number in range(3 * WAITING_MAX))
        put(store, "data.a")
    assert len(store._words._waiting) == WAITING_MAX
    assert {line["event"] for line in lines} == {"the service manager does not read; not told"}
    began_s = time.monotonic()
    store.end()
    assert time.monotonic() - began_s < 20.0
    assert open_fds() == before


async def test_a_systemd_that_was_replaced_is_told_too(reader: SlowReader) -> None:
    store = SystemdStore({"NOTIFY_SOCKET": str(reader.path)})
    store.serve(asyncio.get_running_loop())
    put(store, "first")
    assert await reader.read(1) == ["first"]
    reader.close()
    put(store, "nobody")
    reader.bind()
    put(store, "second")
    assert await reader.read(1) == ["second"]
    store.leave()
