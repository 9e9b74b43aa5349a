"""The real daemon as a process of its own: started, killed, started again at the same socket, asked."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from kvstore.client import Client

__all__ = ["WAIT_S", "Daemon", "eventually"]

T = TypeVar("T")
WAIT_S = 60.0
_POLL_S = 0.02
_PR_SET_PDEATHSIG = 1


def eventually(ask: Callable[[], T], what: str, timeout_s: float = WAIT_S) -> T:
    """The first true answer of `ask`, asked again and again; fails with `what` after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while True:
        answer = ask()
        if answer:
            return answer
        assert time.monotonic() < deadline, f"did not happen within {timeout_s} s: {what}"
        time.sleep(_POLL_S)


def _live_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Daemon:
    """`kvstore serve` on a socket in `folder`.

    Args:
        folder: for the socket and the log; short, because of the socket's path.
        settings: "table.key" → value, over a small arena.
    """

    def __init__(self, folder: Path, settings: Mapping[str, object] | None = None) -> None:
        self.folder = folder
        self.socket = folder / "kv.sock"
        self.log = folder / "daemon.log"
        self._settings = {
            "daemon.socket": self.socket,
            "daemon.heartbeat_s": 1.0,
            "daemon.log_level": "info",
            "host.capacity_bytes": "256MiB",
            "host.slab_bytes": "2MiB",
            "host.huge_pages": "false",
            **(settings or {}),
        }
        self._process: subprocess.Popen[bytes] | None = None
        self._tool: Client | None = None

    # ---- life ---------------------------------------------------------------------------------------------

    def start(self) -> Daemon:
        """Begin, and wait until it answers."""
        flags = [word for key, value in self._settings.items() for word in ("--set", f"{key}={value}")]
        environ = {name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_")}
        with self.log.open("ab") as sink:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kvstore", "serve", *flags],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                preexec_fn=_live_with_parent,
                env=environ,
                cwd=self.folder,
            )
        if self._tool is None:
            self._tool = Client(self.socket, None, role="tool")
        eventually(self._answers, f"the daemon is ready; its log:\n{self.said()}")
        return self

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._tool is not None
        if self._process.poll() is not None:
            raise AssertionError(f"the daemon ended while starting:\n{self.said()}")
        return self._tool.wait_attached(_POLL_S) and self._tool.heartbeat()

    @property
    def pid(self) -> int:
        assert self._process is not None, "not started"
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def said(self) -> str:
        """The end of its log."""
        return self.log.read_text(errors="replace")[-4000:] if self.log.exists() else ""

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Signal it and wait; the exit status (negative: the signal that ended it)."""
        assert self._process is not None, "not started"
        if self.alive:
            self._process.send_signal(number)
            self._process.send_signal(signal.SIGCONT)
        return self._process.wait(WAIT_S)

    def kill(self) -> int:
        """kill -9."""
        return self.stop(signal.SIGKILL)

    def pause(self) -> None:
        """SIGSTOP: it holds its socket and says nothing."""
        assert self._process is not None, "not started"
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        assert self._process is not None, "not started"
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """Whatever state it is in: it is gone afterwards."""
        if self._tool is not None:
            self._tool.close()
            self._tool = None
        if self._process is not None:
            if self.alive:
                self.stop()
            self._process.wait(WAIT_S)

    # ---- questions ----------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """What `kvstore status` reports."""
        return self._ask(Client.status)

    def check(self) -> dict[str, Any]:
        """What `kvstore check` reports."""
        return self._ask(Client.check)

    def _ask(self, what: Callable[[Client], dict[str, Any]]) -> dict[str, Any]:
        assert self._tool is not None, "not started"
        assert self._tool.wait_attached(WAIT_S), f"the daemon does not answer:\n{self.said()}"
        return what(self._tool)

    def group(self, name: str = "default") -> dict[str, Any]:
        """One trust group of the status."""
        found: dict[str, Any] = self.status()["groups"][name]
        return found

    def ready(self, name: str = "default") -> int:
        """Blocks that can be loaded from HOST."""
        return int(self.group(name)["host"]["ready"])

    def assert_quiet(self, name: str = "default") -> None:
        """Alive, every law holds, and no pin, lease, filling or engine is left."""
        eventually(lambda: self._idle(name), f"nothing of an engine is left: {self.group(name)}", 20.0)
        assert self.check()["ok"] is True, self.said()
        assert "Traceback" not in self.log.read_text(errors="replace")

    def _idle(self, name: str) -> bool:
        group = self.group(name)
        host = group["host"]
        return not (
            group["leases"] or group["fillings"] or group["engines"] or host["filling"] or host["draining"]
        )
