"""One contract for everything that keeps descriptors while there is no daemon.

A keeper's life spans processes, so each case is played by daemons that are processes of their own
(`keeper_program.py`); systemd is played by the notify socket that it would listen on.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest
from systemd_end import SystemdEnd

from kvstore.keep.holding import end_leftover
from kvstore.keep.wire import Malformed, receive, send
from kvstore.processes import has_ended

PROGRAM = Path(__file__).with_name("keeper_program.py")
WAIT_S = 60.0


class Played(Protocol):
    """A keeper and its daemons."""

    keeps: bool

    def daemon(self) -> Daemon: ...
    def held(self) -> list[str]: ...
    def close(self) -> None: ...


class Daemon:
    """One daemon's time: a process that calls its keeper as told."""

    def __init__(self, kind: str, path: Path, environ: dict[str, str], fds: list[int]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM), kind, str(path), *map(str, fds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environ},
            pass_fds=fds,
        )

    def ask(self, do: str, **arguments: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, "the daemon ended"
        return json.loads(line)

    def gone(self, number: int = signal.SIGKILL) -> None:
        self.process.send_signal(number)
        self.process.wait(WAIT_S)
        self.close()

    def close(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
        self.process.kill()
        self.process.wait(WAIT_S)


class ByHolder:
    """A holder process."""

    keeps = True

    def __init__(self, folder: Path) -> None:
        self.path = folder / "h"
        self.daemons: list[Daemon] = []

    def daemon(self) -> Daemon:
        self.daemons.append(Daemon("holder", self.path, {}, []))
        return self.daemons[-1]

    def held(self) -> list[str]:
        """Asked by a daemon that leaves again at once."""
        daemon = self.daemon()
        names: list[str] = sorted(daemon.ask("take"))
        daemon.ask("leave")
        daemon.gone()
        return names

    def close(self) -> None:
        for daemon in self.daemons:
            daemon.close()
        end_leftover(self.path)


class BySystemd:
    """systemd, as far as a service sees it."""

    keeps = True

    def __init__(self, folder: Path) -> None:
        self.path = folder / "n"
        self.systemd = SystemdEnd(self.path)
        self.daemons: list[Daemon] = []

    def daemon(self) -> Daemon:
        fds = self.systemd.fds()
        self.daemons.append(Daemon("systemd", self.path, self.systemd.environ(), fds))
        return self.daemons[-1]

    def held(self) -> list[str]:
        return self.systemd.names()

    def close(self) -> None:
        for daemon in self.daemons:
            daemon.close()
        self.systemd.close()


class ByNobody:
    """No keeper."""

    keeps = False

    def __init__(self, folder: Path) -> None:
        self.path = folder / "x"
        self.daemons: list[Daemon] = []

    def daemon(self) -> Daemon:
        self.daemons.append(Daemon("nothing", self.path, {}, []))
        return self.daemons[-1]

    def held(self) -> list[str]:
        return []

    def close(self) -> None:
        for daemon in self.daemons:
            daemon.close()


@pytest.fixture(params=[ByHolder, BySystemd, ByNobody], ids=["holder", "systemd", "nothing"])
def played(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Played]:
    keeper = request.param(tmp_path_factory.mktemp("s"))
    try:
        yield keeper
    finally:
        keeper.close()


def test_what_was_put_is_there_after_a_kill(played: Played) -> None:
    first = played.daemon()
    assert first.ask("take") == {}
    first.ask("put", texts={"data.a": "alpha", "ledger.a": "beta"})
    first.ask("put", texts={"peer.1": "gamma"})
    first.ask("drop", names=["peer.1", "never put"])
    first.gone()
    second = played.daemon()
    expected = {"data.a": "alpha", "ledger.a": "beta"} if played.keeps else {}
    assert second.ask("take") == expected
    # Taking is not taking away: a daemon that is killed at once leaves it to the next.
    second.gone()
    assert played.daemon().ask("take") == expected


def test_a_name_put_again_means_the_new_one(played: Played) -> None:
    first = played.daemon()
    first.ask("take")
    first.ask("put", texts={"data.a": "old"})
    first.ask("put", texts={"data.a": "new"})
    first.gone()
    second = played.daemon()
    assert second.ask("take") == ({"data.a": "new"} if played.keeps else {})
    second.ask("put", texts={"data.a": "newer"})
    second.gone()
    assert played.daemon().ask("take") == ({"data.a": "newer"} if played.keeps else {})


def test_leaving_keeps_and_ending_does_not(played: Played) -> None:
    first = played.daemon()
    first.ask("take")
    first.ask("put", texts={"data.a": "alpha"})
    first.ask("leave")
    first.gone()
    second = played.daemon()
    assert second.ask("take") == ({"data.a": "alpha"} if played.keeps else {})
    second.ask("end")
    assert played.held() == []


def test_many_names_arrive_whole(played: Played) -> None:
    names = {f"peer.{number}": str(number) for number in range(200)} | {"data.a": "x"}
    first = played.daemon()
    first.ask("take")
    first.ask("put", texts=names)
    first.gone()
    assert played.daemon().ask("take") == (names if played.keeps else {})


# ---- the holder alone --------------------------------------------------------------------------------------


@pytest.fixture
def held(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ByHolder]:
    keeper = ByHolder(tmp_path_factory.mktemp("s"))
    try:
        yield keeper
    finally:
        keeper.close()


def knock(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.settimeout(WAIT_S)
    sock.connect(str(path))
    return sock


def test_the_holder_gives_to_one_at_a_time_and_only_after_the_end_of_the_one_before(held: ByHolder) -> None:
    first = held.daemon()
    first.ask("take")
    first.ask("put", texts={"data.a": "alpha"})
    with knock(held.path) as sock:
        send(sock, {"do": "take"})
        got = receive(sock)
        assert got is not None
        assert got[0]["busy"] == "a daemon that runs has it"
        assert got[0]["wait"] is False
    first.ask("leave")  # its connection is closed, and its process lives
    with knock(held.path) as sock:
        send(sock, {"do": "take"})
        got = receive(sock)
        assert got is not None
        assert got[0]["wait"] is True
    first.gone()
    assert held.daemon().ask("take") == {"data.a": "alpha"}


def test_a_daemon_of_another_version_can_only_end_the_holder(held: ByHolder) -> None:
    first = held.daemon()
    first.ask("take")
    first.ask("put", texts={"data.a": "alpha"})
    first.gone()
    with knock(held.path) as sock:
        sock.send(b'{"v": 99, "do": "take"}')
        assert receive(sock) is None
    with knock(held.path) as sock:
        sock.send(b'{"v": 99, "do": "end"}')
        assert receive(sock) is None
    assert not held.path.exists()


def test_a_malformed_packet_ends_its_connection_and_nothing_else(held: ByHolder) -> None:
    first = held.daemon()
    first.ask("take")
    first.ask("put", texts={"data.a": "alpha"})
    first.gone()
    for packet in (
        b"",
        b"{",
        b"[]",
        b'{"do": "take"}',
        b'{"v": 1}',
        b'{"v": 1, "do": "put", "names": ["a"]}',
        b'{"v": 1, "do": "drop", "names": ["data.a"]}',
        b'{"v": 1, "do": "take", "names": [":"]}',
        b"[" * 60_000,
        b"\xff" * 70_000,
    ):
        with knock(held.path) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
            sock.send(packet)
            sock.shutdown(socket.SHUT_WR)
            assert receive(sock) is None
    assert held.daemon().ask("take") == {"data.a": "alpha"}


def test_a_holder_without_an_arena_ends_with_its_daemon(held: ByHolder) -> None:
    first = held.daemon()
    first.ask("take")
    holder = first.ask("holder")
    pidfd = os.pidfd_open(holder)
    try:
        first.ask("put", texts={"facts.1": "x"})
        first.gone()
        assert has_ended(pidfd, WAIT_S)
    finally:
        os.close(pidfd)
    assert not held.path.exists()


def test_packets_are_checked_on_their_way_in() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        send(ours, {"do": "put", "names": ["a b", "c"]}, [0, 1])
        got = receive(theirs)
        assert got is not None
        message, fds = got
        assert (message["names"], len(fds)) == (["a b", "c"], 2)
        for fd in fds:
            assert not os.get_inheritable(fd)
            os.close(fd)
        ours.send(json.dumps({"v": 1, "names": ["x"] * 65}).encode())
        with pytest.raises(Malformed, match="at most 64"):
            receive(theirs)
