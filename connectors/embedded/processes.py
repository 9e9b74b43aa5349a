"""The demo's children: a daemon and an engine, each a process of its own, spoken to in lines of JSON.

Every child ends with its parent, however the parent ends.
"""

from __future__ import annotations

import ctypes
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

__all__ = ["DaemonProcess", "EngineProcess", "ProcessFailed"]

_START_S = 120.0
_STOP_S = 15.0
_PR_SET_PDEATHSIG = 1
# PASSIVE: OpenMP threads that spin while they wait make every step several times slower as soon as anything
# else wants a core, the daemon and the copy threads included.
_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_WAIT_POLICY": "PASSIVE"}


class ProcessFailed(RuntimeError):
    """A child ended or stayed silent; the message holds the end of its log."""


def _inherited() -> dict[str, str]:
    """The environment without the user's own daemon settings: a demo runs with its own."""
    return {name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_")}


def _die_with_parent() -> None:
    """In the child, before exec: SIGTERM when the parent is gone."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class _Child:
    """A child process with its log in a file."""

    def __init__(self, command: Sequence[str], log: Path, stdin: int, stdout: int) -> None:
        self._log = log
        with log.open("ab") as sink:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *command],
                stdin=stdin,
                stdout=stdout,
                stderr=sink,
                preexec_fn=_die_with_parent,
                env={**_ENVIRONMENT, **_inherited()},
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    def failed(self, what: str) -> ProcessFailed:
        """An error that shows what the child wrote last."""
        tail = self._log.read_text(errors="replace")[-2000:]
        return ProcessFailed(f"{what} (exit status {self.process.poll()}); its log ends with:\n{tail}")

    def end(self, number: int = signal.SIGTERM) -> None:
        """Signal the child and wait for it; SIGKILL when it does not listen."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            self.process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(_STOP_S)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


class DaemonProcess(_Child):
    """`kvstore serve` on a socket of its own.

    Args:
        folder: for the socket and the log.
        settings: table.key → value.
        config: a file of more of them, read again on SIGHUP; None = no file.
    """

    def __init__(self, folder: Path, settings: Mapping[str, object], config: Path | None = None) -> None:
        self.socket = folder / "kvstore.sock"
        flags = [f"daemon.socket={self.socket}", *(f"{key}={value}" for key, value in settings.items())]
        command = ["kvstore", "serve", *(part for flag in flags for part in ("--set", flag))]
        if config is not None:
            command += ["--config", str(config)]
        super().__init__(command, folder / "daemon.log", subprocess.DEVNULL, subprocess.DEVNULL)

    def wait_ready(self, timeout_s: float = _START_S) -> None:
        """Until engines may attach.

        Raises:
            ProcessFailed: it ended, or took too long.
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise self.failed("the daemon ended while starting")
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                try:
                    probe.connect(str(self.socket))
                except (FileNotFoundError, ConnectionRefusedError):
                    time.sleep(0.02)
                    continue
                return
        raise self.failed(f"the daemon was not ready after {timeout_s} s")

    def wait_logged(self, text: str, times: int, timeout_s: float) -> None:
        """Until its log has had `text` so often.

        Raises:
            ProcessFailed: it ended, or took too long.
        """
        deadline = time.monotonic() + timeout_s
        while self._log.read_text(errors="replace").count(text) < times:
            if time.monotonic() >= deadline or self.process.poll() is not None:
                raise self.failed(f"the daemon did not say {text!r} {times} times within {timeout_s} s")
            time.sleep(0.005)

    def flush(self, timeout_s: float = _START_S) -> None:
        """Everything that the disk was given is on it.

        Raises:
            ProcessFailed: the daemon says that it is not.
        """
        command = [sys.executable, "-m", "kvstore", "flush", "--set", f"daemon.socket={self.socket}"]
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=timeout_s,
                env={**_ENVIRONMENT, **_inherited()},
            )
        except subprocess.TimeoutExpired:
            raise self.failed(f"the disk was not flushed within {timeout_s} s") from None
        if done.returncode:
            raise self.failed(f"kvstore flush: {done.stdout}{done.stderr}")


class EngineProcess(_Child):
    """The embedded engine in a process of its own (`worker.py`).

    Args:
        folder: for the log.
        config: see `worker.WorkerConfig`.
    """

    def __init__(self, folder: Path, config: Mapping[str, object]) -> None:
        command = ["kvstore.connectors.embedded.worker", json.dumps(config)]
        super().__init__(command, folder / "engine.log", subprocess.PIPE, subprocess.PIPE)
        self._buffer = b""
        try:
            self.ready: dict[str, Any] = self._answer(_START_S)
        except ProcessFailed:
            self.end()
            raise

    def ask(
        self, op: str, arguments: Mapping[str, object] | None = None, timeout_s: float = 600.0
    ) -> dict[str, Any]:
        """One request, one answer.

        Raises:
            ProcessFailed: the engine ended, took too long, or reports an error.
        """
        line = json.dumps({"op": op, **(arguments or {})}).encode() + b"\n"
        stdin = self._pipe(self.process.stdin)
        try:
            stdin.write(line)
            stdin.flush()
        except BrokenPipeError:
            raise self.failed(f"the engine ended before {op}") from None
        answer = self._answer(timeout_s)
        if "error" in answer:
            raise ProcessFailed(f"engine: {op}: {answer['error']}")
        return answer

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        stdout = self._pipe(self.process.stdout)
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise self.failed(f"the engine gave no answer for {timeout_s} s")
                data = os.read(stdout.fileno(), 1 << 20)
                if not data:
                    raise self.failed("the engine ended")
                self._buffer += data
        line, self._buffer = self._buffer.split(b"\n", 1)
        answer: dict[str, Any] = json.loads(line)
        return answer

    @staticmethod
    def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
        assert pipe is not None
        return pipe
