"""Fingerprints of weights, and namespaces: apart when they must be, equal when they can be."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kvstore.connectors.vllm import identity, weights
from kvstore.connectors.vllm.layout import Group, Unsupported, block_layout
from kvstore.connectors.vllm.weights import fingerprint, weight_files
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs

from kvstore.types import Namespace


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sums are remembered here, also those of files that were written just now."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(weights, "_SETTLED_NS", -(10**12))
    return tmp_path / "cache" / "kvstore" / "fingerprints.json"


def file_of(path: Path, content: bytes = b"weights") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def no_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(file: Path) -> tuple[str, str]:
        raise AssertionError(f"{file} was read")

    monkeypatch.setattr(weights, "_hash", refuse)


# ---- fingerprints -----------------------------------------------------------------------------------------


def test_content_counts_and_names_do_not(tmp_path: Path) -> None:
    one = [file_of(tmp_path / "a" / f"{n}.safetensors", b"%d" % n) for n in range(3)]
    same = [file_of(tmp_path / "b" / f"w{n}.safetensors", b"%d" % n) for n in range(3)]
    other = [file_of(tmp_path / "c" / f"{n}.safetensors", b"%d" % (n + 1)) for n in range(3)]
    assert fingerprint(one) == fingerprint(same) == fingerprint(one[::-1])
    assert len({fingerprint(files) for files in (one, one[:2], one[1:], other)}) == 4
    assert len(fingerprint(one)) == 64


def test_a_second_look_reads_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = file_of(tmp_path / "w.safetensors")
    first = fingerprint([file])
    no_reading(monkeypatch)
    assert fingerprint([file]) == first
    (tmp_path / "link").symlink_to(file)
    assert fingerprint([tmp_path / "link"]) == first


def test_a_change_that_hides_in_size_and_mtime_is_seen(tmp_path: Path) -> None:
    file = file_of(tmp_path / "w.safetensors", b"before")
    times, first = file.stat(), fingerprint([file])
    file.write_bytes(b"beyond")  # the same inode
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (times.st_size, times.st_mtime_ns)
    second = fingerprint([file])
    file_of(tmp_path / "new", b"behind").replace(file)  # another inode
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert len({first, second, fingerprint([file])}) == 3


def test_a_file_that_just_changed_is_not_remembered(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may change again within one tick of the file system's clock."""
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    fingerprint([file_of(tmp_path / "w.safetensors")])
    assert not cache.exists()


def test_a_file_that_changes_while_it_is_read_is_not_remembered(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, real = file_of(tmp_path / "w.safetensors"), hashlib.file_digest

    def digest_then_change(source: Any, name: str) -> Any:
        found = real(source, name)
        file.write_bytes(b"other")
        return found

    monkeypatch.setattr(hashlib, "file_digest", digest_then_change)
    fingerprint([file])
    assert not cache.exists()


_RANK = """
import pathlib, sys, time
from kvstore.connectors.vllm import weights
weights._SETTLED_NS, real = -10**12, weights._hash
def slow(file):
    with open(sys.argv[1], "a") as log:
        log.write("read\\n")
    time.sleep(0.5)
    return real(file)
weights._hash = slow
print(weights.fingerprint([pathlib.Path(sys.argv[2])]))
"""


def test_two_ranks_read_once(tmp_path: Path) -> None:
    file = file_of(tmp_path / "w.safetensors")
    command = [sys.executable, "-c", _RANK, str(tmp_path / "log"), str(file)]
    ranks = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    answers = [rank.communicate(timeout=60)[0].strip() for rank in ranks]
    assert answers == [fingerprint([file])] * 2
    assert (tmp_path / "log").read_text() == "read\n"


def test_a_blob_of_the_hub_is_called_by_its_sum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = fingerprint([file_of(tmp_path / "w.safetensors", b"weights")])
    # Its content is another, to show that it is not looked at.
    blob = file_of(tmp_path / "blobs" / hashlib.sha256(b"weights").hexdigest(), b"never read")
    link = tmp_path / "snapshots" / "model.safetensors"
    link.parent.mkdir()
    link.symlink_to(blob)
    no_reading(monkeypatch)
    assert fingerprint([link]) == own


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b'{"sha256": 3}', b'{"sha256": {"a": 1}}', b"\xff"])
def test_a_broken_memory_is_no_error(tmp_path: Path, cache: Path, content: bytes) -> None:
    file = file_of(tmp_path / "w.safetensors")
    first = fingerprint([file])
    file_of(cache, content)
    assert fingerprint([file]) == first
    assert len(json.loads(cache.read_text())["sha256"]) == 1


def test_no_memory_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = file_of(tmp_path / "w.safetensors")
    first = fingerprint([file])
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))  # not a folder
    assert fingerprint([file]) == first


def test_the_oldest_sums_are_forgotten(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "_SUMS_MAX", 2)
    for number in range(4):
        fingerprint([file_of(tmp_path / f"{number}.bin")])
    kept = json.loads(cache.read_text())["sha256"]
    assert [Path(stamp.split(" ", 4)[4]).stem for stamp in kept] == ["2", "3"]


# ---- which files ------------------------------------------------------------------------------------------


def names(found: list[Path]) -> list[str]:
    return [file.name for file in found]


def test_files_are_those_that_vllm_loads(tmp_path: Path) -> None:
    for name in ("a.safetensors", "b.safetensors", "x.bin", "training_args.bin", "y.pt"):
        file_of(tmp_path / name)
    assert names(weight_files(str(tmp_path), None)) == ["a.safetensors", "b.safetensors"]
    index = {"weight_map": {"layer": "b.safetensors"}}
    file_of(tmp_path / "model.safetensors.index.json", json.dumps(index).encode())
    assert names(weight_files(str(tmp_path), None)) == ["b.safetensors"]
    assert names(weight_files(str(tmp_path), None, "npcache")) == ["x.bin"]
    assert names(weight_files(str(tmp_path), None, "pt")) == ["y.pt"]
    file_of(tmp_path / "consolidated.safetensors")
    assert names(weight_files(str(tmp_path), None)) == ["consolidated.safetensors"]
    assert names(weight_files(str(file_of(tmp_path / "q.gguf")), None)) == ["q.gguf"]


@pytest.mark.parametrize(
    ("present", "load_format", "why"),
    [
        ((), "auto", "has no weights"),
        (("training_args.bin",), "auto", "has no weights"),
        (("x.bin",), "safetensors", "has no weights"),
        (("x.safetensors",), "tensorizer", "load_format 'tensorizer'"),
        (("x.safetensors", "model.safetensors.index.json"), "auto", "cannot be read"),
    ],
)
def test_without_files_the_message_says_what_to_set(
    tmp_path: Path, present: tuple[str, ...], load_format: str, why: str
) -> None:
    for name in present:
        file_of(tmp_path / name)
    with pytest.raises(Unsupported, match=rf"{why}.*kv_connector_extra_config\.weights"):
        weight_files(str(tmp_path), None, load_format)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    file_of(tmp_path / "a.safetensors")
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    file_of(tmp_path / "model.safetensors.index.json", json.dumps(index).encode())
    with pytest.raises(Unsupported, match=r"lacks 'b\.safetensors'"):
        weight_files(str(tmp_path), None)


def test_a_repository_is_found_by_revision(tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "models--org--name"
    for number, (name, revision) in enumerate((("main", "1" * 40), ("old", "2" * 40))):
        file_of(repository / "refs" / name, revision.encode())
        file_of(repository / "snapshots" / revision / "w.safetensors", b"%d" % number)
    cache_dir = str(tmp_path / "hub")
    found = [
        weight_files("org/name", revision, "auto", cache_dir) for revision in (None, "main", "old", "2" * 40)
    ]
    assert [files[0].read_bytes() for files in found] == [b"0", b"0", b"1", b"1"]
    with pytest.raises(Unsupported, match="neither a folder nor a downloaded repository"):
        weight_files("org/name", "3" * 40, "auto", cache_dir)
    with pytest.raises(Unsupported, match="neither a folder nor a downloaded repository"):
        weight_files("org/never", None, "auto", cache_dir)


# ---- namespaces -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def config_of() -> Callable[..., Any]:
    """vLLM's configuration for a folder; arguments as of `EngineArgs`."""

    def make(model: Path, **options: Any) -> Any:
        options = {"dtype": "float32", "enforce_eager": True, **options}
        made = EngineArgs(model=str(model), **options).create_engine_config()
        made.kv_transfer_config = KVTransferConfig(kv_connector="KVStoreConnector", kv_role="kv_both")
        return made

    return make


@pytest.fixture(scope="module")
def config(config_of: Callable[..., Any], tiny: Path) -> Any:
    return config_of(tiny)


def spec_of(config: Any) -> Any:
    model = config.model_config
    return SimpleNamespace(block_size=128, head_size=model.get_head_size(), dtype=model.dtype)


def namespace_of(config: Any) -> Namespace:
    spec = spec_of(config)
    layers, heads = (
        config.model_config.get_total_num_hidden_layers(),
        config.model_config.get_total_num_kv_heads(),
    )
    kernel, attention = identity.kernel_of(config, spec), identity.attention_text(config)
    layout = block_layout([Group(0, layers, 0, 0)], spec, heads, kernel, attention)
    return identity.namespace(config, layout, identity.weights_of(config))


def test_equal_weights_in_two_folders_share(
    config: Any, config_of: Callable[..., Any], tiny: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(tiny, tmp_path / "copy")
    other = config_of(copy, served_model_name="other", max_model_len=256, max_num_seqs=3, seed=7)
    assert namespace_of(other) == namespace_of(config)
    assert str(tiny) not in str(namespace_of(config))


def test_what_changes_bytes_keeps_apart(
    config: Any, config_of: Callable[..., Any], tiny: Path, other_tiny: Path, tmp_path: Path
) -> None:
    tokenizer = shutil.copytree(tiny, tmp_path / "tokenizer")
    (tokenizer / "tokenizer_config.json").write_text("{}")
    others = [
        config_of(other_tiny),
        config_of(tiny, dtype="bfloat16"),
        config_of(tiny, hf_overrides={"rms_norm_eps": 1e-3}),
        config_of(tiny, hf_overrides={"rope_parameters": {"rope_type": "default", "rope_theta": 1234.0}}),
        config_of(tokenizer),
    ]
    found = [namespace_of(each) for each in [config, *others]]
    assert len({each.digest for each in found}) == len(found)


def test_the_text_is_short_and_says_the_main_things(config: Any) -> None:
    text = identity.attention_text(config)
    assert len(text) <= 512
    assert text.startswith("arch=")
    assert "dtype=float32; quantization=none; kv=auto; config=" in text


def test_what_a_model_writes_into_its_configuration_does_not_count(
    config_of: Callable[..., Any], tiny: Path
) -> None:
    """It does so in the workers alone; the scheduler must come to the same text."""
    config = config_of(tiny)
    before = identity.attention_text(config)
    config.model_config.hf_config.attn_temperature_tuning = True
    assert identity.attention_text(config) == before


def test_the_kernel_is_named(config: Any) -> None:
    assert identity.kernel_of(config, spec_of(config)).startswith("vllm-0.32.0")
    assert ":cpu_attn:" in identity.kernel_of(config, spec_of(config))


def test_scheduler_and_ranks_agree_on_an_id(config: Any, config_of: Callable[..., Any], tiny: Path) -> None:
    import pickle

    copy = pickle.loads(pickle.dumps(config))  # noqa: S301 - as it goes to the workers
    assert identity.engine_id(copy) == identity.engine_id(config)
    assert len(identity.engine_id(config)) == 16
    assert identity.engine_id(config_of(tiny)) != identity.engine_id(config)


# ---- what cannot be kept right ----------------------------------------------------------------------------


class Changed:
    """An object with some attributes replaced."""

    def __init__(self, base: Any, **changes: Any) -> None:
        self.__dict__ |= {**changes, "_base": base}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_base"], name)


CASES: list[tuple[str, dict[str, Any], str]] = [
    ("parallel_config", {"decode_context_parallel_size": 2}, "decode_context_parallel_size"),
    ("parallel_config", {"prefill_context_parallel_size": 2}, "prefill_context_parallel_size"),
    ("speculative_config", {"method": "eagle"}, "speculative_config.method='eagle'"),
    ("speculative_config", {"method": "mtp"}, "method='mtp'"),
    ("speculative_config", {"method": "draft_model"}, "method='draft_model'"),
    ("speculative_config", {"method": "extract_hidden_states"}, "extract_hidden_states"),
    ("cache_config", {"calculate_kv_scales": True}, "calculate_kv_scales"),
    ("ec_transfer_config", {"ec_role": "ec_consumer"}, "ec_transfer_config"),
    ("model_config", {"runner_type": "pooling"}, "runner='pooling'"),
    ("model_config", {"is_encoder_decoder": True}, "encoder-decoder"),
    ("model_config", {"is_diffusion": True}, "diffusion"),
    ("model_config", {"is_prefix_caching_supported": False}, "does not reuse prefixes"),
    ("model_config", {"model_weights": "s3://x"}, r"s3://x.*kv_connector_extra_config\.weights"),
    ("model_config", {"architectures": ["UltravoxModel"]}, r"Ultravox.*kv_connector_extra_config\.weights"),
    ("load_config", {"load_format": "dummy"}, r"dummy.*kv_connector_extra_config\.weights"),
]


@pytest.mark.parametrize(("part", "change", "why"), CASES)
def test_what_cannot_be_kept_right_is_refused(
    config: Any, part: str, change: dict[str, Any], why: str
) -> None:
    with pytest.raises(Unsupported, match=why):
        identity.check_supported(Changed(config, **{part: Changed(getattr(config, part), **change)}))


def test_what_can_be_kept_is_not_refused(config: Any) -> None:
    identity.check_supported(config)
    identity.check_supported(Changed(config, speculative_config=SimpleNamespace(method="ngram")))
    identity.check_supported(Changed(config, load_config=SimpleNamespace(load_format="dummy")), "mine-v1")
