"""`KVStoreConnector`: vLLM's hooks, handed to the side that this process is.

vLLM makes one connector in each rank (worker first) and one in the scheduler. Each attaches to the daemon by
itself, in the background, under one engine id. What cannot be kept right is refused here, at the start, with
its reason: then every hook does nothing and the engine runs as if there were no cache.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvstore.client import Client
from kvstore.types import Tier

from . import start
from .layout import Unsupported
from .messages import StepOrders, StepReport
from .metrics import KVStoreStats, PromMetrics, Tally
from .options import CONFIG_LINE, Options
from .scheduler import Scheduler
from .worker import Worker

__all__ = ["KVStoreConnector"]

_log = logging.getLogger("vllm.kvstore")
_SOURCES = {
    Tier.HOST: CacheHitSource.HOST,
    Tier.NVME: CacheHitSource.DISK,
    Tier.PEER: CacheHitSource.P2P,
    Tier.REMOTE: CacheHitSource.EXTERNAL_UNSPECIFIED,
}


class KVStoreConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """See `kvstore.connectors.vllm`.

    Raises:
        ValueError: `kv_load_failure_policy` is "fail", or `kv_connector_extra_config` has a mistake.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        if transfer.kv_load_failure_policy != "recompute":
            raise ValueError(
                'kv_load_failure_policy is "fail" (vLLM\'s default): a block that cannot be loaded would '
                f"fail its request, although the engine can compute it. Start vLLM with\n  {CONFIG_LINE}"
            )
        self._options = Options.parse(transfer.kv_connector_extra_config)
        self._tally = Tally()
        self._scheduler: Scheduler | None = None
        self._worker: Worker | None = None
        self._clients: list[Client] = []
        self._starting: threading.Thread | None = None
        self._lock = threading.Lock()  # of what `shutdown` ends, while the start may still make it
        self._closed = False
        self._shape: start.Shape | None = None
        if role is KVConnectorRole.WORKER:  # even one that is refused has to answer the scheduler
            self._worker = Worker(len(kv_cache_config.kv_cache_groups), self._tally)
        try:
            self._shape = start.shape_of(vllm_config, kv_cache_config, self._options)
        except Exception as error:  # noqa: BLE001 the engine must start whatever is wrong here
            self._refuse(error)
            return
        if role is KVConnectorRole.SCHEDULER:
            start.share_interpreter(vllm_config)
            banks = len(self._shape.groups) * vllm_config.parallel_config.world_size
            self._scheduler = Scheduler(
                self._options,
                self._shape.layout.block_tokens,
                banks,
                transfer.is_kv_consumer,
                transfer.is_kv_producer,
                self._tally,
            )
            self._scheduler.chunk_tokens = vllm_config.scheduler_config.max_num_batched_tokens
            self._scheduler.steps.timed = vllm_config.parallel_config.pipeline_parallel_size == 1
            shape, scheduler = self._shape, self._scheduler
            self._start(
                lambda weights: start.scheduler_clients(vllm_config, shape, weights),
                lambda clients: scheduler.serve(clients[0]),
            )

    def _refuse(self, error: Exception) -> None:
        self._shape = None
        why = str(error) if isinstance(error, Unsupported) else f"unexpected: {error!r}"
        _log.warning("kvstore: this engine runs without the store: %s", why)

    # ---- the start ---------------------------------------------------------------------------------------

    def _start(self, make: Callable[[str], list[Client]], use: Callable[[list[Client]], None]) -> None:
        """Attach in the background: the weights' fingerprint may take a while the first time."""

        def begin() -> None:
            try:
                start.unbind()
                weights = start.weights_of(self._vllm_config, self._options)
                with self._lock:
                    if self._closed:
                        return
                    self._clients = make(weights)
                    use(self._clients)
            except Exception as error:  # noqa: BLE001 the engine must start whatever is wrong here
                self._refuse(error)
                return
            start.wait_attached(self._clients, self._options, lambda: self._closed)

        self._starting = threading.Thread(target=begin, name="kvstore-start", daemon=True)
        self._starting.start()

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """A rank's KV memory is there."""
        shape, worker = self._shape, self._worker
        if shape is None or worker is None:
            return
        try:
            banks, writes = start.banks_of(self._vllm_config, self._kv_cache_config, shape, kv_caches)
        except Exception as error:  # noqa: BLE001 the engine must start whatever is wrong here
            self._refuse(error)
            return
        self._start(
            lambda weights: start.worker_clients(self._vllm_config, shape, weights, banks),
            lambda clients: worker.attach(clients, writes),
        )
        self._await_start()

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        if self._scheduler is not None:
            self._scheduler.bind(gpu_block_pool, len(self._kv_cache_config.kv_cache_groups))
            self._await_start()

    def _await_start(self) -> None:
        """The first request should find a warm store: wait a little for a daemon that listens."""
        if self._starting is not None and start.listens(self._options.socket):
            self._starting.join(self._options.attach_s)
        elif self._starting is not None:
            _log.warning(
                "kvstore: nobody listens at %s; this engine computes everything until a daemon does "
                "(kvstore serve)",
                self._options.socket,
            )

    # ---- the scheduler's hooks ---------------------------------------------------------------------------

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache owes nobody anything: a request may end before its blocks are saved."""
        return False

    def on_new_request(self, request: Any) -> None:
        if self._scheduler is not None:
            self._scheduler.arrived(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self._scheduler is None:
            return 0, False
        return self._scheduler.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if self._scheduler is not None:
            self._scheduler.allocated(request, blocks, num_external_tokens)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[Any, int]:
        sources = self._scheduler.sources(request, num_external_tokens) if self._scheduler is not None else {}
        if not sources:
            return super().get_external_cache_hit_sources(request, num_external_tokens)  # type: ignore[no-any-return]
        return {_SOURCES[tier]: tokens for tier, tokens in sources.items()}

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        if self._scheduler is None:
            return StepOrders()
        return self._scheduler.orders(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        if self._scheduler is not None:
            report = connector_output.kv_connector_worker_meta
            self._scheduler.heard(report, connector_output.finished_recving or set())

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Blocks that still have to be copied are pinned by us, so vLLM may free them."""
        return False, self._scheduler.finished(request, block_ids) if self._scheduler is not None else None

    def has_pending_push_work(self) -> bool:
        return self._scheduler is not None and self._scheduler.pending()

    def reset_cache(self) -> bool | None:
        return self._scheduler.reset() if self._scheduler is not None else None

    # ---- a rank's hooks ----------------------------------------------------------------------------------

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        orders = self._get_connector_metadata()
        if self._worker is not None and isinstance(orders, StepOrders):
            self._worker.begin_loads(orders)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are whole before their request is scheduled."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Blocks are saved whole, after the step."""

    def wait_for_save(self) -> None:
        """After the forward, so that what is copied is computed. Blocks are pinned: nothing to wait for."""
        orders = self._get_connector_metadata()
        if self._worker is not None and isinstance(orders, StepOrders):
            self._worker.begin_saves(orders)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        if self._worker is None:
            return KVConnectorTransferResults()
        ended = self._worker.finished(finished_req_ids)
        return KVConnectorTransferResults(finished_recving=ended, failed_recving=self._worker.failed())

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.invalid() if self._worker is not None else set()

    def build_connector_worker_meta(self) -> StepReport | None:
        return self._worker.report() if self._worker is not None else None

    # ---- both --------------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> KVStoreStats | None:
        return self._tally.take()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVStoreStats:
        return KVStoreStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> PromMetrics:
        return PromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """Copies joined, sessions ended. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if self._starting is not None:
            self._starting.join(self._options.attach_s)
        if self._worker is not None:
            self._worker.close()
            for client in self._clients:
                client.close()
        if self._scheduler is not None:
            self._scheduler.close()
