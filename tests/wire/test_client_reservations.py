"""Reservations that outlive their attach, and ranks that fail: no slot is written by two, none is lost."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from client_daemon import ScriptedDaemon
from client_kit import Changes, Maker, chain_of
from client_memory import LAYOUT, LIMITS, NAMESPACE, WAIT_S, Memory
from client_running import Running, cut, fill

from kvstore import _native
from kvstore.client import AsyncClient, PoolSpec, Reservation, Table
from kvstore.errors import BadRequest, Unavailable
from kvstore.rpc import messages as m
from kvstore.types import Busy, Miss, Part, SaveResult

BLOCKS = np.arange(1, 5, dtype=np.uint32)


def reattach(client: Any) -> None:
    changes, generation = Changes(client), client.generation
    cut(client)
    changes.until(lambda: client.attached and client.generation > generation)
    client.poll()


def contents(running: Running, reservation: Reservation) -> list[bytes]:
    arena, length = running.group().arena, LAYOUT.slot_bytes
    return [arena.view(slot, length).tobytes() for slot in reservation.slots.tolist()]


def filling(running: Running) -> int:
    return int(running.call(lambda: running.group().host.counts()["filling"]))


def written(client: Any, reservation: Reservation) -> SaveResult:
    result = client.write(reservation, BLOCKS).wait(WAIT_S)
    assert isinstance(result, SaveResult)
    return result


def loaded(client: Any, chain: Any, memory: Memory) -> list[bytes]:
    hit = client.lookup(chain)
    assert client.load(hit, np.arange(9, 13)).wait(WAIT_S).good == 4
    client.release(hit.lease)
    return [memory.block(block) for block in range(9, 13)]


# ---- a reservation outlives its attach -------------------------------------------------------------------


def test_a_late_write_touches_no_slot_of_another_engine(running: Running, make: Maker) -> None:
    mine, theirs = Memory(), Memory()
    first, second = make.attached(mine), make.attached(theirs)
    fill(mine, 4, b"mine")
    originals = fill(theirs, 4, b"theirs")
    old = first.reserve(chain_of(first, 4), 0, 4)
    reattach(first)
    chain = chain_of(second, 4, first_token=500)
    new = second.reserve(chain, 0, 4)
    assert set(new.slots.tolist()) == set(old.slots.tolist()), "the test needs the same slots"
    before = contents(running, new)
    late = written(first, old)
    assert (late.ready, late.dropped) == (0, 4)
    assert "reserved before this process attached" in late.reason
    assert contents(running, new) == before
    assert written(second, new) == SaveResult(4, 0, 0, 0)
    assert loaded(second, chain, theirs) == originals
    assert first.check()["ok"] is True


def test_the_generation_keeps_out_a_writer_that_believes_the_slot_is_its_own(
    running: Running, make: Maker
) -> None:
    memory = Memory()
    client = make.attached(memory)
    fill(memory, 4)
    old = client.reserve(chain_of(client, 4), 0, 4)
    client.abort(old)
    new = client.reserve(chain_of(client, 4, first_token=500), 0, 4)
    assert set(new.slots.tolist()) == set(old.slots.tolist())
    before = contents(running, new)
    confused = written(client, dataclasses.replace(old, token=new.token))
    assert (confused.ready, confused.dropped) == (0, 4)
    assert contents(running, new) == before
    assert filling(running) == 0  # it ended the filling whose token it used


def test_a_token_of_a_daemon_that_is_gone_publishes_nothing(make: Maker, path: Path) -> None:
    first = Running(path)
    client = make.attached()
    changes = Changes(client)
    old = client.reserve(chain_of(client, 4), 0, 4)
    first.stop()
    changes.until(lambda: not client.attached)
    second = Running(path)
    changes.until(lambda: client.attached)
    chain = chain_of(client, 4)
    new = client.reserve(chain, 0, 4)
    assert new.token != old.token
    assert (old.epoch != new.epoch, old.engine) == (True, new.engine)
    late = written(client, old)
    assert (late.ready, late.dropped, "another daemon" in late.reason) == (0, 4, True)
    client.abort(old)  # a no-op
    assert isinstance(client.lookup(chain), Miss)
    assert written(client, new).ready == 4
    client.close()
    second.stop()


def test_quiesced_ends_reservations(running: Running, make: Maker) -> None:
    client = make.attached()
    chain = chain_of(client, 4)
    old = client.reserve(chain, 0, 4)
    assert client.quiesced() is True
    assert filling(running) == 0
    late = written(client, old)
    assert (late.ready, late.dropped, "quiesced" in late.reason) == (0, 4, True)
    assert written(client, client.reserve(chain, 0, 4)).ready == 4


def test_no_store_begins_while_quiesced_is_said(daemon: ScriptedDaemon, make: Maker) -> None:
    gate = threading.Event()

    def held(*_: Any) -> Any:
        assert gate.wait(WAIT_S)
        return m.Quieted(1)

    daemon.handlers[m.Quiesced] = held
    client = make.attached()
    old = client.reserve(chain_of(client, 4), 0, 4)
    core = client._core
    answers: list[bool] = []
    other = threading.Thread(target=lambda: answers.append(client.quiesced()))
    other.start()
    daemon.await_requests(m.Quiesced, 1)
    with pytest.raises(Unavailable, match="quiescing"):
        core.submit_store(core.attachment, old, BLOCKS)
    gate.set()
    other.join(WAIT_S)
    assert answers == [True]
    with pytest.raises(Unavailable, match="given up"):
        core.submit_store(core.attachment, old, BLOCKS)


def test_a_reservation_is_written_once_at_a_time(daemon: ScriptedDaemon, make: Maker) -> None:
    gate = threading.Event()
    honest = daemon.on_publish

    def held(conn: Any, body: m.Publish) -> Any:
        assert gate.wait(WAIT_S)
        return honest(conn, body)

    daemon.handlers[m.Publish] = held
    client = make.attached()
    reservation = client.reserve(chain_of(client, 4), 0, 4)
    results: list[SaveResult] = []
    other = threading.Thread(target=lambda: results.append(written(client, reservation)))
    other.start()
    daemon.await_requests(m.Publish, 1)
    again = written(client, reservation)
    assert (again.dropped, "under way" in again.reason) == (4, True)
    with pytest.raises(BadRequest, match="under way"):
        client.abort(reservation)
    gate.set()
    other.join(WAIT_S)
    assert results == [SaveResult(4, 0, 0, 0)]
    assert daemon.seen(m.Abort) == []


def test_what_was_reserved_while_a_process_came_back_is_not_its_own(
    daemon: ScriptedDaemon, make: Maker
) -> None:
    client = make.attached()
    daemon.handlers[m.Quiesced] = lambda *_: m.Quieted(3)  # the scheduler reserved after Attached said 0
    reattach(client)
    first = client.reserve(chain_of(client, 4), 0, 4)
    late = written(client, dataclasses.replace(first, token=3))
    assert (late.dropped, "before this process attached" in late.reason) == (4, True)
    assert daemon.seen(m.Publish) == daemon.seen(m.Abort) == []


# ---- ranks -----------------------------------------------------------------------------------------------


class Ranks:
    """A scheduler and two tensor-parallel workers, and a reservation of four blocks."""

    def __init__(self, make: Maker) -> None:
        self.scheduler = make.attached(role="scheduler", layout=LAYOUT)
        self.memories = [Memory(32, Part(0, 2, head, 1)) for head in (0, 1)]
        engine = self.scheduler.engine
        self.workers = [make.attached(memory, role="worker", engine=engine) for memory in self.memories]
        for memory in self.memories:
            fill(memory, 4)
        self.chain = chain_of(self.scheduler, 4)
        self.reservation = self.scheduler.reserve(self.chain, 0, 4)
        assert self.reservation.token


def give_up(ranks: Ranks) -> None:
    ranks.workers[0].abort(ranks.reservation)


def come_back(ranks: Ranks) -> None:
    reattach(ranks.workers[0])
    assert written(ranks.workers[0], ranks.reservation).dropped == 4


def quiesce(ranks: Ranks) -> None:
    assert ranks.workers[0].quiesced()


def leave(ranks: Ranks) -> None:
    ranks.workers[0].close()


def fail_to_copy(ranks: Ranks) -> None:
    bad = dataclasses.replace(ranks.reservation, generations=ranks.reservation.generations + np.uint64(1))
    assert written(ranks.workers[0], bad).dropped == 4


@pytest.mark.parametrize("ends", [give_up, come_back, quiesce, leave, fail_to_copy])
def test_one_rank_frees_no_slot_that_another_may_write(
    running: Running, make: Maker, ends: Callable[[Ranks], None]
) -> None:
    ranks = Ranks(make)
    ends(ranks)
    assert filling(running) == 4, "the other rank may be writing"
    memory = Memory()
    other = make.attached(memory)
    originals = fill(memory, 4, b"other")
    chain = chain_of(other, 4, first_token=500)
    new = other.reserve(chain, 0, 4)
    assert not set(new.slots.tolist()) & set(ranks.reservation.slots.tolist())
    last = written(ranks.workers[1], ranks.reservation)
    assert (last.ready, last.dropped) == (0, 4)
    assert filling(running) == 4, "only the other engine's"
    assert written(other, new).ready == 4
    assert loaded(other, chain, memory) == originals
    assert isinstance(ranks.scheduler.lookup(ranks.chain), Miss)
    assert other.check()["ok"] is True


def test_a_rank_that_wrote_and_left_has_written(running: Running, make: Maker) -> None:
    ranks = Ranks(make)
    assert written(ranks.workers[0], ranks.reservation) == SaveResult(0, 0, 4, 0)
    reattach(ranks.workers[0])
    assert written(ranks.workers[1], ranks.reservation) == SaveResult(4, 0, 0, 0)
    assert filling(running) == 0


def test_a_scheduler_gives_up_for_nobody_but_itself(running: Running, make: Maker) -> None:
    ranks = Ranks(make)
    ranks.scheduler.abort(ranks.reservation)
    ranks.scheduler.close()
    assert filling(running) == 4
    assert written(ranks.workers[0], ranks.reservation).ready == 0
    assert filling(running) == 4
    assert written(ranks.workers[1], ranks.reservation).dropped == 4
    assert filling(running) == 0


def test_a_rank_that_attached_later_has_no_part_in_it(running: Running, make: Maker) -> None:
    ranks = Ranks(make)
    memory = Memory(32, Part(0, 2, 1, 1))
    late = make.attached(memory, role="worker", engine=ranks.scheduler.engine)
    before = contents(running, ranks.reservation)
    result = written(late, ranks.reservation)
    assert (result.dropped, "before this process attached" in result.reason) == (4, True)
    assert contents(running, ranks.reservation) == before
    for worker in ranks.workers:
        last = written(worker, ranks.reservation)
    assert last.ready == 4


def test_without_every_rank_nothing_is_reserved(running: Running, make: Maker) -> None:
    half = make.attached(Memory(32, Part(0, 2, 0, 1)))
    got = half.reserve(chain_of(half, 4), 0, 4)
    assert (got.token, got.dropped) == (0, 4)
    assert "not every cell" in got.reason


# ---- cancellation (asyncio only) -------------------------------------------------------------------------


async def cancelled(call: Any, daemon: ScriptedDaemon, kind: type, honest: Callable[..., Any]) -> None:
    """Start a call, cancel it while the daemon works on it, let the daemon answer."""
    asked, gate = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def held(conn: Any, body: Any) -> Any:
        loop.call_soon_threadsafe(asked.set)
        assert gate.wait(WAIT_S)
        return honest(conn, body)

    daemon.handlers[kind] = held
    task = asyncio.create_task(call)
    await asked.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    daemon.handlers[kind] = honest
    gate.set()


async def test_a_cancelled_reserve_is_aborted(daemon: ScriptedDaemon, path: Path) -> None:
    async with AsyncClient(path, NAMESPACE, Memory(), limits=LIMITS) as client:
        assert await client.wait_attached(WAIT_S)
        call = client.reserve(chain_of(client, 2), 0, 2)
        await cancelled(call, daemon, m.Reserve, daemon.on_reserve)
        await asyncio.to_thread(daemon.await_requests, m.Abort, 1)
    assert daemon.seen(m.Abort) == [m.Abort(1)]


async def test_a_cancelled_grow_takes_nothing_from_a_living_table(daemon: ScriptedDaemon, path: Path) -> None:
    tables = {4: [1, 2, 3, 4], 6: [5, 6], 7: [7], 8: [8]}
    slot = daemon.format.slot_bytes // _native.PAGE_BYTES

    def acquire(_: Any, body: m.Acquire) -> m.Acquired:
        load, runs = ((1, 3), [slot, 2 * slot]) if body.blocks == 4 else ((0, 0), [])
        raw = np.array(tables[body.blocks], "<u4").tobytes()
        return m.Acquired(9, raw, 1, load, np.array(runs, "<u4").tobytes(), [])

    pool = PoolSpec("owned", 15, 4)
    async with AsyncClient(path, NAMESPACE, Memory(), limits=LIMITS, pool=pool, scratch_block=15) as client:
        assert await client.wait_attached(WAIT_S)
        await client.poll()
        await cancelled(client.acquire(0, 4), daemon, m.Acquire, acquire)  # nobody knows this lease
        await asyncio.to_thread(daemon.await_requests, m.Release, 1)
        chain = chain_of(client, 4)
        assert (await client.save(chain, 0, 4, np.arange(4)).wait()) == SaveResult(4, 0, 0, 0)
        hit = await client.lookup(chain)
        await cancelled(client.acquire(hit.lease, 4), daemon, m.Acquire, acquire)
        busy = await client.acquire(hit.lease, 6)
        while isinstance(busy, Busy):  # until the cancelled one has ended
            assert "under way" in busy.reason
            assert await client.heartbeat()
            busy = await client.acquire(hit.lease, 6)
        assert isinstance(busy, Table)
        assert (busy.added.tolist(), busy.device) == ([1, 2, 3, 4, 5, 6], 1)
        assert (busy.load_start, busy.load_stop, busy.slots.tolist()) == (1, 3, [slot, 2 * slot])
        await cancelled(client.acquire(hit.lease, 7), daemon, m.Acquire, acquire)
        assert await client.heartbeat()  # the cancelled answer came before this one
        table = await client.acquire(hit.lease, 8)
        assert isinstance(table, Table)
        assert table.added.tolist() == [7, 8]
        assert len(daemon.seen(m.Release)) == 1
        await client.release(hit.lease)
    assert len(daemon.seen(m.Release)) == 2
