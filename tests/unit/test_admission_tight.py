"""What is written while more is offered than the budget affords: the best, and never nothing."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from offers import BLOCK_BYTES, DAY_BYTES, DAY_S, HOUR_S, REFILL, Stream, agree, let_in, offer, run

from kvstore.policy.admission import Admission, Offer
from kvstore.policy.history import History, Hits

# A day of offers takes half a second; an example that fails is printed as it is.
WITHOUT_SHRINKING = (Phase.explicit, Phase.reuse, Phase.generate)

# ---- tight ------------------------------------------------------------------------------------------------


@settings(max_examples=5, deadline=None, phases=WITHOUT_SHRINKING)
@given(
    good=st.floats(0.1, 0.7),
    flood=st.floats(5, 40),
    times_better=st.floats(1.5, 1000),
    blocks=st.integers(4, 32),
)
def test_a_tight_budget_goes_to_what_is_worth_most(
    good: float, flood: float, times_better: float, blocks: int
) -> None:
    admission = Admission(DAY_BYTES, 0.0)
    best = Stream(good, 0.01 * times_better * blocks / 16, blocks=blocks)
    rest = Stream(flood, 0.01)
    run(admission, (best, rest), 0.5 * DAY_S)  # the full bucket is spent
    run(admission, (best, rest), 1.0 * DAY_S)
    assert admission.counts().tight
    assert let_in(best) >= 0.85
    assert let_in(rest) <= 1 / flood
    # What is left goes to the others, and nothing lies idle.
    spent = (best.got[True] + rest.got[True]) / (DAY_BYTES / 2)
    assert 0.9 <= spent <= 1.1
    assert admission.counts().threshold > 0
    agree(admission.counts())


def test_when_all_are_worth_the_same_the_budget_is_spent() -> None:
    admission = Admission(DAY_BYTES, 0.0)
    one = Stream(40, 0.01)
    run(admission, [one], DAY_S)
    run(admission, [one], 2 * DAY_S)
    assert one.got[True] == pytest.approx(DAY_BYTES, rel=0.05)
    assert let_in(one) == pytest.approx(1 / 40, rel=0.1)


@pytest.mark.parametrize("unknown", [None, 0.0, math.nan])
def test_a_worth_that_nobody_knows_is_no_reason_to_refuse(unknown: float | None) -> None:
    """Without predictions every block counts the same; beside predictions, as an average one."""
    alone = Admission(DAY_BYTES, 0.0)
    blind = Stream(10, unknown)
    run(alone, [blind], DAY_S)
    run(alone, [blind], 2 * DAY_S)
    assert blind.got[True] >= 0.9 * DAY_BYTES
    mixed = Admission(DAY_BYTES, 0.0)
    streams = [Stream(2, 0.001), Stream(0.2, 1.0), Stream(2, unknown)]
    run(mixed, streams, DAY_S)
    run(mixed, streams, 2 * DAY_S)
    low, high, none = (let_in(stream) for stream in streams)
    assert high >= 0.95
    assert low < none < high


def test_it_is_loose_again_after_idling() -> None:
    admission = Admission(DAY_BYTES, 0.0)
    flood = Stream(60, 0.01)
    run(admission, [flood], DAY_S)
    assert admission.counts().tight
    # Quiet for three hours, then less than the refill: everything is let in, whatever it is worth.
    calm = Stream(0.5, 1e-6)
    calm.next_s = DAY_S + 3 * HOUR_S
    run(admission, [calm], DAY_S + 8 * HOUR_S)
    assert calm.got[False] == 0
    assert not admission.counts().tight


def test_after_a_flood_normal_offers_come_in_within_the_hour() -> None:
    """The rate falls at once to what the budget pays for, without a pause."""
    admission = Admission(DAY_BYTES, 0.0)
    run(admission, [Stream(60, 0.01)], DAY_S)
    calm = Stream(0.5, 1e-6, blocks=4)
    calm.next_s = DAY_S
    run(admission, [calm], DAY_S + HOUR_S)
    run(admission, [calm], DAY_S + 2 * HOUR_S)
    assert calm.got[False] == 0


@settings(max_examples=5, deadline=None, phases=WITHOUT_SHRINKING)
@given(flood=st.floats(5, 40), times=st.floats(0.001, 1000))
def test_it_adapts_to_another_mix_within_bounded_bytes(flood: float, times: float) -> None:
    admission = Admission(DAY_BYTES, 0.0)
    run(admission, [Stream(flood, 0.01)], DAY_S)
    other = Stream(flood, 0.01 * times)
    other.next_s = DAY_S
    # Half a day's budget is offered, then it gets what the others had before.
    run(admission, [other], DAY_S * (1 + 0.5 / flood))
    run(admission, [other], DAY_S * 1.5)
    assert other.got[True] >= 0.8 * REFILL * DAY_S * (0.5 - 0.5 / flood)


def test_memory_is_bounded() -> None:
    admission = Admission(1 << 50, 0.0)
    rng = np.random.default_rng(1)
    for number, exponent in enumerate(rng.uniform(-80, 40, 5000)):
        admission.admits(
            Offer(1, int(rng.integers(1, 1 << 40)), 2.0**exponent, bool(number & 1)), number * 1e-3
        )
    assert len(admission._mix.shares) <= 4 * 80 + 2


# ---- case 28: pollution -----------------------------------------------------------------------------------


def test_case_28_a_scan_does_not_take_the_budget_of_what_is_used_again() -> None:
    """One-time chains at 25 × the budget, beside a small set that everybody uses: 3 % of what is offered."""
    admission = Admission(DAY_BYTES, 0.0)
    scan = Stream(25, 0.01, share=0.0)
    used = Stream(0.8, 0.01, reused=True, share=0.9)
    run(admission, (scan, used), DAY_S)
    run(admission, (scan, used), 2 * DAY_S)
    assert let_in(used) == 1.0
    assert scan.got[True] <= 0.1 * used.got[True]
    counts = admission.counts()
    assert counts.reuse_first < 1 / 64 < 0.5 < counts.reuse_again


def test_case_28_the_set_that_is_used_again_is_written_and_the_scan_gets_a_trickle() -> None:
    """The set is so small that most of the budget would be left for the scan: it is not spent on it."""
    admission, history = Admission(DAY_BYTES, 0.0), History()
    ours = np.arange(64, dtype=np.uint32)  # 128 MiB, hit every minute
    fresh = itertools.count(1000)
    kept = spent = 0
    written = np.zeros(64, np.bool_)
    for minute in range(3 * 24 * 60):
        now_s = 60.0 * minute
        admission.hit(history.hit(ours))
        if not written.all():
            got = admission.admits(offer(64, 0.04, reused=minute > 0), now_s)
            history.offered(ours, reused=minute > 0, admitted=got)
            written |= got
            kept += got
        for part in range(10):  # 20 × the refill
            nodes = np.fromiter(itertools.islice(fresh, 11), np.uint32)
            got = admission.admits(offer(11, 0.007), now_s + part)
            history.offered(nodes, reused=False, admitted=got)
            spent += got * 11 * BLOCK_BYTES
    assert (kept, written.all()) == (1, True)
    # What the full bucket of the start let in until the flood was seen; since then a sixteenth of the refill.
    assert spent <= DAY_BYTES * (0.65 + 3 / 16)
    assert spent >= DAY_BYTES * 3 / 16 * 0.8, "and it is looked whether that is still so"


def test_case_28_chains_that_prove_useful_only_on_the_disk_are_not_taken_for_a_scan() -> None:
    """HOST forgets within seconds, so only what was let in can ever be hit again."""
    admission = Admission(DAY_BYTES, 0.0)
    now_s, written = 0.0, 0
    for _ in range(20_000):
        now_s += 16 * BLOCK_BYTES / (REFILL * 40)
        if admission.admits(offer(16, 0.01), now_s):
            written += 16 * BLOCK_BYTES
            admission.hit(Hits(8, 8, 0, 0))
    assert admission.counts().reuse_first > 0.3
    assert written >= 0.9 * REFILL * now_s
