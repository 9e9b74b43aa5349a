"""A store's process as bench.local_peers sees it: run by the store's own Python, asked a line at a time."""

from __future__ import annotations

import argparse
import json
import os
import select
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["OURS", "PEERS", "Child", "PeerError", "System", "named"]

ROOT = Path(__file__).parent.parent
_ANSWER_S = 600.0
_CLOSE_S = 60.0


class PeerError(Exception):
    """A store could not do what was asked; the text is for the table."""


@dataclass(frozen=True, slots=True)
class System:
    """One store.

    Attributes:
        name: in the result.
        module: what its process runs.
        python: of its virtual environment.
    """

    name: str
    module: str
    python: Path


OURS = System("kvstore", "bench.local_ours", Path(sys.executable))
PEERS = {
    name: System(name, f"bench.peers.{name}", ROOT / ".venv-peers" / name / "bin" / "python")
    for name in ("lmcache", "openlake", "redhare")
}


def named(text: str) -> list[str]:
    """Peers of a comma-separated list; all when it is empty.

    Raises:
        argparse.ArgumentTypeError: unknown name.
    """
    names = [name.strip() for name in text.split(",") if name.strip()] or list(PEERS)
    unknown = [name for name in names if name not in PEERS]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown peer {', '.join(unknown)}: choose from {', '.join(PEERS)}")
    return list(dict.fromkeys(names))


class Child:
    """The process of one store and its protocol (bench/peers/serve.py).

    Args:
        system: which.
        folder: for its log and what its daemons need.

    Raises:
        PeerError: it is not installed.
    """

    def __init__(self, system: System, folder: Path) -> None:
        if not system.python.exists():
            raise PeerError("not installed: make peers")
        self.name, self.folder = system.name, folder
        self._log = folder / "child.log"
        self._leaves: list[str] = []
        self._got, self._closed = b"", False
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [str(system.python), "-m", system.module],
                cwd=ROOT,
                env={**os.environ, "PYTHONHASHSEED": "0"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )

    def ask(self, request: str, seconds: float = _ANSWER_S) -> dict[str, Any]:
        """The reply to one request.

        Raises:
            PeerError: it failed, ended, or did not answer in time.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(request.encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise PeerError(f"its process has ended{self._last_words()}") from None
        reply: dict[str, Any] = json.loads(self._line(request, seconds))
        if "error" in reply:
            raise PeerError(f"{request.split()[0]}: {reply['error']}"[:300])
        self._leaves += reply.get("leaves", [])
        return reply

    def close(self) -> None:
        """End it and everything it started; remove what it left. Again is harmless."""
        if self._closed:
            return
        self._closed = True
        with suppress(PeerError):
            self.ask("close", _CLOSE_S)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_CLOSE_S)
        self._process.stdout.close()
        for pattern in self._leaves:
            left = Path(pattern)
            for path in left.parent.glob(left.name):
                path.unlink(missing_ok=True)

    def _line(self, request: str, seconds: float) -> bytes:
        assert self._process.stdout is not None
        deadline = time.monotonic() + seconds
        while b"\n" not in self._got:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._process.stdout], [], [], left)[0]:
                raise PeerError(f"no answer to {request.split()[0]!r} within {seconds:.0f} s")
            some = os.read(self._process.stdout.fileno(), 65536)
            if not some:
                raise PeerError(f"its process has ended{self._last_words()}")
            self._got += some
        line, _, self._got = self._got.partition(b"\n")
        return line

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return f": {lines[-1][:200]}" if lines else ""
