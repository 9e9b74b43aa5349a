"""`kvstore calibrate`: what it measures for real, what it prints, and that it leaves nothing."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command_line import Terminal, kvstore
from fake_engine import SMALL
from real_daemon import eventually
from scene import Scene

DISK = "nvme.directory is not set"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A directory of a real daemon's, which must not change."""
    place = tmp_path / "disk"
    (place / "default").mkdir(parents=True)
    (place / "default" / "segment-000.kvs").write_bytes(b"others' blocks")
    yield place
    assert [path.relative_to(place).as_posix() for path in sorted(place.rglob("*"))] == [
        "default",
        "default/segment-000.kvs",
    ]
    assert (place / "default" / "segment-000.kvs").read_bytes() == b"others' blocks"


def calibrated(*words: str) -> dict[str, Any]:
    done = kvstore("calibrate", "--json", *words)
    assert (done.returncode, done.stderr) == (0, "")
    said: dict[str, Any] = json.loads(done.stdout)
    return said


def on(disk: Path, **settings: object) -> list[str]:
    """Options for a disk that any file system of a test machine is."""
    keys = {"nvme.directory": disk, "nvme.direct": "false", "daemon.socket": disk / "none.sock"}
    keys |= {f"nvme.{name}": value for name, value in settings.items()}
    return [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]


def test_both_tiers_are_measured_and_compared(disk: Path) -> None:
    said = calibrated(*on(disk), "--prefill-tokens-per-s", "2")
    assert said["seconds"] < 60  # 20 on a machine that is not loaded
    assert said["block"] == {"tokens": 16, "bytes": 2 << 20}
    assert said["computing"] == {"token_s": 0.5, "position_s": 0.0, "origin": "--prefill-tokens-per-s"}
    for name in ("HOST", "NVME"):
        tier = said["tiers"][name]
        assert tier["measured"] is True
        assert tier["samples"] >= 1  # 48 unless the machine is busy
        assert 0 <= tier["latency_s"] < 1.0
        assert tier["bytes_per_s"] > 4e6
        # 16 tokens are computed in 8 s; whatever runs this loads 2 MiB in a tenth of that.
        assert tier["reload_from_tokens"] == 16


def test_a_disk_that_is_limited_never_wins(disk: Path) -> None:
    words = (*on(disk, limit_bytes_per_s=10_000_000), "--prefill-tokens-per-s", "8000")
    tier = calibrated(*words)["tiers"]["NVME"]
    assert tier["bytes_per_s"] == pytest.approx(1e7, rel=0.3)
    assert tier["reload_from_tokens"] is None
    text = kvstore("calibrate", *words).stdout
    assert re.search(
        r"^NVME .* (8|9|10|11|12)(\.\d)? MB/s   never \(of 131,072 tokens\)$", text, re.MULTILINE
    )


def test_a_disk_that_stalls_costs_its_own_line_only(disk: Path) -> None:
    tiers = calibrated(*on(disk, limit_bytes_per_s=1, stall_s=0.2))["tiers"]
    assert tiers["HOST"]["measured"] is True
    assert tiers["NVME"] == {"measured": False, "why": "its disk brought 0 of 1 blocks (nvme.stall_s)"}


def test_what_a_killed_calibration_left_is_removed(disk: Path) -> None:
    left = disk / ".calibrate-4999999"  # no such process
    (left / "default").mkdir(parents=True)
    calibrated(*on(disk))
    assert not left.exists()


def test_without_a_prefill_speed_there_is_no_break_even(tmp_path: Path) -> None:
    flags = ("--set", f"daemon.socket={tmp_path}/none.sock")
    said = calibrated(*flags)
    assert said["computing"] is None
    assert "reload_from_tokens" not in said["tiers"]["HOST"]
    assert said["tiers"]["NVME"] == {"measured": False, "why": DISK}
    text = kvstore("calibrate", *flags).stdout
    assert re.search(r"^HOST .* ([GM])B/s   \?$", text, re.MULTILINE)
    assert f"NVME  not measured: {DISK}\n" in text
    assert text.endswith("--prefill-tokens-per-s\n")


def test_a_running_daemon_tells_what_its_engines_are_like_and_keeps_its_blocks(scene: Scene) -> None:
    engine = scene.engine()
    chain = engine.saved(1, 8)
    engine.client.note_prefill(4096, 2.0)
    eventually(
        lambda: scene.daemon.group("default")["prefill_tokens_per_s"] > 0, "the daemon hears of the step"
    )
    before = scene.daemon.group("default")["host"]
    said = calibrated("--set", f"daemon.socket={scene.daemon.socket}")
    assert said["computing"]["token_s"] > 0
    assert said["block"]["tokens"] == SMALL.block_tokens
    assert said["tiers"]["HOST"]["measured"] is True
    assert scene.daemon.group("default")["host"] == before
    assert engine.restored(chain) == 8


def test_it_shows_how_far_it_is_and_ends_when_it_is_told_to(disk: Path) -> None:
    terminal = Terminal("calibrate", *on(disk, limit_bytes_per_s=3_000_000))
    try:
        terminal.until("reading NVME")
        os.kill(terminal.pid, signal.SIGTERM)
        assert terminal.ended() != 0
        assert "Traceback" not in terminal.shown
    finally:
        terminal.close()


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("--prefill-tokens-per-s", "0"), "--prefill-tokens-per-s: need more than 0"),
        (("--prefill-tokens-per-s", "nan"), "--prefill-tokens-per-s: need more than 0"),
        (("--token-bytes", "-1"), "--token-bytes: need more than 0"),
    ],
)
def test_numbers_that_cannot_be_are_refused(words: tuple[str, ...], hint: str) -> None:
    done = kvstore("calibrate", "--json", *words)
    assert (done.returncode, done.stderr) == (2, "")
    assert hint in json.loads(done.stdout)["error"]
