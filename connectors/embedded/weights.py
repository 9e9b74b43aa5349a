"""Weights under their HF names, from *.safetensors or from a *.gguf, checked against the spec.

GGUF stores what llama.cpp wants: other names, quantized blocks, and for the llama architecture q and k rows
permuted so that rotary pairs are neighbours. All three are undone here, so `model.py` knows one form only.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from .gguf_file import GGUFFile
from .spec import ModelSpec, UnsupportedModel, resolve_model

__all__ = ["ROPE_FACTORS", "expected_shapes", "fingerprint", "load_weights"]

ROPE_FACTORS = "rope_factors"
"""Optional [head_dim / 2] divisors of the rotary frequencies: how GGUF carries Llama 3's scaling."""

_READ_BYTES = 8 << 20
_HASH_THREADS_MAX = 4
_LAYER_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_q.bias": "self_attn.q_proj.bias",
    "attn_k.bias": "self_attn.k_proj.bias",
    "attn_v.bias": "self_attn.v_proj.bias",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "rope_freqs.weight": ROPE_FACTORS,
}


def expected_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a model of this spec must have."""
    query, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (spec.vocab, spec.hidden),
        "model.norm.weight": (spec.hidden,),
    }
    if not spec.tied_embeddings:
        shapes["lm_head.weight"] = (spec.vocab, spec.hidden)
    for layer in range(spec.layers):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = (spec.hidden,)
        shapes[prefix + "post_attention_layernorm.weight"] = (spec.hidden,)
        for name, rows in (("q_proj", query), ("k_proj", kv), ("v_proj", kv)):
            shapes[f"{prefix}self_attn.{name}.weight"] = (rows, spec.hidden)
            if spec.qkv_bias:
                shapes[f"{prefix}self_attn.{name}.bias"] = (rows,)
        shapes[prefix + "self_attn.o_proj.weight"] = (spec.hidden, query)
        shapes[prefix + "mlp.gate_proj.weight"] = (spec.intermediate, spec.hidden)
        shapes[prefix + "mlp.up_proj.weight"] = (spec.intermediate, spec.hidden)
        shapes[prefix + "mlp.down_proj.weight"] = (spec.hidden, spec.intermediate)
    return shapes


def load_weights(path: str | Path, spec: ModelSpec, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Load every tensor of `expected_shapes(spec)`, converted to `dtype` on the CPU.

    Args:
        path: a *.gguf, or a directory with *.safetensors (one file, or shards with an index).
        spec: what the tensors must look like.
        dtype: torch.float32 or torch.bfloat16.

    Raises:
        FileNotFoundError: there are no weights, or a shard named by the index is missing.
        UnsupportedModel: a tensor is missing or has another shape than the spec says.
    """
    if dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"dtype is {dtype}; torch.float32 or torch.bfloat16 is needed")
    path = resolve_model(path)
    tensors = _read_gguf(path, spec) if path.is_file() else _read_safetensors(path)
    shapes = expected_shapes(spec)
    weights = {n: t.to(dtype).contiguous() for n, t in tensors if n in shapes or n == ROPE_FACTORS}
    for name, shape in shapes.items():
        if name not in weights:
            raise UnsupportedModel(f"{path} has no tensor {name!r}, which {spec.architecture} needs")
        if tuple(weights[name].shape) != shape:
            raise UnsupportedModel(f"{name!r} has shape {tuple(weights[name].shape)}; the spec says {shape}")
    return weights


def fingerprint(path: str | Path) -> str:
    """BLAKE2b-256 (hex) over the weight files: every tensor's name, shape, dtype and bytes are inside them.

    Files are hashed side by side, then their digests in order of name; a file's own name does not count.
    Reads everything once, at about 1 GB/s per file. `config.json` is not part of it: what it says about
    positions and attention belongs to the namespace as fields of its own.

    Raises:
        FileNotFoundError: there are no weights at this path.
    """
    path = resolve_model(path)
    files = [path] if path.is_file() else _safetensor_files(path)
    with ThreadPoolExecutor(min(_HASH_THREADS_MAX, len(files))) as threads:
        digests = list(threads.map(_file_digest, files))
    return hashlib.blake2b(b"".join(digests), digest_size=32, person=b"kvstore-wt-v1").hexdigest()


def _file_digest(path: Path) -> bytes:
    digest = hashlib.blake2b(digest_size=32)
    buffer = bytearray(_READ_BYTES)
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(buffer):
            digest.update(memoryview(buffer)[:size])
    return digest.digest()


def _safetensor_files(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        files = [directory / name for name in names]
    else:
        files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{directory} has no *.safetensors")
    for file in files:
        if file.resolve().parent != directory.resolve() and not file.is_symlink():
            raise FileNotFoundError(f"{index.name} names {file.name!r} outside of {directory}")
        if not file.is_file():
            raise FileNotFoundError(f"{file} is missing; {index.name} names it")
    return files


def _read_safetensors(directory: Path) -> Iterator[tuple[str, Tensor]]:
    from safetensors import safe_open

    for file in _safetensor_files(directory):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                yield name, tensors.get_tensor(name)


def _read_gguf(path: Path, spec: ModelSpec) -> Iterator[tuple[str, Tensor]]:
    file = GGUFFile(path)
    for ours in file.tensors:
        name = _hf_name(ours)
        if name is None:
            raise UnsupportedModel(f"{spec.architecture}: tensor {ours!r} is not known to this engine")
        tensor = torch.from_numpy(file.dequantized(ours))
        if spec.architecture == "llama":
            if name.endswith("q_proj.weight"):
                tensor = _unpermute(tensor, spec.heads)
            elif name.endswith("k_proj.weight"):
                tensor = _unpermute(tensor, spec.kv_heads)
        yield name, tensor


def _hf_name(name: str) -> str | None:
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    prefix, _, rest = name.partition(".")
    layer, _, leaf = rest.partition(".")
    if prefix != "blk" or leaf not in _LAYER_NAMES:
        return None
    return f"model.layers.{layer}.{_LAYER_NAMES[leaf]}"


def _unpermute(tensor: Tensor, heads: int) -> Tensor:
    """Rows of each head from (pair, half) back to (half, pair)."""
    rows, columns = tensor.shape
    return tensor.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)
