"""The session's Unix socket: non-blocking, close-on-exec, file descriptors taken safely."""

from __future__ import annotations

import array
import contextlib
import os
import select
import socket
from pathlib import Path

from kvstore.errors import BadRequest, Unavailable

__all__ = ["READ_BYTES", "close_fds", "hang_up", "has_hung_up", "open_socket", "receive"]

READ_BYTES = 1 << 16  # replies are small; a Found of 8,192 scattered slots is 64 KiB
_FDS_MAX = 2  # an Attached brings the data and the control memfd, nothing else ever brings any
_FD_BYTES = array.array("i").itemsize
# Room for one more than can be honest, so that a surplus is seen rather than cut off.
_SPACE = socket.CMSG_SPACE((_FDS_MAX + 1) * _FD_BYTES)
# Plain numbers: the enumeration's operators would cost more than the call.
_CLOEXEC, _CUT_OFF = int(socket.MSG_CMSG_CLOEXEC), int(socket.MSG_CTRUNC)


def open_socket(path: Path) -> socket.socket:
    """Connected non-blocking socket.

    A Unix connect never takes long: it succeeds, or fails at once (nobody listens, backlog full).

    Raises:
        Unavailable: nobody listens there.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.connect(os.fspath(path))
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        sock.close()
        raise Unavailable(f"{path}: {error}") from None
    return sock


def receive(sock: socket.socket, fds: list[int]) -> bytes:
    """What can be read now; file descriptors that came along are appended to `fds`.

    Returns:
        Bytes, b"" at the end of the stream.

    Raises:
        BadRequest: more file descriptors came than any reply brings.
        BlockingIOError: nothing is there yet.
        OSError: the connection broke.
    """
    data, ancillary, flags, _ = sock.recvmsg(READ_BYTES, _SPACE, _CLOEXEC)
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            numbers = array.array("i")
            numbers.frombytes(payload[: len(payload) - len(payload) % _FD_BYTES])
            fds.extend(numbers)
    if flags & _CUT_OFF or len(fds) > _FDS_MAX:
        raise BadRequest(f"more than {_FDS_MAX} file descriptors came with a reply")
    return data


def close_fds(fds: list[int]) -> None:
    """Close and forget all of them."""
    while fds:
        os.close(fds.pop())


def has_hung_up(sock: socket.socket) -> bool:
    """Whether the other end is closed; does not wait and takes nothing off the socket."""
    poll = select.poll()
    poll.register(sock, select.POLLRDHUP)
    return bool(poll.poll(0))


def hang_up(sock: socket.socket) -> None:
    """End the conversation for everybody who holds this socket, a forked child included.

    `close` alone would leave the connection open as long as a child of ours holds a copy.
    """
    with contextlib.suppress(OSError):  # the other end may be gone already
        sock.shutdown(socket.SHUT_RDWR)
