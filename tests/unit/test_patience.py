"""A waiter looks a little while, then sleeps; where looking never helps it stops looking."""

from __future__ import annotations

import selectors
import socket
from collections.abc import Iterator

import pytest

from kvstore.patience import _SLEEPS, _VAIN_MAX, NEXT_S, REPLY_S, LookingSelector, Waiter


class Ticking:
    """A clock that moves by a step at every look at it."""

    def __init__(self, step_s: float) -> None:
        self.time_s, self.step_s, self.looks = 0.0, step_s, 0

    def now(self) -> float:
        self.looks += 1
        self.time_s += self.step_s
        return self.time_s


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def test_what_is_there_is_found_at_the_first_look(ends: tuple[socket.socket, socket.socket]) -> None:
    clock = Ticking(0.0)
    ends[1].send(b"x")
    assert Waiter(ends[0], clock).readable(deadline=0.0)
    assert clock.looks == 1  # to know how long it might look


def test_the_end_of_the_stream_counts(ends: tuple[socket.socket, socket.socket]) -> None:
    ends[1].close()
    assert Waiter(ends[0], Ticking(0.0)).readable(deadline=0.0)


def test_nothing_comes_by_the_deadline(ends: tuple[socket.socket, socket.socket]) -> None:
    clock = Ticking(REPLY_S / 10)
    assert not Waiter(ends[0], clock).readable(deadline=REPLY_S / 2)
    assert clock.looks > 3  # it looked before it slept


def test_looking_in_vain_ends_and_is_tried_again(ends: tuple[socket.socket, socket.socket]) -> None:
    clock = Ticking(REPLY_S / 10)
    waiter = Waiter(ends[0], clock)

    def looks() -> int:
        before = clock.looks
        assert not waiter.readable(deadline=clock.time_s + 10 * clock.step_s)
        return clock.looks - before

    looking = [looks() for _ in range(_VAIN_MAX)]
    assert min(looking) > 2
    sleeping = [looks() for _ in range(_SLEEPS)]
    assert set(sleeping) == {1}  # only to know how long to sleep
    assert looks() > 2  # has it changed?
    ends[1].send(b"x")
    for _ in range(_SLEEPS):
        assert waiter.readable(deadline=clock.time_s + 1)
    assert looks_at_once(waiter, clock)


def looks_at_once(waiter: Waiter, clock: Ticking) -> bool:
    """Something is there: one question for the time, no sleep."""
    before = clock.looks
    return waiter.readable(deadline=clock.time_s + 1) and clock.looks - before == 1


def test_an_event_loop_that_was_busy_looks_before_it_sleeps(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    clock = Ticking(NEXT_S / 10)
    with LookingSelector(clock) as selector:
        selector.register(ends[0], selectors.EVENT_READ)
        assert selector.select(0.001) == []
        assert clock.looks == 0  # it was idle: it just slept
        ends[1].send(b"x")
        assert len(selector.select(1)) == 1
        ends[0].recv(1)
        assert selector.select(10 * NEXT_S) == []
        assert clock.looks > 3  # it was busy: it looked, then slept
        before = clock.looks
        assert selector.select(10 * NEXT_S) == []
        assert clock.looks == before  # and looks no more until there is something to do


def test_an_event_loop_with_work_to_do_does_not_look(ends: tuple[socket.socket, socket.socket]) -> None:
    clock = Ticking(NEXT_S / 10)
    with LookingSelector(clock) as selector:
        selector.register(ends[0], selectors.EVENT_READ)
        ends[1].send(b"x")
        assert len(selector.select(None)) == 1
        ends[0].recv(1)
        assert selector.select(0) == []
        assert selector.select(-1) == []
        assert clock.looks == 0
