"""Both clients against the real daemon: its loop runs in a thread of the test, its laws are checked."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
from client_kit import Changes, Maker, chain_of
from client_memory import LAYOUT, LIMITS, WAIT_S, Memory
from client_running import Running, cut, fill

from kvstore import _native
from kvstore.client import PoolSpec, Table
from kvstore.config import TenantConfig
from kvstore.errors import LayoutRefused, Refused
from kvstore.types import Hit, Miss, Part, Reuse, SaveResult


def save(client: Any, chain: Any, start: int, stop: int) -> SaveResult:
    result = client.save(chain, start, stop, np.arange(1 + start, 1 + stop)).wait(WAIT_S)
    assert isinstance(result, SaveResult)
    return result


def test_bytes_come_back_as_they_went(running: Running, make: Maker) -> None:
    memory = Memory(64)
    client = make.attached(memory)
    originals = fill(memory, 20)
    chain = chain_of(client, 20)
    assert isinstance(client.lookup(chain), Miss)
    assert save(client, chain, 0, 12) == SaveResult(12, 0, 0, 0)
    assert save(client, chain, 5, 20) == SaveResult(8, 7, 0, 0)
    hit = client.lookup(chain)
    assert isinstance(hit, Hit)
    assert (hit.blocks, hit.device, hit.plan.load_start, hit.plan.load_stop) == (20, 0, 0, 20)
    load = client.load(hit, np.arange(30, 50))
    assert load.wait(WAIT_S).good == 20
    assert [memory.block(block) for block in range(30, 50)] == originals
    client.release(hit.lease)
    assert client.check() == {"attached": True, "ok": True}
    assert client.status()["attached"] is True
    longer = chain_of(client, 30)
    assert client.lookup(longer).blocks == 20
    other = chain_of(client, 30, first_token=7)
    assert isinstance(client.lookup(other), Miss)
    assert client.counters.digest_mismatches == 0


def test_rot_is_found_reported_and_dropped(running: Running, make: Maker) -> None:
    memory = Memory(64)
    client = make.attached(memory)
    fill(memory, 6)
    chain = chain_of(client, 6)
    save(client, chain, 0, 6)
    hit = client.lookup(chain)
    arena = running.group().arena
    arena.view(int(hit.slots[4]), 64)[0] ^= 1
    result = client.load(hit, np.arange(30, 36)).wait(WAIT_S)
    assert (result.good, result.status[4]) == (4, _native.CORRUPT)
    client.release(hit.lease)
    again = client.lookup(chain)
    assert again.blocks == 4
    client.release(again.lease)
    assert client.check()["ok"] is True
    assert save(client, chain, 4, 6) == SaveResult(1, 1, 0, 0)  # the hollow one is filled again
    assert client.lookup(chain).blocks == 6


def test_a_long_chain_is_found_in_two_trips(running: Running, make: Maker) -> None:
    client = make.attached(Memory(4096))
    chain = chain_of(client, 1500)
    result = client.save(chain, 0, 1000, np.arange(1000)).wait(WAIT_S)
    assert result == SaveResult(1000, 0, 0, 0)
    for asked, known in ((1500, 1000), (1001, 1000), (1000, 1000), (700, 700)):
        hit = client.lookup(chain, asked)
        assert hit.blocks == known
        client.release(hit.lease)
    assert client.check()["ok"] is True


def test_ranks_share_a_reservation(running: Running, make: Maker) -> None:
    scheduler = make.attached(role="scheduler", layout=LAYOUT)
    memories = [Memory(32, Part(0, 2, head, 1)) for head in (0, 1)]
    ranks = [make.attached(memory, role="worker", engine=scheduler.engine) for memory in memories]
    for memory in memories:
        for block in range(1, 5):
            memory.cells[:, :, block] = block
    memories[1].cells[:, :, 1:5] += 100
    chain = chain_of(scheduler, 4)
    reservation = scheduler.reserve(chain, 0, 4)
    assert ranks[0].write(reservation, np.arange(1, 5)).wait(WAIT_S) == SaveResult(0, 0, 4, 0)
    assert isinstance(scheduler.lookup(chain), Miss)
    assert ranks[1].write(reservation, np.arange(1, 5)).wait(WAIT_S) == SaveResult(4, 0, 0, 0)
    hit = scheduler.lookup(chain)
    assert hit.blocks == 4
    for rank, memory in zip(ranks, memories, strict=True):
        assert rank.load_slots(hit.slots, chain.keys[:4], np.arange(20, 24)).wait(WAIT_S).good == 4
        assert (memory.cells[:, :, 20:24] == memory.cells[:, :, 1:5]).all()
    whole = make.attached(Memory(8))  # another engine, without tensor parallelism
    found = whole.lookup(chain_of(whole, 4))
    assert found.blocks == 4
    assert whole.load(found, np.arange(1, 5)).wait(WAIT_S).good == 4
    assert scheduler.check()["ok"] is True


def test_an_owned_pool_lives_its_life(running: Running, make: Maker) -> None:
    memory = Memory(16)
    client = make.attached(memory, pool=PoolSpec("owned", 15, 4))
    chain = chain_of(client, 6)
    table = client.acquire(0, 6)
    assert isinstance(table, Table)
    originals = []
    for number, block in enumerate(table.added.tolist()):
        memory.fill(block, b"table %d" % number)
        originals.append(memory.block(block))
    assert client.commit(table.lease, chain, 0, 6) == 6
    hit = client.lookup(chain)
    assert (hit.blocks, hit.device) == (6, 6)
    shared = client.acquire(hit.lease, 8)
    assert shared.added.tolist()[:6] == table.added.tolist()
    assert shared.device == 6
    client.release(hit.lease)
    client.release(table.lease)  # two of six idle blocks are beyond idle_max: copied down
    assert client.check()["ok"] is True
    again = client.lookup(chain)
    assert again.blocks == 6
    table = client.acquire(again.lease, 6)
    assert (table.device, table.load_start, table.load_stop) == (4, 4, 6)
    assert client.load_slots(table.slots, chain.keys[4:6], table.added[4:6]).wait(WAIT_S).good == 2
    assert [memory.block(block) for block in table.added.tolist()] == originals
    client.release(again.lease)
    assert client.check()["ok"] is True
    fresh = client.acquire(0, 15)  # everything idle has to leave: what HOST lacks is copied down first
    assert len(fresh.added) == 15
    memory.cells[:] = 0
    client.release(fresh.lease)
    last = client.lookup(chain)
    assert (last.blocks, last.device) == (6, 0)
    assert client.load(last, np.arange(9, 15)).wait(WAIT_S).good == 6
    assert [memory.block(block) for block in range(9, 15)] == originals
    assert client.check()["ok"] is True


def test_a_restart_is_survived_and_tables_are_adopted(make: Maker, path: Path) -> None:
    first = Running(path)
    memory = Memory(32)
    client = make(memory, pool=PoolSpec("owned", 31, 8))
    assert client.wait_attached(WAIT_S)
    client.poll()
    table = client.acquire(0, 4)
    chain = chain_of(client, 4)
    client.commit(table.lease, chain, 0, 4)
    changes = Changes(client)
    epoch = client.epoch
    first.stop()
    changes.until(lambda: not client.attached)
    assert isinstance(client.lookup(chain), Miss)
    second = Running(path)
    changes.until(lambda: client.attached)
    assert client.epoch != epoch
    fresh = chain_of(client, 4)
    adopted = client.adopt(table.added, fresh, 4)
    assert isinstance(adopted, Table)
    client.poll()
    more = client.acquire(0, 20)
    assert not set(more.added.tolist()) & set(table.added.tolist())
    hit = client.lookup(fresh)
    assert (hit.blocks, hit.device) == (4, 4)
    client.release(table.lease)  # of the first daemon: a no-op
    for lease in (hit.lease, more.lease, adopted.lease):
        client.release(lease)
    assert client.check()["ok"] is True
    client.close()
    second.stop()


def test_a_lying_layout_runs_uncached(running: Running, make: Maker) -> None:
    memory = Memory()
    memory.lie_about_heads = True
    client = make(memory)
    assert not client.wait_attached(WAIT_S)
    assert isinstance(client.refusal, LayoutRefused)
    client.close()
    stranger = make(tenants=("nobody",))
    assert not stranger.wait_attached(WAIT_S)
    assert isinstance(stranger.refusal, Refused)
    stranger.close()
    assert make.attached(role="tool").check()["ok"] is True


def test_a_client_that_leaves_leaves_nothing(running: Running, make: Maker) -> None:
    tool = make.attached(role="tool")
    client = make.attached(Memory(32))
    chain = chain_of(client, 5)
    save(client, chain, 0, 5)
    assert isinstance(client.lookup(chain), Hit)
    reservation = client.reserve(chain_of(client, 3, first_token=900), 0, 3)
    assert reservation.token
    assert running.call(lambda: (len(running.group().leases), len(running.group().fillings))) == (1, 1)
    client.close()  # Quiesced, then the socket: by the time a tool is answered, both have been heard
    assert tool.check()["ok"] is True
    assert running.call(lambda: (len(running.group().leases), len(running.group().fillings))) == (0, 0)


def test_a_broken_connection_is_mended_with_the_same_daemon(running: Running, make: Maker) -> None:
    memory = Memory(32)
    client = make.attached(memory, pool=PoolSpec("borrowed", 32))
    fill(memory, 3)
    chain = chain_of(client, 3)
    save(client, chain, 0, 3)
    changes = Changes(client)
    epoch = client.epoch
    cut(client)
    changes.until(lambda: client.generation == 2 and client.attached)
    assert client.epoch == epoch
    assert client.lookup(chain_of(client, 3)).blocks == 3
    assert client.check()["ok"] is True


def test_many_threads_share_one_client(running: Running, path: Path) -> None:
    make = Maker("sync", path)
    memory = Memory(64)
    client = make.attached(memory, limits=LIMITS)
    wrong: list[str] = []

    def work(number: int) -> None:
        chain = chain_of(client, 4, first_token=1000 * number)
        blocks = np.arange(4 * number, 4 * number + 4)
        for _ in range(30):
            if client.save(chain, 0, 4, blocks).wait(WAIT_S).dropped:
                wrong.append("dropped")
            hit = client.lookup(chain)
            if not isinstance(hit, Hit) or client.load(hit, blocks + 32).wait(WAIT_S).good != 4:
                wrong.append("not loaded")
            client.release(hit.lease)
            client.poll()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert wrong == []
    assert client.generation == 1
    assert client.check()["ok"] is True
    make.close()


def test_tenants_share_only_what_both_allow(make: Maker, path: Path) -> None:
    sharing = [TenantConfig(name=name, reuse=Reuse.GROUP) for name in ("a", "b")]
    real = Running(path, *sharing, TenantConfig(name="c"))
    memory = Memory(32)
    client = make.attached(memory, tenants=("a", "b", "c"))

    def chain(tenant: str, reuse: Reuse, **extra: Any) -> Any:
        return client.chain(np.arange(16), tenant, reuse, **extra)

    assert chain("c", Reuse.GROUP) is None
    assert chain("c", Reuse.NONE) is None
    assert save(client, chain("a", Reuse.OWN), 0, 4).ready == 4
    for stranger in (chain("a", Reuse.GROUP), chain("b", Reuse.OWN), chain("c", Reuse.OWN)):
        assert isinstance(client.lookup(stranger), Miss)
    assert client.lookup(chain("a", Reuse.OWN)).blocks == 4
    assert save(client, chain("a", Reuse.GROUP), 0, 4).ready == 4
    assert client.lookup(chain("b", Reuse.GROUP)).blocks == 4
    salted = chain("b", Reuse.GROUP, extra={0: b"salt of one request"})
    assert isinstance(client.lookup(salted), Miss)
    assert client.check()["ok"] is True
    client.close()
    real.stop()
