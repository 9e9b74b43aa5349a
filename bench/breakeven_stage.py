"""What bench.breakeven runs on: a real daemon with a disk that can be slowed, and the embedded engine on it.

Before every measured request its prompt is on NVME and nowhere else: the device keeps no idle blocks, and
blocks that nobody will ask for fill HOST (the write budget is spent by then, so that they stay off the disk).
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from kvstore.connectors.embedded.attach import connect
from kvstore.connectors.embedded.demo_disk import disk_folder, disk_settings
from kvstore.connectors.embedded.engine import Engine, EngineLimits
from kvstore.connectors.embedded.model import load_model
from kvstore.connectors.embedded.request import Report, Request
from kvstore.connectors.embedded.smollm2 import find_smollm2
from kvstore.connectors.embedded.spec import read_spec
from kvstore.connectors.embedded.store_tables import StoreTables

from bench.breakeven_daemon import Answer, LimitedDaemon
from kvstore.client import Client, Limits
from kvstore.intent import Intent
from kvstore.types import Choice, Hit, Reuse

__all__ = ["ARMS", "Stage", "stage"]

BLOCK_TOKENS = 16
CHUNK_TOKENS = 256
_MIB = 1 << 20
_SLAB = 32 * _MIB
_ATTACH_S, _REQUEST_S = 60.0, 300.0
# The store's own ways and, as what an engine without a store does, no reuse at all.
_LOAD_ALL = Intent(mode="load")
ARMS: dict[str, Choice | None] = {
    "recompute": Choice.RECOMPUTE,
    "load": Choice.LOAD,
    "split": Choice.SPLIT,
    "planner": None,
}


class Stage:
    """The embedded engine, its daemon, and prompts on the daemon's disk.

    Args:
        folder: for the daemon's socket, log and configuration.
        settings: of its NVME tier.
        lengths: of the prompts, in tokens.
    """

    arms: Sequence[str] = tuple(ARMS)
    facts: Mapping[str, object] = {"block_tokens": BLOCK_TOKENS, "chunk_tokens": CHUNK_TOKENS}

    def __init__(
        self, folder: Path, settings: dict[str, object], model: Path, lengths: Sequence[int]
    ) -> None:
        spec = read_spec(model)
        longest = max(lengths)
        token_bytes = 2 * spec.layers * spec.kv_heads * spec.head_dim * 4
        self._arena_bytes = -(-(longest * token_bytes + 8 * _MIB) // _SLAB) * _SLAB
        self.token_bytes = token_bytes
        self.daemon = LimitedDaemon(folder, {**settings, "host.capacity_bytes": self._arena_bytes})
        self.daemon.wait_ready()
        blocks = (longest + 10_000) // BLOCK_TOKENS  # for the others, too
        self._model = load_model(model, blocks=blocks + 1, block_tokens=BLOCK_TOKENS)
        self.tables: StoreTables = connect(
            self.daemon.socket,
            spec,
            self._model.memory,
            model,
            idle_max=0,
            weights=f"breakeven {model.name}",
            limits=Limits(fetch_s=_REQUEST_S),  # always-load waits, whatever it takes
        )
        limits = EngineLimits(batched_tokens_max=CHUNK_TOKENS, load_s_max=_REQUEST_S)
        self.engine = Engine(self._model, self.tables, limits)
        self._numbers = itertools.count(1)
        self._sequences = 0
        self._busy_names: list[str] = []
        self._busy_until = 0
        self._random = np.random.default_rng(1)
        self._vocab = spec.vocab
        self._wait_attached()
        self.prompts = {length: self._make(length) for length in lengths}
        self.settle()

    @property
    def client(self) -> Client:
        client: Client = self.tables.client
        return client

    def close(self) -> None:
        """The engine leaves, the daemon ends."""
        self.engine.close()
        self.daemon.end()

    # ---- before a request --------------------------------------------------------------------------------

    def _make(self, length: int) -> tuple[int, ...]:
        """A prompt of `length` tokens of which all full blocks are saved; one more token follows them."""
        prompt = tuple(self._random.integers(0, self._vocab, length + 1).tolist())
        self.run(prompt, new_tokens=1)
        return prompt

    def settle(self) -> None:
        """Every save has ended and is on the disk."""
        if not self.tables.settle(60.0):
            raise RuntimeError("saves did not end within a minute")
        self.daemon.flush()

    def only_on_disk(self, prompt: Sequence[int]) -> None:
        """Fill HOST with blocks that nobody wants, until nothing of this prompt is left there.

        Raises:
            RuntimeError: that did not help, or the disk lacks a part of it.
        """
        blocks = (len(prompt) - 1) // BLOCK_TOKENS
        self.tables.settle(_REQUEST_S)  # tables of ended requests wait for their saves
        for _ in range(5):
            spans = self._spans(prompt)
            if spans == {"NVME": blocks}:
                return
            self._fill_host()
        raise RuntimeError(f"the prompt of {len(prompt)} tokens should be on NVME alone, and is on {spans}")

    def _fill_host(self) -> None:
        size = BLOCK_TOKENS * self.token_bytes
        count = int(self._arena_bytes // size)
        tokens = self._random.integers(0, self._vocab, count * BLOCK_TOKENS)
        chain = self.client.chain(tokens, "default", Reuse.OWN)
        assert chain is not None, "the daemon went away"
        for start in range(0, count, 256):
            stop = min(start + 256, count)
            save = self.client.save(chain, start, stop, np.arange(stop - start, dtype=np.uint32))
            if save.wait(_REQUEST_S) is None:
                raise RuntimeError("a save did not end")

    def _spans(self, prompt: Sequence[int]) -> dict[str, int]:
        """Blocks of a prompt by where they are."""
        chain = self.client.chain(prompt, "default", Reuse.OWN)
        assert chain is not None, "the daemon went away"
        found = self.client.lookup(chain, (len(prompt) - 1) // BLOCK_TOKENS, _LOAD_ALL)
        if not isinstance(found, Hit):
            return {}
        self.client.release(found.lease)
        return {span.tier.value: span.stop - span.start for span in found.plan.spans}

    def _wait_attached(self) -> None:
        deadline = time.monotonic() + _ATTACH_S
        while not self.tables.attached and time.monotonic() < deadline:
            self.tables.poll()
            time.sleep(0.005)
        if not self.tables.attached:
            raise self.daemon.failed("the daemon did not accept the engine")

    # ---- requests ----------------------------------------------------------------------------------------

    def ask(self, arm: str, length: int, new_tokens: int = 1) -> Answer:
        """One request for the prompt of that length, which only the disk has."""
        prompt = self.prompts[length]
        self.only_on_disk(prompt)
        self._busy_again()
        self.tables.force = ARMS[arm]
        try:
            name, report = self.run(prompt, new_tokens, reuse="none" if arm == "recompute" else "own")
        finally:
            self.tables.force = None
        plan = {} if arm == "recompute" else self.client.explain(name)
        loaded = sum(report.reused.values())
        return Answer(report.ttft_s or 0.0, report.tokens, str(plan.get("choice", "")), loaded, plan)

    def run(self, prompt: Sequence[int], new_tokens: int, reuse: Any = "own") -> tuple[str, Report]:
        """A request beside whatever else runs, from its arrival to its end."""
        name = f"breakeven-{next(self._numbers)}"
        request = Request(name, tuple(prompt), new_tokens, ignore_eos=True, reuse=reuse)
        if not self.engine.add(request):
            raise RuntimeError("the engine's queue is full")
        deadline = time.monotonic() + _REQUEST_S
        while time.monotonic() < deadline:
            before = self.engine.steps
            for output in self.engine.step():
                if output.request_id == name and output.report is not None:
                    return name, output.report
            if self.engine.steps == before:
                time.sleep(0.0005)  # as `Engine.generate` does: the cores are the loaders'
        raise RuntimeError(f"a request of {len(prompt)} tokens took more than {_REQUEST_S} s")

    @contextmanager
    def busy(self, sequences: int) -> Iterator[None]:
        """So many sequences decode in every step; others take their place before they get long."""
        self._sequences = sequences
        try:
            yield
        finally:
            self._sequences = 0
            self._busy_again()

    def _busy_again(self) -> None:
        if self._busy_names and self._sequences and self.engine.steps < self._busy_until:
            return
        for name in self._busy_names:
            self.engine.abort(name)
        self._busy_until = self.engine.steps + 400
        self._busy_names = [f"busy-{next(self._numbers)}" for _ in range(self._sequences)]
        for name in self._busy_names:
            prompt = tuple(self._random.integers(0, self._vocab, 64).tolist())
            self.engine.add(Request(name, prompt, 1000, ignore_eos=True, reuse="none"))
        for _ in range(3 if self._busy_names else 0):  # their prompts are through
            self.engine.step()


@contextmanager
def stage(lengths: Sequence[int], model: Path | None = None) -> Iterator[Stage]:
    """All of it, gone afterwards."""
    found = model or find_smollm2()
    with tempfile.TemporaryDirectory(prefix="kvstore-breakeven-") as name, disk_folder() as disk:
        settings = disk_settings(disk)
        made = Stage(Path(name), settings, found, lengths)
        try:
            yield made
        finally:
            made.close()
