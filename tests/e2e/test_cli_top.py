"""`kvstore top` in a terminal: refreshes, obeys keys, outlives the daemon, leaves the terminal as it was."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import termios
import time
from pathlib import Path

import pytest
from command_line import KVSTORE, Terminal, kvstore
from real_daemon import WAIT_S, live_with_parent
from scene import Scene

from kvstore.client import PoolSpec


def top(scene: Scene, *words: str, **options: int) -> Terminal:
    flags = ("--config", str(scene.daemon.config), "--interval", "0.1", *words)
    terminal = Terminal("top", *flags, **options)
    scene.keep(terminal)
    return terminal


@pytest.mark.parametrize("key", ["q", "\x03"])
def test_a_key_ends_it_and_the_terminal_is_as_before(scene: Scene, key: str) -> None:
    terminal = top(scene)
    terminal.until("trust group default")
    terminal.until("lookups/s")
    assert not terminal.modes_now() & termios.ICANON
    terminal.press(key)
    assert terminal.ended() == 0
    assert terminal.shown.count("\x1b[?1049h") == terminal.shown.count("\x1b[?1049l") == 1
    assert "Traceback" not in terminal.shown


def test_it_shows_what_happens_while_it_runs(scene: Scene) -> None:
    terminal = top(scene)
    terminal.until("no engine is attached")
    engine = scene.engine(pool=PoolSpec("owned", 64, 64))
    terminal.until(engine.client.engine.hex()[:8])
    engine.restored(engine.saved(1, 7))
    terminal.until("GPU L2")
    terminal.press("q")
    assert terminal.ended() == 0


def test_it_outlives_the_daemon_and_says_so(stage: Scene) -> None:
    daemon = stage.start_daemon()
    terminal = top(stage)
    terminal.until("trust group default")
    daemon.process.kill()
    daemon.process.wait()
    terminal.until("LOST for")
    terminal.until("stale socket")
    daemon.start()
    terminal.until("RESTARTED")
    terminal.until("lookups/s")
    terminal.press("q")
    assert terminal.ended() == 0


def test_sigterm_restores_the_screen(scene: Scene) -> None:
    terminal = top(scene)
    terminal.until("lookups/s")
    os.kill(terminal.pid, signal.SIGTERM)
    assert terminal.ended() == 128 + signal.SIGTERM
    assert "\x1b[?1049l" in terminal.shown


def test_one_frame_where_there_is_no_terminal(scene: Scene) -> None:
    config = ("--config", str(scene.daemon.config), "--interval", "0.1")
    done = kvstore("top", *config)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("trust group default") == 1
    assert re.search(r"last 0\.\d s ", done.stdout)
    assert "\x1b" not in done.stdout
    terminal = top(scene, "--once")
    assert terminal.ended() == 0
    assert terminal.shown.count("trust group default") == 1
    assert "\x1b[?1049h" not in terminal.shown
    done = kvstore("top", *config, "--once", "--json")
    assert json.loads(done.stdout)["groups"]["default"]["rates"]["now"]["interval_s"] >= 0.1


class Stream:
    """`kvstore top --json`, line by line."""

    def __init__(self, config: Path) -> None:
        self.process = subprocess.Popen(
            [str(KVSTORE), "top", "--json", "--interval", "0.1", "--config", str(config)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            preexec_fn=live_with_parent,
        )

    def next(self) -> dict[str, object]:
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], WAIT_S)[0], "no line came"
        found: dict[str, object] = json.loads(self.process.stdout.readline())
        return found

    def until(self, key: str) -> dict[str, object]:
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            line = self.next()
            if line.get(key):
                return line
        raise AssertionError(f"no line with {key}")

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


def test_json_is_one_object_an_interval_also_without_a_daemon(stage: Scene) -> None:
    daemon = stage.start_daemon()
    stream = stage.keep(Stream(daemon.config))
    first, second = stream.next(), stream.next()
    assert first["groups"]["default"]["rates"]["now"] is None
    assert second["uptime_s"] > first["uptime_s"]
    engine = stage.engine()
    engine.restored(engine.saved(1, 7))
    seen = 0.0
    while not seen:
        seen = stream.next()["groups"]["default"]["rates"]["now"]["saved_bytes_per_s"]
    daemon.end()
    lost = stream.until("error")
    assert lost["cause"] in ("absent", "hung_up")
    assert stream.until("lost_s")["lost_s"] > 0
    daemon.start()
    back = stream.until("restarted")
    assert back["restarts"] == 1
    assert back["epoch"] != first["epoch"]
    # Totals of another daemon are not subtracted from these.
    assert back["groups"]["default"]["rates"]["now"] is None
    stream.process.send_signal(signal.SIGINT)
    assert stream.process.wait(WAIT_S) == 0
    assert stream.process.stderr.read() == b""
