"""The simplest fair rival of our vLLM connector: a file per block, named by vLLM's own hash of it.

A block is read straight into the layers' memory by one `preadv` and written by one `pwritev`; nothing is
synced, so in a benchmark it all stays in the page cache. There is no eviction, no checksum, no identity of
the model and no check that a file is complete beyond its name (it is renamed into place).

`kv_connector_extra_config`: {"folder": PATH, "background": false}. With `background` a thread reads and
writes while the engine computes; without, the engine waits for both.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)

__all__ = ["FileConnector"]


@dataclass
class _Orders(KVConnectorMetadata):  # type: ignore[misc]
    """Of one step: request → (file, device block)."""

    loads: dict[str, list[tuple[str, int]]] = field(default_factory=dict)
    saves: dict[str, list[tuple[str, int]]] = field(default_factory=dict)


class FileConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """See the module."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        options = self._kv_transfer_config.kv_connector_extra_config
        self._folder = Path(options["folder"])
        self._background = bool(options.get("background", False))
        self._block_tokens = vllm_config.cache_config.block_size
        # the scheduler's side
        self._requests: dict[str, Any] = {}
        self._offered: dict[str, range] = {}
        self._saved: dict[str, int] = {}
        self._orders = _Orders()
        # the worker's side
        self._layers: list[Any] = []
        self._thread = ThreadPoolExecutor(1)
        self._reading: dict[str, Future[None]] = {}
        self._writing: dict[str, Future[None]] = {}
        self._ending: set[str] = set()

    def _file(self, request: Any, number: int) -> str:
        return str(self._folder / request.block_hashes[number].hex())

    # ---- the scheduler's side -----------------------------------------------------------------------------

    @property
    def requires_kv_delivery(self) -> bool:
        """It is a cache."""
        return False

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Blocks that have a file, counted from what the engine has itself."""
        first = last = num_computed_tokens // self._block_tokens
        # In the foreground the step that loads also computes, so it needs a token to compute.
        most = request.num_tokens if self._background else request.num_tokens - 1
        while last < most // self._block_tokens and os.path.exists(self._file(request, last)):  # noqa: PTH110
            last += 1
        self._offered[request.request_id] = range(first, last)
        return (last - first) * self._block_tokens, self._background and last > first

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Remember the request, and order its load."""
        self._requests[request.request_id] = request
        if not num_external_tokens:
            return
        table = blocks.get_block_ids()[0]
        self._orders.loads[request.request_id] = [
            (self._file(request, number), table[number]) for number in self._offered[request.request_id]
        ]

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Order saves of the blocks that this step fills."""
        orders, self._orders = self._orders, _Orders()
        tables = scheduler_output.kv_connector_block_state
        for ident, new in scheduler_output.num_scheduled_tokens.items():
            request = self._requests[ident]
            full = min((request.num_computed_tokens + new) // self._block_tokens, len(request.block_hashes))
            table = tables.get_block_ids(ident)[0]
            for number in range(self._saved.get(ident, 0), full):
                file = self._file(request, number)
                if not os.path.exists(file):  # noqa: PTH110
                    orders.saves.setdefault(ident, []).append((file, table[number]))
            self._saved[ident] = full
        return orders

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        """Forget it. In the background vLLM is told when its files are written, and waits for that."""
        for known in (self._requests, self._offered, self._saved):
            known.pop(request.request_id, None)
        return self._background, None

    # ---- the worker's side --------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Keep a view of bytes of every layer's blocks."""
        import torch

        self._folder.mkdir(parents=True, exist_ok=True)
        for layer in kv_caches.values():
            flat = layer.flatten(1)  # of a contiguous layer: a view
            self._layers.append(flat.view(torch.uint8).numpy())

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Read, or begin to."""
        for ident, blocks in self._get_connector_metadata().loads.items():
            if self._background:
                self._reading[ident] = self._thread.submit(self._read, blocks)
            else:
                self._read(blocks)

    def _read(self, blocks: Iterable[tuple[str, int]]) -> None:
        for file, block in blocks:
            descriptor = os.open(file, os.O_RDONLY)
            try:
                os.preadv(descriptor, [layer[block] for layer in self._layers], 0)
            finally:
                os.close(descriptor)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Whole blocks are read before or beside the step."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Whole blocks are written after the step."""

    def wait_for_save(self) -> None:
        """Write, or copy aside what the thread is to write."""
        for ident, blocks in self._get_connector_metadata().saves.items():
            for file, block in blocks:
                cells = [layer[block] for layer in self._layers]
                if self._background:
                    self._writing[ident] = self._thread.submit(self._write, file, [c.copy() for c in cells])
                else:
                    self._write(file, cells)

    @staticmethod
    def _write(file: str, cells: list[Any]) -> None:
        descriptor = os.open(file + ".new", os.O_WRONLY | os.O_CREAT)
        try:
            os.pwritev(descriptor, cells, 0)
        finally:
            os.close(descriptor)
        os.rename(file + ".new", file)  # noqa: PTH104

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """Requests whose files have been written, and those whose files have been read."""
        if self._background:
            self._ending |= finished_req_ids
        done = {ident for ident, reading in self._reading.items() if reading.done()}
        for ident in done:
            self._reading.pop(ident).result()
        # One thread writes in order: the last write of a request ends last.
        ended = {name for name in self._ending if name not in self._writing or self._writing[name].done()}
        self._ending -= ended
        for ident in ended & self._writing.keys():
            self._writing.pop(ident).result()
        return ended, done
