"""Loads that fail: the engine computes what is missing, says the same, and never asks for ever (LAWS E22)."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from daemon import Daemon
from engines import Engine
from models import prompt_of

NewEngine = Callable[..., Engine]
LENGTH = 700
BLOCKS = LENGTH // 128


@pytest.fixture
def stored(tiny: Path, daemon: Daemon, new_engine: NewEngine) -> tuple[Engine, list[int], list[int]]:
    """An engine whose device is empty, a prompt that the daemon holds, and its tokens."""
    engine = new_engine(tiny, daemon.socket)
    prompt = prompt_of(LENGTH)
    tokens = engine.generate(prompt, 32).tokens
    engine.drain()
    assert daemon.ready() == BLOCKS
    assert engine.forget()
    return engine, prompt, tokens


def client_of(engine: Engine) -> Any:
    return engine.worker_connector._clients[0]


def arena_of(engine: Engine) -> Any:
    return client_of(engine)._core.attachment.arena


def slots_of_next_load(engine: Engine, monkeypatch: pytest.MonkeyPatch, meddle: Callable[..., Any]) -> None:
    """Let `meddle(slots, keys, blocks)` change what the next loads are told."""
    load = client_of(engine).load_slots
    monkeypatch.setattr(client_of(engine), "load_slots", lambda *told: load(*meddle(*told)))


def wrong_keys(*positions: int) -> Callable[..., Any]:
    """Slots that hold something else than they should: the copy itself sees it."""

    def meddle(slots: np.ndarray, keys: np.ndarray, blocks: np.ndarray) -> Any:
        keys = keys.copy()
        keys[list(positions), 0] ^= 1
        return slots, keys, blocks

    return meddle


@pytest.mark.parametrize("first_bad", [0, 1, 3, BLOCKS - 1])
def test_what_comes_before_the_first_bad_block_is_used(
    stored: tuple[Engine, list[int], list[int]], monkeypatch: pytest.MonkeyPatch, first_bad: int
) -> None:
    engine, prompt, tokens = stored
    slots_of_next_load(engine, monkeypatch, wrong_keys(first_bad))
    began = time.monotonic()
    answer = engine.generate(prompt, 32, timeout_s=60)
    assert answer.tokens == tokens
    assert answer.params is not None
    kept = answer.params["kvstore"]["hit_tokens"].get("HOST", 0)
    assert kept == first_bad * 128, "only what was really loaded is called a hit"
    assert time.monotonic() - began < 30
    engine.drain()
    assert engine.free_blocks == engine.pool.num_gpu_blocks - 1


def test_a_first_block_that_is_always_bad_costs_one_try_a_request(
    stored: tuple[Engine, list[int], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, prompt, tokens = stored
    asked = []

    def meddle(slots: np.ndarray, keys: np.ndarray, blocks: np.ndarray) -> Any:
        asked.append(len(slots))
        return wrong_keys(0)(slots, keys, blocks)

    slots_of_next_load(engine, monkeypatch, meddle)
    for _ in range(3):
        before = len(asked)
        assert engine.generate(prompt, 32, timeout_s=60).tokens == tokens
        assert len(asked) <= before + 1
        engine.drain()
        assert engine.forget()


def test_a_load_that_fails_at_once(
    stored: tuple[Engine, list[int], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within the step that asked for it, before anything was copied: as a synchronous load would."""
    engine, prompt, tokens = stored
    monkeypatch.setattr(engine.worker_connector._worker, "_clients", ())
    answer = engine.generate(prompt, 32, timeout_s=60)
    assert answer.tokens == tokens
    assert answer.params is not None
    assert answer.params["kvstore"]["hit_tokens"] == {}
    assert "attached" in answer.params["kvstore"]["reason"]


def test_a_load_that_is_cancelled_in_the_middle(
    stored: tuple[Engine, list[int], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, prompt, tokens = stored
    client = client_of(engine)
    load = client.load_slots

    def cancelled(*told: Any) -> Any:
        handle = load(*told)
        handle.cancel()
        return handle

    monkeypatch.setattr(client, "load_slots", cancelled)
    for _ in range(5):
        assert engine.generate(prompt, 32, timeout_s=60).tokens == tokens
        engine.drain()
        assert engine.forget()


def test_rotten_bytes_are_found_reported_and_saved_again(
    stored: tuple[Engine, list[int], list[int]], daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One bit flips in the arena."""
    engine, prompt, tokens = stored
    told: list[np.ndarray] = []

    def rot(slots: np.ndarray, keys: np.ndarray, blocks: np.ndarray) -> Any:
        if not told:
            told.append(slots)
            arena_of(engine).view(int(slots[2]), 4096)[100] ^= 4
        return slots, keys, blocks

    slots_of_next_load(engine, monkeypatch, rot)
    assert engine.generate(prompt, 32).tokens == tokens
    engine.drain()
    assert engine.forget()
    # The rotten block is gone, and what follows it cannot be reached; the next request saves it again.
    answer = engine.generate(prompt, 32)
    assert answer.external == 256
    assert answer.tokens == tokens
    engine.drain()
    assert engine.forget()
    answer = engine.generate(prompt, 32)
    assert answer.external == BLOCKS * 128
    assert answer.tokens == tokens
    assert daemon.check()["ok"] is True


def test_an_abort_in_the_middle_of_a_load(
    stored: tuple[Engine, list[int], list[int]], daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, prompt, tokens = stored
    worker = engine.worker_connector._worker
    finished = worker.finished
    monkeypatch.setattr(worker, "finished", lambda gone: set())  # the copies go on, nobody hears of it
    name = engine.submit(prompt, 32)
    for _ in range(5):
        engine.step()
    assert engine.free_blocks == engine.pool.num_gpu_blocks - 1 - BLOCKS
    engine.abort(name)
    for _ in range(5):
        engine.step()
    assert engine.free_blocks == engine.pool.num_gpu_blocks - 1 - BLOCKS, "a copy may still write to them"
    monkeypatch.setattr(worker, "finished", finished)
    engine.drain()
    assert engine.free_blocks == engine.pool.num_gpu_blocks - 1
    assert engine.generate(prompt, 32).tokens == tokens
    engine.drain()
    engine.close()
    monkeypatch.undo()
    daemon.assert_quiet()


def test_a_rank_that_is_refused_answers_all_the_same(
    tiny: Path, daemon: Daemon, new_engine: NewEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler is another process: it offers what others stored, and must hear that nothing came."""
    from kvstore.connectors.vllm import start
    from kvstore.connectors.vllm.layout import Unsupported

    prompt = prompt_of(LENGTH)
    with new_engine(tiny, daemon.socket) as engine:
        tokens = engine.generate(prompt, 16).tokens
        engine.drain()
    assert daemon.ready() == BLOCKS

    def refuse(*_: Any) -> Any:
        raise Unsupported("a head's cell is not contiguous")

    monkeypatch.setattr(start, "banks_of", refuse)
    engine = new_engine(tiny, daemon.socket)
    for length in (LENGTH, 300):
        answer = engine.generate(prompt[:length], 16, timeout_s=60)
        assert answer.params is not None
        assert answer.params["kvstore"]["hit_tokens"] == {}
        engine.drain()
        assert engine.forget()
    assert engine.generate(prompt, 16).tokens == tokens
    engine.drain()
    assert engine.free_blocks == engine.pool.num_gpu_blocks - 1


def test_a_load_that_cannot_begin(
    stored: tuple[Engine, list[int], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, prompt, tokens = stored

    def broken(*_: Any) -> Any:
        raise RuntimeError("out of everything")

    monkeypatch.setattr(client_of(engine), "load_slots", broken)
    answer = engine.generate(prompt, 32, timeout_s=60)
    assert answer.tokens == tokens
    assert answer.params is not None
    assert "out of everything" in answer.params["kvstore"]["reason"]
