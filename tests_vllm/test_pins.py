"""Blocks that wait for their copy: few, alive through preemption, given back whatever happens (LAWS E20)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from daemon import Daemon
from engines import Engine
from models import prompt_of

NewEngine = Callable[..., Engine]


def pins_of(engine: Engine) -> int:
    return int(engine.connector._scheduler._saves.pins)


def watched(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Pins after every step from now on."""
    seen: list[int] = []
    step = engine.step

    def stepping() -> list[str]:
        ended = step()
        seen.append(pins_of(engine))
        return ended

    monkeypatch.setattr(engine, "step", stepping)
    return seen


def test_preemption_with_a_tiny_pool(
    tiny: Path, daemon: Daemon, new_engine: NewEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More requests than the pool holds: they are preempted, resumed, and say the same as without us."""
    prompts = [prompt_of(150 + 10 * i, seed=i) for i in range(8)]
    with new_engine(tiny, None, block_tokens=32, blocks=40) as engine:
        alone = [answer.tokens for answer in engine.generate_all(prompts, 80)]
    engine = new_engine(tiny, daemon.socket, block_tokens=32, blocks=40)
    preempted = []
    preempt = engine.scheduler._preempt_request
    monkeypatch.setattr(
        engine.scheduler,
        "_preempt_request",
        lambda request, *rest, **named: (preempted.append(1), preempt(request, *rest, **named)),
    )
    seen = watched(engine, monkeypatch)
    for _ in range(2):
        assert [answer.tokens for answer in engine.generate_all(prompts, 80)] == alone
        engine.drain()
        assert engine.free_blocks == 39
        assert engine.forget()
    assert preempted, "the pool was not tiny enough"
    assert 0 < max(seen) <= 4
    # What was stored meanwhile is right: alone, one after the other, from HOST.
    hits = 0
    for prompt, tokens in zip(prompts, alone, strict=True):
        answer = engine.generate(prompt, 80)
        assert answer.tokens == tokens
        hits += answer.external
        engine.drain()
        assert engine.forget()
    assert hits > 0
    assert daemon.check()["ok"] is True


@pytest.mark.parametrize(("blocks", "most"), [(9, 1), (64, 6)])
def test_pins_never_exceed_their_share(
    tiny: Path, daemon: Daemon, new_engine: NewEngine, monkeypatch: pytest.MonkeyPatch, blocks: int, most: int
) -> None:
    engine = new_engine(tiny, daemon.socket, block_tokens=32, blocks=blocks)
    seen = watched(engine, monkeypatch)
    for seed in range(6):
        engine.generate(prompt_of(32 * 7 - 1, seed), 1)
    engine.drain()
    assert 0 < max(seen) <= most
    assert engine.free_blocks == blocks - 1


def test_the_engine_goes_on_when_no_save_is_ever_acknowledged(
    tiny: Path, daemon: Daemon, new_engine: NewEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = new_engine(tiny, daemon.socket, block_tokens=32, blocks=24)
    worker = engine.worker_connector._worker
    monkeypatch.setattr(worker, "report", lambda: None)
    for seed in range(6):
        assert len(engine.generate(prompt_of(300, seed), 100).tokens) == 100
    assert pins_of(engine) == 2
    assert engine.connector.has_pending_push_work()
    monkeypatch.undo()
    engine.drain()
    assert pins_of(engine) == 0
    assert engine.free_blocks == 23


def test_blocks_that_found_no_room_are_saved_while_their_request_runs(
    tiny: Path, daemon: Daemon, new_engine: NewEngine
) -> None:
    """Twelve blocks of one step, room for three pins: the rest follows with later steps."""
    engine = new_engine(tiny, daemon.socket, block_tokens=32, blocks=36)
    prompt = prompt_of(32 * 12 + 5)
    cold = engine.generate(prompt, 24)
    engine.drain()
    assert daemon.ready() == 12
    assert engine.forget()
    host = engine.generate(prompt, 24)
    assert host.external == 384
    assert host.tokens == cold.tokens


def test_what_is_dropped_is_counted(tiny: Path, daemon: Daemon, new_engine: NewEngine) -> None:
    engine = new_engine(tiny, daemon.socket, block_tokens=32, blocks=36)
    counts: dict[str, Any] = {}
    take = engine.connector.get_kv_connector_stats

    def taking() -> Any:
        stats = take()
        for name, amount in (stats.data if stats is not None else {}).items():
            counts[name] = counts.get(name, 0) + amount
        return stats

    engine.connector.get_kv_connector_stats = taking
    engine.generate(prompt_of(32 * 12 + 5), 1)  # it ends with the step that fills its blocks
    engine.drain()
    engine.step()
    assert counts["saved_blocks"] + counts["dropped_blocks"] == 12
    assert counts["saved_blocks"] == daemon.ready()
    assert counts["unpinned_blocks"] == counts["dropped_blocks"] > 0


def test_saves_of_many_requests_at_once(tiny: Path, daemon: Daemon, new_engine: NewEngine) -> None:
    engine = new_engine(tiny, daemon.socket, block_tokens=32, blocks=400)
    shared = prompt_of(128, seed=99)
    prompts = [shared + prompt_of(100 + 7 * i, seed=i) for i in range(16)]
    cold = engine.generate_all(prompts, 24)
    engine.drain()
    assert engine.forget()
    host = engine.generate_all(prompts, 24)
    assert [a.tokens for a in host] == [a.tokens for a in cold]
    assert [(a.own, a.external) for a in host if a.own + a.external < 128] == []
    for answer in host:
        assert answer.params is not None
        assert sum(answer.params["kvstore"]["hit_tokens"].values()) == answer.own + answer.external
    engine.drain()
    assert engine.free_blocks == 399
    assert daemon.check()["ok"] is True


def test_what_a_step_computes_is_copied_after_it(
    tiny: Path, daemon: Daemon, new_engine: NewEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another connector may make vLLM start loads before the forward: saves must not begin with them."""
    engine = new_engine(tiny, daemon.socket)
    connector, order = engine.worker_connector, []
    worker = connector._worker
    write, runner = worker.begin_saves, engine.llm.model_executor.driver_worker.worker.model_runner
    monkeypatch.setattr(worker, "begin_saves", lambda orders: (order.append("saves"), write(orders)))
    forward = runner._model_forward
    monkeypatch.setattr(
        runner,
        "_model_forward",
        lambda *given, **named: (order.append("forward"), forward(*given, **named))[1],
    )
    schedule = engine.scheduler.schedule

    def with_sync_loads(*given: object, **named: object) -> Any:
        output = schedule(*given, **named)
        output.has_sync_kv_loads = True
        return output

    monkeypatch.setattr(engine.scheduler, "schedule", with_sync_loads)
    engine.generate(prompt_of(300), 4)
    first = order.index("forward")  # a step before it may only have asked
    assert order[first : first + 4] == ["forward", "saves"] * 2
    engine.drain()
    assert daemon.ready() == 2
