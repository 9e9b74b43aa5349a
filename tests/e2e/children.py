"""Engines in processes of their own, driven line by line so that they can be killed at a known point."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from real_daemon import WAIT_S, eventually, live_with_parent

__all__ = ["Child", "gone"]

_PROGRAM = Path(__file__).with_name("child_program.py")


class Child:
    """`child_program.py`: one JSON object asks, one answers.

    Args:
        log: where its standard error goes.
        options: see `child_program.main`.
    """

    def __init__(self, log: Path, **options: Any) -> None:
        self._log = log
        with log.open("ab") as sink:
            self.process = subprocess.Popen(
                [sys.executable, str(_PROGRAM), json.dumps(options)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=sink,
                preexec_fn=live_with_parent,
            )
        self._buffer = b""
        self.ready = self.answer()

    @property
    def pid(self) -> int:
        return self.process.pid

    def tell(self, op: str, **arguments: Any) -> None:
        """Ask without waiting for the answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"op": op, **arguments}).encode() + b"\n")
        self.process.stdin.flush()

    def ask(self, op: str, **arguments: Any) -> dict[str, Any]:
        """Ask and wait."""
        self.tell(op, **arguments)
        return self.answer()

    def answer(self, timeout_s: float = WAIT_S) -> dict[str, Any]:
        """The next line it says."""
        assert self.process.stdout is not None
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                assert ready, f"the child is silent; it said:\n{self._log.read_text()[-2000:]}"
                data = os.read(self.process.stdout.fileno(), 1 << 16)
                assert data, f"the child ended; it said:\n{self._log.read_text()[-2000:]}"
                self._buffer += data
        line, self._buffer = self._buffer.split(b"\n", 1)
        found: dict[str, Any] = json.loads(line)
        return found

    def stop(self) -> None:
        """SIGSTOP, and wait until it stands still."""
        self.process.send_signal(signal.SIGSTOP)
        stat = Path(f"/proc/{self.pid}/stat")
        eventually(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", "the child has stopped")

    def resume(self) -> None:
        """SIGCONT."""
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.process.kill()
        self.process.wait(WAIT_S)

    def close(self) -> None:
        """Whatever it is doing: it is gone afterwards."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait(WAIT_S)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


def gone(pid: int) -> bool:
    """Is there no such process, or only its remains?"""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True
