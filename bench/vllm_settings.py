"""What a vLLM engine of tests and benchmarks is, and what it answers. Needs no vLLM."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Answer", "Settings", "connector_config", "environment"]


def environment(ranks: int = 1, multiprocess: bool = False) -> dict[str, str]:
    """What must be in the environment before vLLM is imported.

    Args:
        ranks: tensor-parallel processes; each gets its share of the cores.
        multiprocess: scheduler and workers as processes of their own, as `vllm serve` has them.
    """
    cores = os.cpu_count() or 1
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(multiprocess)),
        # Never bound to cores: several engines and a daemon share the few that there are.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(max(1, cores // ranks)),
        # Threads that spin while they wait starve the daemon and the copy threads.
        "OMP_WAIT_POLICY": "PASSIVE",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
        # Even an eager engine compiles a few kernels of its sampler, for seconds, in every process.
        "TORCH_COMPILE_DISABLE": "1",
    }


def connector_config(socket: str | os.PathLike[str], policy: str = "recompute") -> dict[str, Any]:
    """The `--kv-transfer-config` of our connector, for a daemon at `socket`."""
    return {
        "kv_connector": "KVStoreConnector",
        "kv_connector_module_path": "kvstore.connectors.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": {"socket": str(socket)},
    }


@dataclass(frozen=True, slots=True)
class Settings:
    """One engine.

    Attributes:
        model: its directory.
        connector: the KV transfer config; None = without.
        block_tokens: of a block, a multiple of 32.
        blocks: device blocks, one of which vLLM keeps for itself; 0 = as `kv_bytes` gives.
        kv_bytes: device memory for KV, per rank.
        ranks: tensor-parallel processes; more than one are children of this process.
        batched_tokens: most tokens of a step: longer prompts are cut into chunks.
        model_len: longest sequence; 0 = what the model says, or what `blocks` can hold if that is less.
        seqs_max: most sequences of a step.
        prefix_caching: vLLM's own.
        multiprocess: only for processes of their own: see `environment`.
        extra: more arguments of EngineArgs.
    """

    model: str
    connector: Mapping[str, Any] | None = None
    block_tokens: int = 128
    blocks: int = 0
    kv_bytes: int = 512 << 20
    ranks: int = 1
    dtype: str = "float32"
    batched_tokens: int = 2048
    model_len: int = 0
    seqs_max: int = 16
    seed: int = 0
    prefix_caching: bool = True
    multiprocess: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of vLLM's EngineArgs, JSON-ready."""
        return {
            "model": self.model,
            "skip_tokenizer_init": True,
            "dtype": self.dtype,
            "seed": self.seed,
            "block_size": self.block_tokens,
            "kv_cache_memory_bytes": self.kv_bytes,
            "num_gpu_blocks_override": self.blocks or None,
            "max_model_len": self._model_len(),
            "max_num_batched_tokens": self.batched_tokens,
            "max_num_seqs": self.seqs_max,
            "tensor_parallel_size": self.ranks,
            "enable_prefix_caching": self.prefix_caching,
            "enforce_eager": True,
            "kv_transfer_config": dict(self.connector) if self.connector is not None else None,
            **self.extra,
        }

    def _model_len(self) -> int:
        longest = int(json.loads((Path(self.model) / "config.json").read_text())["max_position_embeddings"])
        held = (self.blocks - 1) * self.block_tokens if self.blocks else longest
        return min(self.model_len or longest, held)


@dataclass(slots=True)
class Answer:
    """What an engine says to one prompt.

    Attributes:
        request: vLLM's id of it, the one that connectors see; "" from another process.
        tokens: new ones.
        ttft_s: until the first of them, from the moment the engine was told.
        seconds: until the last.
        own: prompt tokens that vLLM had in its own prefix cache.
        external: prompt tokens that a connector brought.
        params: `kv_transfer_params` of the answer.
        reason: why it ended ("length", "stop", "error", "abort").
    """

    request: str = ""
    tokens: list[int] = field(default_factory=list)
    ttft_s: float = 0.0
    seconds: float = 0.0
    own: int = 0
    external: int = 0
    params: dict[str, Any] | None = None
    reason: str = ""
