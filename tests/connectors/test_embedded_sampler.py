"""Choosing the next token."""

from __future__ import annotations

import torch
from kvstore.connectors.embedded.sampler import TIE_GAP, Sampler, sample_greedy


def test_greedy_takes_the_best_and_notes_ties() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, 2.0 + TIE_GAP / 3, 0.0]], dtype=torch.float32)
    first, second = sample_greedy(logits)
    assert (first.token, first.tied) == (1, False)
    assert second.tied


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([1.0, 0.0, 2.0, -30.0])
    sampler = Sampler(temperature=2.0, top_p=1.0, seed=1)
    counts = torch.bincount(torch.tensor([sampler.sample(logits).token for _ in range(4_000)]), minlength=4)
    # 4,000 draws: a standard deviation of at most 0.008, so 0.04 is five of them.
    torch.testing.assert_close(counts / 4_000, torch.softmax(logits / 2, dim=0), atol=0.04, rtol=0.0)


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    logits = torch.log(torch.tensor([0.1, 0.5, 0.15, 0.25]))
    for top_p, kept in ((0.4, {1}), (0.5 - 1e-6, {1}), (0.6, {1, 3}), (0.8, {1, 2, 3}), (1.0, {0, 1, 2, 3})):
        sampler = Sampler(temperature=1.0, top_p=top_p, seed=3)
        assert {sampler.sample(logits).token for _ in range(300)} == kept


def test_equal_seeds_draw_equal_tokens() -> None:
    logits = torch.randn(50, 100, generator=torch.Generator().manual_seed(0))

    def draw(seed: int | None) -> list[int]:
        sampler = Sampler(1.0, 0.95, seed)
        return [sampler.sample(row).token for row in logits]

    assert draw(4) == draw(4)
    assert draw(4) != draw(5)
    assert draw(None) != draw(None)


def test_a_low_temperature_is_nearly_greedy() -> None:
    logits = torch.randn(20, 100, generator=torch.Generator().manual_seed(0))
    sampler = Sampler(1e-4, 1.0, 0)
    assert [sampler.sample(row).token for row in logits] == logits.argmax(dim=-1).tolist()
