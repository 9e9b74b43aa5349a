"""The command line against a real daemon: answers, and errors of one line with exit status 2."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from command_line import kvstore
from fake_engine import FakeEngine
from real_daemon import RealDaemon
from scene import Scene

from kvstore import __version__
from kvstore.client import PoolSpec


def complaint(*words: str, environ: dict[str, str] | None = None) -> str:
    """The one line that a command which cannot begin ends with."""
    done = kvstore(*words, environ=environ)
    assert done.returncode == 2, done
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("kvstore: ")
    return lines[0]


def test_status_of_a_running_daemon(stage: Scene) -> None:
    daemon = stage.start_daemon()
    engine: FakeEngine = stage.engine(pool=PoolSpec("owned", 64, 64))
    engine.restored(engine.saved(1, 7))
    config = ("--config", str(daemon.config))
    done = kvstore("status", *config, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert (report["version"], report["pid"], report["alarms"]) == (__version__, daemon.pid, [])
    assert report["uptime_s"] > 0
    group = report["groups"]["default"]
    assert group["host"]["ready"] == 7
    assert group["counters"]["hit_blocks"] == 7
    (facts,) = group["engines"].values()
    assert list(group["engines"]) == [engine.client.engine.hex()]
    assert (facts["model"], facts["pool"]) == (stage.name, "owned")
    assert [facts["device"][state] for state in ("free", "mapped", "idle", "draining")] == [64, 0, 0, 0]
    assert group["rates"]["now"]["interval_s"] >= 0.5
    assert group["rates"]["since_start"]["hit_rate"] == 1.0
    assert group["rates"]["since_start"]["loaded_bytes_per_s"] > 0
    now = json.loads(kvstore("status", *config, "--json", "--interval", "0").stdout)
    assert now["groups"]["default"]["rates"]["now"] is None


def test_status_as_text_on_a_narrow_screen(stage: Scene) -> None:
    daemon = stage.start_daemon()
    engine: FakeEngine = stage.engine(pool=PoolSpec("owned", 64, 64))
    engine.restored(engine.saved(1, 7))
    flags = ("status", "--set", f"daemon.socket={daemon.socket}", "--interval", "0.1")
    done = kvstore(*flags, environ={"COLUMNS": "60"})
    assert (done.returncode, done.stderr) == (0, "")
    assert max(len(line) for line in done.stdout.splitlines()) <= 60
    assert "\x1b" not in done.stdout
    for words in ("trust group default", "7 blocks", engine.client.engine.hex()[:8], "GPU L1", "last 0.1 s"):
        assert words in done.stdout, words
    assert re.search(r"leases 0 · fillings 0 \(0 slots, 0 quarantined\)", " ".join(done.stdout.split()))


def test_rot_is_an_alarm_that_comes_first(stage: Scene) -> None:
    daemon = stage.start_daemon()
    engine: FakeEngine = stage.engine()
    chain = engine.saved(1, 4)
    hit = engine.hit(chain)
    engine.flip(int(hit.slots[0]))
    engine.load(hit, chain)
    engine.client.release(hit.lease)
    done = kvstore("status", "--config", str(daemon.config), "--interval", "0")
    assert done.stdout.startswith("ALARM default: corrupt blocks dropped: 1")
    said = kvstore("status", "--config", str(daemon.config), "--interval", "0", "--json")
    assert len(json.loads(said.stdout)["alarms"]) == 1


def test_check_of_a_running_daemon(scene: Scene) -> None:
    config = ("--config", str(scene.daemon.config))
    done = kvstore("check", *config)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ok\n", "")
    # The socket may come from the environment, too.
    done = kvstore("check", "--json", environ={"KVSTORE_DAEMON__SOCKET": str(scene.daemon.socket)})
    assert (done.returncode, json.loads(done.stdout)) == (0, {"ok": True})


BROKEN_LAW = """
import sys
from kvstore import checks

def check(group):
    raise RuntimeError("3 pins in the index, 2 held by leases")
    yield

checks._group = check
from kvstore.cli import main
main(sys.argv[1:])
"""


def test_a_broken_law_is_exit_status_1(stage: Scene, tmp_path: Path) -> None:
    program = tmp_path / "broken.py"
    program.write_text(BROKEN_LAW)
    daemon = stage.keep(RealDaemon(tmp_path_of(stage), program=(str(program),))).start()
    done = kvstore("check", "--config", str(daemon.config))
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout == "BROKEN: group default: 3 pins in the index, 2 held by leases\n"
    done = kvstore("check", "--config", str(daemon.config), "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout) == {
        "ok": False,
        "broken": "group default: 3 pins in the index, 2 held by leases",
    }


def tmp_path_of(stage: Scene) -> Path:
    """A folder short enough for a socket."""
    folder = stage.folder / "b"
    folder.mkdir()
    return folder


def test_version(scene: Scene) -> None:
    done = kvstore("version", "--set", f"daemon.socket={scene.daemon.socket}", "--json")
    found = json.loads(done.stdout)
    assert found["kvstored"] == __version__
    assert found["daemon"]["version"] == __version__
    assert found["daemon"]["pid"] == scene.daemon.pid
    assert len(found["daemon"]["epoch"]) == 32
    done = kvstore("version", "--set", f"daemon.socket={scene.folder}/none.sock")
    assert (done.returncode, done.stderr) == (0, "")
    assert "daemon none: no daemon answers at" in done.stdout
    assert kvstore("--version").stdout.strip() == __version__


BAD: list[tuple[tuple[str, ...], str]] = [
    (("--set", "host.capacty_bytes=1GiB"), "did you mean capacity_bytes"),
    (("--set", "hosts.capacity_bytes=1GiB"), "did you mean host"),
    (("--set", "host.capacity_bytes=lots"), "host.capacity_bytes: 'lots' is not a size"),
    (("--set", "host.capacity_bytes=1MiB"), "host.capacity_bytes"),
    (("--set", "host.capacity_bytes=8TiB"), "host.capacity_bytes"),
    (("--set", "host.threads=many"), "host.threads"),
    (("--set", "host.threads=257"), "host.threads"),
    (("--set", "daemon.socket=" + "x" * 200), "daemon.socket"),
    (("--set", "daemon.socket=/nowhere/at/all/kv.sock"), "daemon.socket"),
    (("--set", "daemon.log_level=loud"), "daemon.log_level"),
    (("--set", "daemon.stale_after_s=1.5"), "two heartbeats"),
    (("--config", "/nowhere/kvstore.toml"), "/nowhere/kvstore.toml: no such configuration file"),
]


def test_serve_refuses_a_bad_configuration(tmp_path: Path) -> None:
    base = ("serve", "--set", "host.capacity_bytes=4MiB", "--set", "host.slab_bytes=2MiB")
    with ThreadPoolExecutor(4) as threads:
        said = list(
            threads.map(
                lambda flags: complaint(*base, "--set", f"daemon.socket={tmp_path}/k", *flags),
                [flags for flags, _ in BAD],
            )
        )
    for line, (_, named) in zip(said, BAD, strict=True):
        assert named in line
    assert list(tmp_path.iterdir()) == []


def test_a_bad_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "kvstore.toml"
    file.write_text("[host\n")
    assert f"{file}: not valid TOML" in complaint("status", "--config", str(file))
    file.write_text("[[tenants]]\nname = 'a b'\n")
    assert "tenants.name" in complaint("serve", "--config", str(file))
    file.write_bytes(b"\xff\xfe")
    assert str(file) in complaint("serve", "--config", str(file))
    assert str(tmp_path) in complaint("serve", "--config", str(tmp_path))


def test_a_bad_environment_is_named(tmp_path: Path) -> None:
    environ = {"KVSTORE_HOST__CAPACITY_BYTES": "much"}
    said = complaint("serve", "--set", f"daemon.socket={tmp_path}/k", environ=environ)
    assert "host.capacity_bytes" in said
