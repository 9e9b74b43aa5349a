"""A model whose layers look back differently far has several KV groups: all of a block is kept, or none."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from daemon import Daemon, eventually
from engines import Engine, EngineProcess
from models import prompt_of

NewEngine = Callable[..., Engine]
WINDOW = 256


@pytest.fixture(scope="session")
def windowed(tiny: Path, models: Path) -> Path:
    """The tiny model, but two of its four layers see only the last 256 tokens."""
    folder = models / "windowed"
    shutil.copytree(tiny, folder)
    config = json.loads((folder / "config.json").read_text())
    config["layer_types"] = ["full_attention", "sliding_attention"] * 2
    config["sliding_window"] = WINDOW
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def groups_of(engine: Engine) -> list[str]:
    return [type(group.kv_cache_spec).__name__ for group in engine.scheduler.kv_cache_config.kv_cache_groups]


@pytest.mark.parametrize("length", [200, 700, 1500])
def test_both_groups_come_back(windowed: Path, daemon: Daemon, new_engine: NewEngine, length: int) -> None:
    engine = new_engine(windowed, daemon.socket, block_tokens=32, blocks=1200, model_len=4096)
    assert sorted(groups_of(engine)) == ["FullAttentionSpec", "SlidingWindowSpec"]
    prompt = prompt_of(length)
    cold = engine.generate(prompt, 40)
    engine.drain()
    full = (length + 39) // 32
    assert daemon.ready() == full
    own = engine.generate(prompt, 40)
    engine.drain()
    assert own.tokens == cold.tokens
    assert engine.forget()
    host = engine.generate(prompt, 40)
    assert host.external == length // 32 * 32
    assert host.tokens == cold.tokens
    engine.drain()
    assert engine.free_blocks == engine.pool.num_gpu_blocks - 1


def test_a_failed_load_fails_as_a_whole(
    windowed: Path, daemon: Daemon, new_engine: NewEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = new_engine(windowed, daemon.socket, block_tokens=32, blocks=1200, model_len=4096)
    prompt = prompt_of(700)
    cold = engine.generate(prompt, 40)
    engine.drain()
    assert engine.forget()
    for client in engine.worker_connector._clients:
        load = client.load_slots

        def meddle(slots: np.ndarray, keys: np.ndarray, blocks: np.ndarray, load: Any = load) -> Any:
            keys = keys.copy()
            keys[-1, 0] ^= 1
            return load(slots, keys, blocks)

        monkeypatch.setattr(client, "load_slots", meddle)
    answer = engine.generate(prompt, 40, timeout_s=60)
    assert answer.tokens == cold.tokens
    assert answer.params is not None
    assert answer.params["kvstore"]["hit_tokens"] == {}, "nothing of it was used"
    engine.drain()
    assert engine.free_blocks == engine.pool.num_gpu_blocks - 1


def test_ranks_and_groups(windowed: Path, daemon: Daemon, new_process: Callable[..., EngineProcess]) -> None:
    prompt = prompt_of(700)
    with new_process(windowed, daemon.socket, ranks=2, block_tokens=32, blocks=1200, model_len=4096) as pair:
        cold = pair.generate(prompt, 32)
        pair.drain()
        eventually(lambda: daemon.ready() == 22, "two banks of two ranks have written")
    with new_process(windowed, daemon.socket, block_tokens=32, blocks=1200, model_len=4096) as single:
        host = single.generate(prompt, 32)
        assert host.external == 672
        assert host.tokens == cold.tokens
    daemon.assert_quiet()
