"""Messages between a daemon and its holder: one JSON object a packet, descriptors beside it.

    daemon → holder   {"do": "take", "limit_s": 600}          first word of a daemon on a new connection
                      {"do": "put", "names": [...]} + fds      hold these, under these names
                      {"do": "drop", "names": [...]}
                      {"do": "end"}                            let everything go and end
    holder → daemon   {"names": [...], "more": true} + fds     answers take, in as many packets as needed; the
                                                               first has the holder's own pidfd, "holder"
                      {"busy": "why", "wait": true}            not yours, or not yet

Every packet has "v". Only "end" means the same in every version, so that a daemon can always be rid of a
holder that it does not understand. SOCK_SEQPACKET: a packet arrives whole or not at all.
"""

from __future__ import annotations

import array
import json
import os
import socket
from collections.abc import Sequence
from typing import Any

__all__ = [
    "FDS_MAX",
    "NAME_BYTES_MAX",
    "PACKET_BYTES_MAX",
    "VERSION",
    "Malformed",
    "close_all",
    "is_name",
    "receive",
    "send",
]

VERSION = 1
FDS_MAX = 64  # in one packet; the kernel allows 253
NAME_BYTES_MAX = 128
PACKET_BYTES_MAX = 64 << 10  # 64 names of 128 bytes are 8 KiB
_FD_BYTES = array.array("i").itemsize


class Malformed(Exception):
    """A packet that is not one of the protocol."""


def is_name(name: object) -> bool:
    """Names are what systemd allows too: printable ASCII without a colon."""
    return (
        isinstance(name, str)
        and 0 < len(name) <= NAME_BYTES_MAX
        and name.isascii()
        and name.isprintable()
        and ":" not in name
    )


def send(sock: socket.socket, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
    """One packet. Raises OSError, BlockingIOError included."""
    data = json.dumps({"v": VERSION, **message}).encode()
    if fds:
        socket.send_fds(sock, [data], list(fds), socket.MSG_NOSIGNAL)
    else:
        sock.send(data, socket.MSG_NOSIGNAL)


def receive(sock: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """The next packet and its descriptors (the caller's to close), None at the end of the connection.

    Raises:
        Malformed: not a packet of the protocol, or descriptors were lost on the way; nothing stays open.
        OSError: the connection broke, or BlockingIOError.
    """
    space = socket.CMSG_SPACE((FDS_MAX + 1) * _FD_BYTES)
    data, ancillary, flags, _ = sock.recvmsg(PACKET_BYTES_MAX, space, socket.MSG_CMSG_CLOEXEC)
    fds: list[int] = []
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            numbers = array.array("i")
            numbers.frombytes(payload[: len(payload) - len(payload) % _FD_BYTES])
            fds.extend(numbers)
    try:
        if not data and not fds:
            return None
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise Malformed("a packet was cut: too long, or no descriptor was left for what came with it")
        message = json.loads(data)
        if not isinstance(message, dict) or not isinstance(message.get("v"), int):
            raise Malformed("not an object with a version")
        names = message.get("names", [])
        if not isinstance(names, list) or len(names) > FDS_MAX or not all(map(is_name, names)):
            raise Malformed(f"names: need at most {FDS_MAX} of 1 to {NAME_BYTES_MAX} printable characters")
    except (Malformed, ValueError, RecursionError) as error:
        close_all(fds)
        raise error if isinstance(error, Malformed) else Malformed(str(error)) from None
    return message, fds


def close_all(fds: Sequence[int]) -> None:
    """Close descriptors."""
    for fd in fds:
        os.close(fd)
