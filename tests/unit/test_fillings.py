"""Who may write a filling, who ends it, and when its slots are free: one behaviour at a time."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore import _native
from kvstore.errors import NotFound, Refused
from kvstore.testing import SessionDriver, StoreDriver, small_layout
from kvstore.transfers import Filling, Fillings
from kvstore.types import Part

LEFT, RIGHT = Part(0, 2, 0, 1), Part(0, 2, 1, 1)


def tokens(blocks: int, start: int = 0) -> range:
    return range(start, start + 4 * blocks)


def ranks(driver: StoreDriver, *parts: Part) -> list[SessionDriver]:
    first = driver.attach(part=parts[0], role="worker")
    return [first, *(driver.attach(part=part, engine=first.engine.id, role="worker") for part in parts[1:])]


def reserved(session: SessionDriver, blocks: int = 4, start: int = 0) -> Filling:
    filling = session.reserve(session.chain(tokens(blocks, start))).filling
    assert filling is not None
    return filling


def filling_slots(driver: StoreDriver) -> int:
    return driver.group().host.counts()["filling"]


def test_an_abort_speaks_for_one_rank_only(driver: StoreDriver) -> None:
    left, right = ranks(driver, LEFT, RIGHT)
    filling = reserved(left)
    left.abort(filling)
    left.abort(filling)  # twice says nothing new
    assert filling_slots(driver) == 4, "the other rank may be writing"
    right.write(filling)
    done = right.publish(filling)
    assert (done.ready, done.dropped, done.pending) == (0, 4, False)
    assert filling_slots(driver) == 0
    assert right.lookup(right.chain(tokens(4))).blocks == 0


def test_a_rank_that_is_gone_gives_its_part_up(driver: StoreDriver) -> None:
    left, right = ranks(driver, LEFT, RIGHT)
    first, second = reserved(left), reserved(left, start=100)
    left.publish(first)
    assert left.quiesce() == 0
    with pytest.raises(NotFound, match="given up by quiesced"):
        left.publish(second)
    right.write(first)
    right.write(second)
    assert right.publish(second).dropped == 4
    assert right.publish(first).ready == 4, "what left wrote before it left counts"
    assert reserved(left, start=200).writers.keys() == {left.caller.session, right.caller.session}


def test_a_replica_may_still_write_what_another_did_not(driver: StoreDriver) -> None:
    left, right, spare = ranks(driver, LEFT, RIGHT, RIGHT)
    filling = reserved(left)
    assert right.die() == 0
    left.write(filling)
    spare.write(filling)
    assert left.publish(filling).pending
    assert spare.publish(filling).ready == 4


def test_a_part_that_nobody_will_write_is_not_waited_for(driver: StoreDriver) -> None:
    left, right, _ = ranks(driver, LEFT, RIGHT, RIGHT)
    filling = reserved(left)
    assert left.die() == 0
    right.write(filling)
    done = right.publish(filling)  # of two replicas one speaks
    assert (done.ready, done.dropped, done.pending) == (0, 4, False)
    assert filling_slots(driver) == 0


def test_the_last_rank_to_go_frees(driver: StoreDriver) -> None:
    left, right = ranks(driver, LEFT, RIGHT)
    reserved(left)
    left.disconnect()
    assert filling_slots(driver) == 4, "a closed socket proves nothing"
    assert right.die() == 0
    assert left.die() == 1
    assert filling_slots(driver) == 0


def test_who_came_later_has_no_part_in_it(driver: StoreDriver) -> None:
    left, right = ranks(driver, LEFT, RIGHT)
    filling = reserved(left)
    late = driver.attach(part=RIGHT, engine=left.engine.id)
    for attempt in (late.publish, late.abort):
        with pytest.raises(NotFound, match="before this session attached"):
            attempt(filling)
    late.die()
    left.write(filling)
    right.write(filling)
    left.publish(filling)
    assert right.publish(filling).ready == 4


def test_a_scheduler_writes_nothing_and_frees_nothing(driver: StoreDriver) -> None:
    left, right = ranks(driver, LEFT, RIGHT)
    scheduler = driver.attach(engine=left.engine.id, role="scheduler")
    filling = reserved(scheduler)
    with pytest.raises(Refused, match="scheduler"):
        scheduler.publish(filling)
    scheduler.abort(filling)
    scheduler.die()
    assert filling_slots(driver) == 4
    left.write(filling)
    right.write(filling)
    assert left.publish(filling).pending
    assert right.publish(filling).ready == 0
    assert filling_slots(driver) == 0


def test_without_a_writer_for_every_cell_nothing_is_reserved(driver: StoreDriver) -> None:
    scheduler = driver.attach(role="scheduler")
    got = scheduler.reserve(scheduler.chain(tokens(4)))
    assert (got.filling, got.dropped, "not every cell" in got.reason) == (None, 4, True)
    left = driver.attach(part=LEFT, engine=scheduler.engine.id)
    assert left.reserve(left.chain(tokens(4))).dropped == 4
    driver.attach(part=RIGHT, engine=scheduler.engine.id)
    assert reserved(scheduler).waiting == {2, 3}


def test_orders_to_a_scheduler_end_with_its_answer_or_with_it(driver: StoreDriver) -> None:
    worker = driver.attach()
    scheduler = driver.attach(engine=worker.engine.id, role="scheduler")
    pool = scheduler.own_pool(8, 1)

    def orders(start: int) -> list[Filling]:
        table = scheduler.acquire(0, 3)
        scheduler.commit(table.lease, scheduler.chain(tokens(3, start)), 0, 3)
        return [order.filling for order in scheduler.release(table.lease)]

    for filling in orders(0):
        scheduler.abort(filling)
    assert (filling_slots(driver), pool.counts()["draining"]) == (0, 0)
    assert orders(100)
    assert filling_slots(driver) > 0
    scheduler.disconnect()
    assert filling_slots(driver) == 0, "nobody was told of it but the scheduler, which cannot write"


def test_an_engine_has_one_layout_and_one_namespace(driver: StoreDriver) -> None:
    first = driver.attach()
    with pytest.raises(Refused, match=r"^engine: .* another layout or namespace"):
        driver.attach(engine=first.engine.id, layout=small_layout(head_dim=512))
    with pytest.raises(Refused, match=r"^engine: "):
        driver.attach(engine=first.engine.id, model="another")
    assert first.engine.sessions == {first.caller.session}
    assert driver.attach(engine=first.engine.id).engine is first.engine


def test_generations_name_the_hand_out(driver: StoreDriver) -> None:
    session = driver.attach()
    first = reserved(session)
    session.abort(first)
    second = reserved(session)
    arena = driver.group().arena
    assert second.generations.tolist() == [arena.control(slot).generation for slot in second.slots.tolist()]
    assert set(first.slots.tolist()) == set(second.slots.tolist())
    before = dict(zip(first.slots.tolist(), first.generations.tolist(), strict=True))
    assert all(g > before[s] for s, g in zip(second.slots.tolist(), second.generations.tolist(), strict=True))
    with pytest.raises(ValueError, match=r"^slots\[1\]"):
        _native.slot_generations(arena, np.array([0, arena.pages], np.uint32))


def test_tokens_start_at_random_and_grow() -> None:
    starts = {Fillings().last_token for _ in range(8)}
    assert len(starts) == 8
    assert all(0 <= start < 1 << 62 for start in starts)
    assert max(starts) > 1 << 40
