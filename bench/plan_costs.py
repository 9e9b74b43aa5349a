"""The model behind bench.plan_sim: what computing and loading cost, and the exact best of both.

No policy here: the exact answer tries every place at which computing and loading could meet. It is what the
daemon's policy is held against.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bench.plan_trace import Trace, TraceError

__all__ = ["BLOCK_TOKENS", "GB", "NEVER", "Cell", "Costs", "Floats", "Matches", "Whole", "tuned"]

Floats = NDArray[np.float64]
Whole = NDArray[np.int64]

GB = 1e9
BLOCK_TOKENS = 16
"""128 KiB a token make blocks of 2 MiB; 32 of them are one of the trace's."""
NEVER = 1 << 62
"""A threshold in tokens above every match."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Of an engine and a tier.

    Attributes:
        bytes_per_s: of the tier.
        slowdown: how many times as long prefill takes as on an idle engine.
        tokens_per_s: of prefill at position 0, idle.
        attention_tokens: position at which attention costs as much as everything else.
        token_bytes: KV of a token.
        setup_s: of a load, before its first byte.
    """

    bytes_per_s: float = 3 * GB
    slowdown: float = 1.0
    tokens_per_s: float = 25_000.0
    attention_tokens: float = 31_000.0
    token_bytes: int = 128 << 10
    setup_s: float = 0.002

    def compute_s(self, stop: Floats) -> Floats:
        """Seconds to compute [0, stop): the integral of the marginal cost."""
        return (stop + stop * stop / (2 * self.attention_tokens)) * (self.slowdown / self.tokens_per_s)

    def load_s(self, tokens: Floats) -> Floats:
        """Seconds to load that many tokens; none take none."""
        return np.where(tokens > 0, self.setup_s + tokens * (self.token_bytes / self.bytes_per_s), 0.0)

    def reload_s(self, start: Floats, stop: Floats, match: Floats) -> Floats:
        """Seconds to load [start, stop) while [0, start) is computed, and then to compute [stop, match)."""
        together = np.maximum(self.compute_s(start), self.load_s(stop - start))
        return together + (self.compute_s(match) - self.compute_s(stop))

    def even_bytes_per_s(self, tokens: Floats) -> Floats:
        """Bandwidth at which loading [0, tokens) takes as long as computing it, which is more than set-up."""
        return tokens * self.token_bytes / (self.compute_s(tokens) - self.setup_s)


@dataclass(frozen=True, slots=True)
class Matches:
    """Requests by the length of their match: what is decided about one depends on nothing else.

    Attributes:
        tokens: (lengths,) ascending, all above 0.
        requests: (lengths,) how many have it.
        rest_s: seconds to compute what lies behind all of these matches, on an idle engine.
    """

    tokens: Whole
    requests: Whole
    rest_s: float

    @staticmethod
    def of(trace: Trace) -> Matches:
        """Of the requests that have one; without, there is nothing to decide.

        Raises:
            TraceError: none has.
        """
        some = trace.matched_tokens > 0
        if not some.any():
            raise TraceError(
                "no prompt of the trace begins like an earlier one, so there is nothing to decide: take more "
                "of the trace, or another one"
            )
        tokens, requests = np.unique(trace.matched_tokens[some], return_counts=True)
        whole_s = Costs().compute_s(trace.prompt_tokens[some].astype(float))
        match_s = Costs().compute_s(trace.matched_tokens[some].astype(float))
        return Matches(tokens, requests.astype(np.int64), float((whole_s - match_s).sum()))

    def sum(self, values: Floats) -> float:
        """Over all requests, of one value per length."""
        return float(values @ self.requests)

    def break_even(self, costs: Costs) -> dict[str, float]:
        """In bytes/s: mean and median over requests, where both sums are equal, and of a first token."""
        tokens = self.tokens.astype(float)
        each = costs.even_bytes_per_s(tokens)
        spare_s = self.sum(costs.compute_s(tokens)) - costs.setup_s * int(self.requests.sum())
        return {
            "mean": self.sum(each) / int(self.requests.sum()),
            "median": float(np.median(np.repeat(each, self.requests))),
            "of_sums": self.sum(tokens) * costs.token_bytes / spare_s,
            "first_token": costs.token_bytes * costs.tokens_per_s / costs.slowdown,
        }


@dataclass(frozen=True, slots=True)
class Cell:
    """Seconds per length of match, of one tier and one load of the engine.

    Attributes:
        costs: of both.
        tokens: (lengths,) the matches.
        recompute_s, load_s: the two pure choices.
        split_s: the least of all places to meet; at both ends these are the pure choices.
    """

    costs: Costs
    tokens: Whole
    recompute_s: Floats
    load_s: Floats
    split_s: Floats

    @staticmethod
    def of(tokens: Whole, costs: Costs) -> Cell:
        """Every place to meet is tried. Cost: Σ tokens / 16."""
        lengths = tokens.astype(float)
        split = [_least(match, costs) for match in lengths]
        return Cell(costs, tokens, costs.compute_s(lengths), costs.load_s(lengths), np.array(split))

    @property
    def pure_s(self) -> Floats:
        """The better of the two pure choices."""
        return np.minimum(self.recompute_s, self.load_s)

    def threshold_s(self, least: int) -> Floats:
        """What it takes to load matches of `least` tokens and more whole, and to compute the others."""
        return np.where(self.tokens >= least, self.load_s, self.recompute_s)


def _least(match: float, costs: Costs) -> float:
    meet = np.append(np.arange(0.0, match, BLOCK_TOKENS), match)
    stop = np.full_like(meet, match)
    return float(costs.reload_s(meet, stop, stop).min())


def tuned(matches: Matches, cells: list[Cell]) -> int:
    """The threshold in tokens whose seconds over the better pure choice are least on average over cells.

    Returns:
        One of the lengths; `NEVER` if loading none is best.
    """
    candidates = [*(int(tokens) for tokens in matches.tokens), NEVER]

    def over(least: int) -> float:
        return sum(matches.sum(cell.threshold_s(least)) / matches.sum(cell.pure_s) for cell in cells)

    return min(candidates, key=over)
