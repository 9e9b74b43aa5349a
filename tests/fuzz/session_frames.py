"""Fuzz the session protocol of a real daemon: `python -m tests.fuzz.session_frames --frames 1000000 --json`.

A daemon of its own (small arena, small index, socket in a temporary directory) is talked to by one child
process after another, each with several connections at once. After every child the daemon must be alive and
sound and hold nothing: no lease, filling, pin, session. At the end its descriptors are as many as before, its
memory has not grown since the second third, and an honest engine saves and loads the right bytes.

Exit status 0 when all of that holds. On a failure the last pieces sent are written to a file for --replay.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(_ROOT / "tests" / "e2e")]  # the stage of the end-to-end tests

from fake_engine import FakeEngine  # noqa: E402
from real_daemon import RealDaemon, eventually, live_with_parent  # noqa: E402

from .ends import conversation  # noqa: E402
from .replay import replay  # noqa: E402
from .talk import Stage  # noqa: E402

__all__ = ["fuzz", "main"]

# Small, so that every limit is met: arena and index hold a fraction of the 2,560 blocks that the chains have.
_SETTINGS = {
    "daemon.log_level": '"error"',
    "daemon.secrets_file": '"secrets.toml"',
    "daemon.leases_max": "256",
    "daemon.stall_s": "0.05",
    "host.capacity_bytes": '"12MiB"',
    "index.nodes_max": "900",
    "events.log_max": "1000",
}
_TENANTS = """[[tenants]]
name = "default"
reuse = "group"

[[tenants]]
name = "friend"
"""
_SECRETS = f"""[tenants]
default = "{"11" * 32}"
friend = "{"22" * 32}"

[groups]
default = "{"33" * 32}"
"""
_CONNECTIONS = 8
_TALLIES = ("kinds", "endings", "statuses", "answers")
_ROUND_FRAMES = 100_000
_ROUNDS_MIN = 3
# Python's and malloc's own breathing (one client that does not read costs 8 MiB for a while); a leak of 50
# bytes a frame would be seen in a million.
RSS_GROWTH_BYTES_MAX = 16 << 20
_CHILD_S = 3600.0


def main(words: list[str] | None = None) -> int:
    """The program."""
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    ask.add_argument("--frames", type=int, default=100_000)
    ask.add_argument("--seed", type=int, default=0)
    ask.add_argument("--json", action="store_true", help="one JSON object and nothing else")
    ask.add_argument("--replay", type=Path, help="send a failure's file again instead")
    ask.add_argument("--failures", type=Path, default=Path.cwd(), help="where a failure's file is written")
    ask.add_argument("--serve", default="", help=argparse.SUPPRESS)
    ask.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    given = ask.parse_args(words)
    if given.child:
        return _child(given.child, given)
    program = (given.serve,) if given.serve else ("-m", "kvstore")
    result = fuzz(given.frames, given.seed, given.failures, again=given.replay, program=program)
    print(json.dumps(result) if given.json else json.dumps(result, indent=2))
    return 0 if result["ok"] else 1


def fuzz(
    frames: int,
    seed: int,
    failures: Path,
    *,
    again: Path | None = None,
    program: Sequence[str] = ("-m", "kvstore"),
) -> dict[str, Any]:
    """Run it all.

    Args:
        failures: folder for what `--replay` reads.
        again: a file to replay instead.
        program: runs the daemon, see RealDaemon.

    Returns:
        What the program prints; `ok` says whether everything held.
    """
    folder = Path(tempfile.mkdtemp(prefix="kvfuzz"))
    (folder / "secrets.toml").touch(0o600)
    (folder / "secrets.toml").write_text(_SECRETS)
    daemon = RealDaemon(folder, _SETTINGS, _TENANTS, program=program)
    try:
        daemon.start()
        run = _Run(daemon, failures)
        if again is not None:
            return run.replayed(again)
        return run.fuzzed(frames, seed)
    finally:
        daemon.close()
        shutil.rmtree(folder)


class _Run:
    """One daemon and what is known of it."""

    def __init__(self, daemon: RealDaemon, failures: Path) -> None:
        self._daemon = daemon
        self._failures = failures
        daemon.status()  # whoever asked before has hung up, and that has been seen
        self._fds = _fds(daemon.pid)
        self._rss: list[int] = []
        self._counts: Counter[str] = Counter()
        self._tallies: dict[str, Counter[str]] = {name: Counter() for name in _TALLIES}
        self._broken: list[str] = []

    def fuzzed(self, frames: int, seed: int) -> dict[str, Any]:
        began = time.monotonic()
        rounds = max(_ROUNDS_MIN, -(-frames // _ROUND_FRAMES))
        for number in range(rounds):
            self._round(frames // rounds, seed * 1_000_003 + number)
            if self._broken:
                break
            self._rss.append(_rss(self._daemon.pid))
        return self._result(time.monotonic() - began)

    def replayed(self, path: Path) -> dict[str, Any]:
        """Send a failure's pieces again, to a daemon as it was."""
        began = time.monotonic()
        self._child("--replay", str(path))
        return self._result(time.monotonic() - began)

    def _round(self, frames: int, seed: int) -> None:
        self._child("--frames", str(frames), "--seed", str(seed), "--failures", str(self._failures))

    def _child(self, *flags: str) -> None:
        """One process that talks, to its end; then whatever was its must be gone."""
        done = subprocess.run(
            [sys.executable, "-m", "tests.fuzz.session_frames", "--child", str(self._daemon.socket), *flags],
            cwd=_ROOT,
            stdout=subprocess.PIPE,
            text=True,
            timeout=_CHILD_S,
            check=False,
            preexec_fn=live_with_parent,
        )
        what = " ".join(flags[:4])
        if done.returncode or not done.stdout:
            self._broken.append(f"{what}: the process that talks ended with {done.returncode}")
        else:
            said = json.loads(done.stdout)
            for name in ("frames", "replies", "sessions"):
                self._counts[name] += said[name]
            for name, tally in self._tallies.items():
                tally.update(said[name])
            self._broken += [f"{what}: {text}" for text in said["broken"]]
        self._settle()

    def _settle(self) -> None:
        """The fuzzing process is gone: everything of it must go, and every law hold."""
        if not self._daemon.alive:
            self._broken.append(f"the daemon ended: {self._daemon.said()}")
            return
        try:
            eventually(lambda: not any(_left(self._daemon).values()), "nothing is left", 20.0)
        except AssertionError:
            self._broken.append(f"left behind: {_left(self._daemon)}")
        found = self._daemon.check()
        if not found["ok"]:
            self._broken.append(found["broken"])
        if "Traceback" in self._daemon.log.read_text(errors="replace"):
            self._broken.append(self._daemon.said())

    def _result(self, took_s: float) -> dict[str, Any]:
        alive = self._daemon.alive
        left = _left(self._daemon) if alive else {}
        if alive and not self._broken:
            self._honest_engine()
        fds = self._fds_growth() if alive else 0
        rss = self._rss_growth()
        if fds > 0:
            self._broken.append(f"{fds} descriptors more than at the start")
        if rss > RSS_GROWTH_BYTES_MAX:
            self._broken.append(f"RSS grew by {rss} bytes")
        return {
            "frames": self._counts["frames"],
            "replies": self._counts["replies"],
            "sessions": self._counts["sessions"],
            "crashes": 0 if alive else 1,
            "internal_errors": self._tallies["statuses"]["INTERNAL"],
            **{f"{name}_left": count for name, count in left.items()},
            "fds_growth": fds,
            "rss_growth_bytes": rss,
            "frames_per_s": round(self._counts["frames"] / took_s),
            "seconds": round(took_s, 1),
            **{name: dict(tally) for name, tally in self._tallies.items()},
            "broken": self._broken,
            "ok": not self._broken,
        }

    def _rss_growth(self) -> int:
        """From the middle third of the rounds to the last: a leak lifts the least of each, buffers do not."""
        third = len(self._rss) // 3
        if not third:
            return 0
        return min(self._rss[-third:]) - min(self._rss[third:-third])

    def _fds_growth(self) -> int:
        """More descriptors than at the start; the last question's own go as soon as it is seen to hang up."""
        with suppress(AssertionError):
            eventually(lambda: _fds(self._daemon.pid) <= self._fds, "descriptors are closed", 5.0)
        return max(0, _fds(self._daemon.pid) - self._fds)

    def _honest_engine(self) -> None:
        """After all that, an engine saves, and another loads the right bytes."""
        for _ in range(2):
            engine = FakeEngine(self._daemon.socket, model="honest", blocks=64)
            try:
                chain = engine.attached().chain(1, 40)
                engine.save(chain)
                if engine.restored(chain) != len(chain):
                    self._broken.append("an honest engine does not get its blocks back")
            finally:
                engine.close()
        eventually(lambda: not any(_left(self._daemon).values()), "an honest engine leaves nothing")


def _left(daemon: RealDaemon) -> dict[str, int]:
    """What clients hold."""
    group = daemon.group()
    counts = {name: group[name] for name in ("leases", "fillings", "pins", "sessions")}
    return {**counts, "engines": len(group["engines"]), "slots": group["host"]["filling"]}


def _fds(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def _rss(pid: int) -> int:
    """Anonymous memory only: which pages of the arena were touched is the arena's business."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


# ---- one process that fuzzes ------------------------------------------------------------------------------


def _child(path: Path, given: argparse.Namespace) -> int:
    """Talk until so many frames are sent, or replay a file; print the tally."""
    stage = Stage(path, random.Random(given.seed))
    broken: list[str] = []
    try:
        if given.replay:
            replay(given.replay, stage)
        else:
            _talk(stage, given.frames)
    except (OSError, AssertionError) as error:
        broken.append(f"{type(error).__name__}: {error}")
    tally = stage.tally
    broken += tally.internal
    if broken and not given.replay:
        file = given.failures / f"session_frames-{given.seed}.jsonl"
        stage.journal.write(file, {"seed": given.seed, "broken": broken[:10], "token": stage.token})
        broken.append(f"replay with --replay {file}")
    counts = {"frames": tally.frames, "replies": tally.replies, "sessions": tally.sessions}
    counters = {name: getattr(tally, name) for name in _TALLIES}
    print(json.dumps({**counts, **counters, "broken": broken}))
    stage.close()
    return 0


def _talk(stage: Stage, frames: int) -> None:
    """Several conversations at once, and one that is deaf; new ones begin where old ones end."""
    talks: list[Iterator[None] | None] = [None] * _CONNECTIONS
    deaf_at = frames // 2
    while stage.tally.frames < frames and not stage.tally.internal:
        if deaf_at and stage.tally.frames >= deaf_at:
            deaf_at = 0
            for _ in conversation(stage, deaf=True):
                pass
        number = stage.chance.randrange(_CONNECTIONS)
        talk = talks[number] = talks[number] or conversation(stage)
        if next(talk, False) is False:
            talks[number] = None


if __name__ == "__main__":
    sys.exit(main())
