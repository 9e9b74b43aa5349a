"""vLLM engines as processes of their own, behind lines of JSON.

Every child ends with its parent, however the parent ends, and takes its own children along.
"""

from __future__ import annotations

import ctypes
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from bench.vllm_family import await_end, cpu_seconds, family, is_tracker, shared_memory
from bench.vllm_settings import Answer, Settings, environment

__all__ = ["Child", "EngineFailed", "EngineProcess"]

ROOT = Path(__file__).parent.parent
_START_S = 180.0
_STOP_S = 30.0
_ANSWER_S = 600.0
_PR_SET_PDEATHSIG = 1


class EngineFailed(RuntimeError):
    """A child ended, stayed silent or reports an error; the message holds the end of its log."""


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Child:
    """A process in a session of its own, its log in a file.

    Args:
        command: what `python -m` runs.
        log: is appended to.
        environ: over this process's environment.
        pipes: to its stdin and stdout; else there is no input, and the output goes to the log.
    """

    def __init__(self, command: Sequence[str], log: Path, environ: Mapping[str, str], pipes: bool) -> None:
        self.log = log
        pipe = subprocess.PIPE if pipes else subprocess.DEVNULL
        with log.open("ab") as sink:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *command],
                cwd=ROOT,
                stdin=pipe,
                stdout=subprocess.PIPE if pipes else sink,
                stderr=sink,
                start_new_session=True,
                preexec_fn=_die_with_parent,
                env={**os.environ, **environ},
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def said(self) -> str:
        """The end of its log."""
        return self.log.read_text(errors="replace")[-4000:]

    def failed(self, what: str) -> EngineFailed:
        """An error that shows what it said last."""
        return EngineFailed(f"{what} (exit status {self.process.poll()}); its log ends with:\n{self.said()}")

    def kill(self) -> None:
        """SIGKILL to it and all that it started."""
        with self._leaving_nothing() as all_of_it:
            for pid in all_of_it:
                if not is_tracker(pid):  # it ends by itself, and then removes semaphores
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)

    def end(self) -> None:
        """Ask it to end; kill it if it does not. Again is harmless."""
        with self._leaving_nothing():
            self._ask_to_end()
            try:
                self.process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                self.kill()

    def _ask_to_end(self) -> None:
        if self.alive:
            self.process.terminate()

    @contextmanager
    def _leaving_nothing(self) -> Iterator[list[int]]:
        """Afterwards all of its processes are gone, and the shared memory that a killed rank left."""
        all_of_it = family(self.pid) if self.alive else []
        shared = {name for pid in all_of_it for name in shared_memory(pid)}
        yield all_of_it
        for pid in all_of_it[1:]:
            await_end(pid)
        self._reap()
        for name in shared:
            Path(name).unlink(missing_ok=True)

    def _reap(self) -> None:
        self.process.wait(_STOP_S)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


class EngineProcess(Child):
    """`bench.vllm_engine` in a process of its own.

    Args:
        folder: for the log.
        settings: of the engine.
        name: of the log.
        environ: over this process's environment.

    Raises:
        EngineFailed: it did not start.
    """

    def __init__(
        self, folder: Path, settings: Settings, name: str = "engine", environ: Mapping[str, str] | None = None
    ) -> None:
        variables = {**environment(settings.ranks, settings.multiprocess), **(environ or {})}
        command = ["bench.vllm_engine", json.dumps(asdict(settings))]
        super().__init__(command, folder / f"{name}.log", variables, pipes=True)
        self._buffer = b""
        try:
            self.reply(_START_S)
        except EngineFailed:
            self.kill()
            raise

    # ---- requests -----------------------------------------------------------------------------------------

    def generate(self, prompt: Sequence[int], max_tokens: int = 16, *, salt: str | None = None) -> Answer:
        """One prompt, alone."""
        return self.generate_all([prompt], max_tokens, salt=salt)[0]

    def generate_all(
        self, prompts: Sequence[Sequence[int]], max_tokens: int = 16, *, salt: str | None = None
    ) -> list[Answer]:
        """Several prompts at once."""
        self.begin(prompts, max_tokens, salt=salt)
        return self.finish()

    def begin(
        self, prompts: Sequence[Sequence[int]], max_tokens: int = 16, *, salt: str | None = None
    ) -> None:
        """Hand prompts over and go on; `finish` must follow."""
        self.send("generate", {"prompts": [list(p) for p in prompts], "max_tokens": max_tokens, "salt": salt})

    def finish(self, timeout_s: float = _ANSWER_S) -> list[Answer]:
        """Answers to what was begun."""
        return [Answer(**answer) for answer in self.reply(timeout_s)["answers"]]

    def drain(self) -> None:
        """Until its connector has nothing under way."""
        self.ask("drain")

    def forget(self) -> bool:
        """Empty vLLM's own prefix cache."""
        return bool(self.ask("forget")["forgotten"])

    @property
    def free_blocks(self) -> int:
        """Device blocks that no request and no pin holds."""
        return int(self.ask("pool")["free"])

    def cpu_seconds(self) -> float:
        """It and its workers, all threads, since they started."""
        return cpu_seconds(self.pid)

    def _ask_to_end(self) -> None:
        if self.alive:
            with suppress(EngineFailed):
                self.ask("close", timeout_s=_STOP_S)

    def close(self) -> None:
        """Let it end by itself; kill it if it does not. Again is harmless."""
        self.end()

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- lines --------------------------------------------------------------------------------------------

    def ask(
        self, op: str, arguments: Mapping[str, object] | None = None, timeout_s: float = _ANSWER_S
    ) -> dict[str, Any]:
        """One request, one reply.

        Raises:
            EngineFailed: it ended, took too long, or reports an error.
        """
        self.send(op, arguments)
        return self.reply(timeout_s)

    def send(self, op: str, arguments: Mapping[str, object] | None = None) -> None:
        """A request whose reply is taken later."""
        stdin = _pipe(self.process.stdin)
        try:
            stdin.write(json.dumps({"op": op, **(arguments or {})}).encode() + b"\n")
            stdin.flush()
        except BrokenPipeError:
            raise self.failed(f"the engine ended before {op}") from None

    def reply(self, timeout_s: float = _ANSWER_S) -> dict[str, Any]:
        """The next reply.

        Raises:
            EngineFailed: as `ask`.
        """
        stdout = _pipe(self.process.stdout)
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise self.failed(f"the engine gave no answer for {timeout_s:.0f} s")
                data = os.read(stdout.fileno(), 1 << 20)
                if not data:
                    self.process.wait(_STOP_S)
                    raise self.failed("the engine ended")
                self._buffer += data
        line, self._buffer = self._buffer.split(b"\n", 1)
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise EngineFailed(f"the engine: {reply['error']}")
        return reply


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe
