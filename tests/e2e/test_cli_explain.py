"""`kvstore explain`: a request's story from a running daemon, and what it says when there is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import kvstore
from fake_engine import FakeEngine
from raw_session import RawSession
from real_daemon import RealDaemon
from scene import Scene

from kvstore.rpc import messages as m

# A daemon that remembers two requests from its start on: of tenant a one that stalled, of b a later one.
REMEMBERS = """
import sys
from kvstore import store
from kvstore.decisions import Asked, Outcome, TrustChange
from kvstore.policy.reload import ReloadQuestion, Way, decide
from kvstore.types import Span, Tier

opened = store.Store.open

def open_and_plan(self, *rest, **keywords):
    opened(self, *rest, **keywords)
    way = Way(Span(Tier.NVME, 0, 96), 0.001, 1e9)
    question = ReloadQuestion(1600, 16, 1 << 20, 0, (way,), lambda start, stop: (stop - start) / 1000)
    memory, now_s = self.groups["team"].decisions, self.clock.now()
    one = Asked(now_s - 1e-3, 12, "a", "SmolLM2", 1600, ((Tier.NVME, 96),), "cmpl-7")
    plan = memory.planned(one, decide(question))
    memory.ended(plan, Outcome(1.84, 3, 0.26))
    memory.trust_changed(TrustChange(now_s, "NVME", False, "a load lagged"))
    memory.planned(Asked(now_s, 13, "b", "SmolLM2", 1600, (), "cmpl-8"), decide(question))

store.Store.open = open_and_plan
from kvstore.cli import main
main(sys.argv[1:])
"""
TENANTS = "\n".join(f'[[tenants]]\nname = "{name}"\ngroup = "team"\nreuse = "own"' for name in "ab")


@pytest.fixture
def remembers(stage: Scene, tmp_path: Path) -> RealDaemon:
    program = tmp_path / "remembers.py"
    program.write_text(REMEMBERS)
    (stage.folder / "e").mkdir()
    daemon = RealDaemon(stage.folder / "e", tenants=TENANTS, program=(str(program),))
    started: RealDaemon = stage.keep(daemon).start()
    return started


def test_a_request_is_told_in_words(remembers: RealDaemon) -> None:
    config = ("--config", str(remembers.config))
    done = kvstore("explain", "cmpl-7", *config, environ={"COLUMNS": "20"})
    assert (done.returncode, done.stderr) == (0, "")
    who, *lines = done.stdout.splitlines()
    assert who.startswith("Request cmpl-7 (lease 12) of tenant a with SmolLM2, ")
    assert who.endswith(": a prompt of 1,600 tokens.")
    assert lines[0] == "Known of its KV: 96 blocks on NVME."
    assert lines[1].startswith("Choice: load. Reason: loads blocks 0 to 96 from NVME: ")
    assert lines[2].startswith(
        "Predicted until its KV is complete: load 170 ms (chosen), recompute 1.6 s, split "
    )
    assert lines[3] == (
        "The load was given up by the lag rule after 260 ms; 3 of 96 blocks had arrived and were kept, the "
        "rest was computed. It took 1.8 s, 11 times as long as predicted; recompute was predicted to take "
        "240 ms less than that."
    )
    assert lines[4].startswith("Since then: NVME lost trust ")
    assert lines[4].endswith(" (a load lagged); 1 more plan: 1 load.")
    last = kvstore("explain", "--last", *config)
    assert last.stdout.startswith("Request cmpl-8 (lease 13) of tenant b with SmolLM2, ")
    by_lease = kvstore("explain", "12", *config, "--json")
    assert (by_lease.returncode, by_lease.stderr) == (0, "")
    told = json.loads(by_lease.stdout)
    assert (told["request"], told["group"], told["outcome"]["loaded_blocks"]) == ("cmpl-7", "team", 3)
    assert told["words"][1:-1] == lines[:-1]
    remembers.assert_sound()


def test_what_is_not_remembered_comes_with_a_fix(remembers: RealDaemon, scene: Scene) -> None:
    done = kvstore("explain", "cmpl-9", "--config", str(remembers.config), "--json")
    assert (done.returncode, done.stderr) == (2, "")
    said = json.loads(done.stdout)
    assert said["status"] == "NOT_FOUND"
    assert "'cmpl-9' is remembered" in said["error"]
    assert said["fix"].startswith("kvstore explain --last tells the latest")
    done = kvstore("explain", "--last", "--set", f"daemon.socket={scene.daemon.socket}")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("kvstore: explain: ")
    assert done.stderr.count("\n") == 1


def told(engine: FakeEngine, request: str = "") -> Any:
    return engine.client.explain(request)


def test_an_engine_hears_of_its_own_tenants_only(stage: Scene, remembers: RealDaemon) -> None:
    a, b = (stage.keep(FakeEngine(remembers.socket, tenant=name)).attached() for name in "ab")
    assert [told(engine)["request"] for engine in (a, b)] == ["cmpl-7", "cmpl-8"]
    assert told(a)["since"]["plans"] == {"recompute": 0, "load": 0, "split": 0}
    assert told(b, "cmpl-8")["known"] is True
    for engine, other in ((a, "cmpl-8"), (b, "cmpl-7"), (b, "12"), (a, "cmpl-9")):
        nothing = told(engine, other)
        assert nothing.keys() == {"known", "reason"}
        assert nothing["known"] is False
        assert f"{other!r} is remembered" in nothing["reason"]
    tool = stage.keep(RawSession(remembers.socket)).tool()
    assert json.loads(tool.ask(m.Explain("cmpl-7")).json)["tenant"] == "a"
    assert json.loads(tool.ask(m.Explain("")).json)["tenant"] == "b"
    remembers.process.kill()
    remembers.process.wait()
    assert told(a)["known"] is False


def test_a_daemon_that_does_not_know_the_question_is_of_another_version(stage: Scene, tmp_path: Path) -> None:
    program = tmp_path / "older.py"
    program.write_text(
        "import sys\n"
        "import msgspec\n"
        "from kvstore.rpc import session\n"
        "decode = session._decode\n"
        "def older(payload):\n"
        "    if b'explain' in bytes(payload):\n"
        "        raise msgspec.ValidationError(\"Invalid value 'explain' - at `$[1][0]`\")\n"
        "    return decode(payload)\n"
        "session._decode = older\n"
        "from kvstore.cli import main\n"
        "main(sys.argv[1:])\n"
    )
    (stage.folder / "o").mkdir()
    daemon = stage.keep(RealDaemon(stage.folder / "o", program=(str(program),))).start()
    done = kvstore("explain", "--last", "--config", str(daemon.config), "--json")
    said = json.loads(done.stdout)
    assert (done.returncode, said["cause"]) == (2, "version")
    assert "the daemon's own installation" in said["fix"]
