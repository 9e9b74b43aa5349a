"""The Unix socket: accepts, watches processes, closes who stays silent.

A process is watched by its pidfd (SO_PEERPIDFD): when it becomes readable the process is gone and can write
to no slot. A closed socket alone proves nothing (LAWS A1).
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import structlog

from kvstore import engines
from kvstore.callers import Caller
from kvstore.checks import Checks
from kvstore.config import DaemonConfig
from kvstore.errors import ConfigError
from kvstore.keep.keeping import Keeping
from kvstore.processes import peer_ids, peer_pidfd, process_identity
from kvstore.rpc.connection import RECEIVED_BYTES, Connection
from kvstore.rpc.former import FormerWriters
from kvstore.rpc.later import Later
from kvstore.rpc.request_log import RequestLog
from kvstore.rpc.session import Session
from kvstore.store import Store

__all__ = ["Peer", "SessionServer", "free_path"]

log = structlog.get_logger()

_BACKLOG = 1024
# After EMFILE: how long to leave the backlog alone before trying again.
_ACCEPT_PAUSE_S = 0.1


class Peer:
    """The process at the other end of a session, watched until nothing depends on it.

    Args:
        watched: all peers of the daemon; this one is in it until its watch ends.
        former: processes that were handed slots by the daemon before.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        session: int,
        watched: set[Peer],
        former: FormerWriters,
    ) -> None:
        self._loop = loop
        self._session = session
        self._watched = watched
        self._former = former
        self._caller: Caller | None = None
        self.pid, self.uid = peer_ids(sock)
        self.connection: Connection | None = None
        self._pidfd = peer_pidfd(sock)
        self._process = process_identity(self._pidfd)
        if self._pidfd >= 0:
            loop.add_reader(self._pidfd, self._on_gone)
        watched.add(self)

    def attached(self, caller: Caller) -> None:
        """From now on this process may be handed slots.

        Raises:
            LimitExceeded: so many may already that a next daemon could not be told of it; nothing changed.
        """
        if caller.copies and self._former.keeping is not None:
            self._former.keeping.attached(self._session, caller.engine.id, self._pidfd)
        self._caller = caller

    def connection_closed(self) -> None:
        """Keep watching only while the process may still write to a slot."""
        self.connection = None
        writes = self._caller is not None and self._session in self._caller.engine.writers
        if not writes:
            self.close()
        elif self._pidfd < 0:
            fix = "run Linux 6.5 or newer, or restart the daemon to get them back"
            log.warning(
                "no pidfd: slots of a closed session stay quarantined",
                **_who(self._session, self._caller),
                fix=fix,
            )

    def _on_gone(self) -> None:
        # A child may hold the socket open; the process that mapped the arena is gone all the same.
        if self.connection is not None:
            self.connection.close("process ended")
        caller, self._caller = self._caller, None
        self.close()
        if caller is not None:
            freed = engines.writer_gone(caller.group, caller.engine, self._session)
            if freed:
                who = _who(self._session, caller)
                log.info("fillings of an ended process freed", **who, fillings=freed)

    def close(self) -> None:
        """Stop watching."""
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
        self._watched.discard(self)
        if self._former.keeping is not None:
            self._former.keeping.gone(self._session)

    def quiesced(self, caller: Caller) -> int:
        """This process says that all its copies are joined: also those of its sessions that closed before.

        Returns:
            Fillings that were freed.
        """
        freed = engines.writer_gone(caller.group, caller.engine, self._session)
        self._former.quiesced(self._process, caller.engine.id)
        for peer in list(self._watched):
            earlier = peer._caller
            if earlier is None or earlier.engine is not caller.engine or peer.connection is not None:
                continue  # what another engine of this process still copies is not this one's to say
            if self._process is None or peer._process != self._process:
                continue
            freed += engines.writer_gone(earlier.group, earlier.engine, peer._session)
            peer.close()
        return freed


def _who(session: int, caller: Caller | None) -> dict[str, object]:
    """What a log line says about a session."""
    if caller is None:
        return {"session": session}
    return {"session": session, "engine": caller.engine.id.hex(), "tenant": ",".join(caller.tenants)}


class SessionServer:
    """Listens on `daemon.socket` and owns every session.

    Args:
        keeping: what outlives this daemon, None = nothing.
        on_stop: called when a tool asks the daemon to end; whether what is kept shall stay.
        requests: shared with other doors of the daemon; None = one of its own.
        checks: of the store, when others ask for them too; opened and closed here.
    """

    def __init__(
        self,
        store: Store,
        loop: asyncio.AbstractEventLoop,
        keeping: Keeping | None = None,
        on_stop: Callable[[bool], None] | None = None,
        requests: RequestLog | None = None,
        checks: Checks | None = None,
    ) -> None:
        self._store = store
        self._former = FormerWriters(store, loop, keeping)
        self._on_stop = on_stop
        self._loop = loop
        self._received = memoryview(bytearray(RECEIVED_BYTES))
        self._config = store.config.daemon
        self._checks = checks or Checks(store, loop)
        self._later = Later(loop)
        self._path = Path(self._config.socket)
        self._listener: socket.socket | None = None
        self._sessions: dict[int, Session] = {}
        self._peers: set[Peer] = set()
        self._last_number = 0
        self._inode = 0
        self.requests = requests or RequestLog(store.clock, every=self._config.log_level == "debug")

    def open(self) -> None:
        """Bind and listen.

        Raises:
            ConfigError: the path is in use by a living daemon, or cannot be bound.
        """
        free_path(self._path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        previous = os.umask(0o777 & ~self._config.socket_mode)
        try:
            listener.bind(str(self._path))
        except OSError as error:
            listener.close()
            raise ConfigError(f"daemon.socket: cannot bind {self._path}: {error.strerror}") from None
        finally:
            os.umask(previous)
        self._inode = self._path.stat().st_ino
        listener.listen(_BACKLOG)
        self._listener = listener
        for group in self._store.groups.values():
            group.later = self._later.begin
        self._checks.open()
        self._former.watch()
        self._loop.add_reader(listener.fileno(), self._accept)

    def __len__(self) -> int:
        return len(self._sessions)

    def reconfigure(self, config: DaemonConfig) -> None:
        """Limits of a reloaded configuration hold from now on."""
        self._config = config
        self.requests.every = config.log_level == "debug"

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                raise
            fix = "raise this process's limit of open files (LimitNOFILE, ulimit -n); two a session"
            log.error("cannot accept", reason=error.strerror, sessions=len(self._sessions), fix=fix)
            self._loop.remove_reader(self._listener.fileno())
            self._loop.call_later(_ACCEPT_PAUSE_S, self._resume_accepting)
            return
        if len(self._sessions) >= self._config.sessions_max:
            most = self._config.sessions_max
            fix = "raise daemon.sessions_max, or end engines that are not needed"
            log.warning("session refused", reason=f"daemon.sessions_max = {most} are connected; {fix}")
            sock.close()
            return
        self._welcome(sock)

    def _resume_accepting(self) -> None:
        if self._listener is not None:
            self._loop.add_reader(self._listener.fileno(), self._accept)

    def _welcome(self, sock: socket.socket) -> None:
        self._last_number += 1
        number = self._last_number
        try:
            peer = Peer(self._loop, sock, number, self._peers, self._former)
        except OSError as error:
            log.error("session refused", session=number, reason=str(error))
            sock.close()
            return
        session = Session(self._store, self._checks, number, peer, self.requests)
        session.on_stop = self._on_stop
        timer = self._loop.call_later(self._config.attach_timeout_s, self._too_silent, number)

        def closed(reason: str) -> None:
            timer.cancel()
            session.on_closed(reason)
            peer.connection_closed()
            del self._sessions[number]

        connection = Connection(self._loop, sock, self._received, session.on_frame, closed)
        session.connection = peer.connection = connection
        self._sessions[number] = session

    def _too_silent(self, number: int) -> None:
        session = self._sessions[number]
        if session.caller is None and not session.tool and session.connection is not None:
            session.connection.close(f"did not attach within {self._config.attach_timeout_s} s")

    def close(self) -> None:
        """Stop listening, close every session, remove the socket."""
        self._checks.close()
        if self._listener is not None:
            self._loop.remove_reader(self._listener.fileno())
            self._listener.close()
            self._listener = None
            # Another daemon may have taken the path over; only our own inode goes.
            if self._path.exists() and self._path.stat().st_ino == self._inode:
                self._path.unlink()
        for session in list(self._sessions.values()):
            if session.connection is not None:
                session.connection.close("daemon stops")
        for peer in list(self._peers):
            peer.close()
        self._later.close()
        self._former.close()


def free_path(path: Path, key: str = "daemon.socket") -> None:
    """Remove a socket that nobody listens on.

    Args:
        key: of the configuration that names it, for messages.

    Raises:
        ConfigError: a daemon listens there, it is something else, or its folder does not exist.
    """
    if not path.parent.is_dir():
        raise ConfigError(f"daemon.socket: there is no folder {path.parent}; make it or choose another path")
    if not path.exists():
        return
    if not stat.S_ISSOCK(path.stat().st_mode):
        raise ConfigError(f"{key}: {path} exists and is not a socket; remove it or choose another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            path.unlink(missing_ok=True)
            return
        except OSError as error:
            raise ConfigError(f"{key}: cannot tell who owns {path}: {error.strerror}") from None
    raise ConfigError(f"{key}: another daemon listens on {path}; stop it or choose another path")
