"""Whose blocks these are: everything beside tokens that has to be equal before an engine may load a block.

Where a file lies and what a model is served as do not count; what is in the files does. What would have to be
known to keep an engine's blocks right, and is not, is `Unsupported`: that engine runs uncached.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvstore.types import BlockLayout, Namespace

from .layout import Unsupported
from .weights import fingerprint, local_folder, weight_files

__all__ = ["attention_text", "check_supported", "engine_id", "kernel_of", "namespace", "weights_of"]

# Of a model's configuration: says where it came from or which software wrote it, not what is computed.
_NO_ARITHMETIC = frozenset(
    {
        "_name_or_path",
        "name_or_path",
        "_commit_hash",
        "transformers_version",
        "_attn_implementation",
        "_attn_implementation_internal",
        "_attn_implementation_autoset",
        "_experts_implementation",
        "_experts_implementation_internal",
        "auto_map",
    }
)
# Speculation without KV of its own: it proposes tokens, and what is accepted is computed as ever.
_DRAFTS_WITHOUT_KV = ("ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator")
# Architectures that load a second set of weights, from another repository or a folder below.
_WEIGHTS_ELSEWHERE = frozenset(
    {
        "ClefOmniForJointSchema",
        "Cosmos3EdgeForConditionalGeneration",
        "Cosmos3ForConditionalGeneration",
        "MoonshotKimiaForCausalLM",
        "UltravoxModel",
    }
)
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tekken.json",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
)


def check_supported(vllm_config: Any, weights: str = "") -> None:
    """Refuse what cannot be kept right.

    Args:
        weights: `kv_connector_extra_config.weights`, "" = the files are hashed.

    Raises:
        Unsupported: the message names the option, and what to set instead where there is something.
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise Unsupported(f"{name} > 1: the tokens of a block lie on several ranks; set it to 1")
    speculative = getattr(vllm_config, "speculative_config", None)
    if speculative is not None and speculative.method not in _DRAFTS_WITHOUT_KV:
        raise Unsupported(
            f"speculative_config.method={speculative.method!r} keeps KV of its own, which depends on tokens "
            f"after the block; use one of {', '.join(_DRAFTS_WITHOUT_KV)}"
        )
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        raise Unsupported("calculate_kv_scales: each engine finds scales of its own; set it to false")
    if getattr(vllm_config, "weight_transfer_config", None) is not None:
        raise Unsupported("weight_transfer_config: the weights change while the engine runs; leave it out")
    if getattr(vllm_config, "ec_transfer_config", None) is not None:
        raise Unsupported("ec_transfer_config: others' encoder outputs come by an id of a caller's choice")
    _check_model(model)
    _check_weights(model, vllm_config.load_config.load_format, weights)


def _check_model(model: Any) -> None:
    if model.runner_type != "generate":
        raise Unsupported(f"runner={model.runner_type!r}: only models that generate, token after token")
    if model.is_encoder_decoder:
        raise Unsupported("an encoder-decoder model: KV of the decoder depends on the encoder's input")
    if getattr(model, "is_diffusion", False):
        raise Unsupported("a diffusion model: KV of a block depends on tokens after it")
    if not model.is_prefix_caching_supported:
        raise Unsupported(f"vLLM itself does not reuse prefixes of {model.architecture}")
    if model.trust_remote_code and model.using_transformers_backend():
        raise Unsupported("trust_remote_code with the Transformers backend: nothing says which code computes")


def _check_weights(model: Any, load_format: str, weights: str) -> None:
    advice = "set kv_connector_extra_config.weights to a name of these exact weights, equal in every engine"
    if weights:
        return
    if load_format == "dummy":
        raise Unsupported(f"load_format='dummy' reads no weights; {advice}")
    if getattr(model, "model_weights", ""):
        raise Unsupported(f"weights are streamed from {model.model_weights!r}; {advice}")
    elsewhere = _WEIGHTS_ELSEWHERE.intersection(model.architectures)
    if elsewhere:
        raise Unsupported(f"{min(elsewhere)} loads further weights from elsewhere; {advice}")


def weights_of(vllm_config: Any) -> str:
    """Fingerprint of the weights that this engine loads. Reads every byte, the first time.

    Raises:
        Unsupported: there are no files, or they cannot be read.
    """
    model, load = vllm_config.model_config, vllm_config.load_config
    try:
        return fingerprint(weight_files(model.model, model.revision, load.load_format, load.download_dir))
    except OSError as error:
        raise Unsupported(f"the weights cannot be read: {error}") from None


# ---- what is computed -------------------------------------------------------------------------------------


def attention_text(vllm_config: Any) -> str:
    """Everything beside weights and layout that changes a byte of KV: names for people, and a digest of all.

    Raises:
        Unsupported: the model's configuration cannot be read again.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    facts = {
        "config": _plain(_fresh_config(model).to_dict()),
        "overrides": _plain(model.hf_overrides) if isinstance(model.hf_overrides, Mapping) else "applied",
        "model": _chosen(model, "quantization_config", "disable_sliding_window", "model_class_overrides"),
        "transformers": bool(model.using_transformers_backend()),
        "length": _length_that_counts(model),
        "cache": _chosen(cache, "kv_cache_dtype_skip_layers", "kv_sharing_fast_prefill", "sliding_window"),
        "media": _chosen(
            getattr(model, "multimodal_config", None),
            "language_model_only",
            "video_pruning_rate",
            "video_pruning_method",
            "mm_encoder_attn_dtype",
            "mm_encoder_fp8_scale_path",
        ),
        # It is computed with every request's adapter, and with none.
        "adapters": _chosen(
            getattr(vllm_config, "lora_config", None),
            "lora_dtype",
            "target_modules",
            "enable_tower_connector_lora",
            "enable_mixed_moe_lora_format",
            "enable_moe_shared_loras",
        ),
    }
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    digest = hashlib.blake2b(text.encode(), digest_size=16, person=b"kvstore-va-v1").hexdigest()
    named = {
        "arch": str(model.architecture)[:128],
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantization": str(model.quantization or "none")[:64],
        "kv": _cache_dtype(vllm_config),
        "config": digest,
    }
    return "; ".join(f"{name}={value}" for name, value in named.items())


def _fresh_config(model: Any) -> Any:
    """The model's configuration as it was before a model was built from it.

    Some models write into theirs while they are built. That happens in the workers alone, and scheduler and
    ranks must come to the same text.
    """
    from vllm.transformers_utils.config import get_config

    overrides = model.hf_overrides
    flat = {} if callable(overrides) else {k: v for k, v in overrides.items() if not isinstance(v, dict)}
    try:
        return get_config(
            model.hf_config_path or model.model,
            model.trust_remote_code,
            getattr(model, "_hf_config_revision", None) or model.revision,
            model.code_revision,
            model.config_format,
            hf_overrides_kw=flat,
            hf_overrides_fn=overrides if callable(overrides) else None,
            token=model.hf_token,
        )
    except (OSError, ValueError) as error:
        raise Unsupported(f"the model's configuration cannot be read again: {error}") from None


def _length_that_counts(model: Any) -> int:
    """`max_model_len` where positions depend on it, else 0: engines with other limits share all the same.

    LongRoPE takes other factors, and Llama 4 another temperature, for a long `max_model_len`.
    """
    text = json.dumps(_plain(model.hf_text_config.to_dict()))
    depends = "longrope" in text or '"su"' in text or "Llama4" in str(model.architecture)
    return int(model.max_model_len) if depends else 0


def _chosen(options: Any, *names: str) -> dict[str, Any]:
    """Some options by name; {} where there are no such options at all."""
    return {} if options is None else {name: _plain(getattr(options, name, None)) for name in names}


def _plain(value: Any) -> Any:
    """A configuration as JSON: keys are text, sets sorted, and what differs between machines is left out."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items() if key not in _NO_ARITHMETIC}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(str(item) for item in value)
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def _cache_dtype(vllm_config: Any) -> str:
    """Quantization of the cache; "auto" is the dtype of the model, whose name goes with it."""
    name = str(vllm_config.cache_config.cache_dtype)
    return {"fp8": "fp8_e4m3"}.get(name, name)


def kernel_of(vllm_config: Any, spec: Any) -> str:
    """The attention kernel, and whatever decides how it packs a cell.

    Args:
        spec: vLLM's KV cache spec of any group.

    Raises:
        Unsupported: not vLLM's CPU kernel.
    """
    import vllm
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        raise Unsupported(f"platform {current_platform.device_name!r}: this version copies CPU memory only")
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    cache_dtype = vllm_config.cache_config.cache_dtype
    isa = _get_attn_isa(vllm_config.model_config.dtype, spec.block_size, spec.head_size, cache_dtype)
    return f"vllm-{vllm.__version__}:cpu_attn:{isa}"


# ---- names ------------------------------------------------------------------------------------------------


def namespace(vllm_config: Any, layout: BlockLayout, weights: str) -> Namespace:
    """Namespace of this engine's blocks.

    Args:
        layout: whose `attention` is `attention_text`.
        weights: fingerprint of the weights.
    """
    model = vllm_config.model_config
    dtype = _cache_dtype(vllm_config)
    return Namespace(
        # Not its path or the name that it is served by: equal weights are told by their fingerprint.
        model=str(model.architecture)[:128],
        weights=weights,
        tokenizer=_tokenizer_digest(model) or weights,
        adapter="none",  # a request's adapter is bound into its first block
        attention=layout.attention,
        kv_dtype=layout.dtype if dtype == "auto" else dtype,
        layout=layout.fingerprint,
        block_tokens=str(layout.block_tokens),
    )


def _tokenizer_digest(model: Any) -> str:
    """Digest of the tokenizer's files; "" if none are found."""
    folder = local_folder(str(model.tokenizer), model.tokenizer_revision)
    if folder is None:
        return ""
    state = hashlib.blake2b(digest_size=16)
    found: list[Path] = [folder / name for name in _TOKENIZER_FILES if (folder / name).is_file()]
    for file in found:
        data = file.read_bytes()
        state.update(f"{file.name} {len(data)}\n".encode() + data)
    return state.hexdigest() if found else ""


def engine_id(vllm_config: Any) -> bytes:
    """16 bytes that scheduler and ranks of one engine agree on: vLLM makes the id before they part."""
    text = str(vllm_config.kv_transfer_config.engine_id)
    return hashlib.blake2b(text.encode(), digest_size=16, person=b"kvstore-ve-v1").digest()
