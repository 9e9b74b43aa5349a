"""`kvstore flush`: what it says, and the status it ends with."""

from __future__ import annotations

import json
from pathlib import Path

from command_line import kvstore
from real_daemon import RealDaemon
from scene import Scene

# Answers in turn, then stays silent: a disk that takes for ever.
ANSWERS = """
import sys
from kvstore.rpc import messages as m, session

answers = iter([
    m.Flushed(1234, 5 << 30, 0, 0.25, ""),
    m.Flushed(1234, 5 << 30, 77, 12.0, ""),
    m.Flushed(7, 7 << 20, 0, 1.5, "group a: Input/output error"),
    m.Flushed(7, 7 << 20, 0, 1.5, "group a: Input/output error"),
])
answered = session.Session._answer

def answer(self, frame):
    return next(answers, None) if isinstance(frame.body, m.Flush) else answered(self, frame)

session.Session._answer = answer
from kvstore.cli import main
main(sys.argv[1:])
"""


def test_what_a_flush_says(stage: Scene, tmp_path: Path) -> None:
    program = tmp_path / "answers.py"
    program.write_text(ANSWERS)
    (stage.folder / "f").mkdir()
    daemon = stage.keep(RealDaemon(stage.folder / "f", program=(str(program),))).start()
    config = ("--config", str(daemon.config))
    done = kvstore("flush", *config)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "flushed in 0.25 s: 1,234 blocks, 5 GiB, are on NVMe\n"
    done = kvstore("flush", *config)
    assert (done.returncode, done.stdout.count("\n")) == (0, 1)
    assert done.stdout.endswith("are on NVMe; 77 were not let in since the start\n")
    done = kvstore("flush", *config)
    assert (done.returncode, done.stdout) == (1, "NOT FLUSHED: group a: Input/output error\n")
    done = kvstore("flush", *config, "--json")
    assert (done.returncode, done.stderr) == (1, "")
    assert json.loads(done.stdout) == {
        "ok": False,
        "blocks": 7,
        "bytes": 7 << 20,
        "refused": 0,
        "seconds": 1.5,
        "error": "group a: Input/output error",
    }
    # Nobody waits for ever, and a disk that is slow is not called a daemon that hangs.
    done = kvstore("flush", *config, "--timeout", "0.2", "--json")
    assert (done.returncode, done.stderr) == (2, "")
    said = json.loads(done.stdout)
    assert said["status"] == "DEADLINE_EXCEEDED"
    assert "not everything is on the disks after 0.2 s" in said["error"]
    assert "--timeout" in said["error"]
    daemon.assert_sound()


def test_without_a_disk_nothing_is_flushed(scene: Scene) -> None:
    done = kvstore("flush", "--set", f"daemon.socket={scene.daemon.socket}")
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.startswith("NOT FLUSHED: ")
    assert "nvme.directory" in done.stdout
    scene.daemon.assert_sound()
