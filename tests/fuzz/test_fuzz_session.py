"""A short run of the session fuzzer, and proof that it is one: it reaches deep, and it notices."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvstore.rpc import messages as m

ROOT = Path(__file__).resolve().parent.parent.parent
# A daemon whose `extend` has a bug: what the fuzzer must find, keep and find again.
BROKEN = """
import sys
import kvstore.rpc.session as session

def extend(self, caller, body):
    raise IndexError("planted")

session._ATTACHED[session.m.Extend] = extend
from kvstore.cli import main
main(sys.argv[1:])
"""


def run(*words: str, timeout_s: float = 100.0) -> tuple[int, dict[str, Any]]:
    """Run the program; its exit status and what it says."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz.session_frames", "--json", *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    return done.returncode, json.loads(done.stdout)


def test_no_frame_hurts_the_daemon(tmp_path: Path) -> None:
    status, said = run("--frames", "24000", "--seed", "3", "--failures", str(tmp_path))
    assert status == 0, said["broken"]
    assert said["frames"] >= 24_000
    for name in ("crashes", "internal_errors", "leases_left", "fillings_left", "pins_left", "sessions_left"):
        assert said[name] == 0, name
    assert said["fds_growth"] == 0
    assert list(tmp_path.iterdir()) == []
    # It got behind every door: each request was made, each kind of answer was given.
    asked = set(msgspec_members(m.Request)) - {m.Stop}  # that one is obeyed
    assert said["kinds"].keys() == {kind.__name__ for kind in asked}
    answers = set(msgspec_members(m.Reply)) - {m.Explained}  # that one needs a plan that was recorded
    assert said["answers"].keys() - {"Explained"} == {kind.__name__ for kind in answers}
    assert said["endings"].keys() >= {"damaged", "deaf", "descriptors", "noise", "truncated", "bad_length"}


def msgspec_members(union: Any) -> tuple[type[msgspec.Struct], ...]:
    return tuple(union.__args__)


def test_a_planted_bug_is_found_and_found_again(tmp_path: Path) -> None:
    program = tmp_path / "broken.py"
    program.write_text(BROKEN)
    flags = ("--failures", str(tmp_path), "--serve", str(program))
    status, said = run("--frames", "9000", "--seed", "1", *flags)
    assert status == 1
    assert said["internal_errors"] >= 1
    assert any("internal error: IndexError" in text for text in said["broken"])
    (file,) = tmp_path.glob("*.jsonl")
    status, said = run("--replay", str(file), *flags)
    assert status == 1
    assert any("planted" in text for text in said["broken"])


@pytest.mark.parametrize("seed", range(3))
def test_a_seed_makes_the_same_values(seed: int, tmp_path: Path) -> None:
    from .hostile import damaged, shapeless

    def some() -> list[bytes]:
        chance = random.Random(seed)
        return [damaged(chance, msgspec.msgpack.encode(shapeless(chance))) for _ in range(50)]

    assert some() == some()
