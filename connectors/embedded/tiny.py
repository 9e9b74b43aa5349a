"""A seeded random model of a few million weights whose output betrays one wrong KV block at once.

With the usual small random weights attention is nearly uniform and output barely depends on any one block.
Here q and k are wide (σ = 1.8/√fan_in): attention is peaked; the head is wide (σ = 2/√fan_in): logits are far
apart. A changed cell changes the next token instead of the sixth digit of a logit.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from torch import Tensor

from .spec import ModelSpec
from .weights import expected_shapes

__all__ = ["TINY", "save_tiny", "tiny_weights"]

TINY = ModelSpec(
    architecture="llama",
    vocab=512,
    hidden=256,
    layers=4,
    heads=4,
    kv_heads=2,
    head_dim=64,
    intermediate=512,
    rope_theta=10_000.0,
    norm_eps=1e-5,
    positions_max=4_096,
    eos_ids=(2,),
    bos_id=1,
)

_GAINS = {"q_proj": 1.8, "k_proj": 1.8, "lm_head": 2.0}
_HF_NAMES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM"}


def tiny_weights(spec: ModelSpec = TINY, seed: int = 0) -> dict[str, Tensor]:
    """Random float32 weights for `spec`; equal seeds give equal weights."""
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, Tensor] = {}
    for name, shape in expected_shapes(spec).items():
        if "norm" in name:
            weights[name] = torch.ones(shape)
            continue
        if "embed_tokens" in name:
            deviation = 1.0
        elif name.endswith("bias"):
            deviation = 0.5
        else:
            gain = next((gain for part, gain in _GAINS.items() if part in name), 1.0)
            deviation = gain / math.sqrt(shape[-1])
        weights[name] = torch.randn(shape, generator=generator) * deviation
    return weights


def save_tiny(directory: str | Path, spec: ModelSpec = TINY, seed: int = 0) -> Path:
    """Write config.json and model.safetensors as HF would; `read_spec` and `load_weights` read them back."""
    from safetensors.torch import save_file

    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": [_HF_NAMES[spec.architecture]],
        "model_type": spec.architecture,
        "vocab_size": spec.vocab,
        "hidden_size": spec.hidden,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "intermediate_size": spec.intermediate,
        "rope_theta": spec.rope_theta,
        "rms_norm_eps": spec.norm_eps,
        "max_position_embeddings": spec.positions_max,
        "tie_word_embeddings": spec.tied_embeddings,
        "hidden_act": "silu",
        "sliding_window": None,
        "eos_token_id": list(spec.eos_ids),
        "bos_token_id": spec.bos_id,
    }
    if spec.rope_scaling is not None:
        config["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": spec.rope_scaling.factor,
            "low_freq_factor": spec.rope_scaling.low_freq_factor,
            "high_freq_factor": spec.rope_scaling.high_freq_factor,
            "original_max_position_embeddings": spec.rope_scaling.original_positions,
        }
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    save_file(tiny_weights(spec, seed), directory / "model.safetensors")
    return directory
