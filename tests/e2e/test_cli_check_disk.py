"""`kvstore check DIRECTORY`: a verdict on what a daemon left on the disk, and its repair."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from command_line import kvstore
from disk_maker import BLOCK_BYTES, Made, flip, made

BLOCKS = 60  # 42 in the first segment of 1 MiB, the others in the second

Make = Callable[..., Made]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Directories below `tmp_path / "nvme"`, one a trust group."""
    every: list[Made] = []

    def make(group: str = "default", end: str = "close", blocks: int = BLOCKS) -> Made:
        (tmp_path / "nvme").mkdir(exist_ok=True)
        every.append(made(tmp_path / "nvme" / group, blocks, end))
        return every[-1]

    yield make
    for one in every:
        one.close()


def checked(path: Path, *words: str, status: int) -> dict[str, Any]:
    """What a check says as values."""
    done = kvstore("check", str(path), "--json", *words)
    assert (done.returncode, done.stderr) == (status, ""), done
    said: dict[str, Any] = json.loads(done.stdout)
    assert said["ok"] is (status == 0)
    return said["directories"]


def refused(path: Path, *words: str) -> str:
    """The one line of a check that cannot begin."""
    done = kvstore("check", str(path), *words)
    assert (done.returncode, done.stdout) == (2, ""), done
    assert done.stderr.startswith("kvstore: ") and done.stderr.count("\n") == 1
    said = json.loads(kvstore("check", str(path), "--json", *words).stdout)
    assert said.keys() >= {"error", "fix", "status"}
    return done.stderr


def test_what_was_closed_in_order_is_whole(make: Make) -> None:
    disk = make()
    before = disk.content()
    found = checked(disk.path, status=0)["default"]
    assert found["path"] == str(disk.path)
    assert (found["records"], found["rotten"], found["unreadable"], found["lost"]) == (BLOCKS, 0, 0, 0)
    assert found["sealed"] >= 2  # segments that were opened ahead are sealed empty
    assert found["unsealed"] <= 1, "the one that would have been filled next"
    assert found["payload_bytes"] == BLOCKS * BLOCK_BYTES
    assert found["bytes"] == sum(len(data) for name, data in before.items() if name.endswith(".kvs"))
    assert len(found["id"]) == 32
    assert disk.content() == before, "a check changes nothing"
    said = kvstore("check", str(disk.path)).stdout
    assert said.startswith(f"default: whole ({disk.path})\n  60 blocks, ")
    assert f"{found['sealed']} sealed" in said and "DAMAGED" not in said


def test_a_kill_is_no_damage_and_can_be_sealed(make: Make) -> None:
    disk = make(end="kill")
    found = checked(disk.path, status=0)["default"]
    assert (found["records"], found["rotten"]) == (BLOCKS, 0)
    assert found["unsealed"] >= 1
    said = kvstore("check", str(disk.path)).stdout
    assert "unsealed    no footer yet" in said
    repaired = checked(disk.path, "--repair", status=0)["default"]
    assert repaired["repaired"] == found["unsealed"]
    after = checked(disk.path, status=0)["default"]
    assert (after["records"], after["unsealed"]) == (BLOCKS, 0)
    assert "repaired" not in after


@pytest.mark.parametrize("end", ["close", "kill"])
def test_rot_is_found_and_left_out(make: Make, end: str) -> None:
    """Case 1: one byte flipped at rest."""
    disk = make(end=end)
    for number in (3, 50):  # one in each segment
        disk.flip_block(number)
    found = checked(disk.path, status=1)["default"]
    assert (found["records"], found["rotten"]) == (BLOCKS - 2, 2)
    done = kvstore("check", str(disk.path))
    assert done.returncode == 1
    assert done.stdout.startswith("default: DAMAGED")
    assert "2 ROTTEN blocks" in done.stdout and "--repair leaves them out" in done.stdout
    done = kvstore("check", str(disk.path), "--repair")
    assert done.returncode == 0
    assert "left out of the footers now" in done.stdout
    # After a kill the segment that would have been filled next is sealed, too.
    assert re.search(r"repaired: [23] footers written", done.stdout)
    after = checked(disk.path, status=0)["default"]
    assert (after["records"], after["rotten"], after["unsealed"]) == (BLOCKS - 2, 0, 0)


def test_a_segment_without_a_header_that_holds_is_lost(make: Make) -> None:
    disk = make()
    flip(min(disk.path.glob("segment-*.kvs")), 9)
    found = checked(disk.path, status=1)["default"]
    assert found["lost"] == 1
    assert found["records"] < BLOCKS
    said = kvstore("check", str(disk.path)).stdout
    assert "1 LOST" in said and "the header is damaged" in said


def test_a_file_that_was_never_finished_is_no_damage(make: Make) -> None:
    disk = make()
    (disk.path / "segment-004711.kvs").write_bytes(bytes(1 << 20))
    (disk.path / "segment-004712.kvs").write_bytes(b"")
    found = checked(disk.path, status=0)["default"]
    assert found["unfinished"] >= 2
    assert "unfinished  made anew at the next start" in kvstore("check", str(disk.path)).stdout


def test_all_groups_of_a_directory(make: Make) -> None:
    red, blue = make("red"), make("blue", blocks=5)
    (red.path.parent / "secrets.toml").write_text("not ours to read")
    (red.path.parent / "lost+found").mkdir()
    found = checked(red.path.parent, status=0)
    assert {name: facts["records"] for name, facts in found.items()} == {"blue": 5, "red": BLOCKS}
    blue.flip_block(2)
    found = checked(red.path.parent, status=1)
    assert {name: facts["ok"] for name, facts in found.items()} == {"blue": False, "red": True}
    assert "secret" not in kvstore("check", str(red.path.parent)).stdout


def test_what_a_daemon_uses_is_left_alone(make: Make) -> None:
    """Case 29: two processes on one directory. Not even the groups that nobody uses are repaired."""
    free, used = make("free", "kill"), make("used", "hold")
    before = free.content()
    for path in (used.path, used.path.parent):
        for words in ((), ("--repair",)):
            assert str(used.path) in refused(path, *words)
    assert free.content() == before
    used.close()
    assert checked(used.path.parent, status=0)["used"]["records"] == BLOCKS


def test_nonsense_is_named(make: Make, tmp_path: Path) -> None:
    assert "no such file or directory" in refused(tmp_path / "none")
    (tmp_path / "file").write_text("x")
    assert "not a directory" in refused(tmp_path / "file")
    (tmp_path / "empty" / "below").mkdir(parents=True)
    assert "no kvstore.disk in it or in a directory below it" in refused(tmp_path / "empty")
    (tmp_path / "empty" / "below" / "kvstore.disk").write_bytes(b"x" * 4096)
    assert str(tmp_path / "empty" / "below") in refused(tmp_path / "empty")
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "segment-000001.kvs").write_bytes(bytes(1 << 20))
    before = list((tmp_path / "bare").iterdir())
    assert str(tmp_path / "bare") in refused(tmp_path / "bare", "--repair")
    assert list((tmp_path / "bare").iterdir()) == before
