"""Endings in slices: thousands of leases, fillings and device blocks let others in between."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import structlog.testing
from turns import HandLoop

from kvstore import block_tables
from kvstore.events import EventKind
from kvstore.group import FILLINGS_SLICE, LEASES_SLICE
from kvstore.rpc.later import Later
from kvstore.testing import StoreDriver, small_config, small_layout
from kvstore.tiers.gpu import CLOSE_SLICE

LAYOUT = small_layout(head_dim=64)  # 4 KiB cells, so that many blocks fit


@pytest.fixture
def loop() -> HandLoop:
    return HandLoop()


@pytest.fixture
def store(loop: HandLoop) -> Iterator[StoreDriver]:
    with StoreDriver(small_config(capacity_bytes=8 << 20, nodes_max=20_000)) as driver:
        driver.group().later = Later(loop.loop).begin
        yield driver
        loop.run()
        driver.store.check()


def test_many_leases_end_in_slices_and_the_first_at_once(store: StoreDriver, loop: HandLoop) -> None:
    group = store.group()
    session, other = store.attach(layout=LAYOUT), store.attach(layout=LAYOUT)
    chain = session.chain(range(40))
    session.save(chain)
    for _ in range(2 * LEASES_SLICE + 10):
        session.lookup(chain)
    session.disconnect()
    assert len(group.leases) == LEASES_SLICE + 10
    kept = other.lookup(chain).lease  # others are served in between
    store.store.check()
    loop.run()
    assert list(group.leases) == [kept]
    other.release(kept)
    assert group.index.pins() == 0


def test_many_fillings_of_a_process_that_is_gone_end_in_slices(store: StoreDriver, loop: HandLoop) -> None:
    group = store.group()
    writer = store.attach(layout=LAYOUT)
    for number in range(FILLINGS_SLICE + 20):
        writer.reserve(writer.chain(range(number, number + 4)))
    open_before = len(group.fillings)
    assert writer.die() == FILLINGS_SLICE
    assert len(group.fillings) == open_before - FILLINGS_SLICE
    store.store.check()
    loop.run()
    assert len(group.fillings) == 0
    assert not group.engines


def test_a_pool_that_dies_is_empty_at_once_and_its_nodes_follow(store: StoreDriver, loop: HandLoop) -> None:
    group = store.group()
    engine = store.attach(layout=LAYOUT)
    engine.own_pool(3 * CLOSE_SLICE, 3 * CLOSE_SLICE)
    for start in range(0, 2 * CLOSE_SLICE, 1024):
        chain = engine.chain(np.arange(start * 4, (start + 1024) * 4, dtype=np.uint32))
        lease = engine.acquire(0, 1024).lease
        block_tables.commit(store.store, engine.caller, lease.id, chain.root, 0, chain.root, chain.keys)
        engine.release(lease)
    assert len(group.index) == 2 * CLOSE_SLICE
    sequence, me = group.events.sequence, engine.engine.id
    engine.disconnect()
    assert 0 < len(group.index) < 2 * CLOSE_SLICE
    told = group.events.since(store.store.epoch, sequence).events
    assert [(event.kind, event.engine) for event in told] == [(EventKind.CLEARED, me)]
    store.store.check()
    again = store.attach(layout=LAYOUT, engine=me)  # the same engine comes back before all of it is gone
    again.own_pool(64, 64)
    lease = again.acquire(0, 8).lease
    chain = again.chain(range(32))
    assert again.commit(lease, chain, 0, 8) == 8
    loop.run()
    store.store.check()
    assert len(group.index) == 8


def test_slices_of_different_work_take_turns_and_a_bug_costs_only_its_own(loop: HandLoop) -> None:
    done: list[str] = []

    def work(name: str, slices: int, bug: bool = False) -> Iterator[None]:
        for number in range(slices):
            done.append(f"{name}{number}")
            if bug and number == 1:
                raise ValueError(name)
            yield

    later = Later(loop.loop)
    with structlog.testing.capture_logs() as logs:
        later.begin(work("a", 3))
        later.begin(work("b", 3, bug=True))
        loop.run()
    assert done == ["a0", "b0", "a1", "b1", "a2"]
    assert [entry["log_level"] for entry in logs] == ["error"]
    later.begin(work("c", 3))
    later.close()
    loop.run()
    assert done[5:] == ["c0"]


def test_work_for_an_engine_that_left_does_not_take_its_successor_along(
    store: StoreDriver, loop: HandLoop
) -> None:
    group = store.group()
    writer = store.attach(layout=LAYOUT)
    for number in range(FILLINGS_SLICE + 20):
        writer.reserve(writer.chain(range(number, number + 4)))
    writer.die()  # two pieces of work, each of two slices: its socket closed, its process ended
    assert loop.turn()
    assert not group.engines
    successor = store.attach(layout=LAYOUT, engine=writer.engine.id)
    assert successor.engine is not writer.engine
    loop.run()
    assert group.engines == {writer.engine.id: successor.engine}
