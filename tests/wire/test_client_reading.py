"""Lookup, load, fetch, release: what the daemon says is checked before anything depends on it."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import numpy as np
import pytest
from client_daemon import ScriptedDaemon, failed
from client_kit import Changes, Maker, chain_of
from client_memory import LIMITS, WAIT_S, Memory

from kvstore import _native
from kvstore.errors import BadRequest, LimitExceeded, NotFound
from kvstore.rpc import messages as m
from kvstore.types import Busy, Hit, Miss, Span, Tier

NOTHING = m.Found(0, 0, 0, 0, 0, 0, (0, 0), b"", [], "nothing is known")


def numbers(raw: bytes) -> list[int]:
    return np.frombuffer(raw, "<u4").tolist()


def u32(*values: int) -> bytes:
    return np.array(values, "<u4").tobytes()


def saved(client: Any, chain: Any, memory: Memory, blocks: int) -> list[bytes]:
    """Save the first blocks of a chain from device blocks 1…; their bytes."""
    for block in range(blocks):
        memory.fill(1 + block, b"block %d" % block)
    result = client.save(chain, 0, blocks, np.arange(1, 1 + blocks, dtype=np.uint32)).wait(WAIT_S)
    assert (result.ready, result.dropped) == (blocks, 0), result
    return [memory.block(1 + block) for block in range(blocks)]


class Tree:
    """An index for scripted lookups: the first `known` keys of one chain, of which `blocks` have bytes."""

    def __init__(self, chain: Any, known: int, blocks: int | None = None) -> None:
        self.chain = chain
        self.known = known
        self.blocks = known if blocks is None else blocks
        self.sent = 0
        self.depth = 0  # the lease keeps what the first trip found

    def found(self, positions: list[int], lease: int = 5) -> m.Found:
        """As the index walks: the deepest known position that was asked, and the first unknown one."""
        asked_known = [p for p in positions if p < self.known]
        depth = self.depth = max(self.depth, asked_known[-1] + 1 if asked_known else 0)
        gap_stop = next((p for p in positions if p >= self.known), len(self.chain))
        blocks = min(depth, self.blocks)
        digest = self.chain.digest(blocks)
        return m.Found(lease if blocks else 0, blocks, 0, depth, gap_stop, digest, (0, 0), b"", [], "test")

    def on_lookup(self, _: Any, body: m.Lookup | m.Extend) -> m.Found:
        positions = numbers(body.positions)
        self.sent += len(positions)
        assert len(body.keys) == 32 * len(positions)
        assert body.keys == self.chain.keys[positions].tobytes()
        return self.found(positions)

    def serve(self, daemon: ScriptedDaemon) -> None:
        daemon.handlers[m.Lookup] = daemon.handlers[m.Extend] = self.on_lookup


@pytest.mark.parametrize("known", [1, 88, 89, 90, 4005, 7990, 7991, 7999, 8000])
def test_two_trips_decide_a_long_chain(daemon: ScriptedDaemon, make: Maker, known: int) -> None:
    client = make.attached()
    chain = chain_of(client, 8000)
    tree = Tree(chain, known)
    tree.serve(daemon)
    hit = client.lookup(chain)
    assert isinstance(hit, Hit)
    # A gap of one block is not worth a trip of its own.
    assert known - 1 <= hit.blocks <= known
    assert tree.sent <= 200
    assert len(daemon.seen(m.Lookup)) == 1
    assert len(daemon.seen(m.Extend)) <= 1


def test_the_end_of_a_conversation_needs_one_trip(daemon: ScriptedDaemon, make: Maker) -> None:
    client = make.attached()
    chain = chain_of(client, 2000)
    Tree(chain, 1997).serve(daemon)
    assert client.lookup(chain).blocks == 1997
    assert daemon.seen(m.Extend) == []


def test_hollow_blocks_do_not_cost_a_second_trip(daemon: ScriptedDaemon, make: Maker) -> None:
    client = make.attached()
    chain = chain_of(client, 2000)
    Tree(chain, known=1000, blocks=10).serve(daemon)
    assert client.lookup(chain).blocks == 10
    assert daemon.seen(m.Extend) == []


def test_only_the_blocks_asked_for(daemon: ScriptedDaemon, make: Maker) -> None:
    client = make.attached()
    chain = chain_of(client, 6)
    assert isinstance(client.lookup(chain, 4), Miss)
    (asked,) = daemon.seen(m.Lookup)
    assert asked.blocks == 4
    assert numbers(asked.positions) == [0, 1, 2, 3]
    assert isinstance(client.lookup(chain, 0), Miss)
    assert len(daemon.seen(m.Lookup)) == 1
    with pytest.raises(BadRequest, match="blocks"):
        client.lookup(chain, 7)


def test_keys_max_is_respected(make: Maker, path: Any) -> None:
    daemon = ScriptedDaemon(path, keys_max=16)
    client = make.attached()
    chain = chain_of(client, 2000)
    tree = Tree(chain, 1000)
    tree.serve(daemon)
    hit = client.lookup(chain)
    assert isinstance(hit, Hit)
    for request in daemon.seen(m.Lookup) + daemon.seen(m.Extend):
        positions = numbers(request.positions)
        assert len(positions) <= 16
        assert positions == sorted(set(positions))
    assert numbers(daemon.seen(m.Lookup)[0].positions)[0] == 0
    assert 900 < hit.blocks <= 1000  # three trips of 16 keys narrow 2,000 blocks down to a few
    client.close()
    daemon.stop()


def test_a_gap_without_a_lease_is_asked_by_a_second_lookup(daemon: ScriptedDaemon, make: Maker) -> None:
    client = make.attached()
    chain = chain_of(client, 30)
    answers = [found(chain, 3), m.Found(0, 0, 0, 0, 4, 0, (0, 0), b"", [], "")]
    daemon.handlers[m.Lookup] = lambda *_: answers.pop()
    assert client.lookup(chain).blocks == 3
    assert numbers(daemon.seen(m.Lookup)[1].positions) == [0, 1, 2, 3]


def found(chain: Any, length: int, **fields: Any) -> m.Found:
    honest = m.Found(5, length, 0, length, length, chain.digest(length), (0, 0), b"", [], "test")
    values = {name: getattr(honest, name) for name in honest.__struct_fields__}
    return m.Found(**{**values, **fields})


def test_another_chain_than_ours_is_a_miss(daemon: ScriptedDaemon, make: Maker) -> None:
    client = make.attached()
    chain = chain_of(client, 5)
    daemon.handlers[m.Lookup] = lambda *_: found(chain, 3, digest=chain.digest(3) ^ 1)
    answer = client.lookup(chain)
    assert isinstance(answer, Miss)
    assert "another chain" in answer.reason
    assert daemon.released == [5]
    counters = client.counters
    assert (counters.digest_mismatches, counters.misses, counters.hits) == (1, {"digest": 1}, 0)


LIES: dict[str, dict[str, Any]] = {
    "more blocks than known": {"blocks": 5},
    "known beyond the gap": {"known": 4, "gap_stop": 3},
    "gap beyond the chain": {"gap_stop": 6},
    "negative": {"blocks": -1, "lease": 0},
    "device beyond the match": {"device": 4},
    "load beyond the match": {"load": (0, 4), "runs": u32(0, 4)},
    "load backwards": {"load": (2, 1)},
    "no lease": {"lease": 0},
    "negative lease": {"lease": -3},
    "fewer slots than blocks": {"load": (0, 3), "runs": u32(0, 2)},
    "more slots than blocks": {"load": (0, 1), "runs": u32(0, 0xFFFFFFFF)},
    "slots outside the arena": {"load": (0, 3), "runs": u32(0xFFFFFF00, 3)},
    "runs cut short": {"load": (0, 1), "runs": b"\0" * 7},
    "half a run": {"load": (0, 3), "runs": u32(1)},
    "unknown tier": {"spans": [("TAPE", 0, 3)]},
    "span outside": {"spans": [("HOST", 0, 4)]},
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
def test_a_found_that_makes_no_sense_ends_the_connection(
    daemon: ScriptedDaemon, make: Maker, lie: dict[str, Any]
) -> None:
    client = make.attached()
    chain = chain_of(client, 5)
    changes = Changes(client)
    daemon.handlers[m.Lookup] = lambda *_: found(chain, 3, **lie)
    answer = client.lookup(chain)
    assert isinstance(answer, Miss)
    assert "malformed" in answer.reason
    assert daemon.conn(0).closed.wait(WAIT_S)
    changes.until(lambda: client.generation == 2)


def test_busy_and_errors_are_values(daemon: ScriptedDaemon, make: Maker) -> None:
    client = make.attached()
    chain = chain_of(client, 5)
    daemon.handlers[m.Lookup] = lambda *_: found(chain, 3, busy="all pinned")
    assert client.lookup(chain) == Busy("all pinned")
    assert daemon.released == [5]
    daemon.handlers[m.Lookup] = lambda *_: failed(LimitExceeded("leases_max = 3"))
    assert client.lookup(chain) == Busy("leases_max = 3")
    daemon.handlers[m.Lookup] = lambda *_: failed(BadRequest("a second parent"))
    assert client.lookup(chain) == Miss("a second parent")
    daemon.handlers[m.Lookup] = lambda *_: m.Failed("FANCY_NEW_STATUS", "whatever")
    assert client.lookup(chain) == Miss("whatever")
    counters = client.counters
    assert (counters.lookups, counters.busy, counters.misses) == (4, 2, {"error": 2})
    assert client.generation == 1


def test_a_silent_daemon_is_a_miss_within_the_deadline(daemon: ScriptedDaemon, make: Maker) -> None:
    client = make.attached(limits=dataclasses.replace(LIMITS, call_s=0.05))
    chain = chain_of(client, 5)
    changes = Changes(client)
    daemon.handlers[m.Lookup] = lambda *_: None
    begun = time.monotonic()
    answer = client.lookup(chain)
    took_s = time.monotonic() - begun
    assert isinstance(answer, Miss)
    assert "in time" in answer.reason
    assert 0.04 < took_s < 2.0  # far below any other limit of this test
    assert daemon.conn(0).closed.wait(WAIT_S)  # the link's state was unknown
    changes.until(lambda: client.generation == 2 and client.attached)


# ---- leases ----------------------------------------------------------------------------------------------


def test_a_lease_of_an_older_attach_is_not_released(make: Maker, path: Any) -> None:
    first = ScriptedDaemon(path)
    memory = Memory()
    client = make.attached(memory)
    chain = chain_of(client, 2)
    saved(client, chain, memory, 2)
    old = client.lookup(chain)
    changes = Changes(client)
    first.stop()
    second = ScriptedDaemon(path)
    changes.until(lambda: client.generation == 2 and client.attached)
    chain = chain_of(client, 2)
    saved(client, chain, memory, 2)
    new = client.lookup(chain)  # the second daemon counts from 1 again
    assert new.lease != old.lease
    client.release(old.lease)
    assert second.released == []
    result = client.load(old, np.array([3, 4], np.uint32)).wait(WAIT_S)
    assert (result.good, result.status.tolist()) == (0, [_native.DROPPED] * 2)
    client.release(new.lease)
    client.release(new.lease)
    assert second.released == [1]
    client.close()
    second.stop()


def test_a_lease_that_the_daemon_has_ended_is_released_quietly(daemon: ScriptedDaemon, make: Maker) -> None:
    memory = Memory()
    client = make.attached(memory)
    chain = chain_of(client, 1)
    saved(client, chain, memory, 1)
    hit = client.lookup(chain)
    daemon.handlers[m.Release] = lambda *_: failed(NotFound("revoked"))
    client.release(hit.lease)
    assert client.heartbeat()


def test_leases_max_is_busy_and_gives_back(daemon: ScriptedDaemon, make: Maker) -> None:
    memory = Memory()
    client = make.attached(memory, limits=dataclasses.replace(LIMITS, leases_max=1))
    chain = chain_of(client, 1)
    saved(client, chain, memory, 1)
    assert isinstance(client.lookup(chain), Hit)
    assert isinstance(client.lookup(chain), Busy)
    assert daemon.released == [2]


# ---- loads -----------------------------------------------------------------------------------------------


def test_loaded_bytes_are_the_saved_ones(daemon: ScriptedDaemon, make: Maker) -> None:
    memory = Memory()
    client = make.attached(memory)
    chain = chain_of(client, 5)
    originals = saved(client, chain, memory, 5)
    hit = client.lookup(chain)
    assert (hit.blocks, hit.device, hit.plan.load_start, hit.plan.load_stop) == (5, 0, 0, 5)
    assert hit.plan.spans == (Span(Tier.HOST, 0, 5),)
    load = client.load(hit, np.arange(10, 15, dtype=np.uint32))
    result = load.wait(WAIT_S)
    assert result is not None
    assert (result.good, result.reason, load.progress()) == (5, "", 5)
    assert load.poll() is not None
    assert [memory.block(10 + block) for block in range(5)] == originals
    assert (client.counters.loads, client.counters.blocks_loaded) == (1, 5)
    assert daemon.reported == []


def test_bad_blocks_are_reported_once(daemon: ScriptedDaemon, make: Maker) -> None:
    memory = Memory()
    client = make.attached(memory)
    chain = chain_of(client, 6)
    saved(client, chain, memory, 6)
    hit = client.lookup(chain)
    daemon.arena.view(int(hit.slots[3]), 64)[9] ^= 1  # rot
    blocks = np.arange(8, 14, dtype=np.uint32)
    result = client.load(hit, blocks).wait(WAIT_S)
    assert result.good == 3
    ok, corrupt = _native.OK, _native.CORRUPT
    assert result.status.tolist() == [ok, ok, ok, corrupt, ok, ok]
    assert result.reason == "1 corrupt"
    assert client.load(hit, blocks).wait(WAIT_S).good == 3
    assert daemon.reported == [[3]]
    assert not client.report(hit.lease, [3])
    assert client.report(hit.lease, [5, 3])
    assert daemon.reported == [[3], [5]]
    assert client.counters.bad_blocks == {"corrupt": 2}


def test_a_workers_load_is_reported_by_its_scheduler(daemon: ScriptedDaemon, make: Maker) -> None:
    memory = Memory()
    scheduler = make.attached(memory)
    worker = make.attached(memory, role="worker", engine=scheduler.engine)
    chain = chain_of(scheduler, 3)
    originals = saved(scheduler, chain, memory, 3)
    hit = scheduler.lookup(chain)
    wrong = chain.keys.copy()
    wrong[1, 0] ^= 1
    result = worker.load_slots(hit.slots, wrong, np.array([9, 10, 11], np.uint32)).wait(WAIT_S)
    assert result.status.tolist() == [_native.OK, _native.STALE, _native.OK]
    assert daemon.reported == []
    assert scheduler.report(hit.lease, [1])
    assert worker.load_slots(hit.slots, chain.keys, np.array([9, 10, 11], np.uint32)).wait(WAIT_S).good == 3
    assert [memory.block(block) for block in (9, 10, 11)] == originals
    far = hit.slots + np.uint32(1 << 30)
    assert worker.load_slots(far, chain.keys, np.array([9, 10, 11], np.uint32)).wait(WAIT_S).good == 0


def test_blocks_are_checked_before_a_load(daemon: ScriptedDaemon, make: Maker) -> None:
    memory = Memory()
    client = make.attached(memory)
    chain = chain_of(client, 2)
    saved(client, chain, memory, 2)
    hit = client.lookup(chain)
    for wrong in ([1], [1, 2, 3], [1, 16], [-1, 2], [[1, 2]], [1.0, 2.0]):
        with pytest.raises(BadRequest, match="blocks"):
            client.load(hit, np.array(wrong))
    assert client.load(hit, np.array([1, 2], np.int64)).wait(WAIT_S).good == 2
    for start, stop in ((0, 1), (1, 3)):  # a table's load range with slots of another
        plan = dataclasses.replace(hit.plan, load_start=start, load_stop=stop)
        with pytest.raises(BadRequest, match="slots"):
            client.load(dataclasses.replace(hit, plan=plan), np.arange(1, 1 + stop - start))
    plan = dataclasses.replace(hit.plan, load_start=1)
    tail = dataclasses.replace(hit, plan=plan, slots=hit.slots[1:])
    assert client.load(tail, np.array([5])).wait(WAIT_S).good == 1


def test_an_empty_load_is_done_at_once(daemon: ScriptedDaemon, make: Maker) -> None:
    client = make.attached()
    chain = chain_of(client, 5)
    daemon.handlers[m.Lookup] = lambda *_: found(chain, 3, device=3)
    hit = client.lookup(chain)
    assert hit.device == 3
    result = client.load(hit, np.empty(0, np.uint32)).wait(WAIT_S)
    assert (result.good, len(result.status), result.reason) == (0, 0, "")
