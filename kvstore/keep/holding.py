"""The daemon's end of a holder process (`holder.py`): start it, feed it, replace it when it dies."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import structlog

from kvstore.errors import ConfigError
from kvstore.keep.wire import FDS_MAX, Malformed, close_all, receive, send
from kvstore.processes import has_ended

__all__ = ["Holding", "end_leftover", "holder_path"]

log = structlog.get_logger()

_CALL_S = 5.0
# How long the daemon before may take to be gone after its socket is: the kernel unmaps its arena meanwhile.
_FORMER_S = 60.0
_ASK_AGAIN_S = 0.02
_RESTART_S, _RESTART_MAX_S = 0.5, 60.0
# A holder that has lived for so long was well: what ended it is no reason to wait longer for the next.
_HEALTHY_S = 60.0
# Packets that wait for a holder that does not read; a session is two. Then it is replaced.
_WAITING_MAX = 4096


def holder_path(daemon_socket: str) -> Path:
    """Where the holder of the daemon at that socket listens.

    Raises:
        ConfigError: the name would be longer than the kernel allows.
    """
    path = f"{daemon_socket}.keep"
    if len(path.encode()) > 107:
        raise ConfigError(
            "daemon.socket: need at most 102 bytes with daemon.keep_arena (SOCKET.keep lies beside it)"
        )
    return Path(path)


def end_leftover(path: Path) -> bool:
    """Let a holder without a daemon give its memory back; whether there was one.

    Raises:
        ConfigError: it belongs to a daemon that runs.
    """
    sock = _knock(path)
    if sock is None:
        return False
    with sock:
        _ask_end(sock)
    path.unlink(missing_ok=True)
    return True


class Holding:
    """See `Keeper`.

    Args:
        path: where the holder listens for the next daemon.
        limit_s: how long it waits for one.
    """

    def __init__(self, path: Path, limit_s: float) -> None:
        self._path, self._limit_s = path, limit_s
        self._held: dict[str, int] = {}  # duplicates: a holder that dies is replaced from here
        self._sock: socket.socket | None = None
        self._child = False  # the holder is a process of ours (not one that an earlier daemon started)
        self._pidfd = -1
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._waiting: deque[tuple[dict[str, Any], list[int]]] = deque()
        self._pause_s = _RESTART_S
        self._watched_s = 0.0  # since when, by the loop's clock

    # ---- begin ---------------------------------------------------------------------------------------------

    def take(self) -> dict[str, int]:
        self._sock = _knock(self._path)
        if self._sock is None:
            self._start()
            return {}
        try:
            found = self._taken(self._sock)
        except (Malformed, OSError) as error:
            log.warning("kept arena dropped, starting cold", reason=f"its holder is of no use: {error}")
            self._sock.close()
            if isinstance(error, Malformed):  # another version: the one word that it understands
                end_leftover(self._path)
            self._start()
            return {}
        self._pidfd = found.pop("holder", -1)
        self._held = {name: os.dup(fd) for name, fd in found.items()}
        return found

    def _taken(self, sock: socket.socket) -> dict[str, int]:
        found: dict[str, int] = {}
        deadline = time.monotonic() + _FORMER_S
        more = True
        send(sock, {"do": "take", "limit_s": self._limit_s})
        try:
            while more:
                message, fds = _answer(sock)
                if "busy" in message:
                    _wait_for_former(message, deadline)
                    send(sock, {"do": "take", "limit_s": self._limit_s})
                    continue
                names = message.get("names", [])
                if len(names) != len(fds):
                    close_all(fds)
                    raise Malformed(f"{len(fds)} descriptors for {len(names)} names")
                found.update(zip(names, fds, strict=True))
                more = bool(message.get("more"))
        except BaseException:  # whatever it was: no descriptor may stay behind
            close_all(list(found.values()))
            raise
        return found

    def _start(self) -> None:
        """A fresh holder, with everything that is held."""
        self._path.unlink(missing_ok=True)
        mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        umask = os.umask(0o177)
        try:
            listener.bind(str(self._path))
            listener.listen()
            self._pidfd = os.pidfd_open(_spawn(self._path, self._limit_s, listener, its))
            self._child = True
        except OSError as error:
            mine.close()
            self._path.unlink(missing_ok=True)
            raise ConfigError(
                f"daemon.keep_arena: cannot start a holder at {self._path}: {error.strerror}"
            ) from None
        finally:
            os.umask(umask)
            listener.close()
            its.close()
        self._sock = mine
        self._waiting.clear()
        for start in range(0, len(self._held), FDS_MAX):
            names = list(self._held)[start : start + FDS_MAX]
            self._tell({"do": "put", "names": names}, [self._held[name] for name in names])

    # ---- hold ----------------------------------------------------------------------------------------------

    def put(self, fds: Mapping[str, int]) -> None:
        names = list(fds)
        for name in names:
            self._forget(name)
            self._held[name] = os.dup(fds[name])
        for start in range(0, len(names), FDS_MAX):
            some = names[start : start + FDS_MAX]
            self._tell({"do": "put", "names": some}, [self._held[name] for name in some])

    def drop(self, names: Iterable[str]) -> None:
        gone = list(names)
        for name in gone:
            self._forget(name)
        for start in range(0, len(gone), FDS_MAX):
            self._tell({"do": "drop", "names": gone[start : start + FDS_MAX]}, [])

    def _forget(self, name: str) -> None:
        fd = self._held.pop(name, -1)
        if fd >= 0:
            os.close(fd)

    def _tell(self, message: dict[str, Any], fds: list[int]) -> None:
        """Send, in order; what does not go out at once waits with duplicates of its descriptors."""
        sock = self._sock
        if sock is None:
            return  # a new holder will be told everything
        if not self._waiting:
            sock.setblocking(False)
            try:
                send(sock, message, fds)
                return
            except BlockingIOError:
                if self._loop is None:
                    select.select([], [sock], [], _CALL_S)
            except OSError as error:
                self._lost(f"send failed: {error}")
                return
            if self._loop is not None:
                self._loop.add_writer(sock.fileno(), self._flush)
        self._waiting.append((message, [os.dup(fd) for fd in fds]))
        if self._loop is None:
            self._flush()
        if len(self._waiting) > _WAITING_MAX:
            self._lost("it does not read")

    def _flush(self) -> None:
        sock = self._sock
        while sock is not None and self._waiting:
            message, fds = self._waiting[0]
            try:
                send(sock, message, fds)
            except BlockingIOError:
                return
            except OSError as error:
                self._lost(f"send failed: {error}")
                return
            self._waiting.popleft()
            close_all(fds)
        if sock is not None and self._loop is not None:
            self._loop.remove_writer(sock.fileno())

    # ---- watch ---------------------------------------------------------------------------------------------

    def serve(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        if self._sock is None:
            self._lost("it ended while the daemon started")
        else:
            self._watch(self._sock)

    def _watch(self, sock: socket.socket) -> None:
        assert self._loop is not None
        sock.setblocking(False)
        self._watched_s = self._loop.time()
        self._loop.add_reader(sock.fileno(), self._readable)
        if self._waiting:
            self._loop.add_writer(sock.fileno(), self._flush)

    def _readable(self) -> None:
        assert self._sock is not None
        try:
            got = receive(self._sock)
        except BlockingIOError:
            return
        except (Malformed, OSError) as error:
            self._lost(str(error))
            return
        if got is None:
            self._lost("it ended")
        else:  # it has nothing to say to a daemon that did not ask
            close_all(got[1])

    def _lost(self, reason: str) -> None:
        """The holder is of no use any more: another one, soon."""
        log.warning("the holder of the arena is gone; starting another one", reason=reason)
        self._disconnect()
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            has_ended(self._pidfd, 1.0)
        self._reap()
        if self._loop is not None:
            if self._loop.time() - self._watched_s >= _HEALTHY_S:
                self._pause_s = _RESTART_S
            self._timer = self._loop.call_later(self._pause_s, self._restart)
            self._pause_s = min(2 * self._pause_s, _RESTART_MAX_S)

    def _restart(self) -> None:
        self._timer = None
        try:
            self._start()
        except ConfigError as error:
            log.error("no holder: a restart would be cold", reason=str(error))
            assert self._loop is not None
            self._timer = self._loop.call_later(self._pause_s, self._restart)
            self._pause_s = min(2 * self._pause_s, _RESTART_MAX_S)
            return
        assert self._sock is not None
        self._watch(self._sock)

    # ---- end -----------------------------------------------------------------------------------------------

    def leave(self) -> None:
        self._close()

    def end(self) -> None:
        if self._sock is not None:
            self._sock.settimeout(_CALL_S)
            try:
                send(self._sock, {"do": "end"})
            except OSError as error:
                log.warning("the holder cannot be told to end; killing it", reason=str(error))
        if self._pidfd >= 0 and (self._sock is None or not has_ended(self._pidfd, _CALL_S)):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            has_ended(self._pidfd, _CALL_S)
        self._close()
        self._path.unlink(missing_ok=True)

    def _close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._disconnect()
        close_all(list(self._held.values()))
        self._held.clear()
        self._reap()

    def _disconnect(self) -> None:
        if self._sock is not None:
            if self._loop is not None:
                self._loop.remove_reader(self._sock.fileno())
                self._loop.remove_writer(self._sock.fileno())
            self._sock.close()
            self._sock = None
        for _, fds in self._waiting:
            close_all(fds)
        self._waiting.clear()

    def _reap(self) -> None:
        """A holder of our own that has ended must not stay as a zombie."""
        if self._pidfd >= 0:
            if self._child and has_ended(self._pidfd):
                os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED)
            os.close(self._pidfd)
        self._pidfd, self._child = -1, False


def _spawn(path: Path, limit_s: float, listener: socket.socket, owner: socket.socket) -> int:
    """Start a holder; its pid."""
    fds = [listener.fileno(), owner.fileno()]
    for fd in fds:
        os.set_inheritable(fd, True)
    command = [sys.executable, "-m", "kvstore.keep.holder", str(path), str(limit_s), *map(str, fds)]
    silence = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in range(3)]
    # A session of its own: what ends the daemon's terminal or process group is not meant for it.
    return os.posix_spawn(sys.executable, command, os.environ, file_actions=silence, setsid=True)


def _knock(path: Path) -> socket.socket | None:
    """A connection to the holder at `path`, None when nobody is there."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.settimeout(_CALL_S)
    try:
        sock.connect(str(path))
    except OSError:
        sock.close()
        return None
    return sock


def _answer(sock: socket.socket) -> tuple[dict[str, Any], list[int]]:
    got = receive(sock)
    if got is None:
        raise Malformed("it hung up")
    return got


def _wait_for_former(message: dict[str, Any], deadline: float) -> None:
    """Raises ConfigError unless asking again may help."""
    if not message.get("wait") or time.monotonic() > deadline:
        raise ConfigError(f"daemon.keep_arena: the kept arena is not to be had: {message['busy']}")
    time.sleep(_ASK_AGAIN_S)


def _ask_end(sock: socket.socket) -> None:
    deadline = time.monotonic() + _FORMER_S
    with contextlib.suppress(Malformed, OSError):
        while True:
            send(sock, {"do": "end"})
            message, fds = _answer(sock)  # it ends by hanging up
            close_all(fds)
            if "busy" not in message:
                return
            _wait_for_former(message, deadline)
