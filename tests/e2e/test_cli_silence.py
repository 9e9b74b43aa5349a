"""A daemon that does not answer: the command says why, for every way there is."""

from __future__ import annotations

import json
import os
import re
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from command_line import as_nobody, kvstore
from raw_session import RawSession
from real_daemon import RealDaemon, eventually
from scene import Scene

from kvstore.rpc.messages import PROTOCOL_VERSION

# A daemon of another protocol version: the real one but for its number.
OTHER_VERSION = """
import sys
import kvstore.rpc.attach
kvstore.rpc.attach.PROTOCOL_VERSION += 1
from kvstore.cli import main
main(sys.argv[1:])
"""


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user may look into; pytest's own are closed."""
    with tempfile.TemporaryDirectory(prefix="kvo") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def asked(command: str, path: Path, **options: Any) -> dict[str, str]:
    """What a command says of a socket, as values; its text must say the same in one line."""
    flags = (command, *(["--last"] if command == "explain" else []), "--set", f"daemon.socket={path}")
    done = kvstore(*flags, "--json", **options)
    assert (done.returncode, done.stderr) == (2, "")
    said: dict[str, str] = json.loads(done.stdout)
    assert said.keys() == {"error", "fix", "status", "cause"}
    assert said["status"] == "UNAVAILABLE"
    assert str(path) in said["error"]
    assert "daemon.socket" in said["error"]
    return said


@pytest.mark.parametrize("command", ["status", "check", "top", "flush", "explain"])
def test_no_socket(command: str, tmp_path: Path) -> None:
    said = asked(command, tmp_path / "none.sock")
    assert said["cause"] == "absent"
    assert "kvstore serve" in said["fix"]


def test_text_says_it_in_one_line(tmp_path: Path) -> None:
    done = kvstore("status", "--set", f"daemon.socket={tmp_path}/none.sock", environ={"COLUMNS": "40"})
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"kvstore: no daemon answers at .*none\.sock .*; start one .*\n", done.stderr)


def test_a_socket_that_a_dead_daemon_left(stage: Scene) -> None:
    daemon = stage.start_daemon()
    daemon.process.kill()
    daemon.process.wait()
    said = asked("status", daemon.socket)
    assert said["cause"] == "stale"
    assert "kvstore serve" in said["fix"]
    # The advice is right: the next daemon replaces it.
    daemon.start()
    assert kvstore("check", "--config", str(daemon.config)).returncode == 0


def test_a_file_that_is_no_socket(tmp_path: Path) -> None:
    (tmp_path / "kv.sock").touch()
    assert asked("status", tmp_path / "kv.sock")["cause"] == "not_a_socket"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become someone else")
def test_permission_denied(open_folder: Path) -> None:
    daemon = RealDaemon(open_folder)
    try:
        daemon.start()
        said = as_nobody("status", "--json", "--set", f"daemon.socket={daemon.socket}")
        assert said["cause"] == "denied"
        assert "mode 0600, owner root" in said["error"]
        assert "run as root" in said["fix"]
        open_folder.chmod(0o700)
        said = as_nobody("status", "--json", "--set", f"daemon.socket={daemon.socket}")
        assert said["cause"] == "denied"
        assert "cannot be searched" in said["error"]
        daemon.assert_sound()
    finally:
        daemon.close()


def test_another_version(stage: Scene, tmp_path: Path) -> None:
    program = tmp_path / "other.py"
    program.write_text(OTHER_VERSION)
    (stage.folder / "v").mkdir()
    daemon = stage.keep(RealDaemon(stage.folder / "v", program=(str(program),))).start()
    said = asked("status", daemon.socket)
    assert said["cause"] == "version"
    spoken = f"daemon speaks {PROTOCOL_VERSION + 1}, client {PROTOCOL_VERSION}"
    assert spoken in said["error"]
    # `version` is about versions: it says the same, and succeeds.
    done = kvstore("version", "--set", f"daemon.socket={daemon.socket}", "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["daemon"]["cause"] == "version"


# What version 0.1.0 reported before it knew its age.
OLDER_REPORT = """
import sys
import kvstore.rpc.session
kvstore.rpc.session.status = lambda store, caller: {"epoch": store.epoch.hex(), "groups": {}}
from kvstore.cli import main
main(sys.argv[1:])
"""


def test_an_older_daemon_of_the_same_protocol(stage: Scene, tmp_path: Path) -> None:
    program = tmp_path / "older.py"
    program.write_text(OLDER_REPORT)
    (stage.folder / "o").mkdir()
    daemon = stage.keep(RealDaemon(stage.folder / "o", program=(str(program),))).start()
    said = asked("status", daemon.socket)
    assert said["cause"] == "version"
    assert "no version, pid, uptime_s" in said["error"]


def test_a_stopped_daemon(stage: Scene) -> None:
    daemon = stage.start_daemon()
    daemon.stopped()
    said = asked("status", daemon.socket)
    assert said["cause"] == "hung"
    assert f"pid {daemon.pid} is stopped" in said["error"]
    assert said["fix"] == f"kill -CONT {daemon.pid}"


def test_a_daemon_that_is_full(stage: Scene) -> None:
    daemon = stage.start_daemon(daemon__sessions_max="1")

    def admitted() -> RawSession | None:  # not before whoever looked whether the daemon is up has gone
        only = RawSession(daemon.socket)
        try:
            return only.tool()
        except (AssertionError, OSError):
            only.close()
            return None

    with eventually(admitted, "the only place is free"):
        said = asked("status", daemon.socket)
    assert said["cause"] == "hung_up"
    assert "sessions_max" in said["error"]


@contextmanager
def server(path: Path, answer: bytes) -> Iterator[None]:
    """Something that listens on a Unix socket and is not kvstore."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen()
    talks: list[socket.socket] = []

    def serve() -> None:
        while True:
            try:
                talk, _ = listener.accept()
            except OSError:
                return
            talks.append(talk)
            talk.sendall(answer)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
        listener.close()
        for talk in talks:
            talk.close()


@pytest.mark.parametrize(
    ("answer", "cause"),
    [
        (b"\x01\x00", "hung"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "foreign"),
        (b"\x00\x00\x00\x00", "foreign"),
        (b"\x03\x00\x00\x00\x92\x01\xc0", "foreign"),
        (b"\x0c\x00\x00\x00\x92\x63\x91\xa4done\x00\x00\x00\x00", "foreign"),
    ],
)
def test_something_else_listens(socket_path: Path, answer: bytes, cause: str) -> None:
    with server(socket_path, answer):
        assert asked("status", socket_path)["cause"] == cause
