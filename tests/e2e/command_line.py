"""The real binary, run to its end or in a terminal of its own."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from real_daemon import WAIT_S, live_with_parent

__all__ = ["KVSTORE", "Terminal", "as_nobody", "kvstore"]

KVSTORE = Path(sys.executable).with_name("kvstore")
"""The installed entry point, as a user's shell finds it."""


def kvstore(
    *words: str, environ: dict[str, str] | None = None, preexec: Callable[[], None] = live_with_parent
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, its output in pipes."""
    return subprocess.run(
        [str(KVSTORE), *words],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
        preexec_fn=preexec,
        env={**os.environ, "COLUMNS": "80", **(environ or {})},
    )


# Loads all that the command needs while it still may, then becomes nobody: our Python lies in root's home.
_AS_NOBODY = """
import os, sys
import kvstore.cli, kvstore.cli.panes, kvstore.rpc.messages, rich.console
os.setgroups([])
os.setresgid(65534, 65534, 65534)
os.setresuid(65534, 65534, 65534)
kvstore.cli.main(sys.argv[1:])
"""


def as_nobody(*words: str) -> dict[str, Any]:
    """What a command that fails says as JSON when uid 65534 runs it. For root only."""
    done = subprocess.run(
        [sys.executable, "-c", _AS_NOBODY, *words],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
        preexec_fn=live_with_parent,
    )
    assert (done.returncode, done.stderr) == (2, ""), done
    said: dict[str, Any] = json.loads(done.stdout)
    return said


class Terminal:
    """A command in a pseudo-terminal.

    Args:
        columns, rows: its size.
    """

    def __init__(
        self, *words: str, columns: int = 100, rows: int = 40, environ: dict[str, str] | None = None
    ) -> None:
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            live_with_parent()
            names = ("COLUMNS", "LINES", "NO_COLOR")
            kept = {name: value for name, value in os.environ.items() if name not in names}
            os.execve(KVSTORE, [str(KVSTORE), *words], {**kept, "TERM": "xterm-256color", **(environ or {})})
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.modes = termios.tcgetattr(self._fd)[3]
        self.shown = ""
        self.status: int | None = None

    def until(self, text: str, timeout_s: float = WAIT_S) -> str:
        """Read until `text` appears after what was read before; all that came since."""
        since = len(self.shown)
        deadline = time.monotonic() + timeout_s
        while text not in self.shown[since:]:
            left_s = deadline - time.monotonic()
            assert left_s > 0, f"{text!r} did not appear in:\n{self.shown[-3000:]}"
            if select.select([self._fd], [], [], left_s)[0] and not self._read():
                assert text in self.shown[since:], f"it ended without {text!r}:\n{self.shown[-3000:]}"
        return self.shown[since:]

    def _read(self) -> bool:
        try:
            data = os.read(self._fd, 1 << 16)
        except OSError as error:
            if error.errno != errno.EIO:  # what Linux says when the other end is closed
                raise
            data = b""
        self.shown += data.decode(errors="replace")
        return bool(data)

    def modes_now(self) -> int:
        """Local modes: whether it echoes, and so on."""
        return int(termios.tcgetattr(self._fd)[3])

    def press(self, keys: str) -> None:
        """Type."""
        os.write(self._fd, keys.encode())

    def ended(self, timeout_s: float = WAIT_S) -> int:
        """Read to the end; the exit status."""
        deadline = time.monotonic() + timeout_s
        while select.select([self._fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
            if not self._read():
                break
        else:
            raise AssertionError(f"it did not end:\n{self.shown[-3000:]}")
        self.status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.status

    def close(self) -> None:
        """Gone, whatever state it was in."""
        if self.status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self._fd)
