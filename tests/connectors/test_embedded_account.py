"""Where tokens came from, over several admissions of one request."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvstore.connectors.embedded.account import Account


def test_a_prefix_that_was_brought_and_the_rest_computed() -> None:
    account = Account()
    account.brought(0, {"GPU": 16, "HOST": 32})
    account.computed(48, 100)
    assert (account.reused(100), account.fresh_tokens(100)) == ({"GPU": 16, "HOST": 32}, 52)
    account.computed(100, 101)  # the first answer
    assert (account.fresh_tokens(100), account.recomputed_tokens) == (52, 0)


def test_a_tail_that_was_brought_behind_a_computed_head() -> None:
    account = Account()
    account.brought(0, {"GPU": 16})
    account.computed(16, 64)
    account.brought(64, {"NVME": 32})
    account.computed(96, 100)
    assert account.reused(100) == {"GPU": 16, "NVME": 32}
    assert account.fresh_tokens(100) == 52


def test_own_work_that_comes_back_stays_fresh() -> None:
    account = Account()
    account.computed(0, 100)
    account.brought(0, {"HOST": 96})  # preempted, and begun again
    account.computed(96, 101)
    assert (account.reused(100), account.fresh_tokens(100)) == ({"HOST": 0}, 100)
    assert account.recomputed_tokens == 4


def test_what_was_brought_once_may_be_computed_later() -> None:
    account = Account()
    account.brought(0, {"HOST": 64})
    account.computed(64, 80)
    account.computed(32, 90)  # the second time less came
    assert (account.reused(90), account.fresh_tokens(90)) == ({"HOST": 32}, 58)
    assert account.recomputed_tokens == 16


@pytest.mark.parametrize("size", [90])
@given(
    steps=st.lists(st.tuples(st.booleans(), st.integers(0, 89), st.integers(1, 30), st.sampled_from("ABC")))
)
def test_every_token_has_one_origin(size: int, steps: list[tuple[bool, int, int, str]]) -> None:
    """Against the plain meaning: the last tier that brought it, unless it was ever computed."""
    account, own, tiers, again = Account(), set[int](), dict[int, str](), 0
    for computed, start, count, tier in steps:
        span = range(start, start + count)
        if computed:
            account.computed(start, start + count)
            again += len(own.intersection(span))
            own.update(span)
        else:
            account.brought(start, {tier: count})
            tiers |= dict.fromkeys(span, tier)
    assert account.fresh_tokens(size) == sum(token < size for token in own)
    expected = [tier for token, tier in tiers.items() if token < size and token not in own]
    assert {t: n for t, n in account.reused(size).items() if n} == {
        t: expected.count(t) for t in set(expected)
    }
    assert account.recomputed_tokens == again
