"""What a slower disk would have brought by when; and alarms, which wake whoever has to look."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.testing.clock import SimClock
from kvstore.tiers.alarms import Alarms
from kvstore.tiers.pacing import TURN_BYTES, Pacing

KIB = 1 << 10
BLOCK = 128 * KIB


def blocks(start: int, stop: int) -> np.ndarray:
    return np.arange(start, stop, dtype=np.uint32)


def run(pacing: Pacing[str], now_s: float, steps: int = 10_000) -> list[tuple[float, str, int]]:
    """Look at every moment at which something is due: (when, whose, position) until nothing waits."""
    out = []
    for _ in range(steps):
        next_s = pacing.next_s()
        if next_s is None:
            return out
        now_s = max(now_s, next_s)
        taken = pacing.take(now_s)
        assert taken, "it was said to be due"
        out += [(now_s, whose, p) for whose, positions in taken for p in positions.tolist()]
    raise AssertionError("it does not end")


def test_without_limits_nothing_has_to_wait() -> None:
    pacing = Pacing[str]()
    assert pacing.idle and pacing.next_s() is None and pacing.take(1.0) == []
    pacing.set_limits(5e6, 0.0, 0.0)
    assert not pacing.idle
    pacing.set_limits(0, 0.01, 0.0)
    assert not pacing.idle
    pacing.set_limits(0, 0.0, 0.0)
    assert pacing.idle


def test_a_limit_is_held_to_the_byte() -> None:
    pacing = Pacing[str]()
    pacing.set_limits(5e6, 0.0, 0.0)
    pacing.put("a", blocks(0, 40), BLOCK, 10.0)
    came = run(pacing, 10.0)
    assert [position for _, _, position in came] == list(range(40))
    for at, _, position in came:
        assert at == pytest.approx(10.0 + (position + 1) * BLOCK / 5e6)


@given(st.lists(st.floats(0.0, 0.2), min_size=1, max_size=50))
def test_late_looks_do_not_add_up(delays: list[float]) -> None:
    pacing = Pacing[str]()
    pacing.set_limits(5e6, 0.02, 0.0)
    pacing.put("a", blocks(0, 100), BLOCK, 10.0)
    came = 0
    now_s = 10.0
    for delay in delays:
        now_s += delay
        came += sum(len(positions) for _, positions in pacing.take(now_s))
        due = max(0.0, (now_s - 10.02) * 5e6 / BLOCK)
        assert min(100, due - 1e-6) - 1 <= came <= due + 1e-6


def test_added_latency_moves_everything_and_costs_no_bandwidth() -> None:
    pacing = Pacing[str]()
    pacing.set_limits(0, 0.05, 0.0)
    for step in range(10):
        pacing.put("a", blocks(step, step + 1), BLOCK, 10.0 + step / 1000)
    came = run(pacing, 10.0)
    assert [at for at, _, _ in came] == pytest.approx([10.05 + step / 1000 for step in range(10)])


def test_promotions_take_turns() -> None:
    """One that asked for much first leaves the other its half, however many reads either is made of."""
    pacing = Pacing[str]()
    pacing.set_limits(5e6, 0.0, 0.0)
    for step in range(0, 100, 4):
        pacing.put("large", blocks(step, step + 4), BLOCK, 10.0)
    pacing.put("small", blocks(0, 10), BLOCK, 10.0)
    came = run(pacing, 10.0)
    small = [at for at, whose, _ in came if whose == "small"]
    turn = TURN_BYTES / 5e6
    assert small[-1] <= 10.0 + 2 * 10 * BLOCK / 5e6 + 2 * turn
    assert came[-1][0] == pytest.approx(10.0 + 110 * BLOCK / 5e6), "taking turns costs nothing"


def test_one_promotion_gets_its_blocks_in_the_order_of_its_chain() -> None:
    """A fast disk answers a whole window in any order; a slow one would not have had the last block first."""
    pacing = Pacing[str]()
    pacing.set_limits(5e6, 0.0, 0.0)
    for start in (20, 0, 30, 10):
        pacing.put("a", blocks(start, start + 10), BLOCK, start / 1e6)
    came = run(pacing, 0.0)
    assert [position for _, _, position in came] == list(range(40))
    assert came[-1][0] == pytest.approx(40 * BLOCK / 5e6, abs=1e-4)


def test_a_block_larger_than_a_turn_comes_whole() -> None:
    pacing = Pacing[str]()
    pacing.set_limits(5e6, 0.0, 0.0)
    pacing.put("a", blocks(0, 3), 4 * TURN_BYTES, 0.0)
    assert [at for at, _, _ in run(pacing, 0.0)] == pytest.approx(
        [(i + 1) * 4 * TURN_BYTES / 5e6 for i in range(3)]
    )


def test_limits_change_for_what_waits() -> None:
    pacing = Pacing[str]()
    pacing.set_limits(5e6, 0.0, 0.0)
    pacing.put("a", blocks(0, 40), BLOCK, 0.0)
    at_10 = 10 * BLOCK / 5e6
    assert sum(len(p) for _, p in pacing.take(at_10)) == 10
    pacing.set_limits(1, 0.0, at_10)
    assert pacing.take(3600.0) == [] and pacing.next_s() == pytest.approx(at_10 + BLOCK)
    pacing.set_limits(1e6, 0.0, 3600.0)
    assert pacing.take(3600.0) == [], "the stall has saved nothing up"
    assert pacing.next_s() == pytest.approx(3600.0 + BLOCK / 1e6)
    pacing.set_limits(0, 0.0, 3600.01)
    assert sum(len(p) for _, p in pacing.take(3600.01)) == 30
    assert pacing.idle


def test_what_is_dropped_makes_way() -> None:
    pacing = Pacing[str]()
    pacing.set_limits(5e6, 0.0, 0.0)
    pacing.put("a", blocks(0, 40), BLOCK, 0.0)
    pacing.put("a", blocks(50, 52), BLOCK, 0.0)
    pacing.put("b", blocks(0, 2), BLOCK, 0.0)
    assert (pacing.held("a"), pacing.held("b"), pacing.held("c")) == (42, 2, 0)
    assert pacing.drop("a").tolist() == [*range(40), 50, 51]
    assert pacing.drop("a").tolist() == []
    assert run(pacing, 0.0)[-1][0] == pytest.approx(2 * BLOCK / 5e6)


# ---- alarms -----------------------------------------------------------------------------------------------


def test_alarms_ring_once_in_order_and_not_before() -> None:
    clock, rung = SimClock(0.0), list[str]()
    alarms = Alarms(clock)
    alarms.set(3.0, lambda: rung.append("c"))
    alarms.set(1.0, lambda: rung.append("a"))
    never = alarms.set(2.0, lambda: rung.append("never"))
    alarms.set(2.0, lambda: rung.append("b"))
    never.cancel()
    for _ in range(2):
        alarms.ring()
    assert (rung, alarms.next_s) == ([], 1.0)
    clock.advance(2.5)
    alarms.ring()
    alarms.ring()
    assert (rung, alarms.next_s) == (["a", "b"], 3.0)


def test_the_loop_is_told_of_the_earliest() -> None:
    clock, told = SimClock(0.0), list[float]()
    alarms = Alarms(clock)
    alarms.wake_at = told.append
    alarms.set(5.0, lambda: None)
    alarms.set(7.0, lambda: None)
    first = alarms.set(2.0, lambda: None)
    assert told == [5.0, 2.0]
    first.cancel()
    clock.advance(5.0)
    alarms.ring()
    assert told == [5.0, 2.0, 7.0]


def test_an_alarm_that_sets_itself_again_does_not_hold_the_loop() -> None:
    clock, rung = SimClock(0.0), list[float]()
    alarms = Alarms(clock)

    def again() -> None:
        rung.append(clock.now())
        alarms.set(clock.now(), again)

    alarms.set(0.0, again)
    alarms.ring()
    assert len(rung) == 1 and alarms.next_s == 0.0


def test_one_that_fails_does_not_silence_the_others() -> None:
    clock, rung, told = SimClock(0.0), list[str](), list[float]()
    alarms = Alarms(clock)

    def fails() -> None:
        raise RuntimeError("a bug")

    alarms.set(0.0, fails)
    alarms.set(0.0, lambda: rung.append("b"))
    alarms.wake_at = told.append
    with pytest.raises(RuntimeError, match="a bug"):
        alarms.ring()
    assert told == [0.0]
    alarms.ring()
    assert rung == ["b"]
