"""What is written under a budget: never more than it allows, and everything while it is loose."""

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from offers import BLOCK_BYTES, DAY_BYTES, DAY_S, HOUR_S, REFILL, agree, offer

from kvstore.policy.admission import Admission, Offer, Refusal
from kvstore.policy.history import History, Hits

# ---- the bucket -------------------------------------------------------------------------------------------


@st.composite
def a_day(draw: st.DrawFn) -> tuple[int, list[tuple[float, Offer]]]:
    """A budget, and offers with the time that passes before each."""
    budget = draw(st.sampled_from([1 << 20, 1 << 26, 1 << 33, 1 << 40]))
    sizes = st.integers(1, 2 * budget)
    seconds = st.one_of(st.none(), st.floats(0, 1e9), st.sampled_from([math.nan, math.inf, -1.0, 5e-324]))
    passes = st.one_of(st.just(0.0), st.floats(0, 600), st.floats(0, 2 * DAY_S))
    one = st.tuples(passes, st.builds(Offer, st.integers(1, 8192), sizes, seconds, st.booleans()))
    return budget, draw(st.lists(one, max_size=60))


@settings(max_examples=100)
@given(a_day())
def test_no_window_gets_more_than_a_day_and_its_refill(day: tuple[int, list[tuple[float, Offer]]]) -> None:
    budget, offers = day
    admission, now_s = Admission(budget, 0.0), 0.0
    written: list[tuple[float, int]] = []
    for passed_s, one in offers:
        now_s += passed_s
        if admission.admits(one, now_s):
            written.append((now_s, one.bytes))
    agree(admission.counts())
    for first, last in itertools.combinations_with_replacement(range(len(written)), 2):
        total = sum(size for _, size in written[first : last + 1])
        window_s = written[last][0] - written[first][0]
        assert total <= budget * (1 + window_s / DAY_S) * (1 + 1e-9)


def test_an_empty_bucket_is_empty_for_the_best_too() -> None:
    admission = Admission(1000 * BLOCK_BYTES, 0.0)
    got = [admission.admits(offer(150, 10.0**number), 0.0) for number in range(12)]
    assert got == [True] * 6 + [False] * 6
    assert admission.counts().refused[Refusal.BUDGET].blocks == 6 * 150


def test_a_budget_of_0_refuses_nothing() -> None:
    """Case 28, over-strict: a filter that stores nothing."""
    admission = Admission(0, 0.0)
    for number in range(20_000):
        assert admission.admits(offer(8192, None), number * 1e-3)
    counts = admission.counts()
    assert counts.admitted.bytes == counts.offered.bytes == 20_000 * 8192 * BLOCK_BYTES
    assert (counts.threshold, counts.tight, counts.bucket_bytes) == (0.0, False, 0.0)
    assert admission.piece_bytes_max > 1 << 50


def test_what_is_given_back_was_never_paid() -> None:
    admission = Admission(DAY_BYTES, 0.0)
    for number in range(10_000):
        assert admission.admits(offer(), float(number))
        admission.give_back(Refusal.SIZE, 16, 16 * BLOCK_BYTES)
    counts = admission.counts()
    assert (counts.admitted.blocks, counts.refused[Refusal.SIZE].blocks) == (0, 160_000)
    assert counts.bucket_bytes == DAY_BYTES
    agree(counts)


def test_what_the_tier_refuses_unasked_is_counted() -> None:
    admission = Admission(DAY_BYTES, 0.0)
    admission.refused(Refusal.QUEUE, 3, 3 * BLOCK_BYTES)
    admission.refused(Refusal.DISK, 2, 2 * BLOCK_BYTES)
    counts = admission.counts()
    assert (admission.refused_blocks, counts.offered.blocks) == (5, 5)
    assert counts.refused[Refusal.DISK].bytes == 2 * BLOCK_BYTES
    agree(counts)


def test_the_report_is_plain_values() -> None:
    admission = Admission(DAY_BYTES, 0.0)
    admission.admits(offer(4), 0.0)
    admission.refused(Refusal.QUEUE, 3, 3 * BLOCK_BYTES)
    report = json.loads(json.dumps(admission.report()))
    assert report["refused"] == {"budget": 0, "value": 0, "queue": 3, "disk": 0, "size": 0, "quota": 0}
    assert (report["offered_blocks"], report["admitted_blocks"], admission.admitted_blocks) == (7, 4, 4)
    assert report["bucket_bytes"] == DAY_BYTES - 4 * BLOCK_BYTES
    assert 0 < report["reuse_first"] < report["reuse_again"] < 1


def test_what_the_disk_copies_by_itself_is_paid_first() -> None:
    admission = Admission(DAY_BYTES, 0.0)
    admission.wrote(DAY_BYTES + DAY_BYTES // 4, 0.0)
    assert not admission.admits(offer(1), 0.0)
    assert admission.counts().refused[Refusal.BUDGET].blocks == 1
    assert not admission.admits(offer(1), DAY_S / 4)
    assert admission.admits(offer(1), DAY_S / 2)
    admission.wrote(1 << 60, DAY_S / 2)
    assert admission.counts().bucket_bytes == -DAY_BYTES, "a day of waiting is the most"


def test_an_offer_of_nothing_is_a_mistake() -> None:
    for wrong in (Offer(0, 1, None, False), Offer(1, 0, None, False)):
        with pytest.raises(ValueError, match="at least one block"):
            Admission(DAY_BYTES, 0.0).admits(wrong, 0.0)


def test_a_clock_that_goes_back_is_harmless() -> None:
    admission = Admission(DAY_BYTES, 1000.0)
    spent = 0
    for now_s in (1000.0, 0.0, -1e9, 999.0, 1000.0):
        while admission.admits(offer(), now_s):
            spent += 16 * BLOCK_BYTES
    assert DAY_BYTES / 2 < spent <= DAY_BYTES, "it stood still: one bucket"
    later = Admission(DAY_BYTES, 1000.0)
    later.wrote(DAY_BYTES, 1000.0)
    later.admits(offer(), 500.0)
    assert later.admits(offer(), 1000.0 + HOUR_S), "and goes on from where it was"


@given(st.lists(st.integers(0, 1 << 40), max_size=8))
def test_another_budget_holds_from_then_on(budgets: list[int]) -> None:
    admission = Admission(DAY_BYTES, 0.0)
    admission.wrote(DAY_BYTES // 2, 0.0)
    for number, budget in enumerate(budgets):
        admission.set_budget(budget, float(number))
        counts = admission.counts()
        assert counts.budget_bytes_per_day == budget
        assert counts.bucket_bytes <= budget
    admission.set_budget(DAY_BYTES, 1e9)
    admission.admits(offer(1), 2e9)
    assert admission.counts().bucket_bytes == pytest.approx(DAY_BYTES - BLOCK_BYTES)


# ---- loose ------------------------------------------------------------------------------------------------


@settings(max_examples=25)
@given(
    share=st.floats(0.05, 0.9),
    blocks=st.integers(1, 64),
    worth=st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=8),
    burst=st.integers(1, 50),
)
def test_what_the_refill_pays_for_is_all_let_in(
    share: float, blocks: int, worth: list[float], burst: int
) -> None:
    admission = Admission(DAY_BYTES, 0.0)
    every_s = burst * blocks * BLOCK_BYTES / (REFILL * share)
    for number in range(40):
        for part in range(burst):
            seconds = worth[(number + part) % len(worth)]
            assert admission.admits(offer(blocks, seconds, reused=bool(part & 1)), number * every_s)
    assert not admission.counts().tight


def test_a_burst_of_a_third_of_the_day_is_no_flood() -> None:
    """One long conversation on an idle node, as fast as an engine saves it."""
    admission = Admission(DAY_BYTES, 0.0)
    for number in range(DAY_BYTES // 3 // (16 * BLOCK_BYTES)):
        assert admission.admits(offer(16, 0.01), number * 0.05)


# ---- history ----------------------------------------------------------------------------------------------


def test_an_offered_block_counts_once_when_it_is_hit() -> None:
    history = History()
    nodes = np.array([5, 70_000, 9], np.uint32)
    assert history.hit(nodes) == Hits(0, 0, 0, 0)
    history.offered(nodes[:2], reused=False, admitted=False)
    history.offered(nodes[2:], reused=True, admitted=True)
    assert history.hit(nodes) == Hits(2, 0, 1, 1)
    assert history.hit(nodes) == Hits(0, 0, 0, 0)
    history.offered(nodes, reused=False, admitted=True)
    history.offered(nodes[:1], reused=True, admitted=False)  # the latest offer is the one that counts
    assert history.hit(nodes) == Hits(2, 2, 1, 0)
    assert history.hit(nodes[:0]) == Hits(0, 0, 0, 0)
    assert 70_000 < history.memory_bytes <= 140_002
