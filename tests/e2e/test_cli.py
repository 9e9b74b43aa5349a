"""The command line against a real daemon: answers, and errors of one line with exit status 2."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fake_engine import FakeEngine
from real_daemon import RealDaemon, live_with_parent
from scene import Scene

from kvstore import __version__


def kvstore(*words: str, environ: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "kvstore", *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        preexec_fn=live_with_parent,
        env={**os.environ, "COLUMNS": "80", **(environ or {})},
    )


def complaint(*words: str, environ: dict[str, str] | None = None) -> str:
    """The one line that a command ends with."""
    done = kvstore(*words, environ=environ)
    assert done.returncode == 2, done
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("kvstore: ")
    return lines[0]


def test_status_and_check_of_a_running_daemon(scene: Scene) -> None:
    engine: FakeEngine = scene.engine()
    engine.restored(engine.saved(1, 7))
    config = ("--config", str(scene.daemon.config))
    done = kvstore("status", *config, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    group = report["groups"]["default"]
    assert group["host"]["ready"] == 7
    assert group["counters"]["hit_blocks"] == 7
    assert list(group["engines"]) == [engine.client.engine.hex()]
    done = kvstore("status", "--set", f"daemon.socket={scene.daemon.socket}")
    assert done.returncode == 0
    assert "7 blocks" in done.stdout
    assert "trust group default" in done.stdout
    done = kvstore("check", *config)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ok\n", "")
    done = kvstore("check", *config, "--json")
    assert json.loads(done.stdout) == {"ok": True}
    # The socket may come from the environment, too.
    done = kvstore("check", environ={"KVSTORE_DAEMON__SOCKET": str(scene.daemon.socket)})
    assert (done.returncode, done.stdout) == (0, "ok\n")


def test_version() -> None:
    done = kvstore("version", "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["kvstored"] == __version__
    assert kvstore("--version").stdout.strip() == __version__


def test_help_lists_every_command() -> None:
    done = kvstore("--help")
    assert done.returncode == 0
    for command in ("serve", "status", "check", "version", "demo"):
        assert re.search(rf"\b{command}\b", done.stdout), command
    said = kvstore("serve", "--help").stdout
    assert "--config" in said
    assert "--set" in said


def test_no_daemon(tmp_path: Path) -> None:
    said = complaint("status", "--set", f"daemon.socket={tmp_path}/none.sock")
    assert f"{tmp_path}/none.sock" in said
    assert "daemon.socket" in said


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


@pytest.mark.parametrize("words", [("sing",), ("status", "--jsn"), ("serve", "8GiB")])
def test_words_that_are_no_command(words: tuple[str, ...]) -> None:
    done = kvstore(*words)
    assert done.returncode != 0
    assert "Traceback" not in done.stderr + done.stdout
    assert words[-1] in done.stderr + done.stdout


def test_a_daemon_that_does_not_answer(stage: Scene) -> None:
    daemon: RealDaemon = stage.start_daemon()
    daemon.stopped()
    began = time.monotonic()
    said = complaint("status", "--config", str(daemon.config))
    assert str(daemon.socket) in said
    assert time.monotonic() - began < 25
