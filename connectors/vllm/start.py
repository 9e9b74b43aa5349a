"""From vLLM's configuration to clients: shape of the blocks, identity, attach."""

from __future__ import annotations

import contextlib
import logging
import os
import socket as sockets
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstore.client import Client, Limits, PoolSpec
from kvstore.types import BlockLayout

from . import identity
from .layout import Group, LayerCells, block_layout, groups_of, heads_of, part_of
from .options import Options

if TYPE_CHECKING:
    import torch

__all__ = [
    "Shape",
    "banks_of",
    "listens",
    "scheduler_clients",
    "shape_of",
    "share_interpreter",
    "unbind",
    "wait_attached",
    "weights_of",
    "worker_clients",
]

_log = logging.getLogger("vllm.kvstore")
_SLICE_S = 0.2
_SWITCH_S = 0.0002
_NULL_BLOCK = 0  # vLLM never stores a token in it: the layout proof may


@dataclass(frozen=True, slots=True)
class Shape:
    """What scheduler and ranks of an engine agree on before they attach.

    Attributes:
        groups: KV groups.
        layout: of a block.
        blocks: device blocks.
        options: the user's.
    """

    groups: tuple[Group, ...]
    layout: BlockLayout
    blocks: int
    options: Options


def shape_of(vllm_config: Any, kv_cache_config: Any, options: Options) -> Shape:
    """Raises Unsupported: this engine's KV cannot be kept."""
    identity.check_supported(vllm_config, options.weights)
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    stages = parallel.pipeline_parallel_size
    groups = groups_of(kv_cache_config, model.get_total_num_hidden_layers(), stages)
    spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
    layout = block_layout(
        groups,
        spec,
        model.get_total_num_kv_heads(),
        identity.kernel_of(vllm_config, spec),
        identity.attention_text(vllm_config),
    )
    return Shape(groups, layout, kv_cache_config.num_blocks, options)


def weights_of(vllm_config: Any, options: Options) -> str:
    """Fingerprint of the weights: given, remembered, or computed from every byte.

    Raises:
        Unsupported: there are no files to read.
    """
    if options.weights:
        return options.weights
    began = time.monotonic()
    found = identity.weights_of(vllm_config)
    _log.info("kvstore: weights %s… (%.1f s)", found[:16], time.monotonic() - began)
    return found


def banks_of(
    vllm_config: Any, kv_cache_config: Any, shape: Shape, tensors: Mapping[str, torch.Tensor]
) -> tuple[list[LayerCells], bool]:
    """This rank's KV memory by group, and whether the rank writes.

    Raises:
        Unsupported: the memory is not laid out as the configuration says.
    """
    from vllm.distributed import get_pp_group, get_tp_group

    tensor, stage = get_tp_group(), get_pp_group()
    first, count, writes = heads_of(shape.layout.kv_heads, tensor.rank_in_group, tensor.world_size)
    banks = []
    for group in shape.groups:
        names = [n for n in kv_cache_config.kv_cache_groups[group.index].layer_names if n in tensors]
        part = part_of(group, names, stage.rank_in_group, stage.world_size, (first, count))
        banks.append(LayerCells({name: tensors[name] for name in names}, shape.layout, part, shape.blocks))
    return banks, writes


def scheduler_clients(vllm_config: Any, shape: Shape, fingerprint: str) -> list[Client]:
    """The scheduler's one client: it declares vLLM's block pool."""
    options = shape.options
    return [
        Client(
            options.socket,
            identity.namespace(vllm_config, shape.layout, fingerprint),
            layout=shape.layout,
            tenants=(options.tenant,),
            role="scheduler",
            pool=PoolSpec("borrowed", shape.blocks),
            engine=identity.engine_id(vllm_config),
            # The courier ends a fetch in its own time.
            limits=Limits(call_s=options.call_s, fetch_s=options.fetch_s + 1.0),
        )
    ]


def worker_clients(
    vllm_config: Any, shape: Shape, fingerprint: str, banks: Sequence[LayerCells]
) -> list[Client]:
    """A client per bank: each maps the arena and copies its own layers."""
    options = shape.options
    # Banks of a hybrid model share their memory: any block is one group's at a time, but for the null block.
    scratch = threading.Lock()
    return [
        Client(
            options.socket,
            identity.namespace(vllm_config, shape.layout, fingerprint),
            bank,
            tenants=(options.tenant,),
            role="worker",
            engine=identity.engine_id(vllm_config),
            copy_threads=options.copy_threads,
            scratch_block=_NULL_BLOCK,
            scratch_lock=scratch,
            limits=Limits(call_s=options.call_s, handles_max=1 << 16),
        )
        for bank in banks
    ]


def share_interpreter(vllm_config: Any) -> None:
    """Let threads beside an engine's main one have their turns, where that spins.

    With several ranks vLLM's main thread waits for them by `os.sched_yield` in a loop, which keeps the GIL:
    on a busy machine lookups then starve. Python's 5 ms are how long each turn is waited for.
    """
    if vllm_config.parallel_config.world_size > 1:
        sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_S))


def unbind() -> None:
    """Let this thread, and those that it starts, run on every core that this process may use.

    vLLM binds the thread that starts us to the cores of its kernels; copies would compete with them there.
    A thread that is older than the binding still shows where the process was allowed to run.
    """
    allowed: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it ended while we looked
            allowed |= os.sched_getaffinity(int(task.name))
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, allowed)


def listens(socket: str) -> bool:
    """Does a daemon listen there? One that was killed leaves its socket behind."""
    with sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(socket)
        except OSError:
            return False
    return True


def wait_attached(clients: Sequence[Client], options: Options, ended: Callable[[], bool]) -> None:
    """Until attached, refused, `ended`, or `attach_s` is over; says which."""
    until = time.monotonic() + options.attach_s
    for client in clients:
        while not client.wait_attached(_SLICE_S):
            if client.refusal is not None:
                _log.warning(
                    "kvstore: the daemon refuses this engine, which runs without it: %s", client.refusal
                )
            if client.refusal is not None or ended() or time.monotonic() > until:
                return
    _log.info("kvstore: attached to %s", options.socket)
