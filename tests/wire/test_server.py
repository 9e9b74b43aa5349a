"""The daemon's side of a connection: bounded memory, and whose process a pidfd is."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading

import pytest

from kvstore.processes import process_identity
from kvstore.rpc.connection import RECEIVED_BYTES, Connection
from kvstore.rpc.messages import FRAME_BYTES_MAX

# One receive plus one frame: what an honest connection may hold at once.
HELD_MAX = RECEIVED_BYTES + FRAME_BYTES_MAX


class Sink:
    """A connection over a socket pair; notes how much it ever held."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.client, server = socket.socketpair()
        self.frames: list[int] = []
        self.held = 0
        self.closed: asyncio.Future[str] = loop.create_future()
        received = memoryview(bytearray(RECEIVED_BYTES))
        self.connection = Connection(loop, server, received, self.take, self.closed.set_result)

    def take(self, payload: memoryview) -> None:
        self.frames.append(len(payload))
        self.held = max(self.held, len(self.connection._in))


def frame(length: int) -> bytes:
    return length.to_bytes(4, "little") + bytes(length)


async def test_a_client_that_sends_faster_than_it_is_answered_waits_in_its_own_buffer() -> None:
    sink = Sink(asyncio.get_running_loop())
    count = 200_000
    flood = frame(60) * count

    def send() -> None:
        sink.client.sendall(flood)
        sink.client.close()

    sender = threading.Thread(target=send)
    sender.start()
    async with asyncio.timeout(60):
        await sink.closed
    sender.join()
    assert len(sink.frames) == count
    assert sink.held <= HELD_MAX


async def test_frames_cut_anywhere_arrive_whole_and_in_order() -> None:
    sink = Sink(asyncio.get_running_loop())
    data = b"".join(frame(length) for length in range(64))
    for byte in data:
        sink.client.send(bytes([byte]))
        await asyncio.sleep(0)
    sink.client.close()
    async with asyncio.timeout(30):
        await sink.closed
    assert sink.frames == list(range(64))


async def test_a_frame_over_the_limit_ends_the_connection_with_a_reason() -> None:
    sink = Sink(asyncio.get_running_loop())
    sink.client.send((FRAME_BYTES_MAX + 1).to_bytes(4, "little"))
    async with asyncio.timeout(30):
        assert "frame_bytes_max" in await sink.closed
    sink.client.close()


async def test_a_client_that_never_reads_is_hung_up_on() -> None:
    sink = Sink(asyncio.get_running_loop())
    while not sink.closed.done():
        sink.connection.send(frame(1 << 20))
        await asyncio.sleep(0)
    assert "does not read" in sink.closed.result()
    sink.client.close()


def test_a_process_is_known_by_its_pidfd_not_by_its_number() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    fds = [os.pidfd_open(os.getpid()), os.pidfd_open(os.getpid()), os.pidfd_open(child.pid)]
    try:
        mine, again, other = map(process_identity, fds)
    finally:
        child.communicate(b"\n")
        for fd in fds:
            os.close(fd)
    if mine is None:
        pytest.skip("kernel before 6.9: pidfds of different processes look the same")
    assert mine == again
    assert mine != other


def test_what_is_no_pidfd_identifies_nobody() -> None:
    anonymous = os.eventfd(0)
    try:
        assert process_identity(anonymous) is None
        assert process_identity(-1) is None
    finally:
        os.close(anonymous)
