"""The engine alone: what every other test of this suite takes for granted."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest
from engines import Engine, EngineProcess
from models import prompt_of

from bench.vllm_models import make_random, words_of


def test_equal_seeds_make_equal_models(tiny: Path, other_tiny: Path, tmp_path: Path) -> None:
    again = make_random(tmp_path / "again")
    names = sorted(entry.name for entry in tiny.iterdir())
    assert names == ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    assert [_sum(again / name) for name in names] == [_sum(tiny / name) for name in names]
    assert _sum(other_tiny / "model.safetensors") != _sum(tiny / "model.safetensors")


def _sum(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def test_the_words_are_the_tokens(tiny: Path) -> None:
    from transformers import AutoTokenizer

    tokens = prompt_of(100)
    assert AutoTokenizer.from_pretrained(str(tiny)).encode(words_of(tokens)) == tokens


def test_an_own_hit_gives_the_tokens_of_a_recompute(tiny: Path, new_engine: Callable[..., Engine]) -> None:
    engine = new_engine(tiny)
    for length in (127, 128, 129, 700):
        prompt = prompt_of(length, seed=length)
        cold = engine.generate(prompt, 64)
        hit = engine.generate(prompt, 64)
        assert (cold.own, cold.external) == (0, 0)
        assert (hit.own, hit.external) == ((length - 1) // 128 * 128, 0)
        assert hit.tokens == cold.tokens
        assert len(set(cold.tokens)) > 16, "an answer that repeats itself proves nothing"
        assert engine.forget()
        assert engine.generate(prompt, 64).tokens == cold.tokens
    engine.drain()
    assert engine.free_blocks == engine.pool.num_gpu_blocks - 1


def test_one_wrong_block_changes_the_answer(tiny: Path, new_engine: Callable[..., Engine]) -> None:
    """The negative control: without it, equal tokens would prove nothing."""
    engine = new_engine(tiny)
    prompt = prompt_of(700)
    right = engine.generate(prompt, 64).tokens
    assert engine.generate(prompt, 64).tokens == right
    runner = engine.llm.model_executor.driver_worker.worker.model_runner
    for layer in runner.kv_caches:
        layer[2] *= -1
    assert engine.generate(prompt, 64).tokens != right


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_engine_of_its_own_says_the_same(
    tiny: Path, new_process: Callable[..., EngineProcess], ranks: int
) -> None:
    engine = new_process(tiny, ranks=ranks, blocks=64)
    prompts = [prompt_of(300, seed) for seed in range(4)]
    cold = engine.generate_all(prompts, 16)
    hits = engine.generate_all(prompts, 16)
    assert [answer.own for answer in hits] == [256] * 4
    assert [answer.tokens for answer in hits] == [answer.tokens for answer in cold]
    engine.drain()
    assert engine.free_blocks == 63
    assert engine.forget()
    engine.begin([prompts[0]], 64)
    engine.kill()  # what it leaves behind fails the suite
    assert not engine.alive
