"""What does a connector cost an engine whose prompts nobody has seen before?

CPU seconds of the engine and of the daemon, all threads of both, over runs with the connector and runs of the
same engine with the connector taken out, each with prompts of its own. The store is not spared: what should
have been saved is counted in the daemon afterwards.

It is one process on purpose. Two engine processes without any connector differ by up to 15 % in CPU seconds
for as long as they live (where their weights lie in memory): no number of pairs would average that away. What
the connector's threads do while it is taken out is taken off the run without.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bench.vllm_family import cpu_seconds
from bench.vllm_processes import EngineProcess
from kvstore.client import Client

__all__ = ["Overhead", "upper_bound"]

_Z95 = 1.6448536


def upper_bound(values: Sequence[float]) -> float:
    """Of the mean, one-sided at 95 %, by Student's t (its quantile is right to 1e-3 from 20 values on)."""
    freedom = len(values) - 1
    z3, z5 = _Z95**3, _Z95**5
    quantile = _Z95 + (z3 + _Z95) / (4 * freedom) + (5 * z5 + 16 * z3 + 3 * _Z95) / (96 * freedom**2)
    return statistics.fmean(values) + quantile * statistics.stdev(values) / math.sqrt(len(values))


@dataclass(frozen=True, slots=True)
class Run:
    """One run.

    Attributes:
        cpu_s: CPU seconds that count.
        wall_s: until all was answered and saved.
    """

    cpu_s: float
    wall_s: float


@dataclass(slots=True)
class Overhead:
    """Turns of three runs: with the connector, without, and without again as control.

    Attributes:
        engine: has the connector.
        daemon: process id.
        tool: asks the daemon.
        vocab: of the model.
        prompts, length, answer: of one run: how many, of how many tokens, with how many new ones.
    """

    engine: EngineProcess
    daemon: int
    tool: Client
    vocab: int
    prompts: int = 2
    length: int = 2_000
    answer: int = 16
    block_tokens: int = 128
    _random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(7))

    def measure(self, pairs: int) -> dict[str, Any]:
        """`pairs` of runs with and without, after one that does not count."""
        self._turn(0)
        before = self._saved()
        found = [self._turn(number) for number in range(pairs)]
        expected = pairs * self.prompts * ((self.length + self.answer - 1) // self.block_tokens)
        saved_share = (self._saved() - before) / expected
        costs = [turn["on"].cpu_s / turn["off"].cpu_s - 1 for turn in found]
        controls = [turn["control"].cpu_s / turn["off"].cpu_s - 1 for turn in found]
        walls = [turn["on"].wall_s / turn["off"].wall_s - 1 for turn in found]
        return {
            "overhead_no_reuse_p95": round(upper_bound(costs), 4),
            "overhead_no_reuse": round(statistics.fmean(costs), 4),
            "overhead_no_reuse_wall": round(statistics.fmean(walls), 4),
            "saved_share": round(saved_share, 4),
            "overhead": {
                "pairs": pairs,
                "prompts": self.prompts,
                "prompt_tokens": self.length,
                "new_tokens": self.answer,
                "cpu_seconds_off": round(statistics.median(turn["off"].cpu_s for turn in found), 2),
                "control": round(statistics.fmean(controls), 4),
                "control_p95": round(upper_bound([abs(control) for control in controls]), 4),
                "shares": [round(cost, 4) for cost in costs],
                "control_shares": [round(control, 4) for control in controls],
            },
        }

    def _saved(self) -> int:
        """Blocks that the daemon has ever made readable."""
        groups = self.tool.status()["groups"]
        return sum(int(group["counters"]["saved_blocks"]) for group in groups.values())

    def _turn(self, number: int) -> dict[str, Run]:
        """One run of each; who is first changes."""
        arms = ("on", "off", "control")
        first = number % len(arms)
        return {arm: self._run(with_connector=arm == "on") for arm in (*arms[first:], *arms[:first])}

    def _run(self, *, with_connector: bool) -> Run:
        prompts = self._random.integers(3, self.vocab, (self.prompts, self.length)).tolist()
        if not with_connector:
            self.engine.ask("connector", {"present": False})
        begin = self._cpu_seconds(with_connector)
        began = time.perf_counter()
        self.engine.generate_all(prompts, self.answer)
        self.engine.drain()
        wall_s = time.perf_counter() - began
        cpu_s = self._cpu_seconds(with_connector) - begin
        if not with_connector:
            self.engine.ask("connector", {"present": True})
        return Run(cpu_s, wall_s)

    def _cpu_seconds(self, with_connector: bool) -> float:
        """So far; either everything that the connector causes is in it, or nothing of it."""
        if with_connector:
            return self.engine.cpu_seconds() + cpu_seconds(self.daemon)
        return self.engine.cpu_seconds() - float(self.engine.ask("connector_cpu")["seconds"])
