"""Blocks of an adapter are that adapter's: its content decides, not its name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from daemon import Daemon
from engines import Engine
from models import prompt_of
from safetensors.torch import save_file

NewEngine = Callable[..., Engine]
RANK = 8


def make_adapter(folder: Path, model: Path, seed: int) -> Path:
    """Random weights for the projections of q and v, large enough to change what is said."""
    config = json.loads((model / "config.json").read_text())
    hidden, heads, kv_heads = (
        config[name] for name in ("hidden_size", "num_attention_heads", "num_key_value_heads")
    )
    head = config.get("head_dim") or hidden // heads
    source = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, rows in (("q_proj", heads * head), ("v_proj", kv_heads * head)):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(RANK, hidden, generator=source) / hidden**0.5
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(rows, RANK, generator=source) / RANK**0.5
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    facts = {"r": RANK, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], "peft_type": "LORA"}
    (folder / "adapter_config.json").write_text(
        json.dumps({**facts, "bias": "none", "task_type": "CAUSAL_LM"})
    )
    return folder


def test_adapters_do_not_share(tiny: Path, tmp_path: Path, daemon: Daemon, new_engine: NewEngine) -> None:
    from vllm.lora.request import LoRARequest

    adapters = [LoRARequest(f"a{i}", i, str(make_adapter(tmp_path / f"a{i}", tiny, i))) for i in (1, 2)]
    engine = new_engine(
        tiny, daemon.socket, extra={"enable_lora": True, "max_loras": 2, "max_lora_rank": RANK}
    )
    prompt = prompt_of(400)

    def ask(adapter: Any) -> Any:
        answer = engine.wait([engine.submit(prompt, 16, extra={"lora_request": adapter})])[0]
        engine.drain()
        assert engine.forget()
        return answer

    cold = [ask(adapter) for adapter in (None, *adapters)]
    assert [answer.external for answer in cold] == [0, 0, 0], "each has to be computed"
    assert len({tuple(answer.tokens) for answer in cold}) == 3
    host = [ask(adapter) for adapter in (None, *adapters)]
    assert [answer.external for answer in host] == [384] * 3
    assert [answer.tokens for answer in host] == [answer.tokens for answer in cold]
    engine.close()
    # Another engine that has the same adapter under the same name and path finds it, by content.
    engine = new_engine(
        tiny, daemon.socket, extra={"enable_lora": True, "max_loras": 2, "max_lora_rank": RANK}
    )
    again = ask(adapters[0])
    assert again.external == 384
    assert again.tokens == cold[1].tokens
