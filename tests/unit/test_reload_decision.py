"""The decision: against all alternatives written out, in the cases of the field, with a source that dies."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from reload_oracle import (
    BYTES,
    TOKENS,
    Curve,
    compute_s,
    load_s,
    questions,
    reach,
    total_s,
    unknown,
    written_out,
)

from kvstore.policy.planned import Planned
from kvstore.policy.prefill import PrefillCurve, Step
from kvstore.policy.rates import Rates, Source, Transfer
from kvstore.policy.reload import BLIND_S, Choice, Prefill, ReloadQuestion, Way, decide
from kvstore.types import Span, Tier

# ---- properties -------------------------------------------------------------------------------------------


@given(questions())
@settings(max_examples=300, deadline=None)
def test_it_is_the_best_of_all_that_could_be_done(question: ReloadQuestion) -> None:
    decision, best = decide(question), written_out(question)
    curve = question.prefill
    assert isinstance(curve, Curve)
    assert set(decision.predicted_s) == set(Choice)
    for choice in Choice:
        predicted, exact = decision.predicted_s[choice], best[choice]
        assert (predicted is None) == (exact is None), choice
        if predicted is not None and exact is not None:
            assert exact <= predicted * (1 + 1e-9)
            if choice is not decision.choice:
                # The lengths in between are not all tried: a step's overhead may be missed, and where loading
                # all takes next to nothing, a part of that.
                clear_s = 0.03 * (best[Choice.RECOMPUTE] or 0.0) if choice is Choice.LOAD else 0.0
                assert predicted <= exact * (1 + 1e-9) + curve.c0 + clear_s
    chosen = decision.predicted_s[decision.choice]
    assert chosen == pytest.approx(total_s(question, decision))
    if decision.choice is not Choice.RECOMPUTE:
        recompute = best[Choice.RECOMPUTE]
        assert recompute is not None
        assert chosen is not None
        assert chosen < recompute
        assert decision.load_s < 0.95 * decision.recompute_s
        split = best[Choice.SPLIT]  # it always may be begun, if it saves enough
        assert split is None or chosen <= split * (1 + 1e-9) + 0.05 * recompute + curve.c0


@given(questions())
@settings(max_examples=200, deadline=None)
def test_spans_and_load_say_the_same(question: ReloadQuestion) -> None:
    decision = decide(question)
    start, stop = decision.load_start, decision.load_stop
    assert question.device <= start <= stop <= reach(question)
    blocks = [k for span in decision.spans for k in range(span.start, span.stop)]
    assert blocks == [*range(question.device), *range(start, stop)]
    for span in decision.spans:
        owners = [way.span for way in question.ways if way.span.tier is span.tier]
        assert span.tier is Tier.GPU or owners[0].start <= span.start < span.stop <= owners[0].stop
    assert (decision.choice is Choice.RECOMPUTE) == (start == stop)
    assert decision.choice is not Choice.LOAD or start == question.device
    assert decision.choice is not Choice.SPLIT or start > question.device
    plan = Planned(7, 0.0, decision).fetch_plan()
    assert (plan.load_start, plan.load_stop, plan.spans, plan.reason, plan.choice, plan.id) == (
        start,
        stop,
        decision.spans,
        decision.reason,
        decision.choice,
        7,
    )


@given(questions(fast=True), st.integers(0, 1 << 30))
@settings(max_examples=300, deadline=None)
def test_a_source_that_dies_costs_a_tenth_of_recompute_at_most(question: ReloadQuestion, seed: int) -> None:
    """Loads as they were decided, from a source that delivers as predicted and then never again."""
    decision = decide(question)
    rule = decision.lag_rule()
    assume(rule is not None and decision.choice is Choice.LOAD)
    assert rule is not None
    curve = question.prefill
    assert isinstance(curve, Curve)
    start, stop = decision.load_start, decision.load_stop
    dies_after = np.random.default_rng(seed).integers(start, stop + 1)
    recompute = decision.predicted_s[Choice.RECOMPUTE]
    assert recompute is not None
    tail_s = compute_s(question, stop * TOKENS, question.prompt_tokens)
    for there in range(start, stop + 1):
        on_time_s = max(0.0, load_s(question, start, there) - decision.lag_from_s)
        rest_s = compute_s(question, there * TOKENS, question.prompt_tokens) - tail_s
        share = 1.0 if there == stop else min(max(0.0, 1 - rest_s / decision.recompute_s), 1 - 1e-12)
        due_s = rule.due_s(share, on_time_s)
        if there < dies_after:
            arrives_s = load_s(question, start, there + 1) - decision.lag_from_s
            # Not every block is looked at: a hundredth of R, or the overhead of a step, may be missed.
            assert arrives_s < due_s + 0.01 * decision.recompute_s + curve.c0
        elif there < stop:
            ends_s = decision.lag_from_s + due_s + rest_s + tail_s
            assert ends_s <= 1.1 * recompute * (1 + 1e-9)
            return
        else:
            assert decision.lag_from_s + on_time_s + tail_s <= recompute


@given(questions(prefill=unknown))
@settings(max_examples=100, deadline=None)
def test_the_first_request_ever_loads_what_comes_soon(question: ReloadQuestion) -> None:
    """No curve: no prediction is invented, and no more than a second is spent."""
    decision = decide(question)
    assume(question.prompt_tokens > question.device * TOKENS)
    assert set(decision.predicted_s.values()) == {None}
    start, stop = decision.load_start, decision.load_stop
    assert start == question.device
    soon = [k for k in range(start, reach(question) + 1) if load_s(question, start, k) < 0.95 * BLIND_S]
    first_comes = start < reach(question) and load_s(question, start, start + 1) < 0.1 * BLIND_S
    assert stop == (max(soon) if first_comes else start)
    rule = decision.lag_rule()
    assert (rule is None) == (start == stop)
    if rule is not None:
        assert rule.due_s(0.0) == pytest.approx(BLIND_S)  # so long may it lag


# ---- the cases of the field -------------------------------------------------------------------------------


def question_of(
    bytes_per_s: float = 1e9,
    blocks: int = 64,
    tier: Tier = Tier.NVME,
    prefill: Prefill | None = None,
    latency_s: float = 1e-4,
) -> ReloadQuestion:
    """64 blocks of 1 MiB: 1,024 tokens, about 1 s to compute."""
    way = Way(Span(tier, 0, blocks), latency_s, bytes_per_s)
    return ReloadQuestion(
        blocks * TOKENS + 16, TOKENS, BYTES, 0, (way,), Curve() if prefill is None else prefill
    )


def test_a_hit_on_a_slow_tier_is_computed() -> None:
    """Case 22: recompute 1 s, the hit would take 13 s."""
    decision = decide(question_of(5e6))
    assert decision.choice is Choice.RECOMPUTE
    assert decision.lag_rule() is None
    assert "computes everything: 1.04 s against" in decision.reason
    assert "NVME" in decision.reason


def test_a_hit_on_a_fast_tier_is_loaded() -> None:
    decision = decide(question_of(1e9))
    assert (decision.choice, decision.load_start, decision.load_stop) == (Choice.LOAD, 0, 64)
    assert decision.spans == (Span(Tier.NVME, 0, 64),)
    assert decision.reason == "loads blocks 0 to 64 from NVME: 83.2 ms against 1.04 s for computing all"


def test_an_engine_that_can_split_does_both() -> None:
    decision = decide(replace(question_of(6.5e7), can_split=True))
    assert decision.choice is Choice.SPLIT
    recompute, load, split = (decision.predicted_s[choice] for choice in Choice)
    assert recompute is not None
    assert load is not None
    assert split is not None
    assert split < 0.6 * min(recompute, load)
    assert (decision.load_start, decision.load_stop) == (32, 64)
    assert decision.lag_from_s == pytest.approx(32 * TOKENS * 1e-3)
    assert decision.recompute_s == pytest.approx(32 * TOKENS * 1e-3)
    assert decision.load_s < 0.1
    assert "and computes 0 to 32 meanwhile" in decision.reason


def test_a_doubted_tier_ends_what_is_loaded() -> None:
    ways = (
        Way(Span(Tier.HOST, 2, 20), 0.0, 1e9),
        Way(Span(Tier.NVME, 20, 64), 1e-4, 1e9, doubted="a load took 3 s, 0.1 s were predicted"),
    )
    question = ReloadQuestion(1040, TOKENS, BYTES, 2, ways, Curve(), can_split=True)
    decision = decide(question)
    assert decision.load_stop == 20
    assert decision.reason.endswith("; NVME is doubted: a load took 3 s, 0.1 s were predicted")
    none = decide(replace(question, device=20, ways=ways[1:]))
    assert (none.choice, none.load_start, none.load_stop) == (Choice.RECOMPUTE, 20, 20)
    assert none.reason.startswith("computes everything that the device lacks; NVME is doubted")
    assert none.spans == (Span(Tier.GPU, 0, 20),)


def test_queues_count_on_both_sides() -> None:
    """A busy disk makes it compute; a busy engine makes it load what would else be too slow."""
    even = question_of(8e7)  # 0.84 s to load, 1 s to compute
    assert decide(even).choice is Choice.LOAD
    behind = replace(even, ways=(replace(even.ways[0], queued_s=0.5),))
    assert decide(behind).choice is Choice.RECOMPUTE
    assert decide(replace(behind, queued_s=2.0)).choice is Choice.LOAD
    slow = question_of(4e7)
    assert decide(slow).choice is Choice.RECOMPUTE
    waits = decide(replace(slow, queued_s=3.0))
    assert (waits.choice, waits.load_s, waits.lag_from_s) == (Choice.LOAD, 0.0, 3.0)


def test_only_a_part_is_loaded_where_the_rest_is_slow() -> None:
    ways = (Way(Span(Tier.HOST, 0, 30), 0.0, 1e9), Way(Span(Tier.NVME, 30, 64), 1e-4, 5e6))
    decision = decide(ReloadQuestion(1040, TOKENS, BYTES, 0, ways, Curve()))
    assert (decision.choice, decision.load_stop) == (Choice.LOAD, 30)
    assert decision.spans == (Span(Tier.HOST, 0, 30),)


@pytest.mark.parametrize(
    ("host", "bytes_per_s", "queued_s"), [(31, 2.3e7, 0.3), (54, 2e7, 0.0), (11, 1e7, 0.3)]
)
def test_a_part_of_a_tier_is_loaded_where_it_becomes_the_slowest(
    host: int, bytes_per_s: float, queued_s: float
) -> None:
    """What comes while HOST, or the engine's queue, takes longer anyway is free; the next block is not."""
    ways = (
        Way(Span(Tier.HOST, 0, host), 0.0, 6e8),
        Way(Span(Tier.NVME, host, host + 50), 1e-3, bytes_per_s),
    )
    question = ReloadQuestion((host + 50) * TOKENS, TOKENS, BYTES, 0, ways, Curve(a=2e-3), queued_s)
    decision = decide(question)
    assert host < decision.load_stop < host + 50
    assert decision.predicted_s[Choice.LOAD] == pytest.approx(written_out(question)[Choice.LOAD])


def test_what_comes_from_below_crosses_host() -> None:
    """A slow copy to the device is the end of a fast disk too, also where HOST holds nothing itself."""
    ways = (Way(Span(Tier.HOST, 0, 0), 0.0, 1e8), Way(Span(Tier.NVME, 0, 64), 0.0, 1e10))
    load = decide(ReloadQuestion(1040, TOKENS, BYTES, 0, ways, Curve())).predicted_s[Choice.LOAD]
    assert load == pytest.approx(64 * BYTES / 1e8 + 0.016)


def test_a_small_gain_is_not_worth_the_risk() -> None:
    decision = decide(question_of(64 * BYTES / 1.0))  # load 1.00 s, compute 1.02 s
    assert decision.choice is Choice.RECOMPUTE
    assert decision.reason.endswith("which saves too little to risk it")


def test_a_load_that_could_not_be_given_up_in_time_is_not_begun() -> None:
    """The first byte comes after a tenth of R: by the lag rule it would be abandoned, always."""
    late = decide(question_of(1e9, latency_s=0.2))
    load = late.predicted_s[Choice.LOAD]
    assert load is not None
    assert load < 0.3
    assert late.choice is Choice.RECOMPUTE
    assert late.reason.endswith("which could not be given up in time if it lagged")
    assert decide(question_of(1e9, latency_s=0.09)).choice is Choice.LOAD


def test_a_load_whose_early_blocks_are_worth_little_is_not_begun() -> None:
    """Attention alone: after 40 % of W only 16 % of R have come, in time, and yet a tenth and more behind."""
    curve = Curve(a=0.0, b=2 / 1024**2)  # 1 s for 1,024 tokens
    slow, fast = (question_of(64 * BYTES / load_s, prefill=curve) for load_s in (0.8, 0.5))
    slow, fast = (replace(question, prompt_tokens=1024) for question in (slow, fast))
    assert decide(slow).choice is Choice.RECOMPUTE
    assert decide(fast).choice is Choice.LOAD


def test_nothing_to_load() -> None:
    """A zero-length prefix, and a device that has everything."""
    empty = decide(ReloadQuestion(500, TOKENS, BYTES, 0, (), Curve()))
    assert (empty.choice, empty.reason) == (Choice.RECOMPUTE, "nothing can be loaded")
    assert empty.predicted_s == {Choice.RECOMPUTE: 0.5, Choice.LOAD: None, Choice.SPLIT: None}
    assert empty.spans == ()
    held = decide(ReloadQuestion(320, TOKENS, BYTES, 20, (), Curve(), queued_s=0.25))
    assert held.predicted_s[Choice.RECOMPUTE] == 0.25
    assert "nothing but the device's blocks" in held.reason
    no_prompt = decide(ReloadQuestion(0, TOKENS, BYTES, 0, (), unknown))
    assert no_prompt.predicted_s[Choice.RECOMPUTE] == 0.0


def test_no_curve_and_a_slow_source() -> None:
    decision = decide(question_of(5e6, prefill=unknown))
    assert decision.choice is Choice.RECOMPUTE
    assert "no step was seen yet" in decision.reason
    part = decide(question_of(3e7, prefill=unknown))
    assert (part.choice, part.load_stop) == (Choice.LOAD, 27)  # 0.95 s
    assert (part.recompute_s, part.lag_from_s) == (10 * BLIND_S, 0.0)


def test_a_curve_that_knows_only_a_part_decides_on_that() -> None:
    """Nothing is known of the tail behind a load: then only what can be predicted is compared."""

    def partial(start: int, stop: int, /) -> float | None:
        return 1e-3 * (stop - start) if start == 0 else None

    decision = decide(replace(question_of(1e9, prefill=partial), can_split=True))
    assert decision.choice is Choice.RECOMPUTE
    assert decision.predicted_s[Choice.LOAD] is None


def test_with_what_was_learnt() -> None:
    """Curve and rates as they are learnt; a source that slows down turns the answer round."""
    curve, rates, disk = PrefillCurve(), Rates(), Source(Tier.NVME)
    for number in range(6):
        tokens = 256 + 64 * (number % 3)
        curve.observe(Step(tokens, tokens * tokens / 2, 0, 0, 1e-3 * tokens), float(number))

    def answer() -> Choice:
        speed = rates.speed(disk, 64 * BYTES)
        way = Way(Span(Tier.NVME, 0, 64), speed.latency_s, speed.bytes_per_s)
        return decide(ReloadQuestion(1040, TOKENS, BYTES, 0, (way,), curve.seconds)).choice

    assert answer() is Choice.LOAD  # a guess, on the fast side
    for number in range(3):
        rates.observe(disk, Transfer(64 * BYTES, 0, 13.0), 10.0 + number)
    assert answer() is Choice.RECOMPUTE
    for number in range(3):
        rates.observe(disk, Transfer(4 * BYTES, 0, 0.01), 20.0 + number)
    assert answer() is Choice.LOAD


# ---- what cannot be asked ---------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, -1.0, math.inf, 1e12])
@pytest.mark.parametrize("name", ["latency_s", "queued_s", "bytes_per_s"])
def test_a_way_that_cannot_be_is_refused(name: str, value: float) -> None:
    if (name, value) == ("bytes_per_s", 1e12):
        return
    with pytest.raises(ValueError, match=f"^{name}:"):
        replace(question_of().ways[0], **{name: value})
    with pytest.raises(ValueError, match=r"^bytes_per_s:"):
        replace(question_of().ways[0], bytes_per_s=0.0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("prompt_tokens", -1),
        ("prompt_tokens", 1 << 40),
        ("prompt_tokens", 1023),
        ("prompt_tokens", math.nan),
        ("block_tokens", 0),
        ("block_bytes", 0),
        ("block_bytes", -5),
        ("device", -1),
        ("queued_s", -0.1),
        ("queued_s", math.nan),
    ],
)
def test_a_question_that_cannot_be_is_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"^{name}:"):
        replace(question_of(), **{name: value})


@pytest.mark.parametrize(
    "spans",
    [
        [Span(Tier.HOST, 1, 5)],
        [Span(Tier.HOST, 0, 5), Span(Tier.NVME, 6, 9)],
        [Span(Tier.HOST, 0, 5), Span(Tier.NVME, 4, 9)],
        [Span(Tier.NVME, 0, 0)],
        [Span(Tier.NVME, 0, -1)],
        [Span(Tier.GPU, 0, 5)],
    ],
)
def test_ways_follow_one_another(spans: list[Span]) -> None:
    ways = tuple(Way(span, 0.0, 1e9) for span in spans)
    with pytest.raises(ValueError, match=r"^ways:"):
        replace(question_of(), ways=ways)


@pytest.mark.parametrize("seconds", [math.nan, -1.0, math.inf])
def test_a_curve_that_gives_no_seconds_is_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match=r"^prefill:"):
        decide(question_of(prefill=lambda start, stop, /: seconds))
