"""The event log: in order, without holes, bounded, and enough to rebuild what is readable."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvstore.events import KEYS_PER_EVENT, EventKind, EventLog, KVEvent
from kvstore.testing import SimClock
from kvstore.types import Tier

EPOCH, OTHER = b"e" * 16, b"o" * 16


def keys_of(*numbers: int) -> np.ndarray:
    return np.array([list(n.to_bytes(32, "little")) for n in numbers], np.uint8).reshape(-1, 32)


def test_sequence_counts_events() -> None:
    log = EventLog(EPOCH, 10)
    assert log.sequence == 0
    assert log.since(EPOCH, 0).events == ()
    log.append(EventKind.STORED, Tier.HOST, keys_of(1, 2), parent=b"p" * 32)
    log.append(EventKind.REMOVED, Tier.GPU, keys_of(1), engine=b"n" * 16)
    replay = log.since(EPOCH, 0)
    assert not replay.gap
    assert [event.sequence for event in replay.events] == [1, 2]
    first, second = replay.events
    assert (first.kind, first.tier, first.engine, first.parent) == (
        EventKind.STORED,
        Tier.HOST,
        b"",
        b"p" * 32,
    )
    assert np.array_equal(first.keys, keys_of(1, 2))
    assert (second.kind, second.engine) == (EventKind.REMOVED, b"n" * 16)


def test_nothing_is_not_an_event() -> None:
    log, woken = EventLog(EPOCH, 10), []
    log.listen(lambda: woken.append(1))
    log.append(EventKind.STORED, Tier.HOST, keys_of())
    assert (log.sequence, woken) == (0, [])
    log.append(EventKind.CLEARED, Tier.HOST, keys_of())
    assert (log.sequence, woken) == (1, [1])


def test_a_subscriber_pages() -> None:
    log = EventLog(EPOCH, 100)
    for n in range(10):
        log.append(EventKind.STORED, Tier.HOST, keys_of(n))
    assert [e.sequence for e in log.since(EPOCH, 3, most=4).events] == [4, 5, 6, 7]
    assert [e.sequence for e in log.since(EPOCH, 8, most=4).events] == [9, 10]
    assert log.since(EPOCH, 10).events == ()
    assert not log.since(EPOCH, 10).gap


@given(st.integers(1, 8), st.integers(0, 30), st.integers(-3, 40))
def test_gap_exactly_when_events_are_gone(log_max: int, count: int, sequence: int) -> None:
    log = EventLog(EPOCH, log_max)
    for n in range(count):
        log.append(EventKind.STORED, Tier.HOST, keys_of(n))
    replay = log.since(EPOCH, sequence)
    seen = [event.sequence for event in replay.events]
    oldest = max(1, count - log_max + 1)
    if sequence > count or sequence < oldest - 1:
        assert replay.gap and not seen
    else:
        assert not replay.gap
        assert seen == list(range(sequence + 1, count + 1))


def test_another_epoch_is_a_gap() -> None:
    log = EventLog(EPOCH, 10)
    assert log.since(OTHER, 0).gap
    log.append(EventKind.STORED, Tier.HOST, keys_of(1))
    assert log.since(OTHER, 1).gap
    assert not log.since(EPOCH, 1).gap


def test_listeners_come_and_go() -> None:
    log, woken = EventLog(EPOCH, 10), []
    one = log.listen(lambda: woken.append("one"))
    two = log.listen(lambda: log.unlisten(two) or woken.append("two"))
    assert one != two
    log.append(EventKind.STORED, Tier.HOST, keys_of(1))
    log.append(EventKind.STORED, Tier.HOST, keys_of(2))
    assert woken == ["one", "two", "one"]
    log.unlisten(one)
    log.unlisten(one)
    log.append(EventKind.STORED, Tier.HOST, keys_of(3))
    assert woken == ["one", "two", "one"]


def apply(held: set[bytes], events: tuple[KVEvent, ...]) -> None:
    for event in events:
        keys = {key.tobytes() for key in event.keys}
        held.update(keys) if event.kind is EventKind.STORED else held.difference_update(keys)


@given(
    st.lists(st.tuples(st.booleans(), st.sets(st.integers(0, 9), min_size=1)), max_size=30),
    st.integers(0, 30),
)
def test_snapshot_then_replay_is_the_state(changes: list[tuple[bool, set[int]]], at: int) -> None:
    log, truth, snapshot = EventLog(EPOCH, 100), set[bytes](), (0, frozenset[bytes]())
    for number, (stored, members) in enumerate(changes):
        if number == at:
            snapshot = (log.sequence, frozenset(truth))
        keys = keys_of(*sorted(members))
        log.append(EventKind.STORED if stored else EventKind.REMOVED, Tier.HOST, keys)
        (truth.update if stored else truth.difference_update)(key.tobytes() for key in keys)
    sequence, rebuilt = snapshot[0], set(snapshot[1])
    apply(rebuilt, log.since(EPOCH, sequence).events)
    assert rebuilt == truth


def test_large_events_leave_the_log_earlier() -> None:
    log = EventLog(b"e" * 16, 10)
    big = np.zeros((8 * KEYS_PER_EVENT, 32), np.uint8)
    for _ in range(10):
        log.append(EventKind.STORED, Tier.HOST, big)
    assert log.since(log.epoch, 0).gap
    kept = log.since(log.epoch, log.sequence - 1)
    assert [len(event.keys) for event in kept.events] == [len(big)]
    assert sum(len(event.keys) for event in log._ring) <= 10 * KEYS_PER_EVENT


def test_lag_is_that_of_the_slowest_subscriber_that_says_what_it_heard() -> None:
    clock = SimClock()
    log = EventLog(EPOCH, 3, clock)
    silent, slow, fast = (log.listen(lambda: None) for _ in range(3))
    assert (log.lag().events, log.lag().seconds) == (0, 0.0)
    log.heard(slow, 0)
    log.heard(fast, 0)
    log.heard(99, 0)  # nobody
    for _ in range(2):
        clock.advance(1.0)
        log.append(EventKind.STORED, Tier.HOST, keys_of(1))
    clock.advance(0.5)
    log.heard(fast, 2)
    assert (log.lag().events, log.lag().seconds) == (2, 1.5)
    log.heard(slow, 1)
    assert (log.lag().events, log.lag().seconds) == (1, 0.5)
    for _ in range(10):  # what it waits for has left the ring
        log.append(EventKind.STORED, Tier.HOST, keys_of(1))
    assert (log.lag().events, log.lag().seconds) == (11, 0.0)
    log.unlisten(slow)
    log.unlisten(fast)
    log.unlisten(silent)
    assert log.lag().events == 0
