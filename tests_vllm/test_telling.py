"""What others see: vLLM's statistics and metrics, the response, and the daemon's picture of the device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from daemon import Daemon, eventually
from engines import Engine
from models import prompt_of

NewEngine = Callable[..., Engine]


def test_hits_by_source(tiny: Path, daemon: Daemon, new_engine: NewEngine) -> None:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    engine = new_engine(tiny, daemon.socket)
    prompt = prompt_of(400)
    engine.generate(prompt, 2)
    engine.drain()
    assert engine.forget()
    seen: list[dict[Any, int]] = []
    ask = engine.connector.get_external_cache_hit_sources
    engine.connector.get_external_cache_hit_sources = lambda *told: seen.append(ask(*told)) or seen[-1]
    engine.scheduler.connector_prefix_cache_stats = _Recorder()
    answer = engine.generate(prompt, 2)
    assert answer.params == {
        "kvstore": {"hit_tokens": {"HOST": 384}, "reason": answer.params["kvstore"]["reason"]}
    }
    assert seen == [{CacheHitSource.HOST: 384}]


class _Recorder:
    reset = False

    def record(self, **_: object) -> None:
        pass


def test_statistics_add_up_and_become_metrics(tiny: Path, daemon: Daemon, new_engine: NewEngine) -> None:
    from kvstore.connectors.vllm import KVStoreConnector
    from kvstore.connectors.vllm.metrics import COUNTERS, KVStoreStats
    from prometheus_client import REGISTRY, Counter, Gauge, Histogram

    engine = new_engine(tiny, daemon.socket)
    sums = KVStoreStats(data={})

    def collect(connector: Any) -> None:
        take = connector.get_kv_connector_stats

        def taking() -> Any:
            stats = take()
            if stats is not None:
                sums.aggregate(stats)
            return stats

        connector.get_kv_connector_stats = taking

    collect(engine.connector)
    collect(engine.worker_connector)
    prompt = prompt_of(400)
    for _ in range(2):
        engine.generate(prompt, 2)
        engine.drain()
        engine.step()
        assert engine.forget()
    counts = sums.data
    assert set(counts) <= set(COUNTERS)
    assert (counts["lookups"], counts["hits"], counts["loaded_tokens"]) == (2, 1, 384)
    assert counts["saved_blocks"] == 3
    block = 2 * 128 * 4 * 2 * 64 * 4  # K and V, tokens, layers, heads, head_dim, float32
    assert counts["loaded_bytes"] == 3 * block
    assert "dropped_blocks" not in counts
    shown = KVStoreConnector.build_kv_connector_stats(dict(counts)).reduce()
    assert shown["loaded_tokens"] == 384
    assert shown["load_GB_per_s"] > 0
    metrics = KVStoreConnector.build_prom_metrics(
        engine.llm.vllm_config,
        {Counter: Counter, Gauge: Gauge, Histogram: Histogram},
        ["model_name", "engine"],
        {0: ["tiny", "0"]},
    )
    metrics.observe(counts, 0)
    labels = {"model_name": "tiny", "engine": "0"}
    assert REGISTRY.get_sample_value("vllm:kvstore_loaded_tokens_total", labels) == 384
    assert REGISTRY.get_sample_value("vllm:kvstore_saved_blocks_total", labels) == 3


def test_the_daemon_sees_the_device_pool(tiny: Path, daemon: Daemon, new_engine: NewEngine) -> None:
    engine = new_engine(tiny, daemon.socket, blocks=32)
    prompt = prompt_of(700)
    name = engine.submit(prompt, 200)
    while len(engine.peek(name).tokens) < 20:
        engine.step()

    def pool() -> dict[str, int]:
        engines = daemon.group()["engines"]
        assert len(engines) == 1
        one = next(iter(engines.values()))
        device: dict[str, int] = one["device"]
        return device

    eventually(lambda: pool().get("mapped") == 7, f"six blocks and vLLM's null block are mapped: {pool()}")
    engine.wait([name])
    engine.drain()
    eventually(
        lambda: (pool().get("mapped"), pool().get("idle")) == (1, 7), f"7 full ones stay idle: {pool()}"
    )
    assert pool()["free"] == 32 - 8
    assert engine.forget()
    engine.generate(prompt_of(30), 2)
    eventually(lambda: pool().get("idle") == 0, f"vLLM forgot them: {pool()}")
