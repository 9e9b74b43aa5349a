"""The real daemon as a process of its own: started, signalled, asked, and always ended."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import systemd_end
from raw_session import RawSession
from systemd_end import SystemdEnd

from kvstore.keep.holding import end_leftover

__all__ = ["WAIT_S", "RealDaemon", "eventually", "live_with_parent"]

T = TypeVar("T")
# Generous: a loaded machine must not fail a test; every wait ends as soon as what it waits for is there.
WAIT_S = 60.0
_POLL_S = 0.01
_PR_SET_PDEATHSIG = 1
_never = threading.Event()


def eventually(ask: Callable[[], T], what: str, timeout_s: float = WAIT_S) -> T:
    """The first true answer of `ask`, asked again and again; fails with `what` after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while True:
        answer = ask()
        if answer:
            return answer
        assert time.monotonic() < deadline, f"did not happen within {timeout_s} s: {what}"
        _never.wait(_POLL_S)


def live_with_parent() -> None:
    """In a child, before exec: SIGKILL when the test process is gone, however that ended."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class RealDaemon:
    """`python -m kvstore serve` on a socket in `folder`.

    Args:
        folder: for the configuration, the socket and the log; short, because of the socket's path.
        settings: "table.key" → TOML value as text, over a small arena and a plan.mode of "load".
        tenants: TOML text of [[tenants]] tables.
        environ: over this process's environment.
        program: arguments of Python that run the command line; for daemons with a planted fault.
    """

    def __init__(
        self,
        folder: Path,
        settings: Mapping[str, str] | None = None,
        tenants: str = "",
        environ: Mapping[str, str] | None = None,
        program: Sequence[str] = ("-m", "kvstore"),
    ) -> None:
        self.folder = folder
        self._program = program
        self.socket = folder / "kv.sock"
        self.config = folder / "kvstore.toml"
        self.log = folder / "daemon.log"
        self._environ = {**os.environ, **(environ or {})}
        values = {
            "daemon.socket": f'"{self.socket}"',
            "daemon.heartbeat_s": "1.0",
            "daemon.stale_after_s": "120.0",
            "host.capacity_bytes": '"16MiB"',
            "host.slab_bytes": '"2MiB"',
            "host.huge_pages": "false",
            "host.threads": "1",
            "plan.mode": '"load"',  # a test of loads asks for them; computing a tiny model may well be faster
            **(settings or {}),
        }
        tables: dict[str, list[str]] = {}
        for path, value in values.items():
            table, _, key = path.partition(".")
            tables.setdefault(table, []).append(f"{key} = {value}")
        text = [f"[{table}]\n" + "\n".join(lines) for table, lines in tables.items()]
        self.config.write_text("\n\n".join([*text, tenants]) + "\n")
        self._process: subprocess.Popen[bytes] | None = None

    # ---- life ---------------------------------------------------------------------------------------------

    def start(self, wait: bool = True, under: SystemdEnd | None = None) -> RealDaemon:
        """Begin, and by default wait until engines may attach; `under` a service systemd, with its fds."""
        command = [*self._program, "serve", "--config", str(self.config)]
        environ, fds = self._environ, []
        if under is not None:
            fds = under.fds()
            environ = {**environ, **under.environ()}
            command = [systemd_end.__file__, str(len(fds)), *map(str, fds), *command]
        with self.log.open("ab") as sink:
            self._process = subprocess.Popen(
                [sys.executable, *command],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                preexec_fn=live_with_parent,
                env=environ,
                pass_fds=fds,
                cwd=self.folder,
            )
        if wait:
            eventually(self._answers, f"the daemon is ready; its log:\n{self.said()}")
        return self

    def _answers(self) -> bool:
        if self.process.poll() is not None:
            status = self.process.returncode
            raise AssertionError(f"the daemon ended with {status} while starting:\n{self.said()}")
        try:
            RawSession(self.socket).close()
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        return True

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "not started"
        return self._process

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def said(self) -> str:
        """The end of its log."""
        return self.log.read_text(errors="replace")[-4000:] if self.log.exists() else ""

    def send(self, number: int) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    def stopped(self) -> None:
        """SIGSTOP, and wait until the kernel says that it has stopped."""
        self.send(signal.SIGSTOP)
        eventually(lambda: _state(self.pid) == "T", "the daemon has stopped")

    def end(self, number: int = signal.SIGTERM) -> int:
        """Signal it and wait; the exit status (negative: the signal that ended it)."""
        if self.alive:
            self.send(number)
            self.process.send_signal(signal.SIGCONT)
        status = self.process.wait(WAIT_S)
        # At its end native code tells of objects that a cycle of references has kept.
        assert status or "leaked" not in self.log.read_text(errors="replace")
        return status

    def close(self) -> None:
        """Whatever state it is in: it is gone afterwards."""
        if self.alive:
            self.process.kill()
        if self._process is not None:
            self._process.wait(WAIT_S)
        end_leftover(Path(f"{self.socket}.keep"))  # a holder outlives a daemon that was killed

    # ---- questions ----------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """What `kvstore status` reports."""
        with RawSession(self.socket) as tool:
            return tool.status()

    def group(self, name: str = "default") -> dict[str, Any]:
        """One trust group of the status."""
        found: dict[str, Any] = self.status()["groups"][name]
        return found

    def check(self) -> dict[str, Any]:
        """What `kvstore check` reports."""
        with RawSession(self.socket) as tool:
            return tool.check()

    def assert_sound(self) -> None:
        """Alive, and every conservation law holds."""
        assert self.alive, f"the daemon ended:\n{self.said()}"
        assert self.check()["ok"] is True, self.said()

    def assert_quiet(self, name: str = "default") -> None:
        """Sound, and nothing of any engine is left: no pin, lease, filling, session."""
        eventually(lambda: self._idle(name), f"nothing of an engine is left: {self.group(name)}", 20.0)
        self.assert_sound()
        assert "Traceback" not in self.log.read_text(errors="replace")

    def _idle(self, name: str) -> bool:
        group = self.group(name)
        host = group["host"]
        return not (
            group["leases"] or group["fillings"] or group["engines"] or host["filling"] or host["draining"]
        )

    def memfds(self) -> list[str]:
        """Arenas that the daemon has mapped."""
        return mapped(self.pid)


def mapped(pid: int) -> list[str]:
    """Memfds that a process has mapped; of this one, those that something still refers to."""
    if pid == os.getpid():
        gc.collect()
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return [line.split(maxsplit=5)[-1] for line in lines if "/memfd:" in line]


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
