"""Reload or recompute in a real vLLM: what the plan says is what is done, and both sides tell of it."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from daemon import Daemon, eventually
from engines import Engine, patient
from models import prompt_of
from nvme_kit import nvme_settings, on_disk

LENGTH = 700
BLOCKS = LENGTH // 128


class Place:
    """A daemon that decides, over a disk of some speed; an engine whose steps it has learnt from."""

    def __init__(self, folder: Path, ending: ExitStack, new_engine: Any, model: Path) -> None:
        self._folder, self._ending = folder, ending
        self.daemon = self._started(0)
        self.engine: Engine = new_engine(model, connector=patient(self.daemon.socket))
        self.prompt = prompt_of(LENGTH)
        self.tokens = self.engine.generate(self.prompt, 32).tokens
        self.engine.drain()
        on_disk(self.daemon, BLOCKS)

    def _started(self, limit: int) -> Daemon:
        settings = {
            "host.capacity_bytes": '"32MiB"',
            **nvme_settings(
                self._folder / "nvme",
                capacity_bytes='"256MiB"',
                segment_bytes='"8MiB"',
                limit_bytes_per_s=str(limit),
                stall_s="5.0",
            ),
            "plan.mode": '"decide"',
        }
        made = Daemon(self._folder, settings)
        self._ending.callback(made.close)
        made.start()
        return made

    def restart(self, limit: int) -> None:
        """Nothing is on HOST any more, or in the engine; the disk has that speed, and the daemon a curve."""
        assert self.engine.forget()
        self.daemon.end()
        self.daemon = self._started(limit)
        epoch = self.daemon.status()["epoch"]
        courier, rank = self.engine.connector._scheduler._courier, self.engine.worker_connector._clients[0]
        eventually(lambda: {courier.epoch.hex(), rank.epoch.hex()} == {epoch}, "both found it")
        for seed in range(1, 7):
            self.engine.generate(prompt_of(180 + 40 * seed, seed=seed), 4)
            self.engine.drain()
        eventually(lambda: self.daemon.group()["pricing"]["curves"], "it has learnt from steps")


@pytest.fixture
def place(tiny: Path, tmp_path_factory: pytest.TempPathFactory, ending: ExitStack, new_engine: Any) -> Place:
    return Place(tmp_path_factory.mktemp("d"), ending, new_engine, tiny)


def test_a_disk_slower_than_computing_is_not_waited_for(place: Place) -> None:
    """Case 22. The first request finds out, within what it may lose; the second is told."""
    place.restart(limit=20_000)  # blocks of 64 KiB and more: seconds each
    first = place.engine.generate(place.prompt, 32)
    assert first.tokens == place.tokens
    place.engine.drain()
    assert place.engine.forget()
    second = place.engine.generate(place.prompt, 32)
    assert second.tokens == place.tokens
    assert second.params["kvstore"]["hit_tokens"].get("NVME", 0) == 0
    place.engine.drain()
    assert place.engine.free_blocks == place.engine.pool.num_gpu_blocks - 1


def test_a_request_may_decide_for_itself(place: Place) -> None:
    place.restart(limit=0)

    def hit_tokens(plan: str) -> dict[str, int]:
        wish = {"kv_transfer_params": {"kvstore": {"plan": plan}}}
        answer = place.engine.wait([place.engine.submit(place.prompt, 32, sampling={"extra_args": wish})])[0]
        assert answer.tokens == place.tokens
        place.engine.drain()
        assert place.engine.forget()
        found: dict[str, int] = answer.params["kvstore"]["hit_tokens"]
        return found

    assert hit_tokens("load") == {"NVME": BLOCKS * 128}
    assert hit_tokens("recompute") == {}, "although all of it is on HOST now"
    assert hit_tokens("load") == {"HOST": BLOCKS * 128}


def test_what_was_decided_and_how_long_it_took_is_told(place: Place) -> None:
    place.restart(limit=0)
    name = place.engine.submit(place.prompt, 8)
    while place.engine.scheduler.has_requests():
        place.engine.step()
    place.engine.take(name)
    place.engine.drain()
    client = place.engine.connector._scheduler._courier._client
    story = client.explain(name)
    assert story["known"], story
    assert story["prompt_tokens"] == LENGTH
    assert story["choice"] in ("load", "recompute")
    eventually(lambda: (client.explain(name)["outcome"] or {}).get("seconds"), "it has told how long it took")
