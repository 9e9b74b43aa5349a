"""From how long a prefix on reloading wins: against arithmetic, and every shorter length tried."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.cli.break_even import TOKENS_MAX, Block, Computing, computing_of, first_win
from kvstore.policy.rates import Rates, Source, Transfer
from kvstore.policy.reload import Choice, ReloadQuestion, Way, decide
from kvstore.types import Span, Tier

BLOCK = Block(16, 2 << 20)
HOST, NVME = Source(Tier.HOST), Source(Tier.NVME)


def learnt(latency_s: float, bytes_per_s: float, below_per_s: float = 0.0) -> Rates:
    """Rates after loads of many sizes that all took what such a source takes."""
    rates = Rates()
    for source, speed in ((HOST, bytes_per_s), (NVME, below_per_s)):
        for turn in range(48 if speed else 0):
            size = (1, 4, 8, 19)[turn % 4] * BLOCK.size_bytes
            rates.observe(source, Transfer(size, 0, latency_s + size / speed), turn / 100)
    return rates


def linear(tokens_per_s: float) -> Computing:
    return Computing(1 / tokens_per_s, 0.0, "a test")


def test_a_tier_that_never_pays_off_says_so() -> None:
    # 2 MiB at 10 MB/s take 0.2 s, 16 tokens at 8,000 a second 2 ms.
    assert first_win(learnt(0.001, 1e7), HOST, BLOCK, linear(8000)) is None


def test_without_latency_the_first_block_wins() -> None:
    # 0.1 ms against 2 ms; at 1e10 B/s it would come later than the lag rule waits for a first block.
    assert first_win(learnt(0.0, 2e10), HOST, BLOCK, linear(8000)) == 16
    assert first_win(learnt(0.0, 1e10), HOST, BLOCK, linear(8000)) == 32


def test_with_attention_long_prefixes_win_on_a_slow_tier() -> None:
    # Loading takes 2.1 s per 1,000 tokens; computing 1 s at the start, and more than 2.1 s from 11,000 on.
    grows = Computing(1e-3, 1e-7, "a test")
    won = first_win(learnt(0.0, 6.2e7), HOST, BLOCK, grows)
    assert won is not None
    assert 20_000 < won < 30_000  # where the mean exceeds it
    assert first_win(learnt(0.0, 6.2e7), HOST, BLOCK, Computing(1e-3, 0.0, "a test")) is None


def test_what_lies_below_crosses_host() -> None:
    fast, slow = learnt(0.001, 1e10, 2e9), learnt(0.001, 1e7, 2e9)
    assert first_win(fast, NVME, BLOCK, linear(4000)) is not None
    assert first_win(slow, NVME, BLOCK, linear(4000)) is None


@given(st.sampled_from([1e-4, 1e-3, 1e-2]), st.floats(8.3, 10.3), st.sampled_from([2000.0, 8000.0]))
def test_it_is_the_first_that_the_planner_loads(latency_s: float, log_speed: float, speed: float) -> None:
    rates, computing = learnt(latency_s, 10**log_speed), linear(speed)
    won = first_win(rates, HOST, BLOCK, computing)

    def choice(tokens: int) -> Choice:
        blocks = tokens // 16
        host = rates.speed(HOST, blocks * BLOCK.size_bytes)
        way = Way(Span(Tier.HOST, 0, blocks), host.latency_s, host.bytes_per_s)
        return decide(ReloadQuestion(tokens + 1, 16, BLOCK.size_bytes, 0, (way,), computing)).choice

    if won is None:
        assert choice(TOKENS_MAX) is Choice.RECOMPUTE
    else:
        assert choice(won) is Choice.LOAD
        assert won == 16 or choice(won - 16) is Choice.RECOMPUTE


# ---- what a daemon has learnt -----------------------------------------------------------------------------


def report(*curves: dict[str, Any], speed: float = 0.0) -> dict[str, Any]:
    """As `kvstore status` gives it, as far as it matters here."""
    named = {f"{number:02x}": curve for number, curve in enumerate(curves)}
    return {"groups": {"default": {"pricing": {"curves": named}, "prefill_tokens_per_s": speed}}}


def test_the_curve_goes_through_the_prompts_that_status_shows() -> None:
    truth = Computing(1.2e-4, 3e-9, "truth")
    seconds = {str(tokens): truth(0, tokens) for tokens in (1000, 8000)}
    found = computing_of(report({"model": "SmolLM2", "steps": 1234, "seconds": seconds}))
    assert found is not None
    assert (found.token_s, found.position_s) == (pytest.approx(1.2e-4), pytest.approx(3e-9))
    assert found.origin == "the prefill curve of SmolLM2, 1,234 steps"
    assert found(500, 700) == pytest.approx(truth(500, 700))


def test_of_several_curves_the_best_known_counts() -> None:
    few = {"model": "a", "steps": 3, "seconds": {"1000": 9.0, "8000": 99.0}}
    many = {"model": None, "steps": 50, "seconds": {"1000": 0.5, "8000": None}}
    unknown = {"model": "c", "steps": 900, "seconds": {"1000": None, "8000": None}}
    found = computing_of(report(few, many, unknown, speed=7.0))
    assert found is not None
    assert (found.token_s, found.position_s) == (0.0005, 0.0)
    assert found.origin == "the prefill curve of an engine that has left, 50 steps"


def test_a_curve_that_gets_faster_with_length_has_no_attention_term() -> None:
    found = computing_of(report({"model": "a", "steps": 9, "seconds": {"1000": 1.0, "8000": 4.0}}))
    assert found is not None
    assert (found.token_s, found.position_s) == (0.0005, 0.0)


def test_without_a_curve_the_speed_counts_and_without_that_nothing_is_known() -> None:
    found = computing_of(report(speed=4000.0))
    assert found is not None
    assert (found.token_s, found.position_s) == (0.00025, 0.0)
    assert computing_of(report()) is None
    older = {"groups": {"default": {"prefill_tokens_per_s": 4000.0}}}  # a daemon without pricing
    assert computing_of(older) == found
