"""Saves and the device pool: every token ends once, and nothing is claimed that was not kept."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from client_daemon import HangUp, ScriptedDaemon, failed
from client_kit import Changes, Maker, chain_of
from client_memory import LAYOUT, LIMITS, NAMESPACE, WAIT_S, Memory

from kvstore._native import NONE
from kvstore.client import AsyncClient, PoolSpec, Table
from kvstore.errors import BadRequest, NotFound
from kvstore.rpc import messages as m
from kvstore.types import Busy, Hit, SaveResult

OWNED = PoolSpec("owned", 15, 4)


def u32(*values: int) -> bytes:
    return np.array(values, "<u4").tobytes()


def u64(*values: int) -> bytes:
    return np.array(values, "<u8").tobytes()


def saving(client: Any, chain: Any, start: int, stop: int) -> SaveResult:
    blocks = np.arange(1, 1 + stop - start, dtype=np.uint32)
    result = client.save(chain, start, stop, blocks).wait(WAIT_S)
    assert isinstance(result, SaveResult)
    return result


def ends(daemon: ScriptedDaemon) -> list[tuple[str, int]]:
    """How tokens ended."""
    return [("publish", r.token) for r in daemon.seen(m.Publish)] + [
        ("abort", r.token) for r in daemon.seen(m.Abort)
    ]


def test_a_save_is_readable_afterwards(daemon: ScriptedDaemon, make: Maker) -> None:
    memory = Memory()
    client = make.attached(memory)
    chain = chain_of(client, 5)
    memory.fill(3, b"three")
    memory.fill(7, b"seven")
    assert client.save(chain, 0, 2, [3, 7]).wait(WAIT_S) == SaveResult(2, 0, 0, 0)
    (reserve,) = daemon.seen(m.Reserve)
    assert (reserve.root, reserve.parent) == (chain.root, chain.root)
    assert saving(client, chain, 0, 4) == SaveResult(2, 2, 0, 0)
    assert saving(client, chain, 4, 5) == SaveResult(1, 0, 0, 0)
    assert daemon.seen(m.Reserve)[-1].parent == chain.keys[3].tobytes()
    hit = client.lookup(chain)
    assert hit.blocks == 5
    assert client.load(hit, np.arange(8, 13)).wait(WAIT_S).good == 5
    assert memory.block(9) == memory.block(7)
    assert (client.counters.saves, client.counters.blocks_saved, client.counters.blocks_dropped) == (3, 5, 0)


def test_rounds_follow_each_other_in_order(make: Maker, path: Path) -> None:
    daemon = ScriptedDaemon(path, keys_max=3)
    client = make.attached()
    chain = chain_of(client, 8)
    assert saving(client, chain, 0, 8) == SaveResult(8, 0, 0, 0)
    kinds = [type(r) for r in daemon.conn(0).requests if isinstance(r, m.Reserve | m.Publish)]
    assert kinds == [m.Reserve, m.Publish] * 3
    parents = [r.parent for r in daemon.seen(m.Reserve)]
    assert parents == [chain.root, chain.keys[2].tobytes(), chain.keys[5].tobytes()]
    client.close()
    daemon.stop()


def test_what_follows_a_dropped_block_is_dropped(make: Maker, path: Path) -> None:
    daemon = ScriptedDaemon(path, keys_max=3)
    first = [m.Reserved(0, u32(NONE), b"", 0, 1, 2, "no room", "")]
    daemon.handlers[m.Reserve] = lambda *_: first.pop()
    client = make.attached()
    result = saving(client, chain_of(client, 8), 0, 8)
    assert result == SaveResult(0, 0, 1, 7, "no room")
    assert len(daemon.seen(m.Reserve)) == 1
    client.close()
    daemon.stop()


def test_busy_drops_everything_and_says_why(daemon: ScriptedDaemon, make: Maker) -> None:
    daemon.handlers[m.Reserve] = lambda *_: m.Reserved(0, b"", b"", 0, 0, 4, "", "all pinned")
    client = make.attached()
    assert saving(client, chain_of(client, 4), 0, 4) == SaveResult(0, 0, 0, 4, "all pinned")
    daemon.handlers[m.Reserve] = lambda *_: failed(BadRequest("duplicate keys"))
    assert saving(client, chain_of(client, 4), 0, 4) == SaveResult(0, 0, 0, 4, "duplicate keys")
    assert ends(daemon) == []


def test_a_lost_race_is_dropped(daemon: ScriptedDaemon, make: Maker) -> None:
    daemon.handlers[m.Publish] = lambda *_: m.Published(1, 2, False)
    client = make.attached()
    result = saving(client, chain_of(client, 3), 0, 3)
    assert (result.ready, result.dropped) == (1, 2)
    assert "race" in result.reason


def test_a_publish_that_fails_is_aborted(daemon: ScriptedDaemon, make: Maker) -> None:
    daemon.handlers[m.Publish] = lambda *_: failed(NotFound("token 1"))
    client = make.attached()
    assert saving(client, chain_of(client, 3), 0, 3) == SaveResult(0, 0, 0, 3, "token 1")
    assert ends(daemon) == [("publish", 1), ("abort", 1)]


RESERVED_LIES = {
    "a slot outside the arena": m.Reserved(1, u32(0, 4, 0xFFFFFF00), u64(1, 1, 1), 0, 0, 0),
    "slots cut short": m.Reserved(1, b"\0" * 7, u64(1), 0, 0, 0),
    "generations cut short": m.Reserved(1, u32(0, 4, 8), u64(1, 1, 1)[:-1], 0, 0, 0),
    "a generation missing": m.Reserved(1, u32(0, 4, 8), u64(1, 1), 0, 0, 0),
    "too many slots": m.Reserved(1, u32(0, 4, 8, 12), u64(1, 1, 1, 1), 0, 0, 0),
    "unaccounted blocks": m.Reserved(1, u32(0, 4), u64(1, 1), 0, 0, 0),
    "negative": m.Reserved(1, u32(0, 4, 8, 12), u64(1, 1, 1, 1), 0, 0, -1),
    "no token": m.Reserved(0, u32(0, 4, 8), u64(1, 1, 1), 0, 0, 0),
    "a token for nothing": m.Reserved(3, u32(NONE, NONE, NONE), b"", 3, 0, 0),
    "counts that disagree": m.Reserved(1, u32(0, 4, NONE), u64(1, 1), 0, 0, 0),
}


@pytest.mark.parametrize("lie", RESERVED_LIES.values(), ids=RESERVED_LIES.keys())
def test_a_reserved_that_makes_no_sense(daemon: ScriptedDaemon, make: Maker, lie: m.Reserved) -> None:
    daemon.handlers[m.Reserve] = lambda *_: lie
    client = make.attached()
    result = saving(client, chain_of(client, 3), 0, 3)
    assert (result.ready, result.dropped) == (0, 3)
    assert "malformed" in result.reason
    assert daemon.conn(0).closed.wait(WAIT_S)


@pytest.mark.parametrize(
    "reply", [m.Published(4, 0, False), m.Published(-1, 0, False), m.Published(2, 2, False)]
)
def test_a_published_that_makes_no_sense(daemon: ScriptedDaemon, make: Maker, reply: m.Published) -> None:
    daemon.handlers[m.Publish] = lambda *_: reply
    client = make.attached()
    result = saving(client, chain_of(client, 3), 0, 3)
    assert (result.ready, result.dropped) == (0, 3)
    assert "malformed" in result.reason


@pytest.mark.parametrize("step", [m.Reserve, m.Publish])
def test_a_daemon_that_dies_in_a_save(daemon: ScriptedDaemon, make: Maker, step: type) -> None:
    client = make.attached()
    changes = Changes(client)
    honest = getattr(daemon, "on_" + step.__name__.lower())
    fault = [HangUp()]
    daemon.handlers[step] = lambda conn, body: fault.pop() if fault else honest(conn, body)
    result = saving(client, chain_of(client, 3), 0, 3)
    assert (result.ready, result.dropped) == (0, 3)
    assert result.reason
    changes.until(lambda: client.generation == 2 and client.attached)
    client.poll()
    assert saving(client, chain_of(client, 6, first_token=100), 0, 6) == SaveResult(6, 0, 0, 0)
    assert client.counters.blocks_dropped == 3


def test_without_a_daemon_a_save_is_dropped(daemon: ScriptedDaemon, make: Maker) -> None:
    client = make.attached()
    chain = chain_of(client, 3)
    client.close()
    assert saving(client, chain, 0, 3) == SaveResult(0, 0, 0, 3, "no daemon is attached")
    assert client.reserve(chain, 0, 3).dropped == 3


def test_arguments_of_a_save_are_checked(daemon: ScriptedDaemon, make: Maker) -> None:
    client = make.attached()
    chain = chain_of(client, 3)
    with pytest.raises(BadRequest, match="inside a chain of 3"):
        client.save(chain, 1, 4, [1, 2, 3])
    with pytest.raises(BadRequest, match="need 2 device blocks"):
        client.save(chain, 1, 3, [1])
    with pytest.raises(BadRequest, match=r"in \[0, 16\)"):
        client.save(chain, 1, 3, [1, 16])
    assert client.save(chain, 1, 1, []).wait(WAIT_S) == SaveResult(0, 0, 0, 0)
    assert daemon.seen(m.Reserve) == []


def test_several_ranks_write_one_reservation(daemon: ScriptedDaemon, make: Maker) -> None:
    scheduler = make.attached(role="scheduler", layout=LAYOUT)
    ranks = [make.attached(role="worker", engine=scheduler.engine) for _ in range(2)]
    chain = chain_of(scheduler, 3)
    reservation = scheduler.reserve(chain, 0, 3)
    assert (reservation.token, len(reservation.slots), reservation.dropped) == (1, 3, 0)
    daemon.handlers[m.Publish] = lambda *_: m.Published(0, 0, True)
    blocks = np.array([1, 2, 3], np.uint32)
    assert ranks[0].write(reservation, blocks).wait(WAIT_S) == SaveResult(0, 0, 3, 0)
    del daemon.handlers[m.Publish]
    assert ranks[1].write(reservation, blocks).wait(WAIT_S) == SaveResult(3, 0, 0, 0)
    assert scheduler.lookup(chain).blocks == 3


def test_handles_max_bounds_what_is_under_way(daemon: ScriptedDaemon, make: Maker) -> None:
    gate = threading.Event()
    honest = daemon.on_publish

    def held(conn: Any, body: m.Publish) -> Any:
        assert gate.wait(WAIT_S)
        return honest(conn, body)

    daemon.handlers[m.Publish] = held
    client = make.attached(limits=dataclasses.replace(LIMITS, handles_max=1))
    chain = chain_of(client, 4)
    thread_results: list[SaveResult] = []
    other = threading.Thread(target=lambda: thread_results.append(saving(client, chain, 0, 2)))
    other.start()
    daemon.await_requests(m.Publish, 1)
    result = saving(client, chain, 2, 4)
    gate.set()
    other.join(WAIT_S)
    assert (result.dropped, "handles_max" in result.reason) == (2, True)
    assert thread_results == [SaveResult(2, 0, 0, 0)]


# ---- the device pool -------------------------------------------------------------------------------------


def acquired(lease: int, *blocks: int, **fields: Any) -> m.Acquired:
    honest = m.Acquired(lease, u32(*blocks), 0, (0, 0), b"", [])
    values = {name: getattr(honest, name) for name in honest.__struct_fields__}
    return m.Acquired(**{**values, **fields})


def demote_once(daemon: ScriptedDaemon, memory: Memory) -> tuple[Callable[[], Any], list[bytes]]:
    """An order to copy device blocks 5 and 6 down, as the daemon would give it."""
    keys = [b"k" * 32, b"l" * 32]
    memory.fill(5, b"five")
    memory.fill(6, b"six")

    def order() -> m.Demote:
        got = daemon.on_reserve(daemon.conn(0), m.Reserve(b"r" * 32, b"r" * 32, b"".join(keys)))
        return m.Demote(got.token, u32(5, 6), got.slots, got.generations)

    return order, keys


def test_acquire_copies_down_first(daemon: ScriptedDaemon, make: Maker) -> None:
    memory = Memory()
    client = make.attached(memory, pool=OWNED)
    order, keys = demote_once(daemon, memory)
    answers = [acquired(4, 8, 9, device=1), acquired(0, demote=[order()])]
    daemon.handlers[m.Acquire] = lambda *_: answers.pop()
    table = client.acquire(0, 2)
    assert isinstance(table, Table)
    assert (table.added.tolist(), table.device) == ([8, 9], 1)
    assert daemon.seen(m.Publish) == [m.Publish(1, 2, True)]
    cell = daemon.arena.view(daemon.slots[keys[1]], LAYOUT.cell_bytes)
    assert cell.tobytes() == memory.read_cell(6, 0, 0)
    daemon.handlers[m.Acquire] = lambda *_: acquired(4, 10)
    assert client.acquire(table.lease, 3).added.tolist() == [10]
    assert daemon.seen(m.Acquire)[-1] == m.Acquire(4, 3)
    daemon.handlers[m.Commit] = lambda *_: m.Committed(2)
    chain = chain_of(client, 3)
    assert client.commit(table.lease, chain, 1, 3) == 2
    (commit,) = daemon.seen(m.Commit)
    assert (commit.lease, commit.start, commit.parent) == (4, 1, chain.keys[0].tobytes())
    client.release(table.lease)
    assert daemon.released == [4]
    assert client.commit(table.lease, chain, 1, 3) == 0
    assert isinstance(client.acquire(table.lease, 4), Busy)


def test_release_copies_down_what_has_to_leave(daemon: ScriptedDaemon, make: Maker) -> None:
    memory = Memory()
    client = make.attached(memory, pool=OWNED)
    order, keys = demote_once(daemon, memory)
    daemon.handlers[m.Acquire] = lambda *_: acquired(4, 8)
    daemon.handlers[m.Release] = lambda *_: m.Released([order()])
    client.release(client.acquire(0, 1).lease)
    assert daemon.slots.keys() == set(keys)


def test_rounds_of_copying_down_are_bounded(daemon: ScriptedDaemon, make: Maker) -> None:
    memory = Memory()
    client = make.attached(memory, pool=OWNED, limits=dataclasses.replace(LIMITS, demote_rounds_max=3))
    daemon.handlers[m.Acquire] = lambda *_: acquired(0, demote=[m.Demote(7, b"", b"", b"")])
    assert "3 rounds" in client.acquire(0, 1).reason
    assert len(daemon.seen(m.Acquire)) == 3


def test_a_scheduler_that_cannot_copy_gives_the_bytes_up(daemon: ScriptedDaemon, make: Maker) -> None:
    client = make.attached(role="scheduler", layout=LAYOUT, pool=OWNED)
    answers = [acquired(4, 8), acquired(0, demote=[m.Demote(7, u32(1), u32(0), u64(1))])]
    daemon.handlers[m.Acquire] = lambda *_: answers.pop()
    assert client.acquire(0, 1).added.tolist() == [8]
    assert ends(daemon) == [("abort", 7)]


ACQUIRED_LIES = {
    "a block outside the pool": acquired(4, 16),
    "a table cut short": acquired(4, table=b"\0\0\0"),
    "no lease": acquired(0, 3),
    "slots without a load": acquired(4, 3, runs=u32(1)),
    "load backwards": acquired(4, 3, load=(1, 0)),
    "negative device": acquired(4, 3, device=-1),
    "blocks without slots": acquired(0, demote=[m.Demote(7, u32(1, 2), u32(0), u64(1, 1))]),
    "generations that do not pair up": acquired(0, demote=[m.Demote(7, u32(1), u32(0), b"")]),
    "a device block outside": acquired(0, demote=[m.Demote(7, u32(16), u32(0), u64(1))]),
    "a slot outside": acquired(0, demote=[m.Demote(7, u32(1), u32(0xFFFFFF00), u64(1))]),
}


@pytest.mark.parametrize("lie", ACQUIRED_LIES.values(), ids=ACQUIRED_LIES.keys())
def test_an_acquired_that_makes_no_sense(daemon: ScriptedDaemon, make: Maker, lie: m.Acquired) -> None:
    daemon.handlers[m.Acquire] = lambda *_: lie
    client = make.attached(pool=OWNED)
    answer = client.acquire(0, 1)
    assert isinstance(answer, Busy)
    assert "malformed" in answer.reason
    assert daemon.conn(0).closed.wait(WAIT_S)


def test_tables_are_adopted_in_the_callback(daemon: ScriptedDaemon, make: Maker) -> None:
    daemon.handlers[m.Adopt] = lambda *_: acquired(11)
    daemon.handlers[m.Acquire] = lambda *_: acquired(11, 9)
    client = make(pool=OWNED)
    assert client.wait_attached(WAIT_S)
    chain = chain_of(client, 3)
    table = client.adopt(np.array([4, 5, 6], np.uint32), chain, 2)
    bare = client.adopt(np.array([7], np.uint32), None, 0)
    assert isinstance(table, Table)
    assert isinstance(bare, Table)
    first, second = daemon.seen(m.Adopt)
    assert first == m.Adopt(u32(4, 5, 6), chain.root, chain.keys[:2].tobytes())
    assert second == m.Adopt(u32(7), b"", b"")
    client.poll()
    assert client.acquire(table.lease, 4).added.tolist() == [9]
    assert daemon.seen(m.Acquire) == [m.Acquire(11, 4)]


def test_a_borrowed_pool_is_told_in_pieces(make: Maker, path: Path) -> None:
    daemon = ScriptedDaemon(path, keys_max=2)
    client = make.attached(pool=PoolSpec("borrowed", 16))
    keys = np.arange(32 * 5, dtype=np.uint8).reshape(5, 32)
    assert client.observe(1, 2, 3, keys, keys[:1])
    told = daemon.seen(m.Observe)
    assert b"".join(one.stored for one in told) == keys.tobytes()
    assert [one.removed for one in told] == [keys[:1].tobytes(), b"", b""]
    with pytest.raises(BadRequest, match="keys"):
        client.observe(1, 2, 3, keys.astype(np.uint16), keys)
    client.close()
    daemon.stop()


# ---- cancellation (asyncio only) -------------------------------------------------------------------------


async def test_a_cancelled_lookup_gives_its_lease_back(daemon: ScriptedDaemon, path: Path) -> None:
    asked, gate = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def held(conn: Any, body: m.Lookup) -> Any:
        loop.call_soon_threadsafe(asked.set)
        assert gate.wait(WAIT_S)
        return daemon.on_lookup(conn, body)

    async with AsyncClient(path, NAMESPACE, Memory(), limits=LIMITS) as client:
        assert await client.wait_attached(WAIT_S)
        chain = chain_of(client, 2)
        assert await client.save(chain, 0, 2, np.array([1, 2], np.uint32)).wait() == SaveResult(2, 0, 0, 0)
        daemon.handlers[m.Lookup] = held
        lookup = asyncio.create_task(client.lookup(chain))
        await asked.wait()
        lookup.cancel()
        with pytest.raises(asyncio.CancelledError):
            await lookup
        gate.set()
        await asyncio.to_thread(daemon.await_requests, m.Release, 1)
        del daemon.handlers[m.Lookup]
        assert isinstance(await client.lookup(chain), Hit)
        assert client.generation == 1
    assert daemon.released == [1]


async def test_many_calls_in_flight_on_one_connection(daemon: ScriptedDaemon, path: Path) -> None:
    async with AsyncClient(path, NAMESPACE, Memory(), limits=LIMITS) as client:
        assert await client.wait_attached(WAIT_S)
        answers = await asyncio.gather(*(client.heartbeat() for _ in range(50)))
        assert answers == [True] * 50
    assert len(daemon.conns) == 1
