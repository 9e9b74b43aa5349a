"""What one promotion teaches of its disk, from moments and counts alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.policy.rates import Transfer
from kvstore.tiers.measured import Measured

BLOCK = 1000


def test_all_came() -> None:
    measured = Measured(10.0, BLOCK, 0, 0)
    measured.came(2, 10.5)
    measured.came(8, 12.0)
    assert measured.ended(10 * BLOCK) == Transfer(10 * BLOCK, 0, 2.0, 0.5, 2 * BLOCK)
    assert measured.over


def test_nothing_came() -> None:
    assert Measured(10.0, BLOCK, 0, 0).ended(0) is None
    assert Measured(10.0, BLOCK, 0, 0).gave_up(10, 10**9, 20.0) is None, (
        "others got something: not ours to say"
    )


def test_given_up_alone_is_its_own_pace() -> None:
    measured = Measured(10.0, BLOCK, 0, 0)
    measured.came(1, 10.5)
    measured.came(4, 11.5)
    assert measured.gave_up(20, 5 * BLOCK, 12.5) == Transfer.cut_short(20 * BLOCK, 5 * BLOCK, 2.5, 0.5, BLOCK)


def test_given_up_behind_others_is_the_pace_of_all() -> None:
    """30 blocks came in 3 s, 3 of them ours: 10 a second, for our 20 and the 40 ahead."""
    measured = Measured(10.0, BLOCK, 40 * BLOCK, 7 * BLOCK)
    measured.came(3, 13.0)
    transfer = measured.gave_up(20, 37 * BLOCK, 13.0)
    assert transfer is not None
    assert (transfer.size_bytes, transfer.ahead_bytes, transfer.given_up) == (20 * BLOCK, 40 * BLOCK, True)
    assert transfer.seconds == pytest.approx(6.0)


@given(
    st.integers(1, 100),
    st.integers(0, 10_000),
    st.integers(0, 1 << 40),
    st.floats(0.0, 1e5),
    st.floats(-1.0, 1e5),
    st.integers(0, 100),
)
def test_whatever_happened_it_is_a_transfer(
    came: int, ahead: int, brought: int, first: float, more: float, missing: int
) -> None:
    """A clock that stands still or goes back, and counts that contradict each other, included."""
    measured = Measured(1000.0, BLOCK, ahead, 1 << 20)
    measured.came(came, 1000.0 + first)
    measured.came(missing, 1000.0 + first + max(0.0, more))
    transfer = measured.gave_up(came + missing, brought, 1000.0 + first + more)
    assert transfer is not None and transfer.given_up
    assert transfer.seconds >= max(0.0, first + min(more, 0.0)) * (1 - 1e-9) - 1e-9
