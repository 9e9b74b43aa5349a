"""A language model over a real daemon: exactly what can be reused is reused, and no token changes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

from fake_engine import FakeEngine
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kvstore.connectors.embedded.demo import expected_reuse
from kvstore.connectors.embedded.demo_stage import GOLDEN_INPUTS, GOLDEN_OUTPUTS
from kvstore.connectors.embedded.engine import EngineLimits
from kvstore.connectors.embedded.processes import EngineProcess
from kvstore.connectors.embedded.request import Report
from real_daemon import RealDaemon
from scene import Scene
from tiny_engines import GPU, HOST, SPEC, TinyEngine, TinyModel, prompt, tiny, tiny_engine, written

__all__ = ["tiny", "tiny_engine", "written"]
Make = Callable[..., TinyEngine]
_seeds = itertools.count(1000)


def converse(
    engine: TinyEngine, inputs: Sequence[int], outputs: Sequence[int], reuse: str = "own"
) -> list[tuple[list[int], Report]]:
    """A conversation: each prompt is all that was said before, and new tokens. (prompt, report) per turn."""
    turns = []
    said: list[int] = []
    for size, new in zip(inputs, outputs, strict=True):
        asked = prompt(size, next(_seeds), said)
        report = engine.ask(asked, new, reuse)
        turns.append((asked, report))
        assert engine.client.check() == {"attached": True, "ok": True}
        said = [*asked, *report.tokens]
    return turns


def reused(turns: list[tuple[list[int], Report]]) -> list[int]:
    return [sum(report.reused.values()) for _, report in turns]


# ---- conversations -----------------------------------------------------------------------------------------


def test_the_golden_conversation(tiny_engine: Make, tiny: TinyModel) -> None:
    turns = converse(tiny_engine(), GOLDEN_INPUTS, GOLDEN_OUTPUTS)
    assert reused(turns) == [0, 496, 784, 1136, 1488]
    assert sum(reused(turns)) == 3904
    assert [report.fresh_tokens for _, report in turns] == [400, 204, 216, 264, 212]
    for (asked, report), new in zip(turns, GOLDEN_OUTPUTS, strict=True):
        assert report.tokens == tiny.uncached(asked, new)


def test_the_golden_conversation_in_blocks_of_32(tiny_engine: Make) -> None:
    turns = converse(tiny_engine(block_tokens=32, blocks=80), GOLDEN_INPUTS, GOLDEN_OUTPUTS)
    assert reused(turns) == expected_reuse(GOLDEN_INPUTS, GOLDEN_OUTPUTS, 32, cache=True)
    assert reused(turns) == [0, 480, 768, 1120, 1472]


def test_the_golden_conversation_without_reuse(tiny_engine: Make, scene: Scene) -> None:
    before = scene.daemon.group()["counters"]
    turns = converse(tiny_engine(), (400, 700, 1000), (20, 20, 1), reuse="none")
    assert reused(turns) == [0, 0, 0] == expected_reuse((1, 1, 1), (1, 1, 1), 16, cache=False)
    assert scene.daemon.group()["counters"] == before


@given(
    growth=st.lists(st.tuples(st.integers(1, 120), st.integers(1, 40)), min_size=2, max_size=4),
    block_tokens=st.sampled_from([16, 32]),
)
@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_conversation(
    shared_daemon: RealDaemon, tiny: TinyModel, growth: list[tuple[int, int]], block_tokens: int
) -> None:
    inputs, outputs, said = [], [], 0
    for new_input, new_output in growth:
        inputs.append(said + new_input)
        outputs.append(new_output)
        said += new_input + new_output
    engine = TinyEngine(tiny, shared_daemon.socket, block_tokens=block_tokens, blocks=80).attached()
    try:
        turns = converse(engine, inputs, outputs)
        assert reused(turns) == expected_reuse(inputs, outputs, block_tokens, cache=True)
        for (asked, report), new in zip(turns, outputs, strict=True):
            assert report.tokens == tiny.uncached(asked, new)
    finally:
        engine.close()
    shared_daemon.assert_quiet()


# ---- where it comes from -----------------------------------------------------------------------------------


def test_cold_l2_and_host_give_the_same_tokens(tiny_engine: Make, tiny: TinyModel) -> None:
    """The engine restarts between L2 and HOST: only the daemon remembers."""
    asked = prompt(300, 1)
    first = tiny_engine()
    cold, l2 = first.ask(asked), first.ask(asked)
    assert cold.reused.get(GPU, 0) == 0
    assert (l2.reused[GPU], l2.reused.get(HOST, 0), l2.fresh_tokens) == (288, 0, 12)
    first.settle()
    first.close()
    second = tiny_engine()
    host = second.ask(asked)
    assert (host.reused.get(GPU, 0), host.reused[HOST], host.fresh_tokens) == (0, 288, 12)
    assert cold.tokens == l2.tokens == host.tokens == tiny.uncached(asked)


def test_every_length_modulo_the_block(tiny_engine: Make, tiny: TinyModel) -> None:
    """A hit may cover the whole prompt: the last token is computed all the same."""
    engine = tiny_engine()
    for size in (*range(1, 4), *range(15, 34), *range(47, 50)):
        asked = prompt(size, 20_000 + size)
        cold, warm = engine.ask(asked, 4), engine.ask(asked, 4)
        assert sum(warm.reused.values()) == (size - 1) // 16 * 16
        assert cold.tokens == warm.tokens == tiny.uncached(asked, 4)


def test_idle_blocks_beyond_the_limit_leave_and_come_back_from_host(
    tiny_engine: Make, tiny: TinyModel
) -> None:
    engine = tiny_engine(idle_max=4)
    asked = prompt(200, 2)
    cold = engine.ask(asked)
    engine.settle()
    device = next(iter(engine.client.status()["groups"]["default"]["engines"].values()))["device"]
    assert device["idle"] <= 4
    warm = engine.ask(asked)
    assert warm.reused[HOST] >= 192 - 4 * 16
    assert sum(warm.reused.values()) == 192
    assert cold.tokens == warm.tokens == tiny.uncached(asked)


def test_without_idle_blocks_everything_comes_from_host(tiny_engine: Make, tiny: TinyModel) -> None:
    engine = tiny_engine(idle_max=0)
    asked = prompt(100, 3)
    for expected in (0, 96, 96):
        report = engine.ask(asked)
        assert report.reused.get(HOST, 0) == expected
        assert report.reused.get(GPU, 0) == 0
        assert report.tokens == tiny.uncached(asked)
        engine.settle()


def test_a_small_pool_evicts_and_reloads(tiny_engine: Make, tiny: TinyModel) -> None:
    """Three conversations in a pool that holds one: each comes back from HOST, in part or whole."""
    engine = tiny_engine(blocks=24)
    asked = [prompt(250, seed) for seed in (4, 5, 6)]
    for one in asked:
        assert engine.ask(one, 16).tokens == tiny.uncached(one, 16)
    engine.settle()
    for one in asked:
        report = engine.ask(one, 16)
        assert sum(report.reused.values()) == 240
        assert report.reused[HOST] > 0
        assert report.tokens == tiny.uncached(one, 16)
    assert engine.client.check()["ok"] is True


def test_preemption_changes_no_token(tiny_engine: Make, tiny: TinyModel) -> None:
    engine = tiny_engine(blocks=20, engine_limits=EngineLimits(batch_max=4, batched_tokens_max=64))
    asked = [prompt(60 + number, 30 + number) for number in range(4)]
    reports = engine.engine.generate([engine.request(one) for one in asked])
    assert any(report.preemptions for report in reports)
    for one, report in zip(asked, reports, strict=True):
        assert report.tokens == tiny.uncached(one)
        assert report.prompt_tokens == report.fresh_tokens + sum(report.reused.values())
    # What was saved on the way is right too: a fresh engine answers the same from HOST.
    engine.settle()
    engine.close()
    fresh = tiny_engine()
    for one in asked:
        report = fresh.ask(one)
        assert report.reused.get(HOST, 0) > 0
        assert report.tokens == tiny.uncached(one)


def test_requests_that_run_together_share_a_prefix(tiny_engine: Make, tiny: TinyModel) -> None:
    engine = tiny_engine()
    head = prompt(160, 7)
    engine.ask(head, 1)
    asked = [prompt(200 + number, 40 + number, head) for number in range(3)]
    reports = engine.engine.generate([engine.request(one, 24) for one in asked])
    for one, report in zip(asked, reports, strict=True):
        assert report.reused[GPU] == 160
        assert report.tokens == tiny.uncached(one, 24)


def test_two_processes_share_host(tiny_engine: Make, tiny: TinyModel, scene: Scene, tmp_path: Path) -> None:
    engine = tiny_engine()
    ours, theirs = prompt(150, 8), prompt(170, 9)
    cold = engine.ask(ours)
    engine.settle()
    config = {"model": str(tiny.path), "socket": str(scene.daemon.socket), "blocks": 80}
    other = EngineProcess(tmp_path, config)
    try:
        report = other.ask("generate", {"prompt": ours, "max_new_tokens": 64})
        assert report["reused"] == {"GPU": 0, "HOST": 144}
        assert tuple(report["tokens"]) == cold.tokens == tiny.uncached(ours)
        answer = other.ask("generate", {"prompt": theirs, "max_new_tokens": 64})
        assert other.ask("settle")["settled"] is True
        back = engine.ask(theirs)
        assert back.reused[HOST] == 160
        assert back.tokens == tuple(answer["tokens"]) == tiny.uncached(theirs)
    finally:
        other.end()


def test_a_read_only_engine_takes_and_gives_nothing(tiny_engine: Make, tiny: TinyModel, scene: Scene) -> None:
    giver = tiny_engine()
    asked, other = prompt(120, 10), prompt(120, 11)
    giver.ask(asked)
    giver.settle()
    reader = tiny_engine()
    reader.tables.read_only = True
    saved = scene.daemon.group()["counters"]["saved_blocks"]
    for expected in (112, 112):
        report = reader.ask(asked)
        assert report.reused[HOST] == expected
        assert report.tokens == tiny.uncached(asked)
    for _ in range(2):
        report = reader.ask(other)
        assert sum(report.reused.values()) == 0
        assert report.tokens == tiny.uncached(other)
    assert scene.daemon.group()["counters"]["saved_blocks"] == saved


def test_the_layout_of_the_model_is_not_that_of_others(tiny_engine: Make, scene: Scene) -> None:
    """A block of this model under another layout: another namespace, nothing in common."""
    engine = tiny_engine()
    engine.ask(prompt(100, 12), 4)
    engine.settle()
    stranger: FakeEngine = scene.engine()
    assert stranger.matched(stranger.chain(12, 6)) == 0
    assert SPEC.vocab == engine.model.spec.vocab
