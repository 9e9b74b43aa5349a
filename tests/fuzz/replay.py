"""Send the pieces of a failed run again, to a fresh daemon with the same salts.

Lease ids, keys and roots are the same in every run; tokens of fillings start at random, so those that a
message names are moved by the difference.
"""

from __future__ import annotations

import socket
from contextlib import suppress
from pathlib import Path

import msgspec
from raw_session import RawSession

from kvstore.rpc import messages as m

__all__ = ["replay"]

# Tokens of one run lie this close behind its first.
_TOKENS_SPAN = 1 << 30
_decode = msgspec.msgpack.Decoder(m.RequestFrame).decode


def replay(path: Path, daemon: Path) -> int:
    """Send every piece; how many."""
    lines = path.read_bytes().splitlines()
    facts = msgspec.json.decode(lines[0])
    with RawSession(daemon) as first:
        moved = first.attach().welcome.token - facts["token"]  # type: ignore[union-attr]
    talks: dict[int, socket.socket] = {}
    sent = 0
    try:
        for line in lines[1:]:
            number, what, data = msgspec.json.decode(line, type=tuple[int, str, str])
            if what == "close":
                if number in talks:
                    talks.pop(number).close()
                continue
            if number not in talks:
                talks[number] = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                talks[number].connect(str(daemon))
            with suppress(BrokenPipeError, ConnectionResetError):
                talks[number].sendall(_moved(bytes.fromhex(data), facts["token"], moved))
                sent += 1
            _drain(talks[number])
    finally:
        for talk in talks.values():
            talk.close()
    return sent


def _drain(talk: socket.socket) -> None:
    """Drop what has been answered, descriptors included, so that the daemon never waits for us."""
    with suppress(BlockingIOError, ConnectionResetError):
        while talk.recv(1 << 18, socket.MSG_DONTWAIT):
            pass


def _moved(data: bytes, token: int, by: int) -> bytes:
    """The same frames, with the tokens of this daemon."""
    out, at = bytearray(), 0
    while len(data) - at >= 4:
        length = int.from_bytes(data[at : at + 4], "little")
        payload = data[at + 4 : at + 4 + length]
        at += 4 + length
        try:
            frame = _decode(payload)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            out += length.to_bytes(4, "little") + payload
            continue
        body = frame.body
        if isinstance(body, m.Publish | m.Abort) and token <= body.token < token + _TOKENS_SPAN:
            body = msgspec.structs.replace(body, token=body.token + by)
            payload = msgspec.msgpack.encode([frame.id, body])
        out += len(payload).to_bytes(4, "little") + payload
    return bytes(out + data[at:])
