"""What tests of kept arenas ask: who holds what, what the daemon said, and whether saved blocks come back."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from children import gone
from fake_engine import LIMITS, FakeEngine
from real_daemon import WAIT_S, RealDaemon, eventually

from kvstore.types import Hit

__all__ = [
    "IMPATIENT",
    "KEEP",
    "attached_again",
    "cli",
    "edit",
    "events",
    "hit_of",
    "holders",
    "memfds_held",
    "nothing_is_left_of",
]

KEEP = {"daemon__keep_arena": "true"}
IMPATIENT = replace(LIMITS, call_s=5.0, attach_s=20.0)


def holders(daemon: RealDaemon) -> list[int]:
    """Pids of holder processes of this daemon's socket."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"kvstore.keep.holder" in words and f"{daemon.socket}.keep".encode() in words:
            found.append(int(entry.name))
    return [pid for pid in found if not gone(pid)]


def memfds_held(pid: int) -> list[str]:
    """Memfds that a process has open."""
    links = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            links.append(str(entry.readlink()))
        except OSError:
            continue
    return sorted(link for link in links if link.startswith("/memfd:"))


def nothing_is_left_of(daemon: RealDaemon) -> None:
    """No process, no socket."""
    assert holders(daemon) == []
    assert {entry.name for entry in daemon.folder.iterdir()} == {"kvstore.toml", "daemon.log"}


def events(daemon: RealDaemon, name: str) -> list[dict[str, Any]]:
    """What it logged under that name."""
    lines = [line for line in daemon.log.read_text().splitlines() if line.startswith("{")]
    return [line for line in map(json.loads, lines) if line["event"] == name]


def cli(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvstore", *words], capture_output=True, text=True, timeout=WAIT_S, check=False
    )


def attached_again(engine: FakeEngine, generation: int) -> None:
    eventually(lambda: engine.client.generation >= generation and engine.client.attached, "attached again")
    engine.client.poll()


def hit_of(engine: FakeEngine, seed: int, blocks: int) -> int:
    """Blocks that the next lookup of a saved chain finds on HOST and that come back right."""
    chain = engine.chain(seed, blocks)
    found = engine.client.lookup(chain)
    if not isinstance(found, Hit):
        return 0
    assert found.device == 0
    good = engine.load(found, chain).good
    engine.client.release(found.lease)
    return good


def edit(daemon: RealDaemon, before: str, after: str) -> None:
    """Change its configuration file."""
    text = daemon.config.read_text()
    assert before in text
    daemon.config.write_text(text.replace(before, after))
