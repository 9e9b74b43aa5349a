"""Cases 1, 3, 16, 17, 26, 28 and 29 where bytes outlive the daemon: on its disk."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
from fake_engine import BIG, FakeEngine
from real_daemon import RealDaemon, eventually
from scene import Scene

from kvstore.cli.tool import Tool
from kvstore.types import Hit

MIB = 1 << 20
RECORD_PAGES = 1 + 65  # of BIG: a header, and a slot of 260 KiB
SEGMENT_MIB, CAPACITY_MIB = 4, 32  # fifteen records of BIG to a segment


def disk(scene: Scene, **more: str) -> dict[str, str]:
    """Settings of a daemon with a small HOST (14 blocks of BIG) and a disk of its scene's own."""
    return {
        "host__capacity_bytes": '"4MiB"',
        "nvme__directory": f'"{scene.folder / "disk"}"',
        "nvme__capacity_bytes": f'"{CAPACITY_MIB}MiB"',
        "nvme__segment_bytes": f'"{SEGMENT_MIB}MiB"',
        "nvme__write_budget_bytes_per_day": "0",
        **more,
    }


def nvme(daemon: RealDaemon) -> dict[str, Any]:
    """What the daemon says of its disk."""
    found: dict[str, Any] = daemon.group()["nvme"]
    return found


def flush(daemon: RealDaemon) -> None:
    """What `kvstore flush` does, without a process of its own."""
    with Tool(daemon.socket) as tool:
        flushed = tool.flush(60.0)
    assert not flushed.error, flushed.error


def again(scene: Scene, daemon: RealDaemon, engine: FakeEngine, number: int = signal.SIGKILL) -> FakeEngine:
    """End the daemon, start it again on the same disk; a new engine, so that nothing is on a device."""
    engine.close()
    daemon.end(number)
    daemon.start()
    return scene.engine(layout=BIG, blocks=14)


def segments(scene: Scene) -> list[Path]:
    """Segment files of the scene's disk."""
    return sorted((scene.folder / "disk").glob("default/segment-*.kvs"))


def test_case_01_bits_flipped_at_rest_are_a_miss(stage: Scene) -> None:
    daemon = stage.start_daemon(**disk(stage))
    engine = stage.engine(layout=BIG, blocks=14)
    engine.saved(1, 5)
    flush(daemon)
    engine.close()
    daemon.end()
    for file in segments(stage):
        with file.open("r+b") as segment:  # in the payload of the fourth record, where there is one
            segment.seek((1 + 3 * RECORD_PAGES + 7) * 4096)
            byte = segment.read(1)
            segment.seek(-1, os.SEEK_CUR)
            segment.write(bytes([byte[0] ^ 0x10]))
    daemon.start()
    engine = stage.engine(layout=BIG, blocks=14)
    chain = engine.chain(1, 5)
    assert engine.restored(chain) == 3
    assert nvme(daemon)["corrupt"] == 1
    assert engine.matched(chain) == 3, "the rotten block is gone"
    engine.save(chain, 3, 4)
    flush(daemon)
    engine = again(stage, daemon, engine)
    assert engine.restored(engine.chain(1, 5)) == 5, "a save heals it, and what lies behind is good"
    daemon.assert_sound()


def test_case_03_a_write_that_failed_is_never_a_hit(stage: Scene) -> None:
    """The disk takes nothing: HOST serves, the disk promises nothing, after a restart there is nothing."""
    folder = stage.folder / "faulty"
    folder.mkdir()
    settings = {key.replace("__", "."): value for key, value in disk(stage).items()}
    program = (str(Path(__file__).parents[1] / "e2e" / "faulty_daemon.py"), "write_eio=1.0")
    daemon: RealDaemon = stage.keep(RealDaemon(folder, settings, program=program)).start()
    engine: FakeEngine = stage.keep(FakeEngine(daemon.socket, model="m", layout=BIG, blocks=14)).attached()
    chain = engine.saved(1, 5)
    eventually(lambda: nvme(daemon)["trouble"] or nvme(daemon)["errors"], "the disk refused")
    assert engine.restored(chain) == 5
    assert nvme(daemon)["records"] == 0
    engine.close()
    daemon.end()
    healthy: RealDaemon = stage.keep(RealDaemon(folder, settings)).start()
    engine = stage.keep(FakeEngine(healthy.socket, model="m", layout=BIG, blocks=14)).attached()
    assert engine.matched(engine.chain(1, 5)) == 0
    engine.saved(2, 5)
    flush(healthy)
    assert nvme(healthy)["records"] == 5


def test_case_16_a_restart_finds_every_block_and_capacity_holds_for_ever(stage: Scene) -> None:
    daemon = stage.start_daemon(**disk(stage))
    engine = stage.engine(layout=BIG, blocks=14)
    for number in range(3):
        for seed in range(12):
            engine.save(engine.chain(100 * number + seed, 10))
            flush(daemon)
            assert sum(file.stat().st_size for file in segments(stage)) <= CAPACITY_MIB * MIB
        newest = [100 * number + seed for seed in range(8, 12)]
        engine = again(stage, daemon, engine, signal.SIGTERM if number % 2 else signal.SIGKILL)
        for seed in newest:
            assert engine.restored(engine.chain(seed, 10)) == 10, f"chain {seed} after restart {number}"
    daemon.assert_sound()


def test_case_17_what_a_flush_acknowledged_survives_sigkill(stage: Scene) -> None:
    daemon = stage.start_daemon(**disk(stage))
    engine = stage.engine(layout=BIG, blocks=14)
    for round_ in range(4):
        kept = [engine.saved(10 * round_ + seed, 4) for seed in range(3)]
        flush(daemon)
        engine.save(engine.chain(1000 + round_, 10))  # on its way when the daemon dies
        engine = again(stage, daemon, engine)
        for seed, chain in enumerate(kept):
            assert engine.restored(engine.chain(10 * round_ + seed, 4)) == 4, chain
        unflushed = engine.client.lookup(engine.chain(1000 + round_, 10))
        if isinstance(unflushed, Hit):  # it may be there; then it is right (`load` compares)
            assert engine.load(unflushed, engine.chain(1000 + round_, 10)).good == unflushed.blocks
            engine.client.release(unflushed.lease)
    daemon.assert_sound()


def test_case_26_no_tail_is_kept_without_its_head(stage: Scene) -> None:
    """Conversations grow turn by turn through a disk that recycles: what is found begins at the beginning."""
    daemon = stage.start_daemon(**disk(stage))
    engine = stage.engine(layout=BIG, blocks=14)
    for turn in range(1, 7):
        for seed in range(12):
            chain = engine.chain(seed, 2 * turn)
            engine.save(chain, engine.restored(chain))
            flush(daemon)
    assert nvme(daemon)["dropped"]["evicted"] > 0
    engine = again(stage, daemon, engine)
    eventually(lambda: not any(nvme(daemon)[state] for state in ("sealing", "evacuating")), "it has settled")
    found = [engine.restored(engine.chain(seed, 12)) for seed in range(12)]
    assert sum(found) == nvme(daemon)["records"] > 0, "every record is reached from its chain's first block"
    daemon.assert_sound()


def admission(daemon: RealDaemon) -> dict[str, Any]:
    """What was let in to the daemon's disk, and what was not."""
    report: dict[str, Any] = nvme(daemon)["admission"]
    return report


def test_case_28_a_scan_does_not_spend_the_budget_of_what_is_reused(stage: Scene) -> None:
    """Prompts that are seen once have made the budget tight: what comes again is written, they are not."""
    budget = 24 * MIB
    daemon = stage.start_daemon(**disk(stage, nvme__write_budget_bytes_per_day=str(budget)))
    engine = stage.engine(layout=BIG, blocks=14)
    for number in range(40):
        engine.save(engine.chain(10_000 + number, 4))
        flush(daemon)  # or a slow disk would refuse some before the budget does
    before = admission(daemon)
    assert before["tight"]
    engine.saved(1, 4)
    kept_out = admission(daemon)
    assert kept_out["refused"]["value"] > before["refused"]["value"], "once is not again"

    def let_in() -> bool:
        assert engine.restored(engine.chain(1, 4)) == 4, "it is on HOST still"
        return bool(admission(daemon)["admitted_blocks"] == before["admitted_blocks"] + 4)

    eventually(let_in, "what is used again was let in")
    for number in range(20):
        engine.save(engine.chain(20_000 + number, 4))
        flush(daemon)
    after = admission(daemon)
    assert after["admitted_blocks"] <= before["admitted_blocks"] + 4 + 8, "a trickle of what is offered"
    assert after["admitted_bytes"] <= budget
    flush(daemon)
    engine = again(stage, daemon, engine)
    assert engine.restored(engine.chain(1, 4)) == 4, "HOST is gone: it came from the disk"
    assert sum(engine.matched(engine.chain(20_000 + number, 4)) for number in range(20)) <= 8


def test_case_28_a_budget_that_is_not_spent_refuses_nothing(stage: Scene) -> None:
    daemon = stage.start_daemon(**disk(stage, nvme__write_budget_bytes_per_day=str(100 * MIB)))
    engine = stage.engine(layout=BIG, blocks=14)
    for number in range(10):
        engine.save(engine.chain(number, 4))
        flush(daemon)
    assert sum(admission(daemon)["refused"].values()) == 0
    assert nvme(daemon)["written"] == 40
    engine = again(stage, daemon, engine)
    assert [engine.restored(engine.chain(number, 4)) for number in range(10)] == [4] * 10


def test_case_29_a_directory_belongs_to_one_daemon(stage: Scene) -> None:
    first = stage.start_daemon(**disk(stage))
    engine = stage.engine(layout=BIG, blocks=14)
    chain = engine.saved(1, 5)
    flush(first)
    folder = stage.folder / "second"
    folder.mkdir()
    settings = {key.replace("__", "."): value for key, value in disk(stage).items()}
    second: RealDaemon = stage.keep(RealDaemon(folder, settings))
    second.start(wait=False)
    assert second.process.wait(60) != 0
    said = second.log.read_text()
    assert f"pid {first.pid}" in said, said
    assert "choose another directory" in said, said
    assert engine.restored(chain) == 5
    first.assert_sound()


def test_tenants_stay_apart_after_a_restart(stage: Scene) -> None:
    """The probe of two tenants, repeated where the bytes outlive the daemon."""
    tenants = '[[tenants]]\nname = "a"\n[[tenants]]\nname = "b"\n'
    daemon = stage.start_daemon(tenants, **disk(stage))
    engine = stage.engine(layout=BIG, blocks=14, tenant="a")
    engine.saved(1, 5)
    flush(daemon)
    engine.close()
    daemon.end(signal.SIGKILL)
    daemon.start()
    other = stage.engine(layout=BIG, blocks=14, tenant="b")
    assert other.matched(other.chain(1, 5)) == 0
    owner = stage.engine(layout=BIG, blocks=14, tenant="a")
    assert owner.restored(owner.chain(1, 5)) == 5
    assert not np.array_equal(owner.chain(1, 5).keys, other.chain(1, 5).keys)
    daemon.assert_sound()
