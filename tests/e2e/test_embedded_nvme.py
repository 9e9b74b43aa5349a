"""A language model whose KV comes back from the disk: the same tokens, whatever the disk does."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from kvstore.connectors.embedded.request import Report
from nvme_kit import faulty, flip, nvme_settings, on_disk
from real_daemon import RealDaemon, eventually
from scene import Scene
from tiny_engines import PATIENT, TinyEngine, TinyModel, prompt, tiny, written

from kvstore.types import Hit, Reuse

__all__ = ["tiny", "written"]
STALLED = "stall_ms=5000:1"
# Below the five seconds of the disk, above whatever a loaded machine needs to compute.
SOON_S = 4.0


class Place:
    """Daemons one after another over the same socket and directory, and engines on them."""

    def __init__(self, stage: Scene, tiny: TinyModel, **settings: str) -> None:
        self._stage, self._tiny = stage, tiny
        self.directory = stage.folder / "nvme"
        self._settings = nvme_settings(self.directory)
        self._settings |= {key.replace("__", "."): value for key, value in settings.items()}
        self.daemon = self._make()
        self.daemon.start()

    def _make(self, **more: Any) -> RealDaemon:
        daemon: RealDaemon = self._stage.keep(RealDaemon(self._stage.folder, self._settings, **more))
        return daemon

    def engine(self, **options: Any) -> TinyEngine:
        engine: TinyEngine = self._stage.keep(TinyEngine(self._tiny, self.daemon.socket, **options))
        return engine.attached()

    def keep(self, *prompts: list[int], blocks: int = 0) -> None:
        """Have these answered, and so many blocks (all, if they share none) on the disk; the engine ends."""
        engine = self.engine()
        for one in prompts:
            engine.ask(one, 8)
        engine.settle()
        engine.close()
        on_disk(self.daemon, blocks or sum(len(one) // 16 for one in prompts))

    def restart(self, faults: str = "", number: int = signal.SIGTERM) -> RealDaemon:
        """End the daemon; the next one has nothing but what is on the disk."""
        self.daemon.end(number)
        self.daemon = self._make(program=faulty(faults)) if faults else self._make()
        return self.daemon.start()

    def slot_bytes(self, tokens: list[int], block: int) -> bytes:
        """Some bytes of one block, as they lie in the arena and on the disk."""
        engine = self.engine()
        chain = engine.client.chain(np.array(tokens, np.uint32), "default", Reuse.OWN)
        hit = engine.client.lookup(chain)
        assert isinstance(hit, Hit)
        assert len(hit.slots) > block, "it is on HOST"
        arena = engine.client._core.attachment.arena
        piece = bytes(arena.view(int(hit.slots[block]), 4096)[1000:1064].tobytes())
        engine.client.release(hit.lease)
        engine.close()
        return piece

    def end(self) -> None:
        self.daemon.assert_quiet()


@pytest.fixture
def place(stage: Scene, tiny: TinyModel) -> Iterator[Callable[..., Place]]:
    made: list[Place] = []

    def make(**settings: str) -> Place:
        made.append(Place(stage, tiny, **settings))
        return made[-1]

    yield make
    for one in made:
        one.end()


def reused(report: Report) -> dict[str, int]:
    return {str(tier): tokens for tier, tokens in report.reused.items() if tokens}


def ended(engine: TinyEngine, wanted: list[Any]) -> list[Report]:
    """Reports in the order in which the requests end."""
    reports: list[Report] = []
    for request in wanted:
        assert engine.engine.add(request)

    def step() -> bool:
        reports.extend(output.report for output in engine.engine.step() if output.report is not None)
        return not engine.engine.unfinished

    eventually(step, "every request ends")
    return reports


# ---- hits --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["stopped", "killed"])
def test_a_restarted_daemon_answers_from_the_disk(
    place: Callable[..., Place], tiny: TinyModel, number: int
) -> None:
    at = place()
    asked = prompt(600, 1)
    at.keep(asked)
    at.restart(number=number)
    engine = at.engine()
    report = engine.ask(asked)
    assert reused(report) == {"NVME": 592}
    assert report.tokens == tiny.uncached(asked)
    # Now it is on the device, and, for others, on HOST.
    assert reused(engine.ask(asked)) == {"GPU": 592}
    engine.close()
    other = at.engine()
    assert reused(other.ask(asked)) == {"HOST": 592}
    other.close()
    hits = at.daemon.group()["counters"]["hit_blocks_by_tier"]
    assert (hits["NVME"], hits["HOST"], hits["GPU"]) == (37, 37, 37)


def test_a_conversation_goes_on_after_a_restart(place: Callable[..., Place], tiny: TinyModel) -> None:
    """What it says after the restart is saved, and found after the next one."""
    at = place()
    said = prompt(200, 2)
    known = 0
    for turn in range(3):
        engine = at.engine()
        report = engine.ask(said, 40)
        assert report.tokens == tiny.uncached(said, 40)
        assert reused(report).get("NVME", 0) == known, turn
        engine.settle()
        engine.close()
        known = (len(said) + 39) // 16 * 16
        on_disk(at.daemon, known // 16)
        said = [*said, *report.tokens, *prompt(50, 20 + turn)]
        at.restart()


def test_a_host_that_is_too_small_is_completed_by_the_disk(
    place: Callable[..., Place], tiny: TinyModel
) -> None:
    """Nothing restarts: what HOST had no room for comes from the disk, and the two make one hit."""
    at = place(host__capacity_bytes='"8MiB"')
    prompts = [prompt(800, seed) for seed in range(30, 36)]
    at.keep(*prompts)
    assert at.daemon.group()["host"]["ready"] < 6 * 50
    engine = at.engine(blocks=64)
    by_tier: dict[str, int] = {}
    for one in reversed(prompts):  # in the order in which they came, each would evict the next
        report = engine.ask(one, 16)
        assert report.tokens == tiny.uncached(one, 16)
        for tier, tokens in reused(report).items():
            by_tier[tier] = by_tier.get(tier, 0) + tokens
        assert sum(reused(report).values()) == 784
    assert by_tier["NVME"] > 0
    assert by_tier["HOST"] > 0
    engine.close()


def test_what_the_device_holds_is_completed_by_the_disk(place: Callable[..., Place], tiny: TinyModel) -> None:
    at = place()
    asked = prompt(600, 3)
    at.keep(asked)
    at.restart()
    engine = at.engine()
    assert reused(engine.ask(asked[:200], 8)) == {"NVME": 192}
    report = engine.ask(asked)
    assert reused(report) == {"GPU": 192, "NVME": 400}
    assert report.tokens == tiny.uncached(asked)
    engine.close()


def test_requests_at_once_that_share_a_prefix_on_the_disk(
    place: Callable[..., Place], tiny: TinyModel
) -> None:
    at = place()
    head = prompt(320, 4)
    prompts = [prompt(420 + number, 40 + number, head) for number in range(4)]
    at.keep(*prompts, blocks=20 + 4 * 6)
    at.restart()
    engine = at.engine(blocks=200)
    reports = engine.engine.generate([engine.request(one, 24) for one in prompts])
    for one, report in zip(prompts, reports, strict=True):
        assert report.tokens == tiny.uncached(one, 24)
        assert sum(reused(report).values()) == (len(one) - 1) // 16 * 16
    engine.close()


# ---- a disk that is rotten, slow or gone -------------------------------------------------------------------


@pytest.mark.parametrize("block", [0, 20])
def test_one_flipped_bit_is_computed_again(place: Callable[..., Place], tiny: TinyModel, block: int) -> None:
    at = place()
    asked = prompt(600, 5)
    at.keep(asked)
    piece = at.slot_bytes(asked, block)
    at.daemon.end()
    flip(at.directory, piece)
    at.restart()
    engine = at.engine()
    report = engine.ask(asked)
    assert reused(report).get("NVME", 0) == block * 16
    assert report.tokens == tiny.uncached(asked)
    assert at.daemon.group()["nvme"]["corrupt"] == 1
    # A load that ends early for this is no load with an error: what was computed is saved again.
    engine.settle()
    engine.close()
    other = at.engine()
    whole = other.ask(asked)
    assert sum(reused(whole).values()) == 592
    assert whole.tokens == report.tokens
    other.close()


def test_a_disk_that_stalls_costs_a_moment_and_no_token(place: Callable[..., Place], tiny: TinyModel) -> None:
    at = place(nvme__stall_s="0.3")
    slow, fresh = prompt(600, 6), prompt(100, 7)
    at.keep(slow)
    at.restart(STALLED)
    engine = at.engine()
    began = time.monotonic()
    first, second = ended(engine, [engine.request(slow, 16), engine.request(fresh, 4)])
    assert time.monotonic() - began < SOON_S
    assert first.tokens == tiny.uncached(fresh, 4), "the other did not wait for it"
    assert second.tokens == tiny.uncached(slow, 16)
    assert second.fresh_tokens == 600
    engine.close()


def test_an_engine_has_a_patience_of_its_own(place: Callable[..., Place], tiny: TinyModel) -> None:
    at = place(nvme__stall_s="60.0")
    asked = prompt(600, 8)
    at.keep(asked)
    at.restart(STALLED)
    engine = at.engine(limits=replace(PATIENT, fetch_s=0.3))
    began = time.monotonic()
    report = engine.ask(asked, 16)
    assert time.monotonic() - began < SOON_S
    assert (report.tokens, report.fresh_tokens) == (tiny.uncached(asked, 16), 600)
    engine.close()


def test_a_request_that_is_aborted_while_its_blocks_are_read(
    place: Callable[..., Place], tiny: TinyModel
) -> None:
    at = place(nvme__stall_s="60.0")
    asked, other = prompt(600, 9), prompt(100, 10)
    at.keep(asked)
    at.restart(STALLED)
    engine = at.engine()
    request = engine.request(asked, 16)
    assert engine.engine.add(request)
    engine.engine.step()
    assert at.daemon.group()["leases"] == 1
    assert engine.engine.abort(request.id) is not None

    def released() -> bool:
        engine.engine.step()
        return not at.daemon.group()["leases"]

    eventually(released, "its lease has ended, its blocks are free", SOON_S)
    assert engine.ask(other, 16).tokens == tiny.uncached(other, 16)
    engine.close()


def test_a_daemon_that_is_killed_while_it_reads(place: Callable[..., Place], tiny: TinyModel) -> None:
    at = place(nvme__stall_s="60.0")
    asked = prompt(600, 11)
    at.keep(asked)
    at.restart(STALLED)
    engine = at.engine()
    request = engine.request(asked, 16)
    assert engine.engine.add(request)
    engine.engine.step()
    at.daemon.end(signal.SIGKILL)
    (report,) = ended(engine, [])
    assert report.tokens == tiny.uncached(asked, 16)
    engine.close()
    at.restart()


def test_a_disk_that_reads_nothing_is_no_error_of_a_request(
    place: Callable[..., Place], tiny: TinyModel
) -> None:
    """Every read fails: misses, and the request computes."""
    at = place()
    asked = prompt(600, 12)
    at.keep(asked)
    at.restart("read_eio=1")
    engine = at.engine()
    report = engine.ask(asked, 16)
    assert (report.tokens, reused(report)) == (tiny.uncached(asked, 16), {})
    engine.settle()
    again = engine.ask(asked, 16)
    assert sum(reused(again).values()) == 592, "it is on the device, and was saved to HOST"
    engine.close()
