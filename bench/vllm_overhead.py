"""What does a connector cost an engine whose prompts nobody has seen before?

CPU seconds of the engine and of the daemon, all threads of both, over alternating runs of an engine with the
connector and one without, each run with prompts of its own. The store is not spared: what should have been
saved is counted in the daemon afterwards.
"""

from __future__ import annotations

import math
import statistics
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


@dataclass(slots=True)
class Overhead:
    """Pairs of runs.

    Attributes:
        on, off: engines that differ by the connector alone.
        daemon: process id.
        tool: asks the daemon.
        vocab: of the model.
        prompts, length, answer: of one run: how many, of how many tokens, with how many new ones.
    """

    on: EngineProcess
    off: EngineProcess
    daemon: int
    tool: Client
    vocab: int
    prompts: int = 2
    length: int = 2_000
    answer: int = 16
    block_tokens: int = 128
    _random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(7))

    def measure(self, pairs: int) -> dict[str, Any]:
        """`pairs`, after one that does not count."""
        self._pair(0)
        before = self._saved()
        found = [self._pair(number) for number in range(pairs)]
        shares = [(on - off) / off for on, off, _ in found]
        expected = pairs * self.prompts * ((self.length + self.answer - 1) // self.block_tokens)
        return {
            "overhead_no_reuse_p95": round(upper_bound(shares), 4),
            "overhead_no_reuse": round(statistics.fmean(shares), 4),
            "overhead_no_reuse_wall": round(statistics.fmean(wall for _, _, wall in found), 4),
            "saved_share": round((self._saved() - before) / expected, 4),
            "overhead": {
                "pairs": pairs,
                "prompts": self.prompts,
                "prompt_tokens": self.length,
                "new_tokens": self.answer,
                "cpu_seconds_off": round(statistics.median(off for _, off, _ in found), 2),
                "shares": [round(share, 4) for share in shares],
            },
        }

    def _saved(self) -> int:
        """Blocks that the daemon has ever made readable."""
        groups = self.tool.status()["groups"]
        return sum(int(group["counters"]["saved_blocks"]) for group in groups.values())

    def _pair(self, number: int) -> tuple[float, float, float]:
        """CPU seconds on and off, and by how much the wall time differs."""
        if number % 2:
            off_cpu, off_wall = self._run(self.off, 0)
            on_cpu, on_wall = self._run(self.on, self.daemon)
        else:
            on_cpu, on_wall = self._run(self.on, self.daemon)
            off_cpu, off_wall = self._run(self.off, 0)
        return on_cpu, off_cpu, (on_wall - off_wall) / off_wall

    def _run(self, engine: EngineProcess, daemon: int) -> tuple[float, float]:
        """CPU seconds of one run with all that it started, and the seconds until its last token."""
        prompts = self._random.integers(3, self.vocab, (self.prompts, self.length)).tolist()
        begin = engine.cpu_seconds() + (cpu_seconds(daemon) if daemon else 0.0)
        answers = engine.generate_all(prompts, self.answer)
        engine.drain()
        end = engine.cpu_seconds() + (cpu_seconds(daemon) if daemon else 0.0)
        return end - begin, max(answer.seconds for answer in answers)
