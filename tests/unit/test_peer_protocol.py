"""bench.local --peers: the line protocol, its faults, and a table that never leaves a store out silently."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import bench.local_peers as local_peers
from bench.limits import LibcCopy
from bench.peer_process import OURS, PEERS, Child, PeerError, System, named

BLOCK = 64 << 10
DICT = "tests.unit.peer_dict_store"


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Child]]:
    """Start a dict store with a fault, opened with 32 blocks of 64 KiB."""
    children = []
    LibcCopy(tmp_path)

    def start(fault: str) -> Child:
        monkeypatch.setenv("PEER_FAULT", fault)
        child = Child(System("dict", DICT, Path(sys.executable)), tmp_path)
        children.append(child)
        child.ask(f"open {tmp_path} {tmp_path / 'limit.so'} {BLOCK} 32 32")
        return child

    yield start
    for child in children:
        child.close()


def test_every_request_is_answered_with_seconds(opened: Callable[[str], Child]) -> None:
    child = opened("")
    assert child.ask("put 32")["seconds"] > 0
    got = child.ask("get")
    assert got["seconds"] > 0
    assert got["wrong"] == 0
    assert child.ask("memcpy put 32")["seconds"] > 0
    assert child.ask("memcpy get 32")["seconds"] > 0
    child.ask("plant 20 2")
    assert [child.ask(f"lookup 20 {kind}")["blocks"] for kind in ("hit", "half", "miss")] == [20, 10, 0]


def test_wrong_bytes_are_counted(opened: Callable[[str], Child]) -> None:
    child = opened("flip")
    child.ask("put 32")
    assert child.ask("get")["wrong"] == 32


def test_a_get_needs_a_put_that_nothing_overwrote(opened: Callable[[str], Child]) -> None:
    child = opened("")
    with pytest.raises(PeerError, match="put comes first"):
        child.ask("get")
    child.ask("put 8")
    child.ask("memcpy put 8")
    with pytest.raises(PeerError, match="put comes first"):
        child.ask("get")


def test_an_error_is_a_reply_and_the_process_lives_on(opened: Callable[[str], Child]) -> None:
    child = opened("refuse")
    with pytest.raises(PeerError, match="put: RuntimeError: the store is full"):
        child.ask("put 32")
    with pytest.raises(PeerError, match="no such request: 'sing'"):
        child.ask("sing")
    assert child.ask("memcpy put 32")["seconds"] > 0


def test_a_process_that_ends_is_an_error_with_its_last_words(opened: Callable[[str], Child]) -> None:
    with pytest.raises(PeerError, match="has ended: last words"):
        opened("die").ask("put 32")


def test_an_answer_has_a_deadline(opened: Callable[[str], Child], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.peer_process._CLOSE_S", 0.2)
    with pytest.raises(PeerError, match=r"no answer to 'put' within 0\.2 s|within 0 s"):
        opened("hang").ask("put 32", seconds=0.2)


def test_what_a_store_leaves_is_removed(opened: Callable[[str], Child], tmp_path: Path) -> None:
    child = opened("")
    assert (tmp_path / "left-by-dict-store").exists()
    child.close()
    assert not (tmp_path / "left-by-dict-store").exists()


def test_what_a_store_leaves_is_removed_when_its_process_died(
    opened: Callable[[str], Child], tmp_path: Path
) -> None:
    child = opened("die")
    with pytest.raises(PeerError):
        child.ask("put 32")
    child.close()
    assert not (tmp_path / "left-by-dict-store").exists()


def test_a_peer_that_is_not_installed_says_how(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match="make peers"):
        Child(System("dict", DICT, tmp_path / "no-python"), tmp_path)


def test_names_of_peers() -> None:
    assert named("") == list(PEERS)
    assert named("openlake, lmcache,openlake") == ["openlake", "lmcache"]
    with pytest.raises(argparse.ArgumentTypeError, match="unknown peer nobody: choose from"):
        named("nobody")


def test_the_command_line_decides_the_exit_status(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def fail(names: list[str], *rest: object) -> tuple[dict[str, object], list[str]]:
        asked.append(names)
        return {"peers": {}}, ["redhare"]

    monkeypatch.setattr(local_peers, "peers", fail)
    monkeypatch.setattr(local_peers, "table", lambda figures: "")
    command = argparse.ArgumentParser()
    command.add_argument("--json", action="store_true")
    command.add_argument("--only", action="append")
    command.add_argument("--turns", type=int, default=1)
    local_peers.arguments(command)
    status = {
        words: local_peers.compare(command.parse_args(["--json", *words.split()]))[1]
        for words in ("", "--peers", "--only peers", "--peers redhare,openlake")
    }
    assert status == {"": 0, "--peers": 0, "--only peers": 0, "--peers redhare,openlake": 4}
    assert asked == [list(PEERS), list(PEERS), ["redhare", "openlake"]]


def test_a_failing_store_is_a_line_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole comparison, with dicts in the places of the stores."""
    python = Path(sys.executable)
    monkeypatch.setattr(local_peers, "SIZES", {"64k": BLOCK})
    monkeypatch.setattr(local_peers, "LENGTHS", (20,))
    monkeypatch.setattr(local_peers, "OURS", System(OURS.name, DICT, python))
    absent = System("lmcache", DICT, tmp_path / "no-python")
    present = System("openlake", DICT, python)
    monkeypatch.setattr(local_peers, "PEERS", {"lmcache": absent, "openlake": present})
    figures, failed = local_peers.peers(["lmcache", "openlake"], 1, 4 << 20, say=lambda _: None)
    assert failed == ["lmcache"]
    assert figures["peers"]["openlake"]["get_over_memcpy_64k"] > 0
    assert figures["peers"]["openlake"]["put_first_over_memcpy_64k"] > 0
    assert figures["peers"]["openlake"]["lookup_half_20_over_echo"] > 0
    assert figures["peers"]["openlake"]["wrong_blocks"] == 0
    lines = local_peers.table(figures).splitlines()
    assert lines[1].startswith("kvstore 1.0")
    figures["peers"]["openlake"]["wrong_blocks"] = 3
    assert "openlake: WRONG BYTES in 3 of the blocks compared" in local_peers.table(figures)
    assert any(line.startswith("lmcache: not (wholly) measured: not installed: make peers") for line in lines)


def test_our_own_store_speaks_the_protocol(tmp_path: Path) -> None:
    LibcCopy(tmp_path)
    child = Child(OURS, tmp_path)
    try:
        child.ask(f"open {tmp_path} {tmp_path / 'limit.so'} {BLOCK} 64 64")
        child.ask("put 64")
        assert child.ask("get")["wrong"] == 0
        assert child.ask("memcpy put 64")["seconds"] > 0
        assert child.ask("put 64")["seconds"] > 0
        assert child.ask("get")["wrong"] == 0
        child.ask("plant 10 1")
        assert [child.ask(f"lookup 10 {kind}")["blocks"] for kind in ("hit", "half", "miss")] == [10, 5, 0]
    finally:
        child.close()
