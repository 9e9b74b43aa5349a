"""bench.nvme and bench.kill9 say what they measured: fio's words, bars, pace, the ledger, a wrong byte."""

from __future__ import annotations

import json
import shutil
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import nvme_fio, nvme_place
from bench.kill9 import Report
from bench.kill9_ledger import KINDS, Ledger, Offered, names
from bench.kill9_memory import KeyedMemory
from bench.measure import Measured
from bench.numbers_nvme import kill9_text, nvme_text
from bench.nvme import BARS, capacity_bytes, missed, summary
from bench.nvme_fio import Fio, FioFailed, FioJob, FioRun, parsed
from bench.nvme_pace import Pace
from bench.nvme_place import disk_folder, file_system_of
from bench.nvme_reopen import opening_s
from kvstore.keys import KeyChain
from kvstore.types import BlockLayout

MIB = 1 << 20


def fio_says(error: int = 0, io_bytes: int = 4096, runtime_ms: int = 500, jobs: int = 1) -> str:
    """As fio 3.33 prints it, warnings first."""
    moved = {"io_bytes": io_bytes, "bw_bytes": 1, "runtime": runtime_ms, "total_ios": 1}
    job = {"jobname": "limit", "error": error, "read": moved, "write": {**moved, "io_bytes": 0, "runtime": 0}}
    return "fio: some note on a line of its own\n" + json.dumps(
        {"fio version": "fio-3.33", "jobs": [job] * jobs}
    )


# ---- fio --------------------------------------------------------------------------------------------------


def test_fio_runs_are_read_from_its_json() -> None:
    assert parsed(fio_says(io_bytes=8192, runtime_ms=250), "read") == FioRun(8192, 0.25)


@pytest.mark.parametrize(
    ("text", "verb", "why"),
    [
        ("", "read", "something else"),
        ("fio: unknown option", "read", "something else"),
        ('{"jobs": []}', "read", "something else"),
        (fio_says(jobs=2), "read", "something else"),
        (fio_says(error=28), "read", "error 28"),
        (fio_says(), "write", "moved 0 bytes"),
        (fio_says(runtime_ms=0), "read", "in 0.0 s"),
    ],
)
def test_what_fio_did_not_do_is_no_figure(text: str, verb: Any, why: str) -> None:
    with pytest.raises(FioFailed, match=why):
        parsed(text, verb)


def test_a_job_has_as_many_bytes_under_way_as_the_daemon() -> None:
    assert [FioJob("read", size, 64 * MIB).depth for size in (2 * MIB, 256 << 10, 128 * MIB)] == [32, 256, 1]
    options = FioJob("write", 2 * MIB, 32 * MIB).options()
    assert "--end_fsync=1" in options
    assert "--bs=2097152" in options
    assert "--rw=randread" in FioJob("read", 2 * MIB, 64 * MIB).options()


def test_without_fio_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(nvme_fio.shutil, "which", lambda name: None)
    monkeypatch.setattr(nvme_fio, "_ROOT", tmp_path)  # no script that could install it
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "system_packages.sh").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "tools" / "system_packages.sh").chmod(0o700)
    with pytest.raises(FioFailed, match="apt-get install fio"):
        nvme_fio.need_fio()


@pytest.mark.skipif(shutil.which("fio") is None, reason="fio is installed where bench.nvme is run")
def test_fio_moves_what_it_is_told_to(tmp_path: Path) -> None:
    fio = Fio(tmp_path, files=2, file_bytes=4 * MIB)
    fio.lay_out()
    for job in (FioJob("read", 2 * MIB, 8 * MIB), FioJob("write", 256 << 10, 4 * MIB)):
        assert fio.seconds(job) > 0
        assert fio.describe(job)["engine"] in nvme_fio.ENGINES
    assert sorted(path.stat().st_size for path in tmp_path.iterdir()) == [4 * MIB] * 2


# ---- ratios and bars --------------------------------------------------------------------------------------


def test_a_ratio_is_speed_over_fio_in_the_same_turn() -> None:
    seconds = {"fio": [1.0, 2.0, 1.0], "fetch": [2.0, 2.0, 4.0], "fio again": [1.0, 2.0, 1.2]}
    done = Measured("fio", seconds, seconds)
    assert done.speed("fetch").median == 0.5
    assert done.json(10)["arms"]["fetch"]["bytes_per_s"] == 5
    assert not done.void
    assert Measured("fio", {**seconds, "fio again": [2.0, 4.0, 2.0]}, seconds).void


def test_bars_are_at_least_for_speeds_and_at_most_for_seconds() -> None:
    good = dict(BARS)
    assert missed(good) == []
    assert missed({}) == []  # what was not measured
    for name, bar in BARS.items():
        worse = bar + 0.01 if name.startswith("reopen") else bar - 0.01
        assert [text.split()[0] for text in missed({**good, name: worse})] == [name]


def test_a_summary_begins_with_the_plain_figures() -> None:
    ratio = {"median": 0.97, "low": 0.9, "high": 1.0}
    figures = summary({"set_bytes": 1, "read_over_fio_2m": ratio, "read_2m": {"turns": 7}, "opened_s": 0.1})
    assert figures["read_over_fio_2m"] == 0.97
    assert figures["spread"] == {"read_over_fio_2m": ratio}
    assert figures["opened_s"] == 0.1
    assert figures["read_2m"] == {"turns": 7}


def test_a_store_has_room_for_the_set_and_more() -> None:
    assert capacity_bytes(4096 * MIB) >= 4096 * MIB * 3 // 2


def test_opening_begins_before_the_line_that_ends_it() -> None:
    opened = {"timestamp": "2026-11-30T07:00:01.500000Z", "seconds": 0.25}
    began = datetime(2026, 11, 30, 7, 0, 1, 250_000, tzinfo=UTC).timestamp()
    assert opening_s(opened, began + 0.75) == pytest.approx(0.75)


def test_readme_texts_name_what_was_found() -> None:
    arms = {"arms": {"fio": {"bytes_per_s": 2_000_000_000}}, "turns": 7}
    ratio = {"median": 0.97, "low": 0.9, "high": 1.0}
    names = [f"{verb}_{size}" for verb in ("read", "write") for size in ("2m", "256k")]
    result: dict[str, Any] = dict.fromkeys(names, arms)
    result |= {"spread": {name.replace("_", "_over_fio_"): ratio for name in names}}
    result |= {"set_bytes": 4 << 30, "reopen": {"blocks_found": 100_000}, "reopen_s_100k_blocks": 0.5}
    result |= {"restart_to_first_hit_s": 2.0, "restart_empty_s": 1.5}
    text = nvme_text(result)
    assert text.count("0.97 ×") == 4
    assert "100,000 blocks" in text
    assert "0.50 s" in text
    report = Report(rounds=100, kills_with_writes_in_flight=97)
    assert "97 kills" in kill9_text(report.json())


# ---- the place --------------------------------------------------------------------------------------------


def test_memory_is_no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    shm = Path("/dev/shm")
    if not shm.is_dir() or file_system_of(shm) != "tmpfs":
        monkeypatch.setattr(nvme_place, "file_system_of", lambda path: "tmpfs")
    monkeypatch.setenv(nvme_place.PLACE, str(shm if shm.is_dir() else Path.cwd()))
    with pytest.raises(SystemExit, match=r"tmpfs.*KVSTORE_BENCH_DIR"), disk_folder(1):
        pass


def _interrupted(folder: Path) -> None:
    (folder / "segment").write_bytes(b"x")
    raise KeyboardInterrupt


def test_a_folder_is_gone_whatever_ends_the_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(nvme_place, "file_system_of", lambda path: "ext4")
    monkeypatch.setenv(nvme_place.PLACE, str(tmp_path))
    with pytest.raises(KeyboardInterrupt), disk_folder(1) as folder:
        _interrupted(folder)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(SystemExit, match="MiB are free"), disk_folder(1 << 60):
        pass


# ---- the pace ---------------------------------------------------------------------------------------------


def test_nothing_is_saved_that_the_queue_would_refuse() -> None:
    queue, asked = 0, 0

    def queued() -> int:
        nonlocal queue, asked
        asked += 1
        queue = max(0, queue - 40)  # the disk is at work
        return queue

    pace = Pace(queued, room_bytes=100)
    for _ in range(50):
        pace.begin(30)
        assert queue + 30 <= 100
        queue += 30
        pace.end(30)
    assert 0 < asked < 100


def test_what_ends_while_the_daemon_is_asked_is_not_forgotten() -> None:
    pace: Pace
    answering = threading.Event()

    def queued() -> int:
        if not answering.is_set():
            answering.set()
            pace.end(60)  # another thread's save is acknowledged, after the daemon has looked at its queue
            return 0
        return 0

    pace = Pace(queued, room_bytes=100)
    pace.begin(60)
    pace.begin(60)  # waits for a second answer: the first may not have known of the 60 bytes
    assert answering.is_set()


# ---- kill9 ------------------------------------------------------------------------------------------------


def offered(ledger: Ledger, blocks: int, like: Offered | None = None) -> Offered:
    tokens = np.arange(4 * blocks, dtype=np.uint32)
    return ledger.offer(KINDS[0], tokens, KeyChain.of(bytes(32), tokens, 4), like)


def test_a_flush_vouches_for_what_was_acknowledged_before_it() -> None:
    ledger = Ledger(segment_bytes=MIB)
    first, second = offered(ledger, 3), offered(ledger, 3)
    ledger.acknowledge(first)
    asked = ledger.acknowledged()
    ledger.acknowledge(second)
    ledger.flush(asked)
    assert (ledger.must_be_there(first), ledger.must_be_there(second)) == (True, False)
    ledger.kill()
    ledger.forget_unflushed()
    assert ledger.acknowledged() == []
    assert ledger.must_be_there(first), "where nothing is evicted, for ever"


def test_what_is_old_or_begins_like_something_old_may_be_evicted() -> None:
    size = KINDS[0].record_bytes
    ledger = Ledger(segment_bytes=size, window_bytes=10 * size)
    old = offered(ledger, 4)
    new, grown = offered(ledger, 4), offered(ledger, 4, like=old)
    for one in (old, new, grown):
        ledger.acknowledge(one)
    ledger.flush(ledger.acknowledged())
    assert [ledger.must_be_there(one) for one in (old, new, grown)] == [False, True, False]
    ledger.kill()  # three segments may have been left half full
    assert not ledger.must_be_there(new)


def test_what_was_never_saved_or_was_dropped_must_not_be_there() -> None:
    ledger = Ledger(segment_bytes=MIB)
    one = offered(ledger, 4)
    keys = set(names(one.chain))
    assert ledger.strays(KINDS[0], keys) == keys
    ledger.begin(one, 0, 3)
    assert ledger.strays(KINDS[0], keys) == {names(one.chain)[3]}
    ledger.acknowledge(one)
    flushed = ledger.acknowledged()
    ledger.expect_drop(KINDS[0])
    ledger.flush(flushed)  # it was asked for before the drop, and ended after it
    assert not ledger.must_be_there(one)
    ledger.dropped(KINDS[0])
    assert ledger.strays(KINDS[0], keys) == keys
    ledger.begin(one, 0, 1)
    assert ledger.strays(KINDS[0], keys) == keys - {names(one.chain)[0]}
    assert ledger.strays(KINDS[1], keys) == keys, "of another namespace"


def test_one_wrong_byte_shows() -> None:
    memory = KeyedMemory(BlockLayout(1, 2, 64, "float32", 4), 5)
    keys = np.random.default_rng(1).integers(0, 256, (4, 32), np.uint8)
    memory.fill(keys)
    assert memory.wrong(keys) == []
    memory.cells[2, 1, 77] ^= 1
    assert memory.wrong(keys) == [2]
    memory.fill(keys)
    memory.cells[3] = memory.cells[1]  # another key's block
    assert memory.wrong(keys) == [3]
    memory.cells[1, 0], memory.cells[1, 1] = memory.cells[1, 1].copy(), memory.cells[1, 0].copy()
    assert memory.wrong(keys) == [1, 3]
    memory.clear(4)
    assert memory.wrong(keys) == [0, 1, 2, 3]


def test_bars_of_kill9() -> None:
    report = Report(rounds=100, kills_with_writes_in_flight=90, damage_noticed=True, drops_noticed=True)
    report.tally.blocks_flushed = 1
    assert report.missed() == []
    report.kills_with_writes_in_flight = 89
    assert len(report.missed()) == 1
    for name in ("flushed_lost", "corrupt", "phantom", "blocks_evicted_wrongly", "unsound"):
        bad = Report(rounds=1, kills_with_writes_in_flight=1, damage_noticed=True, drops_noticed=True)
        bad.tally.blocks_flushed = 1
        setattr(bad, name, 1)
        assert bad.missed() == [f"{name} 1, bar 0"]
    assert len(Report(rounds=1, kills_with_writes_in_flight=1).missed()) == 3, "nothing flushed, no controls"
