"""What a model is: the numbers that decide its arithmetic, read from an HF config.json or from GGUF metadata.

Accepted are plain Llama, Mistral without a sliding window, and Qwen2 (bias on q, k and v). Everything else is
refused by name: an architecture that is computed almost right would produce KV that is wrong but plausible.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .gguf_file import ArrayLength, GGUFFile, Value

__all__ = ["ModelSpec", "RopeScaling", "UnsupportedModel", "read_spec", "resolve_model"]

_HF_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
}
_GGUF_ARCHITECTURES = ("llama", "qwen2")
_COUNTS = ("vocab", "hidden", "layers", "heads", "kv_heads", "head_dim", "intermediate", "positions_max")


class UnsupportedModel(ValueError):
    """The model is not one that this engine computes exactly. The message names what is in the way."""


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama 3's stretching of the low rotary frequencies."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Shape and arithmetic of one model.

    Raises:
        UnsupportedModel: a count is not positive, heads do not divide, or head_dim is odd.
    """

    architecture: str
    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    rope_theta: float
    norm_eps: float
    positions_max: int
    tied_embeddings: bool = False
    qkv_bias: bool = False
    rope_scaling: RopeScaling | None = None
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None

    def __post_init__(self) -> None:
        for field in _COUNTS:
            if getattr(self, field) < 1:
                raise UnsupportedModel(f"{field} is {getattr(self, field)}; it must be at least 1")
        if self.heads % self.kv_heads:
            raise UnsupportedModel(f"heads ({self.heads}) is not a multiple of kv_heads ({self.kv_heads})")
        if self.head_dim % 2:
            raise UnsupportedModel(f"head_dim ({self.head_dim}) is odd; rotary positions need pairs")

    @property
    def query_group(self) -> int:
        """Query heads that share one KV head."""
        return self.heads // self.kv_heads


def resolve_model(path: str | Path) -> Path:
    """The *.gguf file or the directory with config.json that `path` means.

    A directory with exactly one *.gguf and no config.json means that file.

    Raises:
        FileNotFoundError: there is no model, or more than one, at this path.
    """
    path = Path(path)
    if path.is_file():
        if path.suffix != ".gguf":
            raise FileNotFoundError(f"{path} is not a *.gguf file; pass one, or a directory with config.json")
        return path
    if not path.is_dir():
        raise FileNotFoundError(f"{path} does not exist; pass a *.gguf file or a directory with config.json")
    if (path / "config.json").is_file():
        return path
    found = sorted(path.glob("*.gguf"))
    if len(found) != 1:
        raise FileNotFoundError(f"{path} has no config.json and {len(found)} *.gguf files; one is needed")
    return found[0]


def read_spec(path: str | Path) -> ModelSpec:
    """Read the spec of the model at `path` (see `resolve_model`).

    Raises:
        FileNotFoundError: no model there.
        UnsupportedModel: the architecture or one of its options is not computed by this engine.
    """
    path = resolve_model(path)
    if path.is_file():
        return _from_gguf(path)
    config = json.loads((path / "config.json").read_text())
    generation = path / "generation_config.json"
    extra = json.loads(generation.read_text()).get("eos_token_id") if generation.is_file() else None
    return _from_hf(config, _ids(extra))


def _from_hf(config: Mapping[str, Any], extra_eos: tuple[int, ...]) -> ModelSpec:
    names = config.get("architectures") or [config.get("model_type", "unnamed")]
    architecture = _HF_ARCHITECTURES.get(names[0])
    if architecture is None:
        raise UnsupportedModel(f"architecture {names[0]} is not supported; this engine runs {_known()}")
    _refuse(config, architecture)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = rope.get("rope_theta", config.get("rope_theta", 10_000.0))
    heads = config["num_attention_heads"]
    return ModelSpec(
        architecture=architecture,
        vocab=config["vocab_size"],
        hidden=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        intermediate=config["intermediate_size"],
        rope_theta=float(theta),
        norm_eps=float(config["rms_norm_eps"]),
        positions_max=config["max_position_embeddings"],
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=architecture == "qwen2",
        rope_scaling=_rope_scaling(rope, architecture),
        eos_ids=tuple(dict.fromkeys(_ids(config.get("eos_token_id")) + extra_eos)),
        bos_id=config.get("bos_token_id"),
    )


def _refuse(config: Mapping[str, Any], architecture: str) -> None:
    """Options that change the arithmetic and that the model does not implement."""
    if config.get("hidden_act", "silu") != "silu":
        raise UnsupportedModel(f"{architecture}: hidden_act {config['hidden_act']!r} is not supported")
    if config.get("sliding_window") and (architecture == "mistral" or config.get("use_sliding_window")):
        raise UnsupportedModel(f"{architecture}: sliding_window {config['sliding_window']} is not supported")
    for option in ("attention_bias", "mlp_bias"):
        if config.get(option):
            raise UnsupportedModel(f"{architecture}: {option} is not supported")
    if config.get("quantization_config"):
        raise UnsupportedModel(f"{architecture}: quantization_config is not supported; use plain or GGUF")


def _rope_scaling(rope: Mapping[str, Any], architecture: str) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise UnsupportedModel(f"{architecture}: rope_type {kind!r} is not supported")
    return RopeScaling(
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_positions=int(rope["original_max_position_embeddings"]),
    )


def _from_gguf(path: Path) -> ModelSpec:
    file = GGUFFile(path)

    def read(key: str, default: Value | None = None) -> Any:
        value = file.values.get(key, default)
        if value is None:
            raise UnsupportedModel(f"{path} has no {key!r}")
        if isinstance(value, ArrayLength):
            raise UnsupportedModel(f"{path}: {key!r} is an array; layers that differ are not supported")
        return value

    architecture = str(read("general.architecture", "unnamed"))
    if architecture not in _GGUF_ARCHITECTURES:
        raise UnsupportedModel(f"architecture {architecture} is not supported; this engine runs {_known()}")
    if read(f"{architecture}.expert_count", 0):
        raise UnsupportedModel(f"{architecture}: expert_count (mixture of experts) is not supported")
    if "token_embd.weight" not in file.tensors:
        raise UnsupportedModel(f"{path} has no tensor 'token_embd.weight'")
    scaling = read(f"{architecture}.rope.scaling.type", "none")
    if scaling != "none":
        raise UnsupportedModel(f"{architecture}: rope.scaling.type {scaling!r} is not supported")
    hidden, heads = read(f"{architecture}.embedding_length"), read(f"{architecture}.attention.head_count")
    ends = [file.values.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    bos = file.values.get("tokenizer.ggml.bos_token_id")
    head_dim = read(f"{architecture}.attention.key_length", hidden // heads)
    if read(f"{architecture}.rope.dimension_count", head_dim) != head_dim:
        raise UnsupportedModel(f"{architecture}: rope.dimension_count smaller than the head is not supported")
    return ModelSpec(
        architecture=architecture,
        vocab=file.tensors["token_embd.weight"].shape[0],
        hidden=hidden,
        layers=read(f"{architecture}.block_count"),
        heads=heads,
        kv_heads=read(f"{architecture}.attention.head_count_kv", heads),
        head_dim=head_dim,
        intermediate=read(f"{architecture}.feed_forward_length"),
        rope_theta=float(read(f"{architecture}.rope.freq_base", 10_000.0)),
        norm_eps=float(read(f"{architecture}.attention.layer_norm_rms_epsilon")),
        positions_max=read(f"{architecture}.context_length"),
        tied_embeddings="output.weight" not in file.tensors,
        qkv_bias=architecture == "qwen2",
        eos_ids=tuple(dict.fromkeys(end for end in ends if isinstance(end, int))),
        bos_id=bos if isinstance(bos, int) else None,
    )


def _ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _known() -> str:
    return "llama, mistral (no sliding window) and qwen2"
