"""A head is computed while its tail is loading from the disk: the same tokens, whatever the disk does."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from kvstore.connectors.embedded.request import Report
from kvstore.connectors.embedded.scheduler import EngineLimits
from nvme_kit import flip
from real_daemon import RealDaemon, eventually
from test_embedded_nvme import STALLED, Place, ended, place, reused
from tiny_engines import TinyEngine, TinyModel, prompt, tiny, written

from kvstore.types import Choice, Reuse, Tier

__all__ = ["place", "tiny", "written"]
Places = Callable[..., Place]
# A block of 32 KiB in 10 ms, a token in less than a ms: the two meet somewhere in the middle.
LIMIT = str(32_000 * 100)
SIZE = 600
KNOWN = 592
# One block at a time, and never more than a step ahead of what the disk has brought.
SMALL = EngineLimits(split_tokens_min=16)


def split(at: Place, **options: Any) -> TinyEngine:
    options.setdefault("engine_limits", SMALL)
    engine = at.engine(**options)
    engine.tables.force = Choice.SPLIT
    return engine


def cold(place: Places, *asked: list[int], blocks: int = 0, **settings: str) -> Place:
    """Prompts that only the disk holds, of a daemon whose disk is slow."""
    settings.setdefault("nvme__limit_bytes_per_s", LIMIT)
    at = place(nvme__stall_s="20.0", **settings)
    at.keep(*asked, blocks=blocks)
    at.restart()
    return at


def hits(daemon: RealDaemon) -> dict[str, int]:
    return {tier: n for tier, n in daemon.group()["counters"]["hit_blocks_by_tier"].items() if n}


def stepped(engine: TinyEngine, done: Callable[[], bool], what: str) -> list[Report]:
    """Step until something is the case."""
    reports: list[Report] = []

    def step() -> bool:
        reports.extend(output.report for output in engine.engine.step() if output.report is not None)
        return done()

    eventually(step, what)
    return reports


def tail(engine: TinyEngine) -> Any:
    """The load of the only table that is split; None: none is."""
    found = [handle.split for _, handle in engine.tables._live.values() if handle.split is not None]
    return found[0].load if found else None


def in_the_middle(engine: TinyEngine) -> bool:
    """Something was loaded, something computed, and they have not met."""
    load = tail(engine)
    return load is not None and engine.engine.steps > 0 and load.lowest < KNOWN // 16 and not load.done


# ---- what it is for ----------------------------------------------------------------------------------------


def test_a_split_answers_as_if_all_was_computed(place: Places, tiny: TinyModel) -> None:
    asked = prompt(SIZE, 1)
    at = cold(place, asked)
    engine = split(at)
    report = engine.ask(asked)
    assert report.tokens == tiny.uncached(asked)
    loaded = reused(report)["NVME"]
    assert reused(report) == {"NVME": loaded} and 16 <= loaded < KNOWN, "it met in the middle"
    assert report.fresh_tokens == SIZE - loaded
    assert report.recomputed_tokens == 0
    engine.settle()
    # All of it has keys on the device now, and nothing that was loaded was saved again.
    engine.tables.force = None
    again = engine.ask(asked)
    assert (reused(again), again.tokens) == ({"GPU": KNOWN}, report.tokens)
    engine.close()
    assert hits(at.daemon) == {"NVME": loaded // 16, "GPU": KNOWN // 16}
    # What was computed behind the prompt was new. What was computed of it HOST had not, but for blocks that
    # the disk had under way when computing came by. The tail it had.
    new, computed = (SIZE + 63 - KNOWN) // 16, (SIZE + 63) // 16 - loaded // 16
    assert new <= at.daemon.group()["counters"]["saved_blocks"] <= computed
    other = at.engine()
    assert reused(other.ask(asked)) == {"HOST": KNOWN}, "so the whole chain is on HOST"
    other.close()


def test_one_flipped_restored_cell_changes_the_answer(place: Places, tiny: TinyModel) -> None:
    """Negative control: what the tail brings is what the answer is computed from."""
    asked = prompt(SIZE, 2)
    at = cold(place, asked)
    engine = split(at)
    memory = engine.model.memory

    def spoil(blocks: list[int]) -> None:
        cell = memory.read_cell(blocks[-1], 0, 0)
        memory.write_cell(blocks[-1], 0, 0, bytes(byte ^ 0xFF for byte in cell))

    engine.tables.on_loaded = spoil
    engine.tables.read_only = True
    report = engine.ask(asked)
    assert reused(report)["NVME"] > 0
    assert report.tokens != tiny.uncached(asked)
    engine.close()


def test_prompts_of_every_length(place: Places, tiny: TinyModel) -> None:
    sizes = [33, 34, 47, 48, 49, *range(400, 417)]
    prompts = [prompt(size, 100 + size) for size in sizes]
    at = cold(place, *prompts)
    engine = split(at, engine_limits=EngineLimits(split_tokens_min=40))
    total: dict[str, int] = {}
    for one in prompts:
        report = engine.ask(one, 16)
        assert report.tokens == tiny.uncached(one, 16), len(one)
        assert sum(reused(report).values()) % 16 == 0
        for tier, tokens in reused(report).items():
            total[tier] = total.get(tier, 0) + tokens
    engine.close()
    assert total["NVME"] > 0
    assert hits(at.daemon) == {tier: tokens // 16 for tier, tokens in total.items()}


def test_the_head_may_be_on_the_device(place: Places, tiny: TinyModel) -> None:
    asked = prompt(SIZE, 3)
    at = cold(place, asked)
    engine = split(at)
    assert reused(engine.ask(asked[:200], 8)).get("GPU", 0) == 0
    report = engine.ask(asked)
    assert report.tokens == tiny.uncached(asked)
    assert reused(report)["GPU"] == 192 and reused(report)["NVME"] > 0
    engine.close()


def test_a_head_on_host_is_loaded_before_anything_is_computed(place: Places, tiny: TinyModel) -> None:
    asked = prompt(SIZE, 17)
    at = cold(place, asked)
    warm = at.engine()
    warm.ask(asked[:330], 4)
    warm.close()
    before = hits(at.daemon)
    engine = split(at)
    report = engine.ask(asked)
    assert report.tokens == tiny.uncached(asked)
    loaded = reused(report)["NVME"]
    assert reused(report) == {"HOST": 320, "NVME": loaded} and 16 <= loaded < KNOWN - 320
    engine.close()
    gained = {tier: n - before.get(tier, 0) for tier, n in hits(at.daemon).items()}
    assert gained == {"HOST": 20, "NVME": loaded // 16}


def test_a_tail_that_is_on_host_is_loaded_at_once(place: Places, tiny: TinyModel) -> None:
    asked = prompt(SIZE, 4)
    at = cold(place, asked)
    warm = at.engine()
    warm.tables.force = Choice.LOAD
    assert reused(warm.ask(asked, 4)) == {"NVME": KNOWN}
    warm.close()
    engine = split(at)
    report = engine.ask(asked)
    assert report.tokens == tiny.uncached(asked)
    assert set(reused(report)) == {"HOST"}
    engine.close()
    assert hits(at.daemon) == {"NVME": KNOWN // 16, "HOST": reused(report)["HOST"] // 16}


@pytest.mark.parametrize("choice", [Choice.RECOMPUTE, Choice.LOAD])
def test_a_choice_may_be_forced(place: Places, tiny: TinyModel, choice: Choice) -> None:
    asked = prompt(SIZE, 5)
    at = cold(place, asked)
    engine = at.engine()
    engine.tables.force = choice
    report = engine.ask(asked)
    assert report.tokens == tiny.uncached(asked)
    assert reused(report) == ({} if choice is Choice.RECOMPUTE else {"NVME": KNOWN})
    assert at.daemon.group()["nvme"]["read"] == (0 if choice is Choice.RECOMPUTE else KNOWN // 16)
    engine.close()


# ---- company -----------------------------------------------------------------------------------------------


def test_two_requests_for_the_same_blocks_at_once(place: Places, tiny: TinyModel) -> None:
    asked = prompt(SIZE, 6)
    at = cold(place, asked)
    engine = split(at)
    reports = engine.engine.generate([engine.request(asked), engine.request(asked)])
    for report in reports:
        assert report.tokens == tiny.uncached(asked)
        assert 0 < reused(report)["NVME"] < KNOWN
    assert at.daemon.group()["nvme"]["read"] <= KNOWN // 16, "the disk was asked once"
    engine.close()


def test_others_are_answered_meanwhile(place: Places, tiny: TinyModel) -> None:
    asked, fresh = prompt(SIZE, 7), prompt(40, 8)
    at = cold(place, asked, nvme__limit_bytes_per_s=str(32_000 * 20))
    engine = split(at)
    first, second = ended(engine, [engine.request(asked, 16), engine.request(fresh, 4)])
    assert (first.tokens, second.tokens) == (tiny.uncached(fresh, 4), tiny.uncached(asked, 16))
    engine.close()


def test_preemption_in_a_small_pool(place: Places, tiny: TinyModel) -> None:
    """The younger ones lose their blocks, some while their tails are loading, and begin again."""
    prompts = [prompt(200 + number, 20 + number) for number in range(3)]
    at = cold(place, *prompts)
    engine = split(at, blocks=42)
    reports = engine.engine.generate([engine.request(one, 64) for one in prompts])
    assert sum(report.preemptions for report in reports) > 0
    for one, report in zip(prompts, reports, strict=True):
        assert report.tokens == tiny.uncached(one, 64)
        assert report.prompt_tokens == report.fresh_tokens + sum(report.reused.values())
    engine.close()


# ---- ends --------------------------------------------------------------------------------------------------


def test_an_abort_in_the_middle_gives_the_blocks_back(place: Places, tiny: TinyModel) -> None:
    asked, other = prompt(SIZE, 9), prompt(SIZE, 10)
    at = cold(place, asked, nvme__limit_bytes_per_s=str(32_000 * 40))
    engine = split(at, blocks=44)  # the other one needs most of them
    request = engine.request(asked, 16)
    assert engine.engine.add(request)
    stepped(engine, lambda: in_the_middle(engine), "it is in the middle")
    report = engine.engine.abort(request.id)
    assert report is not None and report.tokens == ()
    stepped(engine, lambda: not at.daemon.group()["leases"], "its lease has ended")
    assert engine.ask(other, 32).tokens == tiny.uncached(other, 32)
    engine.close()


def test_a_bad_block_in_the_middle(place: Places, tiny: TinyModel) -> None:
    asked = prompt(SIZE, 11)
    at = place(nvme__stall_s="20.0", nvme__limit_bytes_per_s=LIMIT)
    at.keep(asked)
    piece = at.slot_bytes(asked, 30)
    at.daemon.end()
    flip(at.directory, piece)
    at.restart()
    engine = split(at)
    report = engine.ask(asked)
    assert report.tokens == tiny.uncached(asked)
    assert reused(report)["NVME"] <= (37 - 31) * 16, "what lies above it is used"
    assert at.daemon.group()["nvme"]["corrupt"] == 1
    engine.settle()
    engine.close()
    other = at.engine()
    whole = other.ask(asked)
    assert (sum(reused(whole).values()), whole.tokens) == (KNOWN, report.tokens), "and it is healed"
    other.close()


def test_a_slot_that_rots_on_its_way(place: Places, tiny: TinyModel) -> None:
    """The copy's check fails: that block is computed, the daemon drops it, and nothing behind it is saved."""
    asked = prompt(SIZE, 12)
    at = cold(place, asked)
    warm = at.engine()
    warm.tables.force = Choice.LOAD
    warm.ask(asked, 4)
    engine = split(at)
    hit = engine.client.lookup(engine.client.chain(np.array(asked, np.uint32), "default", Reuse.OWN))
    arena = engine.client._core.attachment.arena
    arena.view(int(hit.slots[30]), 4096)[1000:1064] ^= 0x10
    engine.client.release(hit.lease)
    warm.close()
    report = engine.ask(asked)
    assert report.tokens == tiny.uncached(asked)
    assert reused(report) == {"HOST": 6 * 16}
    assert engine.client.counters.bad_blocks["corrupt"] == 1
    engine.settle()
    # At most the bad one, which rests on nothing that was loaded.
    assert at.daemon.group()["counters"]["saved_blocks"] <= 1
    engine.close()


def test_a_disk_that_stalls_costs_nothing(place: Places, tiny: TinyModel) -> None:
    asked = prompt(SIZE, 13)
    at = cold(place, asked, nvme__limit_bytes_per_s="1")
    engine = split(at)
    report = engine.ask(asked)
    assert (report.tokens, report.fresh_tokens) == (tiny.uncached(asked), SIZE)
    assert hits(at.daemon) == {}
    engine.close()


def test_reads_that_do_not_come_back(place: Places, tiny: TinyModel) -> None:
    """The real disk stalls, in the middle of everything; what was reserved for it is freed in the end."""
    asked = prompt(SIZE, 14)
    at = place(nvme__stall_s="20.0")
    at.keep(asked)
    at.restart(STALLED)
    engine = split(at)
    report = engine.ask(asked)
    assert (report.tokens, report.fresh_tokens) == (tiny.uncached(asked), SIZE)
    engine.close()
    eventually(lambda: not at.daemon.group()["nvme"]["promotions"], "the reads have ended")


def test_a_daemon_that_is_killed_in_the_middle(place: Places, tiny: TinyModel) -> None:
    asked = prompt(SIZE, 15)
    at = cold(place, asked, nvme__limit_bytes_per_s=str(32_000 * 40))
    engine = split(at)
    request = engine.request(asked)
    assert engine.engine.add(request)
    stepped(engine, lambda: in_the_middle(engine), "it is in the middle")
    at.daemon.end(signal.SIGKILL)
    (report,) = stepped(engine, lambda: not engine.engine.unfinished, "it ends")
    assert report.tokens == tiny.uncached(asked)
    assert report.prompt_tokens == report.fresh_tokens + sum(report.reused.values())
    engine.close()
    at.restart()


# ---- everything at once ------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_any_mixture_gives_the_right_tokens(place: Places, tiny: TinyModel, seed: int) -> None:
    """Prompts that share beginnings, a disk of some speed, a pool that is too small, some aborts."""
    random = np.random.default_rng(seed)
    heads = [prompt(int(random.integers(100, 250)), 200 + seed), []]
    prompts = [
        prompt(int(random.integers(260, 420)), 300 + 10 * seed + number, heads[number % 2])
        for number in range(5)
    ]
    at = cold(place, *prompts, blocks=60, nvme__limit_bytes_per_s=str(32_000 * int(random.integers(20, 300))))
    limits = EngineLimits(split_tokens_min=int(random.integers(1, 64)))
    engine = split(at, engine_limits=limits, blocks=75)
    wanted = [engine.request(prompts[int(random.integers(5))], 24) for _ in range(9)]
    waiting, reports = list(wanted), dict[str, Report]()

    def step() -> bool:
        while waiting and random.random() < 0.3:
            assert engine.engine.add(waiting.pop(0))
        if engine.engine.unfinished and random.random() < 0.02:
            engine.engine.abort(next(iter(engine.engine._live)))
        for output in engine.engine.step():
            if output.report is not None:
                reports[output.request_id] = output.report
        return not waiting and not engine.engine.unfinished

    eventually(step, "every request ends")
    assert reports
    for request in wanted:
        if request.id in reports:
            report = reports[request.id]
            assert report.tokens == tiny.uncached(request.prompt, 24)
            assert report.prompt_tokens == report.fresh_tokens + sum(report.reused.values())
    assert sum(report.reused.get(Tier.NVME, 0) for report in reports.values()) > 0
    engine.settle()
    engine.close()
    at.daemon.assert_sound()
