"""Cases 5–8 and 34 on a language model: a failed load, a preemption, an odd length change no token."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from kvstore.connectors.embedded.engine import EngineLimits
from real_daemon import eventually
from scene import Scene
from tiny_engines import GPU, HOST, TinyEngine, TinyModel, prompt, tiny, tiny_engine, written

from kvstore.types import Hit, Reuse

__all__ = ["tiny", "tiny_engine", "written"]
Make = Callable[..., TinyEngine]


def slots_of(engine: TinyEngine, asked: list[int]) -> list[int]:
    """Where the prompt's blocks lie on HOST."""
    chain = engine.client.chain(asked, "default", Reuse.OWN)
    found = engine.client.lookup(chain)
    assert isinstance(found, Hit)
    slots: list[int] = found.slots.tolist()
    engine.client.release(found.lease)
    return slots


def flip(engine: TinyEngine, slot: int) -> None:
    attachment = engine.client._core.attachment
    attachment.arena.view(slot, 64)[10] ^= 0xFF


@pytest.fixture
def saved(tiny_engine: Make) -> Callable[[list[int]], TinyEngine]:
    """A prompt is put on HOST by one engine; another one is returned, which has nothing on its device."""

    def make(asked: list[int]) -> TinyEngine:
        first = tiny_engine()
        first.ask(asked, 4)
        first.settle()
        first.close()
        return tiny_engine()

    return make


def test_case_05_preempted_blocks_stay_until_they_are_saved(tiny_engine: Make, tiny: TinyModel) -> None:
    """A pool so small that blocks are taken from running requests while their saves are under way."""
    engine = tiny_engine(blocks=14, engine_limits=EngineLimits(batch_max=3, batched_tokens_max=48))
    asked = [prompt(50 + 5 * number, 70 + number) for number in range(4)]
    reports = engine.engine.generate([engine.request(one, 40) for one in asked])
    assert sum(report.preemptions for report in reports) > 0
    assert [report.tokens for report in reports] == [tiny.uncached(one, 40) for one in asked]
    engine.settle()
    engine.close()
    fresh = tiny_engine()
    for one, report in zip(asked, reports, strict=True):
        longer = [*one, *report.tokens]
        again = fresh.ask(longer, 8)
        assert again.reused[HOST] > 0
        assert again.tokens == tiny.uncached(longer, 8)


@pytest.mark.parametrize("rotten", [0, 5, 11])
def test_case_06_a_load_that_fails_is_recomputed(
    saved: Callable[[list[int]], TinyEngine], tiny: TinyModel, rotten: int
) -> None:
    asked = prompt(200, 80 + rotten)
    engine = saved(asked)
    flip(engine, slots_of(engine, asked)[rotten])
    report = engine.ask(asked)
    assert report.reused.get(HOST, 0) == 16 * rotten
    assert report.fresh_tokens == 200 - 16 * rotten
    assert report.tokens == tiny.uncached(asked)
    # The hole is filled by what was computed, and everything is whole again.
    engine.settle()
    engine.close()


def test_case_06_a_load_that_fails_after_the_hit_was_reported(
    saved: Callable[[list[int]], TinyEngine], tiny: TinyModel
) -> None:
    """The table is begun, the hit is known, and then the bytes turn out to be bad."""
    asked = prompt(200, 90)
    engine = saved(asked)
    slots = slots_of(engine, asked)
    for slot in slots[3:]:
        flip(engine, slot)
    table = engine.tables.begin("hit", asked, "own")
    assert table is not None
    eventually(lambda: engine.tables.ready(table), "the load has an end")
    assert table.reused == 48
    engine.tables.finish(table)
    assert engine.ask(asked).tokens == tiny.uncached(asked)


@pytest.mark.parametrize("size", [32, 64, 160])
def test_case_07_a_hit_may_not_cover_the_whole_prompt(tiny_engine: Make, tiny: TinyModel, size: int) -> None:
    """Every block of the prompt is known, on the device and on HOST; its last token is computed anew."""
    asked = prompt(size, 100 + size)
    engine = tiny_engine()
    cold = engine.ask([*asked, 5], 16)  # longer by one: all the blocks of `asked` are full and saved
    engine.settle()
    device = engine.ask(asked, 16)
    engine.close()
    host = tiny_engine().ask(asked, 16)
    for report, tier in ((device, GPU), (host, HOST)):
        assert report.reused[tier] == size - 16
        assert report.fresh_tokens == 16
        assert report.tokens == tiny.uncached(asked, 16)
    assert cold.fresh_tokens == size + 1


@pytest.mark.parametrize("size", [1, 15, 16, 17, 31, 33, 100, 127])
def test_case_08_a_tail_shorter_than_a_block(tiny_engine: Make, tiny: TinyModel, size: int) -> None:
    asked = prompt(size, 300 + size)
    engine = tiny_engine()
    for _ in range(2):
        assert engine.ask(asked, 4).tokens == tiny.uncached(asked, 4)
    engine.settle()
    engine.close()
    report = tiny_engine().ask(asked, 4)
    assert report.reused.get(HOST, 0) == (size - 1) // 16 * 16
    assert report.tokens == tiny.uncached(asked, 4)


def test_case_34_tokens_hit_are_the_sum_over_tiers(tiny_engine: Make, tiny: TinyModel, scene: Scene) -> None:
    """Cold, from the device, from HOST and from both: each token is counted once, by engine and daemon."""

    def metrics() -> dict[str, dict[str, int]]:
        found: dict[str, dict[str, int]] = scene.daemon.group()["tokens"]
        return found["default"]

    def counters() -> dict[str, object]:
        found: dict[str, object] = scene.daemon.group()["counters"]
        return found

    before, metrics_before = counters(), metrics()
    head, asked = prompt(100, 500), prompt(300, 501, prompt(100, 500))
    first = tiny_engine()
    reports = [first.ask(asked, 4), first.ask(asked, 4)]
    first.settle()
    first.close()
    second = tiny_engine()
    reports.append(second.ask(head, 4))  # 96 tokens of it come from HOST and stay on the device
    reports.append(second.ask(asked, 4))  # so this one has both
    for report in reports:
        assert report.prompt_tokens == report.fresh_tokens + sum(report.reused.values())
        assert report.tokens == tiny.uncached(head if report.prompt_tokens == 100 else asked, 4)
    assert [report.reused.get(GPU, 0) for report in reports] == [0, 288, 0, 96]
    assert [report.reused.get(HOST, 0) for report in reports] == [0, 0, 96, 192]
    second.settle()
    second.close()
    after = counters()
    by_tier = {
        tier: after["hit_blocks_by_tier"][tier] - before["hit_blocks_by_tier"][tier]  # type: ignore[index]
        for tier in ("GPU", "HOST")
    }
    assert by_tier == {"GPU": (288 + 96) // 16, "HOST": (96 + 192) // 16}
    assert after["hit_blocks"] - before["hit_blocks"] == sum(by_tier.values())  # type: ignore[operator]
    # The metrics say the same in tokens, and what the engine says that it saved agrees with both.
    asked_tokens = [288, 288, 96, 288]
    tokens = metrics()
    assert tokens["lookup"] - metrics_before["lookup"] == sum(asked_tokens)
    hit = {tier: tokens["hit"][tier] - metrics_before["hit"][tier] for tier in (GPU, HOST)}
    assert hit == {tier: 16 * blocks for tier, blocks in by_tier.items()}
    assert tokens["saved"] - metrics_before["saved"] == sum(hit.values())
