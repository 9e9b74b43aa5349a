"""The holder: a small process that keeps a daemon's descriptors while there is no daemon.

    python -m kvstore.keep.holder SOCKET LIMIT_S LISTENER_FD OWNER_FD

It maps nothing, so it costs a Python interpreter and no more; a memfd lives as long as somebody holds it. It
gives everything to one daemon at a time: the one before must have closed its connection *and* be gone. It
ends when it is told to, when no daemon has come for LIMIT_S, and when its daemon leaves without having put an
arena.
"""

from __future__ import annotations

import os
import resource
import selectors
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

from kvstore.keep.wire import FDS_MAX, VERSION, Malformed, close_all, receive, send
from kvstore.processes import has_ended, peer_ids, peer_pidfd

__all__ = ["Holder", "main"]

# Sessions of 65,536 clients twice over, and a few arenas.
NAMES_MAX = 1 << 18
CONNECTIONS_MAX = 16
_BACKLOG = 8
# A daemon that asks reads its answer at once; one that does not is not worth waiting for.
_SEND_S = 5.0


class Holder:
    """Descriptors by name, and who may have them.

    Args:
        listener: where the next daemon knocks.
        path: its address, removed at the end if it is still this socket.
        limit_s: how long to wait for a daemon.
        owner: connection of the daemon that started this process.
    """

    def __init__(self, listener: socket.socket, path: Path, limit_s: float, owner: socket.socket) -> None:
        self._listener, self._path, self._limit_s = listener, path, limit_s
        self._inode = path.stat().st_ino if path.exists() else 0
        self._fds: dict[str, int] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._ended = False
        self._owner: socket.socket | None = None
        self._owner_pidfd = -1
        self._alone_since = time.monotonic()
        self._own(owner)
        self._selector.register(owner, selectors.EVENT_READ)

    def run(self) -> None:
        """Until it is time to end; then nothing is left."""
        while not self._ended:
            for key, _ in self._selector.select(self._patience_s()):
                if key.fileobj is self._listener:
                    self._accept()
                elif isinstance(key.fileobj, socket.socket) and key.fileobj.fileno() >= 0:
                    self._hear(key.fileobj)  # (one that an earlier event of this round closed says nothing)
            if self._owner is None and time.monotonic() - self._alone_since >= self._limit_s:
                break
        self._close()

    def _patience_s(self) -> float | None:
        if self._owner is not None:
            return None
        return max(0.0, self._alone_since + self._limit_s - time.monotonic())

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return  # it hung up again, or no descriptor is left: the backlog waits
        _, uid = peer_ids(sock)
        if uid not in (0, os.geteuid()) or len(self._selector.get_map()) > CONNECTIONS_MAX:
            sock.close()
            return
        sock.settimeout(_SEND_S)
        self._selector.register(sock, selectors.EVENT_READ)

    def _hear(self, sock: socket.socket) -> None:
        try:
            got = receive(sock)
        except (Malformed, OSError):
            got = None
        if got is None:
            self._hang_up(sock)
            return
        message, fds = got
        try:
            self._obey(sock, message, fds)
        except OSError:
            self._hang_up(sock)

    def _obey(self, sock: socket.socket, message: dict[str, Any], fds: list[int]) -> None:
        do = message.get("do")
        if do == "put" and sock is self._owner and len(fds) == len(message.get("names", [])):
            for name, fd in zip(message["names"], fds, strict=True):
                self._put(name, fd)
            return
        close_all(fds)
        if sock is not self._owner and do in ("take", "end"):
            why = self._taken()
            if why:
                send(sock, {"busy": why, "wait": self._owner is None})
                return
            if self._ended:
                return
        if do == "end":
            self._ended = True
        elif do == "take" and sock is not self._owner and message["v"] == VERSION:
            limit_s = message.get("limit_s")
            self._limit_s = float(limit_s) if isinstance(limit_s, int | float) else self._limit_s
            self._own(sock)
            self._give(sock)
        elif do == "drop" and sock is self._owner:
            for name in message.get("names", []):
                fd = self._fds.pop(name, -1)
                if fd >= 0:
                    os.close(fd)
        else:
            self._hang_up(sock)

    def _taken(self) -> str:
        """Why nobody else may have it now, "" if one may."""
        if self._owner is not None and self._owner_pidfd >= 0 and has_ended(self._owner_pidfd):
            # Its end and this question came together: what it had sent before counts, then it is gone.
            while self._owner is not None:
                self._hear(self._owner)
        if self._owner is not None:
            return "a daemon that runs has it"
        if self._owner_pidfd >= 0 and not has_ended(self._owner_pidfd):
            return "the daemon before has not ended yet"
        return ""

    def _own(self, sock: socket.socket) -> None:
        if self._owner_pidfd >= 0:
            os.close(self._owner_pidfd)
        self._owner, self._owner_pidfd = sock, peer_pidfd(sock)
        if self._owner_pidfd < 0:  # Linux < 6.5: it lives now, so its pid is its own
            try:
                self._owner_pidfd = os.pidfd_open(peer_ids(sock)[0])
            except OSError:
                self._owner_pidfd = -1

    def _give(self, sock: socket.socket) -> None:
        mine = os.pidfd_open(os.getpid())
        try:
            waiting = [("holder", mine), *self._fds.items()]
            while waiting:
                some, waiting = waiting[:FDS_MAX], waiting[FDS_MAX:]
                send(
                    sock, {"names": [name for name, _ in some], "more": bool(waiting)}, [fd for _, fd in some]
                )
        finally:
            os.close(mine)

    def _put(self, name: str, fd: int) -> None:
        former = self._fds.pop(name, -1)
        if former >= 0:
            os.close(former)
        if len(self._fds) < NAMES_MAX:
            self._fds[name] = fd
        else:
            os.close(fd)

    def _hang_up(self, sock: socket.socket) -> None:
        self._selector.unregister(sock)
        sock.close()
        if sock is self._owner:
            self._owner, self._alone_since = None, time.monotonic()
            # Without an arena (its daemon never came that far) there is nothing to wait for.
            self._ended = self._ended or not any(name.startswith("data.") for name in self._fds)

    def _close(self) -> None:
        # The address first: who finds it gone must not wait for us.
        if self._inode and self._path.exists() and self._path.stat().st_ino == self._inode:
            self._path.unlink()
        self._listener.close()
        close_all(list(self._fds.values()))
        self._fds.clear()


def main() -> None:
    """See the top of this file."""
    path, limit_s, listener, owner = sys.argv[1:5]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    knock = socket.socket(fileno=int(listener))
    daemon = socket.socket(fileno=int(owner))
    daemon.settimeout(_SEND_S)
    holder = Holder(knock, Path(path), float(limit_s), daemon)
    os.chdir("/")  # keep no file system busy
    holder.run()


if __name__ == "__main__":
    main()
