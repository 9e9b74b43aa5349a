"""Who is at the other end of a Unix socket, told by pidfd: a pid may be another process by now."""

from __future__ import annotations

import errno
import os
import select
import socket
import struct

__all__ = ["has_ended", "peer_ids", "peer_pidfd", "process_identity"]

_SO_PEERPIDFD = 77  # Linux 6.5; not yet a constant of the socket module


def peer_ids(sock: socket.socket) -> tuple[int, int]:
    """Pid and uid of the process that connected (0 for a pid of another pid namespace)."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", raw)
    return pid, uid


def peer_pidfd(sock: socket.socket) -> int:
    """A pidfd of the process that connected; -1 on a kernel before 6.5, or when it is gone already.

    Raises:
        OSError: no descriptor left: better no session than one whose end cannot be seen.
    """
    try:
        fd = struct.unpack("i", sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD, 4))[0]
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
            raise
        return -1
    os.set_inheritable(fd, False)
    return int(fd)


def process_identity(pidfd: int) -> tuple[int, int] | None:
    """What two pidfds of one process share and of two processes do not; None where the kernel cannot tell.

    Not the pid: an engine in another container has pid 0 here. Since Linux 6.9 pidfds live on a file system
    of their own with an inode per process; before, all share the one anonymous inode, like an eventfd.
    """
    if pidfd < 0:
        return None
    anonymous = os.eventfd(0, os.EFD_CLOEXEC)
    try:
        mine, other = os.fstat(pidfd), os.fstat(anonymous)
    finally:
        os.close(anonymous)
    return (mine.st_dev, mine.st_ino) if mine.st_dev != other.st_dev else None


def has_ended(pidfd: int, timeout_s: float = 0.0) -> bool:
    """Whether the process of a pidfd is gone, waiting for that at most `timeout_s`."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(max(0, int(timeout_s * 1000))))
