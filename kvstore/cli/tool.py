"""A tool's session with a running daemon: blocking, one deadline an answer, and a cause for every silence."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import socket
import stat
import struct
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import msgspec

from kvstore.errors import STATUS, DeadlineExceeded, NotFound, Unavailable, from_status
from kvstore.processes import peer_ids, peer_pidfd
from kvstore.rpc import messages as m

__all__ = ["ANSWER_S", "NoAnswer", "Tool", "ask"]

# A daemon answers status in under a millisecond; one that is prefaulting has no socket yet.
ANSWER_S = 3.0
_STATUS_NEEDS = ("version", "pid", "uptime_s", "epoch", "groups")
_OTHER_INSTALLATION = "use the kvstore of the daemon's own installation, or restart the daemon with this one"
_LENGTH = struct.Struct("<I")

Cause = Literal["absent", "not_a_socket", "stale", "denied", "hung", "hung_up", "version", "foreign"]


class NoAnswer(Unavailable):
    """Nobody answers at a socket, and why.

    Attributes:
        cause: absent: there is no such file; not_a_socket: something else is there; stale: its daemon is
            gone; denied: not allowed to connect; hung: accepts and stays silent; hung_up: closed without a
            word; version: another protocol version; foreign: not a kvstore daemon.
        fix: what to do.
    """

    def __init__(self, path: Path, cause: Cause, why: str, fix: str) -> None:
        super().__init__(f"no daemon answers at {path} (daemon.socket): {why}")
        self.cause, self.fix = cause, fix


class Tool:
    """One connection with the role "tool": it may ask for status, checks, explanations, a flush and
    the daemon's end.

    Args:
        path: the daemon's socket.
        answer_s: how long one answer may take.

    Raises:
        NoAnswer: the daemon cannot be asked; also from `ask`, then this session is over.
    """

    def __init__(self, path: Path, answer_s: float = ANSWER_S) -> None:
        from kvstore.keys import test_vector  # numpy and the native core: not for `kvstore --help`

        self._path = path
        self._answer_s = answer_s
        self._sock = _connect(path, answer_s)
        self._in = bytearray()
        self._last_id = 0
        try:
            hello = m.Attach(m.PROTOCOL_VERSION, "tool", b"", {}, None, (0, 0, 0, 0), [], test_vector())
            welcome = self._round_trip(hello)
        except BaseException:  # whatever it was, nobody else will close the socket
            self.close()
            raise
        if not isinstance(welcome, m.Attached):
            self.close()
            raise self._refused(welcome)
        self.epoch = welcome.epoch.hex()

    def __enter__(self) -> Tool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Hang up."""
        self._sock.close()

    def ask(self, what: Literal["status", "check"]) -> dict[str, Any]:
        """The daemon's report; what it says is in `kvstore.status` and `Session._check`."""
        reply = self._round_trip(m.Status() if what == "status" else m.Check())
        if not isinstance(reply, m.StatusReport):
            raise self._refused(reply)
        report: dict[str, Any] = json.loads(reply.json)
        missing = [name for name in _STATUS_NEEDS if name not in report] if what == "status" else []
        if missing:
            why = f"it is older than this command: its report has no {', '.join(missing)}"
            raise NoAnswer(self._path, "version", why, _OTHER_INSTALLATION)
        return report

    def explain(self, request: str) -> dict[str, Any]:
        """What the daemon decided for a request and what came of it; what it says: `kvstore.explaining`.

        Args:
            request: "" = the latest.

        Raises:
            NotFound: nothing is remembered of it.
        """
        reply = self._round_trip(m.Explain(request))
        if isinstance(reply, m.Failed) and reply.status == STATUS[NotFound]:
            raise NotFound(reply.message)
        if not isinstance(reply, m.Explained):
            raise self._refused(reply)
        told: dict[str, Any] = json.loads(reply.json)
        return told

    def flush(self, timeout_s: float) -> m.Flushed:
        """Ask the daemon to bring what its disks have accepted to the medium, and wait for that.

        Raises:
            DeadlineExceeded: it takes longer; it goes on all the same.
        """
        try:
            reply = self._round_trip(m.Flush(), timeout_s)
        except NoAnswer as silence:
            if silence.cause != "hung":
                raise
            raise DeadlineExceeded(
                f"not everything is on the disks after {timeout_s:g} s, and the daemon goes on; ask again, "
                "or wait longer (--timeout)"
            ) from None
        if not isinstance(reply, m.Flushed):
            raise self._refused(reply)
        return reply

    def stop(self, keep: bool) -> None:
        """Ask the daemon to end; `keep`: and to leave its arenas to the next one.

        Raises:
            KVStoreError: it refuses, and why.
        """
        reply = self._round_trip(m.Stop(keep))
        if isinstance(reply, m.Failed):
            raise from_status(reply.status, reply.message)

    def process(self) -> tuple[int, int]:
        """Pid and pidfd of the daemon; the pidfd is the caller's, -1 where there is none to be had."""
        pid, pidfd = peer_ids(self._sock)[0], peer_pidfd(self._sock)
        if pidfd < 0 and pid > 0:  # Linux before 6.5; it has just answered, so the pid is still its own
            with contextlib.suppress(OSError):
                pidfd = os.pidfd_open(pid)
        return pid, pidfd

    # ---- one request, one reply --------------------------------------------------------------------------

    def _round_trip(self, body: m.Request, answer_s: float | None = None) -> Any:
        self._last_id += 1
        answer_s = self._answer_s if answer_s is None else answer_s
        payload = msgspec.msgpack.encode(m.RequestFrame(self._last_id, body))
        deadline = time.monotonic() + answer_s
        try:
            self._sock.settimeout(answer_s)
            self._sock.sendall(_LENGTH.pack(len(payload)) + payload)
            return self._receive(deadline).body
        except TimeoutError:
            raise _hung(self._path, answer_s, self._sock) from None
        except (BrokenPipeError, ConnectionResetError):
            raise self._hung_up() from None

    def _receive(self, deadline: float) -> m.ReplyFrame:
        length = _LENGTH.unpack(self._take(_LENGTH.size, deadline))[0]
        if not 0 < length <= m.FRAME_BYTES_MAX:
            raise self._foreign(f"a frame of {length} bytes")
        payload = self._take(length, deadline)
        try:
            frame = msgspec.msgpack.decode(payload, type=m.ReplyFrame)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise self._foreign(str(error)) from None
        if frame.id != self._last_id and not isinstance(frame.body, m.Failed):
            raise self._foreign(f"an answer to {frame.id}, which was not asked")
        return frame

    def _take(self, length: int, deadline: float) -> bytes:
        while len(self._in) < length:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            self._sock.settimeout(left_s)
            data = self._sock.recv(1 << 16)
            if not data:
                raise self._hung_up()
            self._in += data
        taken = bytes(self._in[:length])
        del self._in[:length]
        return taken

    # ---- causes ------------------------------------------------------------------------------------------

    def _hung_up(self) -> NoAnswer:
        why = "it hung up without a word: daemon.sessions_max is reached, or it is stopping"
        return NoAnswer(self._path, "hung_up", why, "look at its log; ask again")

    def _foreign(self, what: str) -> NoAnswer:
        why = f"what answers does not speak protocol version {m.PROTOCOL_VERSION} ({what})"
        return NoAnswer(self._path, "foreign", why, "use the kvstore of the daemon's own installation")

    def _refused(self, reply: object) -> NoAnswer:
        said = reply.message if isinstance(reply, m.Failed) else f"an unexpected {type(reply).__name__}"
        if said.startswith(("version:", "vector:", "frame:")):
            return NoAnswer(self._path, "version", said, _OTHER_INSTALLATION)
        return NoAnswer(self._path, "foreign", f"it refused: {said}", "look at its log")


def ask(path: Path, what: Literal["status", "check"]) -> dict[str, Any]:
    """Connect, ask one question, hang up.

    Raises:
        NoAnswer: with the cause and the fix.
    """
    with Tool(path) as tool:
        return tool.ask(what)


def _connect(path: Path, answer_s: float) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    sock.settimeout(answer_s)
    try:
        sock.connect(os.fspath(path))
    except OSError as error:
        sock.close()
        raise _not_connected(path, answer_s, error) from None
    return sock


def _not_connected(path: Path, answer_s: float, error: OSError) -> NoAnswer:
    start = "start one with kvstore serve, or name its socket: --set daemon.socket=PATH, --config FILE"
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return NoAnswer(path, "absent", "there is no such socket", start)
    if isinstance(error, PermissionError):
        return NoAnswer(path, "denied", f"permission denied{_door(path)}", _who_may(path))
    if isinstance(error, TimeoutError | BlockingIOError):
        return _hung(path, answer_s, None)
    if isinstance(error, ConnectionRefusedError):
        if path.exists() and not stat.S_ISSOCK(path.stat().st_mode):
            return NoAnswer(path, "not_a_socket", "that file is not a socket", start)
        why = "a stale socket: the daemon that made it is gone"
        return NoAnswer(path, "stale", why, "start it again with kvstore serve, which replaces the socket")
    return NoAnswer(path, "foreign", error.strerror or str(error), start)


def _hung(path: Path, answer_s: float, sock: socket.socket | None) -> NoAnswer:
    why = f"it accepts connections and stays silent for {answer_s:g} s"
    pid = peer_ids(sock)[0] if sock is not None else 0
    if not pid:
        return NoAnswer(path, "hung", why, "look at its log; restart it")
    if _process_state(pid) in ("T", "t"):
        return NoAnswer(path, "hung", f"{why}: pid {pid} is stopped (SIGSTOP)", f"kill -CONT {pid}")
    fix = f"look at its log and at what pid {pid} waits for; kill -ABRT {pid} and restart it"
    return NoAnswer(path, "hung", f"{why} (pid {pid})", fix)


def _process_state(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def _door(path: Path) -> str:
    """Mode and owner of a socket, if they can be seen."""
    with contextlib.suppress(OSError):
        facts = path.stat()
        return f": mode {stat.S_IMODE(facts.st_mode):04o}, owner {_user(facts.st_uid)}"
    return f": {path.parent} cannot be searched"


def _who_may(path: Path) -> str:
    with contextlib.suppress(OSError):
        owner = _user(path.stat().st_uid)
        return f"you are {_user(os.geteuid())}: run as {owner}, or widen daemon.socket_mode"
    return f"you are {_user(os.geteuid())}: run as the user who started it"


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"
