"""Frames: whatever arrives, and however it is cut, the client survives it and says what was wrong."""

from __future__ import annotations

import dataclasses
import os
import struct
from typing import Any

import msgspec
import numpy as np
import pytest
from client_daemon import HangUp, Raw, ScriptedDaemon, encode
from client_kit import Changes, Maker, arena_descriptors, chain_of
from client_memory import LIMITS

from kvstore.client.wire import Wire
from kvstore.errors import BadRequest
from kvstore.rpc import messages as m
from kvstore.types import Miss


def frame(payload: bytes) -> bytes:
    return struct.pack("<I", len(payload)) + payload


def test_frames_may_arrive_in_any_pieces() -> None:
    wire = Wire()
    first, _ = wire.request(m.Heartbeat())
    second, _ = wire.request(m.Status())
    stream = (
        encode(second, m.StatusReport("{}")) + encode(0, m.Progress(4, 1, 2, b"")) + encode(first, m.Done())
    )
    whole = [f for at in range(len(stream)) for f in wire.feed(stream[at : at + 1])]
    assert [f.id for f in whole] == [second, 0, first]
    assert whole[1].body == m.Progress(4, 1, 2, b"")


def test_a_request_too_long_to_send_is_the_callers_mistake() -> None:
    wire = Wire()
    with pytest.raises(BadRequest, match="frame_bytes_max"):
        wire.request(m.Observe(0, 0, 0, b"k" * m.FRAME_BYTES_MAX, b""))
    ident, data = wire.request(m.Heartbeat())  # and the connection goes on
    assert wire.feed(encode(ident, m.Done()))[0].body == m.Done()
    assert msgspec.msgpack.decode(data[4:]) == [ident, ["heartbeat"]]


BROKEN = {
    "empty": frame(b""),
    "over frame_bytes_max": struct.pack("<I", m.FRAME_BYTES_MAX + 1),
    "4 GiB": b"\xff\xff\xff\xff",
    "not msgpack": frame(b"\xc1\xc1\xc1"),
    "another shape": frame(msgspec.msgpack.encode({"id": 1})),
    "unknown tag": frame(msgspec.msgpack.encode([1, ["sesame"]])),
    "missing fields": frame(msgspec.msgpack.encode([1, ["found", 1, 2]])),
    "surplus fields": frame(msgspec.msgpack.encode([1, ["done", 1]])),
    "wrong types": frame(msgspec.msgpack.encode([1, ["released", "none"]])),
    "deeply nested": frame(b"\x91" * 10_000),
    "an id never asked": encode(99_999, m.Done()),
    "a reply to nobody": encode(0, m.Done()),
    "a notice with an id": encode(1, m.Progress(1, 1, 1, b"")),
}


@pytest.mark.parametrize("data", BROKEN.values(), ids=BROKEN.keys())
def test_broken_frames_are_named(data: bytes) -> None:
    wire = Wire()
    wire.request(m.Heartbeat())
    with pytest.raises(BadRequest, match=r"reply|notice"):
        wire.feed(data)


def test_the_same_reply_twice_is_broken() -> None:
    wire = Wire()
    ident, _ = wire.request(m.Heartbeat())
    assert len(wire.feed(encode(ident, m.Done()))) == 1
    with pytest.raises(BadRequest, match="not asked"):
        wire.feed(encode(ident, m.Done()))


def test_a_daemon_that_cannot_read_us_is_quoted() -> None:
    with pytest.raises(BadRequest, match="frame: no such tag"):
        Wire().feed(encode(0, m.Failed("INVALID_ARGUMENT", "frame: no such tag")))


@pytest.mark.parametrize("data", BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_reply_is_a_miss_and_a_new_attach(daemon: ScriptedDaemon, make: Maker, data: bytes) -> None:
    client = make.attached()
    changes = Changes(client)
    chain = chain_of(client, 3)
    daemon.handlers[m.Lookup] = lambda *_: Raw(data)
    answer = client.lookup(chain)
    assert isinstance(answer, Miss)
    assert "malformed" in answer.reason
    assert daemon.conn(0).closed.wait(20)
    changes.until(lambda: client.generation == 2 and client.attached)


def test_replies_cut_byte_by_byte(daemon: ScriptedDaemon, make: Maker) -> None:
    client = make.attached()
    chain = chain_of(client, 2)

    def drip(conn: Any, body: m.Lookup) -> None:
        ident = 1 + sum(1 for request in conn.requests[:-1])
        for byte in encode(ident, daemon.on_lookup(conn, body)):
            conn.sock.sendall(bytes([byte]))

    daemon.handlers[m.Lookup] = drip
    answer = client.lookup(chain)
    assert answer == Miss("nothing is known")


def test_replies_of_another_kind_end_the_connection(daemon: ScriptedDaemon, make: Maker) -> None:
    client = make.attached()
    daemon.handlers[m.Lookup] = lambda *_: m.Done()
    answer = client.lookup(chain_of(client, 2))
    assert isinstance(answer, Miss)
    assert "Done answers Lookup" in answer.reason
    assert daemon.conn(0).closed.wait(20)


def test_a_large_request_passes_a_small_socket_buffer(daemon: ScriptedDaemon, make: Maker) -> None:
    client = make.attached()
    stored = np.frombuffer(os.urandom(32 * 8192), np.uint8).reshape(-1, 32)
    assert client.observe(1, 2, 3, stored, stored[:0])
    (told,) = daemon.seen(m.Observe)
    assert told.stored == stored.tobytes()
    assert (told.mapped, told.idle, told.free) == (1, 2, 3)


def test_surplus_descriptors_are_closed_and_refused(daemon: ScriptedDaemon, make: Maker) -> None:
    def surplus(conn: Any, body: m.Attach) -> HangUp:
        fd = daemon.arena.data_fd
        conn.send(1, daemon.on_attach(conn, body), (fd, fd, fd))
        return HangUp()

    daemon.handlers[m.Attach] = surplus
    held = arena_descriptors()
    client = make(limits=dataclasses.replace(LIMITS, retry_s=1000.0, retry_max_s=1000.0))
    assert daemon.conn(0).closed.wait(20)
    client.close()
    assert arena_descriptors() == held
