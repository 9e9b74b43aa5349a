"""The memory of decisions: what is kept, found, forgotten, and counted."""

from __future__ import annotations

import math
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plans import asked, computed, loaded

from kvstore.decisions import (
    DECISIONS_MAX,
    ERROR_BOUNDS,
    NAME_CHARS_MAX,
    REGRET_BOUNDS_S,
    TRUST_CHANGES_MAX,
    Decisions,
    Outcome,
    TrustChange,
)
from kvstore.meters import Histogram
from kvstore.policy.reload import Choice


def bucket(histogram: Histogram) -> list[float]:
    """Bounds under which values lie."""
    bounds = (*histogram.bounds, math.inf)
    return [bound for bound, count in zip(bounds, histogram.counts, strict=True) for _ in range(count)]


def test_nothing_is_remembered_before_the_first_plan() -> None:
    memory = Decisions()
    assert len(memory) == 0
    assert memory.last() is memory.plan(0) is memory.plan(1) is memory.of_lease(0) is memory.find("") is None
    assert list(memory.recent()) == []
    assert memory.ended(1, Outcome(1.0)) is False
    assert memory.plans == {Choice.RECOMPUTE: 0, Choice.LOAD: 0, Choice.SPLIT: 0}


def test_the_oldest_is_forgotten_and_its_end_counts_nothing() -> None:
    memory = Decisions()
    plans = [memory.planned(asked(lease), loaded()) for lease in range(1, DECISIONS_MAX + 3)]
    assert len(memory) == DECISIONS_MAX
    assert [memory.plan(plan) is None for plan in plans[:3]] == [True, True, False]
    assert (memory.of_lease(2), memory.of_lease(3)) == (None, plans[2])
    assert memory.ended(plans[1], Outcome(9.0)) is False
    assert memory.ended(plans[2], Outcome(9.0)) is True
    assert memory.regret[Choice.LOAD].count == memory.error[Choice.LOAD].count == 1
    assert [record.id for record in memory.recent(2)] == [plans[-1], plans[-2]]
    assert sum(1 for _ in memory.recent(10**9)) == DECISIONS_MAX
    assert memory.plans[Choice.LOAD] == DECISIONS_MAX + 2  # since the start
    assert len(memory._of_lease) == DECISIONS_MAX


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(0, DECISIONS_MAX))
def test_a_lease_finds_its_latest_plan_as_long_as_that_is_remembered(leases: list[int], others: int) -> None:
    memory, latest = Decisions(), dict[int, int]()
    for lease in leases:
        latest[lease] = memory.planned(asked(lease), loaded())
    for _ in range(others):
        last = memory.planned(asked(0), computed())
    newest = max([*latest.values(), *([last] if others else [])], default=0)
    for lease in (1, 2, 3):
        plan = latest.get(lease)
        kept = plan is not None and plan > newest - DECISIONS_MAX
        assert memory.of_lease(lease) == (plan if kept else None)
    assert memory.of_lease(0) is None
    if others:
        assert memory.last() is memory.plan(last)


def test_a_request_is_found_by_its_name_then_by_its_lease() -> None:
    memory = Decisions()
    first = memory.planned(asked(7, request="cmpl-a"), loaded())
    memory.ended(first, Outcome(1.0))
    again = memory.planned(asked(8, request="cmpl-a"), loaded())
    named_like_a_lease = memory.planned(asked(9, request="7"), loaded())
    by = {name: memory.find(name) for name in ("cmpl-a", "7", "8", "9", "10", "0", "")}
    found = {name: record and record.id for name, record in by.items()}
    assert found == {
        "cmpl-a": again,
        "7": named_like_a_lease,
        "8": again,
        "9": named_like_a_lease,
        "10": None,
        "0": None,
        "": None,
    }
    assert first not in found.values()


def test_a_name_that_an_engine_has_made_longer_is_found() -> None:
    memory = Decisions()
    longer = memory.planned(asked(1, request="cmpl-7-1f00aa77"), loaded())
    lease = memory.planned(asked(7, request="cmpl-70"), loaded())
    by = {name: memory.find(name) for name in ("cmpl-7", "cmpl-70", "7", "cmp", "cmpl")}
    found = {name: record and record.id for name, record in by.items()}
    assert found == {"cmpl-7": longer, "cmpl-70": lease, "7": lease, "cmp": None, "cmpl": lease}


def test_a_name_of_any_length_is_kept_in_part_and_found_whole() -> None:
    memory = Decisions()
    memory.planned(asked(request="x" * 10_000), loaded())
    record = memory.find("x" * 10_000)
    assert record is not None
    assert len(record.asked.request) == NAME_CHARS_MAX


def test_parts_of_an_end_add_up_and_seconds_count_once() -> None:
    memory = Decisions()
    plan = memory.planned(asked(), loaded(load_s=0.25, recompute_s=1.0))
    record = memory.plan(plan)
    assert record is not None and record.outcome is None
    memory.ended(plan, Outcome(loaded_blocks=30, abandoned_s=0.1, why="NVME stalled"))  # a fetch knows this
    assert (record.regret_s, record.error) == (None, None)
    assert memory.error[Choice.LOAD].count == 0
    memory.ended(plan, Outcome(seconds=1.5))  # its engine this
    memory.ended(plan, Outcome(seconds=99.0, loaded_blocks=96, why="too late"))
    assert record.outcome == Outcome(1.5, 30, 0.1, "NVME stalled")
    assert (record.regret_s, record.error) == (0.5, 6.0)
    assert bucket(memory.regret[Choice.LOAD]) == [1.0]
    assert bucket(memory.error[Choice.LOAD]) == [10.0]
    assert (memory.regret[Choice.LOAD].sum, memory.error[Choice.LOAD].sum) == (0.5, 6.0)
    assert memory.regret[Choice.RECOMPUTE].count == memory.error[Choice.SPLIT].count == 0


def test_regret_is_against_the_best_other_choice_and_never_negative() -> None:
    memory = Decisions()
    fast = memory.planned(asked(), loaded(load_s=0.3, recompute_s=1.7))
    memory.ended(fast, Outcome(0.2))
    slow = memory.planned(asked(), computed())
    memory.ended(slow, Outcome(1.75))
    assert bucket(memory.regret[Choice.LOAD]) == [0.0]
    assert bucket(memory.regret[Choice.RECOMPUTE]) == [0.1]
    assert memory.regret[Choice.RECOMPUTE].sum == pytest.approx(0.06)


def test_without_a_prediction_there_is_nothing_to_compare_with() -> None:
    memory = Decisions()
    plan = memory.planned(asked(), loaded(load_s=0.3, recompute_s=None))  # the first request ever
    memory.ended(plan, Outcome(0.3))
    assert memory.regret[Choice.LOAD].count == 0
    assert memory.error[Choice.LOAD].count == 1
    free = memory.planned(asked(), loaded(load_s=0.0))  # an empty prompt: a ratio to nothing is none
    memory.ended(free, Outcome(0.1))
    assert memory.error[Choice.LOAD].count == 1
    tiny = memory.planned(asked(), loaded(load_s=5e-324))
    memory.ended(tiny, Outcome(1.0))
    assert memory.error[Choice.LOAD].count == 1
    assert math.isfinite(memory.error[Choice.LOAD].sum)


@pytest.mark.parametrize("seconds", [-1e-9, math.nan, math.inf, 2e9])
def test_times_that_cannot_be_are_refused_by_name(seconds: float) -> None:
    with pytest.raises(ValueError, match=r"^seconds: "):
        Outcome(seconds)
    with pytest.raises(ValueError, match=r"^abandoned_s: "):
        Outcome(abandoned_s=seconds)


def test_a_negative_count_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"^loaded_blocks: "):
        Outcome(loaded_blocks=-1)


def test_trust_is_remembered_for_a_while() -> None:
    memory = Decisions()
    for number in range(TRUST_CHANGES_MAX + 1):
        memory.trust_changed(TrustChange(float(number), "NVME", number % 2 == 0))
    assert len(memory.changes) == TRUST_CHANGES_MAX
    assert memory.changes[0].at_s == 1.0


def test_memory_stays_within_what_is_stated() -> None:
    tracemalloc.start()
    try:
        memory = Decisions()
        for lease in range(1, 3 * DECISIONS_MAX):
            one = asked(lease, lease + 0.5, request=f"chatcmpl-{lease:036}")
            plan = memory.planned(one, loaded(load_s=0.1 * lease, recompute_s=0.2 * lease, blocks=lease))
            memory.ended(plan, Outcome(lease / 3, lease, lease / 7, f"NVME: {lease} of {lease} blocks came"))
        size_bytes = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert 0.3 * 1024 * DECISIONS_MAX < size_bytes < 2.0 * 1024 * DECISIONS_MAX


def test_bounds_ascend() -> None:
    for bounds in (REGRET_BOUNDS_S, ERROR_BOUNDS):
        assert list(bounds) == sorted(set(bounds))
