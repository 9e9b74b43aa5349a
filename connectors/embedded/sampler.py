"""Next token from logits: greedy, or temperature with a nucleus, reproducible by seed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Sampled", "Sampler", "sample_greedy"]

TIE_GAP = 1e-5
"""Two best logits closer than this are a tie: float32 sums in another order may swap them."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """One token, and whether the greedy choice was a tie (always False when sampling by temperature)."""

    token: int
    tied: bool


def sample_greedy(logits: Tensor) -> list[Sampled]:
    """The best token of each row of `logits` [rows, vocab]."""
    best = torch.topk(logits, 2, dim=-1)
    tied = (best.values[:, 0] - best.values[:, 1] < TIE_GAP).tolist()
    return [Sampled(token, tie) for token, tie in zip(best.indices[:, 0].tolist(), tied, strict=True)]


class Sampler:
    """The random choice of one request. Equal seeds and logits give equal tokens, alone or in a batch.

    Args:
        temperature: > 0; logits are divided by it.
        top_p: in (0, 1]; the smallest set of best tokens with at least this probability is kept.
        seed: None draws one from the system.
    """

    def __init__(self, temperature: float, top_p: float, seed: int | None) -> None:
        self._temperature, self._top_p = temperature, top_p
        self._generator = torch.Generator()
        if seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(seed)

    def sample(self, logits: Tensor) -> Sampled:
        """One token from one row of logits [vocab]; draws exactly one random number."""
        scaled = logits.detach().to(device="cpu", dtype=torch.float64) / self._temperature
        probabilities, order = torch.sort(torch.softmax(scaled, dim=-1), descending=True, stable=True)
        sums = torch.cumsum(probabilities, dim=-1)
        kept = int(torch.searchsorted(sums, self._top_p * float(sums[-1]))) + 1
        sums = sums[:kept]
        # An inverse-CDF draw moves by one token at most when logits differ in their last digits.
        draw = torch.rand(1, generator=self._generator, dtype=torch.float64) * sums[-1]
        choice = min(int(torch.searchsorted(sums, draw, right=True)), kept - 1)
        return Sampled(int(order[choice]), False)
