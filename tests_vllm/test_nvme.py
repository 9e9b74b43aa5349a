"""KV that comes back from the disk: the same tokens, told as such, and never worse than computing it."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from daemon import Daemon, eventually
from engines import Engine, EngineProcess, patient
from models import prompt_of
from nvme_kit import faulty, flip, nvme_settings, on_disk

NewEngine = Callable[..., Engine]
NewProcess = Callable[..., EngineProcess]
LENGTH = 700
BLOCKS = LENGTH // 128
STALLED = "stall_ms=5000:1"


class Disk:
    """Daemons one after another over the same socket and directory."""

    def __init__(self, folder: Path, ending: ExitStack, **settings: str) -> None:
        self._folder, self._ending = folder, ending
        self.directory = folder / "nvme"
        self._settings = {
            "host.capacity_bytes": '"32MiB"',
            **nvme_settings(self.directory, capacity_bytes='"256MiB"', segment_bytes='"8MiB"'),
            **{key.replace("__", "."): value for key, value in settings.items()},
        }
        self.daemon = self._made()
        self.daemon.start()

    def _made(self, **more: Any) -> Daemon:
        daemon = Daemon(self._folder, self._settings, **more)
        self._ending.callback(daemon.close)
        return daemon

    @property
    def socket(self) -> Path:
        return self.daemon.socket

    def restart(self, engine: Engine | None = None, faults: str = "") -> None:
        """The next daemon has nothing but what is on the disk; the engine has found it."""
        self.daemon.end()
        self.daemon = self._made(program=faulty(faults)) if faults else self._made()
        self.daemon.start()
        if engine is not None:
            eventually(lambda: attached(engine, self.daemon), "scheduler and rank found it")


def attached(engine: Engine, daemon: Daemon) -> bool:
    epoch = bytes.fromhex(daemon.status()["epoch"])
    courier, rank = engine.connector._scheduler._courier, engine.worker_connector._clients[0]
    return bool(courier.epoch == epoch == rank.epoch)


@pytest.fixture
def new_disk(tmp_path_factory: pytest.TempPathFactory, ending: ExitStack) -> Callable[..., Disk]:
    """Make a daemon with a disk; arguments: its settings."""
    return lambda **settings: Disk(tmp_path_factory.mktemp("d"), ending, **settings)


def kept(engine: Engine, disk: Disk, *prompts: list[int], tokens: int = 32) -> list[list[int]]:
    """What is said to these prompts; their blocks are on the disk, and nowhere in the engine."""
    said = []
    for prompt in prompts:
        said.append(engine.generate(prompt, tokens).tokens)
        engine.drain()
    on_disk(disk.daemon, sum(len(prompt) // 128 for prompt in prompts))
    assert engine.forget()
    return said


def hits(answer: Any) -> dict[str, int]:
    assert answer.params is not None
    found: dict[str, int] = answer.params["kvstore"]["hit_tokens"]
    return found


def counting(engine: Engine) -> dict[str, float]:
    """Sums of what both sides count from now on."""
    sums: dict[str, float] = {}
    for connector in (engine.connector, engine.worker_connector):
        take = connector.get_kv_connector_stats

        def taking(take: Callable[[], Any] = take) -> Any:
            stats = take()
            for name, amount in (stats.data if stats is not None else {}).items():
                sums[name] = sums.get(name, 0) + amount
            return stats

        connector.get_kv_connector_stats = taking
    return sums


# ---- hits --------------------------------------------------------------------------------------------------


def test_a_hit_on_the_disk_gives_the_tokens_of_a_recompute_and_says_so(
    tiny: Path, new_disk: Callable[..., Disk], new_engine: NewEngine
) -> None:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    disk = new_disk()
    engine = new_engine(tiny, connector=patient(disk.socket))
    prompt = prompt_of(LENGTH)
    (tokens,) = kept(engine, disk, prompt)
    disk.restart(engine)
    counts, seen = counting(engine), []
    ask = engine.connector.get_external_cache_hit_sources
    engine.connector.get_external_cache_hit_sources = lambda *told: seen.append(ask(*told)) or seen[-1]
    engine.scheduler.connector_prefix_cache_stats = _Recorder()
    answer = engine.generate(prompt, 32)
    assert answer.tokens == tokens
    assert (answer.own, answer.external, hits(answer)) == (0, BLOCKS * 128, {"NVME": BLOCKS * 128})
    assert seen == [{CacheHitSource.DISK: BLOCKS * 128}]
    engine.drain()
    engine.step()
    assert (counts["fetches"], counts["fetched_tokens"]) == (1, BLOCKS * 128)
    assert (counts["loaded_tokens"], counts["loaded_nvme_tokens"]) == (BLOCKS * 128, BLOCKS * 128)
    assert counts["fetch_seconds"] > 0
    assert "short_fetches" not in counts
    # It is on HOST by now.
    assert engine.forget()
    assert hits(engine.generate(prompt, 32)) == {"HOST": BLOCKS * 128}
    engine.drain()
    assert engine.free_blocks == engine.pool.num_gpu_blocks - 1
    by_tier = disk.daemon.group()["counters"]["hit_blocks_by_tier"]
    assert (by_tier["NVME"], by_tier["HOST"]) == (BLOCKS, BLOCKS)


class _Recorder:
    reset = False

    def record(self, **_: object) -> None:
        pass


def test_a_host_that_is_too_small_is_completed_by_the_disk(
    tiny: Path, new_disk: Callable[..., Disk], new_engine: NewEngine
) -> None:
    disk = new_disk(host__capacity_bytes='"16MiB"')
    engine = new_engine(tiny, connector=patient(disk.socket))
    prompts = [prompt_of(LENGTH, seed=seed) for seed in range(7)]
    said = kept(engine, disk, *prompts)
    assert disk.daemon.ready() < 7 * BLOCKS
    by_tier: dict[str, int] = {}
    # The last one first: in the order in which they came, each would evict the next.
    for prompt, tokens in zip(reversed(prompts), reversed(said), strict=True):
        answer = engine.generate(prompt, 32)
        assert answer.tokens == tokens
        assert answer.external == BLOCKS * 128
        for tier, count in hits(answer).items():
            by_tier[tier] = by_tier.get(tier, 0) + count
        engine.drain()
        assert engine.forget()
    assert by_tier["NVME"] > 0
    assert by_tier["HOST"] > 0
    assert sum(by_tier.values()) == 7 * BLOCKS * 128


def test_many_requests_at_once(tiny: Path, new_disk: Callable[..., Disk], new_engine: NewEngine) -> None:
    """More than fetch at the same time: all of them find theirs."""
    disk = new_disk(host__capacity_bytes='"64MiB"')
    engine = new_engine(tiny, connector=patient(disk.socket), blocks=200)
    prompts = [prompt_of(300 + 10 * seed, seed=seed) for seed in range(14)]
    said = kept(engine, disk, *prompts, tokens=16)
    disk.restart(engine)
    answers = engine.generate_all(prompts, 16)
    assert [answer.tokens for answer in answers] == said
    assert [hits(answer) for answer in answers] == [{"NVME": len(prompt) // 128 * 128} for prompt in prompts]
    engine.drain()
    assert engine.free_blocks == 199


def test_two_ranks_load_what_one_lookup_brought(
    tiny: Path, new_disk: Callable[..., Disk], new_process: NewProcess
) -> None:
    disk = new_disk()
    prompt = prompt_of(LENGTH)
    with new_process(tiny, connector=patient(disk.socket), ranks=2) as engine:
        tokens = engine.generate(prompt, 32).tokens
        engine.drain()
        on_disk(disk.daemon, BLOCKS)
    disk.restart()
    with new_process(tiny, connector=patient(disk.socket), ranks=2) as engine:
        answer = engine.generate(prompt, 32)
        assert answer.external == BLOCKS * 128, answer.params
        assert answer.tokens == tokens
        assert hits(answer) == {"NVME": BLOCKS * 128}
    disk.daemon.assert_quiet()


# ---- a disk that is rotten, slow or gone -------------------------------------------------------------------


@pytest.mark.parametrize("block", [0, 3])
def test_one_flipped_bit_on_the_disk_is_computed_again(
    tiny: Path,
    new_disk: Callable[..., Disk],
    new_engine: NewEngine,
    monkeypatch: pytest.MonkeyPatch,
    block: int,
) -> None:
    disk = new_disk()
    engine = new_engine(tiny, connector=patient(disk.socket))
    prompt = prompt_of(LENGTH)
    (tokens,) = kept(engine, disk, prompt)
    rank, pieces = engine.worker_connector._clients[0], []
    load = rank.load_slots

    def looking(slots: np.ndarray, keys: np.ndarray, blocks: np.ndarray) -> Any:
        arena = rank._core.attachment.arena
        pieces.append(bytes(arena.view(int(slots[block]), 8192)[5000:5064].tobytes()))
        return load(slots, keys, blocks)

    with monkeypatch.context() as patch:
        patch.setattr(rank, "load_slots", looking)
        assert hits(engine.generate(prompt, 32)) == {"HOST": BLOCKS * 128}
    engine.drain()
    assert engine.forget()
    disk.daemon.end()
    flip(disk.directory, pieces[0])
    disk.restart(engine)
    answer = engine.generate(prompt, 32)
    assert answer.tokens == tokens
    assert hits(answer).get("NVME", 0) == block * 128
    if block:
        assert "did not come from the disk" in answer.params["kvstore"]["reason"]
    engine.drain()
    assert disk.daemon.group()["nvme"]["corrupt"] == 1
    # What was computed is saved again: nothing was wrong with what this request was given.
    assert engine.forget()
    again = engine.generate(prompt, 32)
    assert (again.tokens, again.external) == (tokens, BLOCKS * 128)
    engine.drain()
    assert engine.free_blocks == engine.pool.num_gpu_blocks - 1


def test_a_disk_that_stalls_delays_its_own_request_by_a_moment(
    tiny: Path, new_disk: Callable[..., Disk], new_engine: NewEngine
) -> None:
    """Five seconds: the daemon ends the fetch, the request is computed, and others run meanwhile."""
    disk = new_disk()
    engine = new_engine(tiny, disk.socket)
    prompt = prompt_of(LENGTH)
    (tokens,) = kept(engine, disk, prompt)
    disk.restart(engine, STALLED)
    counts, began = counting(engine), time.monotonic()
    slow, quick = engine.submit(prompt, 32), engine.submit(prompt_of(200, seed=9), 4)
    ended: list[str] = []
    while len(ended) < 2:
        ended += engine.step()
        assert time.monotonic() - began < 30
    assert ended == [quick, slow]
    assert time.monotonic() - began < 4.5
    engine.take(quick)
    answer = engine.take(slow)
    assert answer.tokens == tokens
    assert hits(answer) == {}
    assert "did not come from the disk" in answer.params["kvstore"]["reason"]
    engine.drain()
    engine.step()
    assert counts["short_fetches"] == 1


def test_an_engine_has_a_patience_of_its_own(
    tiny: Path, new_disk: Callable[..., Disk], new_engine: NewEngine
) -> None:
    disk = new_disk(nvme__stall_s="60.0")
    engine = new_engine(tiny, connector=patient(disk.socket, fetch_s=0.3))
    prompt = prompt_of(LENGTH)
    (tokens,) = kept(engine, disk, prompt)
    disk.restart(engine, STALLED)
    began = time.monotonic()
    answer = engine.generate(prompt, 32)
    assert time.monotonic() - began < 4.5
    assert answer.tokens == tokens
    assert hits(answer) == {}


def test_an_abort_ends_the_fetch_and_its_lease(
    tiny: Path, new_disk: Callable[..., Disk], new_engine: NewEngine
) -> None:
    disk = new_disk(nvme__stall_s="60.0")
    engine = new_engine(tiny, connector=patient(disk.socket))
    prompt, other = prompt_of(LENGTH), prompt_of(200, seed=9)
    kept(engine, disk, prompt)
    disk.restart(engine, STALLED)
    name = engine.submit(prompt, 32)
    eventually(lambda: engine.step() or disk.daemon.group()["leases"] == 1, "it is being fetched")
    began = time.monotonic()
    engine.abort(name)
    eventually(lambda: disk.daemon.group()["leases"] == 0, "its lease has ended")
    assert time.monotonic() - began < 1.5, "not only when it would have been given up"
    assert len(engine.generate(other, 16).tokens) == 16
    engine.drain()
    assert engine.free_blocks == engine.pool.num_gpu_blocks - 1
    engine.close()
    disk.daemon.assert_quiet()


def test_a_daemon_that_is_killed_while_it_reads(
    tiny: Path, new_disk: Callable[..., Disk], new_engine: NewEngine
) -> None:
    disk = new_disk(nvme__stall_s="60.0")
    engine = new_engine(tiny, connector=patient(disk.socket))
    prompt = prompt_of(LENGTH)
    (tokens,) = kept(engine, disk, prompt)
    disk.restart(engine, STALLED)
    name = engine.submit(prompt, 32)
    eventually(lambda: engine.step() or disk.daemon.group()["leases"] == 1, "it is being fetched")
    disk.daemon.kill()
    assert engine.wait([name], 60)[0].tokens == tokens
    disk.restart(engine)
    assert engine.forget()
    answer = engine.generate(prompt, 32)
    assert (answer.tokens, hits(answer)) == (tokens, {"NVME": BLOCKS * 128})
