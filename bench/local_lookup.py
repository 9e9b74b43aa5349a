"""Lookups at a daemon that holds a million nodes in random order, against an echo of all the chain's keys."""

from __future__ import annotations

import statistics
import struct
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.limits import Echo
from bench.measure import Arm, Measured, measure
from bench.paged import BenchDaemon, PagedMemory, client_of, layout_of
from kvstore.client import Client
from kvstore.keys import KeyChain
from kvstore.types import Hit, Miss, Reuse

__all__ = ["lookups"]

# A slot of one page: what is measured is metadata, and a million blocks must fit.
BLOCK_BYTES = 2048
PAGE_BYTES = 4096
MEMORY_BLOCKS = 4096
LENGTHS = (1000, 8000)
CHAINS = 6  # of each length, so that no lookup finds the nodes of the one before in a nearer cache
FILLER_BLOCKS = 4000
IN_A_ROW = 8  # of one kind, other chains each time; a turn is their median


class _Planter:
    """Saves chains block by block in random turns: neighbours in a chain are none in memory."""

    def __init__(self, client: Client, nodes: int) -> None:
        self.client = client
        self.random = np.random.default_rng(1)
        self.planted = 0
        self._blocks = np.arange(MEMORY_BLOCKS, dtype=np.uint32)
        self.prompts = {length: [self.tokens(length) for _ in range(CHAINS)] for length in LENGTHS}
        self.by_length = {length: [self.of(p) for p in prompts] for length, prompts in self.prompts.items()}
        self._plant([chain for chains in self.by_length.values() for chain in chains], nodes)

    def chain(self, blocks: int) -> KeyChain:
        """Keys that nobody has used before."""
        return self.of(self.tokens(blocks))

    def of(self, prompt: NDArray[np.uint32]) -> KeyChain:
        """Its keys, as an engine makes them."""
        made = self.client.chain(prompt, "default", Reuse.OWN)
        assert made is not None
        return made

    def tokens(self, blocks: int) -> NDArray[np.uint32]:
        """Random ids for so many blocks."""
        return self.random.integers(0, 1 << 31, 16 * blocks, np.uint32)

    def _plant(self, chains: list[KeyChain], nodes: int) -> None:
        order = np.concatenate([np.full(len(chain), i, np.uint32) for i, chain in enumerate(chains)])
        self.random.shuffle(order)
        between = max(0, nodes - len(order)) / len(order)
        reached = [0] * len(chains)
        filler, filled, owed = self.chain(FILLER_BLOCKS), 0, 0.0
        for number in order.tolist():
            self._save(chains[number], reached[number], 1)
            reached[number] += 1
            owed += between
            some = int(min(owed, len(filler) - filled))
            if some:
                self._save(filler, filled, some)
                filled, owed = filled + some, owed - some
            if filled == len(filler):
                filler, filled = self.chain(FILLER_BLOCKS), 0

    def _save(self, chain: KeyChain, start: int, count: int) -> None:
        done = self.client.save(chain, start, start + count, self._blocks[:count]).wait(30)
        if done is None or done.ready != count:
            raise SystemExit(f"could not save blocks [{start}, {start + count}): {done}")
        self.planted += count


def lookups(nodes: int, turns: int) -> tuple[dict[str, Any], list[str]]:
    """Full hit, half a hit and a miss, for every length.

    Returns:
        Figures, and reasons why they may not be believed.
    """
    figures: dict[str, Any] = {}
    voids = []
    memory = PagedMemory(layout_of(BLOCK_BYTES), MEMORY_BLOCKS)
    capacity = nodes * PAGE_BYTES * 17 // 16
    capacity += -capacity % (32 << 20)
    settings = {"host.capacity_bytes": capacity, "index.nodes_max": 2 * nodes}
    with (
        tempfile.TemporaryDirectory(prefix="kvstore-bench-") as path,
        BenchDaemon(Path(path), settings) as daemon,
    ):
        echo = Echo(Path(path))
        try:
            with client_of(daemon.socket, memory) as client:
                start = time.perf_counter()
                planter = _Planter(client, nodes)
                index = client.status()["groups"]["default"]["index"]["nodes"]
                figures["lookup_nodes"] = index
                figures["lookup_planting_s"] = round(time.perf_counter() - start, 1)
                for length in LENGTHS:
                    done = _one_length(client, planter, echo, length, turns)
                    for kind, name in (("hit", ""), ("half", "half_"), ("miss", "miss_")):
                        figures[f"lookup_{name}{length}_over_echo"] = done.cost(kind).json()
                    figures[f"lookup_{length}"] = done.json()
                    voids.append(done.void)
        finally:
            echo.close()
    return figures, voids


def _one_length(client: Client, planter: _Planter, echo: Echo, length: int, turns: int) -> Measured:
    known = planter.by_length[length]
    random = planter.random
    half, missing = [], []
    for prompt in planter.prompts[length]:
        # The same first half, then blocks that nobody saved.
        new = planter.tokens(length - length // 2)
        half.append(planter.of(np.concatenate([prompt[: len(prompt) - len(new)], new])))
        missing.append(planter.chain(length))
    payload = known[0].keys.tobytes()
    into = bytearray(len(payload) + struct.calcsize("<I"))

    def ask(chains: list[KeyChain], expected: int) -> float:
        chain = chains[int(random.integers(len(chains)))]
        start = time.perf_counter()
        found = client.lookup(chain)
        seconds = time.perf_counter() - start
        if isinstance(found, Hit):
            blocks = found.blocks
            if len(found.slots) != blocks:
                raise SystemExit(f"{len(found.slots)} slots for {blocks} blocks")
            client.release(found.lease)
        else:
            blocks = 0 if isinstance(found, Miss) else -1
        if blocks != expected:
            raise SystemExit(f"a lookup of {length} blocks found {found}, expected {expected}")
        return seconds

    def bounce() -> float:
        start = time.perf_counter()
        echo.ask(payload, into)
        return time.perf_counter() - start

    def often(work: Callable[[], float]) -> Callable[[], float]:
        return lambda: statistics.median(work() for _ in range(IN_A_ROW))

    arms = [
        Arm("hit", often(lambda: ask(known, length))),
        Arm("half", often(lambda: ask(half, length // 2))),
        Arm("miss", often(lambda: ask(missing, 0))),
    ]
    return measure([Arm("echo", often(bounce))], arms, turns=turns, warm_turns=3)
