"""Clocks never go back."""

from __future__ import annotations

import pytest

from kvstore.clock import Clock, MonotonicClock
from kvstore.testing import SimClock


def test_the_machine_clock_is_monotonic() -> None:
    clock: Clock = MonotonicClock()
    readings = [clock.now() for _ in range(1000)]
    assert readings == sorted(readings)


def test_a_simulated_clock_moves_only_when_told() -> None:
    clock: Clock = SimClock(5.0)
    assert clock.now() == clock.now() == 5.0
    assert isinstance(clock, SimClock)
    clock.advance(2.5)
    assert clock.now() == 7.5
    with pytest.raises(ValueError, match="cannot go back"):
        clock.advance(-1)
    assert clock.now() == 7.5
