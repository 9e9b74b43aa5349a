"""What was saved is loaded, by the same engine, by another process, after any restart: the same tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from daemon import Daemon, eventually
from engines import Engine, EngineProcess
from models import prompt_of

NewEngine = Callable[..., Engine]


def saved(daemon: Daemon, blocks: int) -> None:
    """Wait until so many blocks can be loaded."""
    eventually(lambda: daemon.ready() >= blocks, f"{blocks} blocks are saved, {daemon.ready()} are")


def test_a_hit_on_host_gives_the_tokens_of_a_recompute(
    tiny: Path, daemon: Daemon, new_engine: NewEngine
) -> None:
    engine = new_engine(tiny, daemon.socket)
    prompt = prompt_of(700)
    cold = engine.generate(prompt, 64)
    engine.drain()
    assert (cold.own, cold.external) == (0, 0)
    assert daemon.ready() == (700 + 63) // 128
    own = engine.generate(prompt, 64)
    assert (own.own, own.external) == (640, 0), "the device holds it: nothing is loaded"
    engine.drain()
    assert engine.forget()
    host = engine.generate(prompt, 64)
    assert (host.own, host.external) == (0, 640)
    assert host.tokens == own.tokens == cold.tokens
    engine.drain()
    assert engine.free_blocks == engine.pool.num_gpu_blocks - 1


def test_bytes_that_come_back_are_the_bytes_that_went(
    tiny: Path, daemon: Daemon, new_engine: NewEngine
) -> None:
    engine = new_engine(tiny, daemon.socket, blocks=64)
    prompt = prompt_of(512)

    def kv(request_blocks: list[int]) -> list[np.ndarray]:
        runner = engine.llm.model_executor.driver_worker.worker.model_runner
        return [
            layer[request_blocks].clone().view(dtype=layer.dtype).numpy().copy() for layer in runner.kv_caches
        ]

    def table_of(name: str) -> list[int]:
        request = engine.peek(name).request
        return list(engine.scheduler.kv_cache_manager.get_block_ids(request)[0])

    def run() -> list[np.ndarray]:
        name = engine.submit(prompt, 8)
        while not engine.peek(name).tokens:
            engine.step()
        got = kv(table_of(name)[:4])
        engine.wait([name])
        engine.drain()
        return got

    before = run()
    assert engine.forget()
    after = run()
    assert daemon.ready() == 4
    for ours, theirs in zip(after, before, strict=True):
        # The last token of a prompt that was loaded whole is computed once more.
        assert (ours[:3] == theirs[:3]).all()


@pytest.mark.parametrize("block_tokens", [32, 128])
def test_a_prefix_is_loaded_and_the_rest_computed(
    tiny: Path, daemon: Daemon, new_engine: NewEngine, block_tokens: int
) -> None:
    engine = new_engine(tiny, daemon.socket, block_tokens=block_tokens)
    shared = prompt_of(640, seed=1)
    prompts = [shared + prompt_of(n, seed=10 + n) for n in (1, 31, 77, 200)]
    cold = []
    for prompt in prompts:
        cold.append(engine.generate(prompt, 24).tokens)
        engine.drain()
        assert engine.forget()
    for prompt, tokens in zip(prompts, cold, strict=True):
        answer = engine.generate(prompt, 24)
        assert answer.external == len(prompt) // block_tokens * block_tokens
        assert answer.tokens == tokens
        engine.drain()
        assert engine.forget()


def test_every_length_modulo_the_block(tiny: Path, daemon: Daemon, new_engine: NewEngine) -> None:
    engine = new_engine(tiny, daemon.socket, block_tokens=32)
    for length in range(96, 96 + 33):
        prompt = prompt_of(length, seed=length)
        cold = engine.generate(prompt, 8)
        engine.drain()
        assert engine.forget()
        host = engine.generate(prompt, 8)
        assert host.external == length // 32 * 32, length
        assert host.tokens == cold.tokens, length
        engine.drain()
        assert engine.forget()
    assert engine.free_blocks == engine.pool.num_gpu_blocks - 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_another_process_goes_on_where_the_first_ended(
    tiny: Path, daemon: Daemon, new_process: Callable[..., EngineProcess], dtype: str
) -> None:
    """Equal to vLLM's own hit of the same prefix, in any dtype: the same kernels see the same bytes."""
    prompts = [prompt_of(300 + 37 * i, seed=i) for i in range(4)]
    blocks = sum(len(prompt) // 128 for prompt in prompts)
    first = new_process(tiny, daemon.socket, dtype=dtype)
    for prompt in prompts:
        first.generate(prompt, 1)
    own = [first.generate(prompt, 32) for prompt in prompts]
    first.drain()
    saved(daemon, blocks)
    first.close()
    second = new_process(tiny, daemon.socket, dtype=dtype)
    host = [second.generate(prompt, 32) for prompt in prompts]
    assert [a.external for a in host] == [a.own for a in own] == [len(p) // 128 * 128 for p in prompts]
    assert [answer.tokens for answer in host] == [answer.tokens for answer in own]
    second.drain()
    second.close()
    daemon.assert_quiet()


def test_the_last_block_of_a_prompt_is_loaded_too(tiny: Path, daemon: Daemon, new_engine: NewEngine) -> None:
    """vLLM's own hit leaves it out, because the last token must be computed; a load need not."""
    engine = new_engine(tiny, daemon.socket)
    prompt = prompt_of(512)
    cold = engine.generate(prompt, 32)
    engine.drain()
    assert engine.generate(prompt, 1).own == 384
    engine.drain()
    assert engine.forget()
    host = engine.generate(prompt, 32)
    assert host.external == 512
    assert host.tokens == cold.tokens


def test_what_the_engine_generated_is_kept_as_well(tiny: Path, daemon: Daemon, new_engine: NewEngine) -> None:
    """The next turn of a conversation brings the answer along as its prompt."""
    engine = new_engine(tiny, daemon.socket, block_tokens=32)
    prompt = prompt_of(70)
    first = engine.generate(prompt, 90)
    engine.drain()
    turn = prompt + first.tokens + prompt_of(20, seed=5)
    assert engine.forget()
    answer = engine.generate(turn, 8)
    assert answer.external == (70 + 89) // 32 * 32
    engine.drain()
    assert engine.forget()
    engine.connector.reset_cache()
    assert engine.generate(turn, 8).tokens == answer.tokens


def test_chunks_of_a_long_prompt(tiny: Path, daemon: Daemon, new_engine: NewEngine) -> None:
    engine = new_engine(tiny, daemon.socket, batched_tokens=200)
    prompt = prompt_of(1500)
    cold = engine.generate(prompt, 16)
    engine.drain()
    assert daemon.ready() == 11
    assert engine.forget()
    host = engine.generate(prompt, 16)
    assert host.external == 1408
    assert host.tokens == cold.tokens


def test_the_engines_own_hit_is_not_loaded_again(tiny: Path, daemon: Daemon, new_engine: NewEngine) -> None:
    engine = new_engine(tiny, daemon.socket)
    long = prompt_of(1100)
    cold = engine.generate(long, 16)
    engine.drain()
    assert engine.forget()
    engine.generate(long[:600], 4)  # the device holds 4 blocks again
    engine.drain()
    answer = engine.generate(long, 16)
    assert (answer.own, answer.external) == (512, 512)
    assert answer.tokens == cold.tokens
    hits = answer.params["kvstore"]["hit_tokens"] if answer.params else {}
    assert hits == {"GPU": 512, "HOST": 512}
