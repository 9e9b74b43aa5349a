"""Loads of hits that are partly below HOST: fetched and copied piece by piece, and cut short in every way."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from client_below import LEASE, Below
from client_daemon import Conn, HangUp, ScriptedDaemon, failed
from client_kit import Maker
from client_memory import LIMITS, WAIT_S

from kvstore import _native
from kvstore.errors import NotFound
from kvstore.rpc import messages as m
from kvstore.types import Hit, Miss, Span, Tier

OK, CORRUPT, DROPPED = _native.OK, _native.CORRUPT, _native.DROPPED


# ---- what a hit says ---------------------------------------------------------------------------------------


def test_a_hit_names_the_slots_of_its_part_on_host(daemon: ScriptedDaemon, make: Maker) -> None:
    below = Below(daemon, make)
    hit = below.hit()
    assert hit.plan.spans == (Span(Tier.HOST, 0, 2), Span(Tier.NVME, 2, 6))
    assert (hit.plan.load_start, hit.ready, hit.plan.load_stop) == (0, 2, 6)
    assert hit.slots.tolist() == below.slots[:2].tolist()


def test_without_any_slots_all_is_to_be_fetched(daemon: ScriptedDaemon, make: Maker) -> None:
    """HOST is limited."""
    below = Below(daemon, make)
    honest = below.found()
    values = {name: getattr(honest, name) for name in honest.__struct_fields__}
    daemon.handlers[m.Lookup] = lambda *_: m.Found(**{**values, "runs": b""})
    hit = below.client.lookup(below.chain)
    assert isinstance(hit, Hit)
    assert (hit.plan.load_start, hit.ready, hit.plan.load_stop) == (0, 0, 6)


@pytest.mark.parametrize("named", [1, 3, 6])
def test_other_slots_than_those_on_host_are_malformed(
    daemon: ScriptedDaemon, make: Maker, named: int
) -> None:
    below = Below(daemon, make)
    honest = below.found()
    values = {name: getattr(honest, name) for name in honest.__struct_fields__}
    lie = m.Found(**{**values, "runs": below.slots[:named].astype("<u4").tobytes()})
    daemon.handlers[m.Lookup] = lambda *_: lie
    answer = below.client.lookup(below.chain)
    assert isinstance(answer, Miss)
    assert "malformed" in answer.reason


@pytest.mark.parametrize(
    ("spans", "load", "ready"),
    [
        ([("GPU", 0, 3), ("HOST", 3, 4), ("NVME", 4, 6)], (3, 6), 4),
        ([("GPU", 0, 3), ("NVME", 3, 6)], (3, 6), 3),
        ([("NVME", 0, 6)], (0, 6), 0),
        ([("HOST", 0, 6)], (0, 6), 6),
        ([("HOST", 0, 4), ("NVME", 4, 4), ("PEER", 4, 6)], (0, 4), 4),
        ([], (0, 6), 6),
    ],
)
def test_host_ends_where_a_lower_tier_begins(
    daemon: ScriptedDaemon, make: Maker, spans: Any, load: tuple[int, int], ready: int
) -> None:
    below = Below(daemon, make)
    runs, digest = below.packed(load[0], ready), below.chain.digest(6)
    found = m.Found(LEASE, 6, load[0], 6, 6, digest, load, runs, spans, "test")
    daemon.handlers[m.Lookup] = lambda *_: found
    hit = below.hit()
    assert hit.ready == ready
    assert hit.slots.tolist() == below.slots[load[0] : ready].tolist()


# ---- everything arrives ------------------------------------------------------------------------------------


def test_what_has_come_is_copied_while_the_rest_is_read(daemon: ScriptedDaemon, make: Maker) -> None:
    below = Below(daemon, make)
    below.bring(3)
    load = below.load()
    below.reached(load, 3)
    assert load.poll() is None
    below.assert_loaded(3)
    below.tell(3, 5)
    below.reached(load, 5)
    below.tell(5, 6)
    result = load.wait(WAIT_S)
    assert (result.good, result.arrived, result.reason, load.progress()) == (6, 6, "", 6)
    assert result.bytes > 0
    below.assert_loaded(6)
    assert [(ask.lease, ask.start, ask.stop) for ask in below.fetches] == [(LEASE, 2, 6)]
    counters = below.client.counters
    assert (counters.loads, counters.blocks_loaded, counters.bad_blocks) == (1, 6, {})


@pytest.mark.parametrize("host", [0, 5])
def test_a_fetch_that_is_answered_at_once(daemon: ScriptedDaemon, make: Maker, host: int) -> None:
    below = Below(daemon, make, host=host)
    below.bring(6)
    result = below.load().wait(WAIT_S)
    assert (result.good, result.reason) == (6, "")
    below.assert_loaded(6)


def test_a_hundred_notices_are_few_copies(daemon: ScriptedDaemon, make: Maker) -> None:
    """No copy queue is filled by a disk that brings one block at a time."""
    below = Below(daemon, make, blocks=100, host=1)
    below.bring(*range(1, 101))
    result = below.load().wait(WAIT_S)
    assert (result.good, result.reason) == (100, "")
    below.assert_loaded(100)
    again = below.load().wait(WAIT_S)
    assert again.good == 100


def test_a_load_range_behind_what_the_device_holds(daemon: ScriptedDaemon, make: Maker) -> None:
    below = Below(daemon, make)
    below.bring(6)
    hit = below.hit()
    plan = dataclasses.replace(hit.plan, load_start=1)
    later = dataclasses.replace(hit, plan=plan, slots=hit.slots[1:])
    result = below.client.load(later, below.target[1:]).wait(WAIT_S)
    assert (result.good, len(result.status)) == (5, 5)
    assert below.memory.block(int(below.target[5])) == below.memory.block(6)


def test_a_scheduler_fetches_what_its_workers_load(daemon: ScriptedDaemon, make: Maker) -> None:
    below = Below(daemon, make)
    scheduler = make.attached(role="scheduler", layout=below.memory.layout)
    hit = scheduler.lookup(below.chain)

    def answer(conn: Conn, ask: m.Fetch) -> None:
        conn.send(len(conn.requests), m.Fetched(3, below.packed(2, 3)))
        conn.send(0, m.Progress(LEASE, 6, 6, below.packed(3, 6)))

    below.answer = answer
    fetched = scheduler.fetch(hit, hit.ready, 6).wait(WAIT_S)
    assert (fetched.ready, fetched.reason) == (6, "")
    slots = np.concatenate([hit.slots, fetched.slots])
    assert below.client.load_slots(slots, below.chain.keys, below.target).wait(WAIT_S).good == 6
    below.assert_loaded(6)


# ---- less arrives ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("notices", "good"),
    [([(2, 2, 2)], 2), ([(2, 4, 4)], 4), ([(2, 3, 5), (3, 5, 5)], 5), ([(2, 3, 5), (3, 3, 3)], 3)],
)
def test_a_fetch_that_ends_before_its_end(
    daemon: ScriptedDaemon, make: Maker, notices: list[tuple[int, int, int]], good: int
) -> None:
    below = Below(daemon, make)
    below.bring(2)
    hit = below.hit()
    load = below.load(hit)
    daemon.await_requests(m.Fetch, 1)
    for before, ready, stop in notices:
        below.tell(before, ready, stop)
    result = load.wait(WAIT_S)
    assert (result.good, result.arrived) == (good, good)
    assert result.status.tolist() == [OK] * good + [DROPPED] * (6 - good)
    assert f"no more than {good}" in result.reason
    below.assert_loaded(good)
    assert daemon.reported == []
    # The lease goes on, and so does the connection: the rest may be asked for again.
    below.bring(6)
    assert below.load(hit).wait(WAIT_S).good == 6
    assert below.client.generation == 1


@pytest.mark.parametrize(("ready", "stop"), [(3, 7), (1, 6), (4, 3), (7, 7)])
def test_a_notice_that_makes_no_sense(daemon: ScriptedDaemon, make: Maker, ready: int, stop: int) -> None:
    below = Below(daemon, make)
    below.bring(2)
    load = below.load()
    daemon.await_requests(m.Fetch, 1)
    below.reached(load, 2)
    daemon.conn(0).send(0, m.Progress(LEASE, ready, stop, b""))
    result = load.wait(WAIT_S)
    assert result.good == 2
    assert "malformed" in result.reason or "went away" in result.reason


def test_a_stop_that_was_lowered_is_not_raised_again(daemon: ScriptedDaemon, make: Maker) -> None:
    below = Below(daemon, make)
    below.bring(2)
    load = below.load()
    daemon.await_requests(m.Fetch, 1)
    below.tell(2, 3, 4)
    below.reached(load, 3)
    below.tell(3, 5, 6)
    assert load.wait(WAIT_S).good == 3


def test_a_fetch_that_stalls_is_given_up(daemon: ScriptedDaemon, make: Maker) -> None:
    below = Below(daemon, make, limits=dataclasses.replace(LIMITS, fetch_s=0.1))
    below.bring(3)
    hit = below.hit()
    result = below.load(hit).wait(WAIT_S)
    assert (result.good, result.arrived) == (3, 3)
    assert "in time" in result.reason
    below.assert_loaded(3)
    # The daemon still is at it: its notices are not those of another fetch.
    second = below.load(hit).wait(WAIT_S)
    assert (second.good, len(below.fetches)) == (2, 1)
    assert "under way" in second.reason
    below.tell(3, 4)
    below.tell(4, 4, 4)
    assert below.client.heartbeat()
    below.bring(6)
    assert below.load(hit).wait(WAIT_S).good == 6
    assert below.client.generation == 1


def test_a_fetch_that_is_refused(daemon: ScriptedDaemon, make: Maker) -> None:
    below = Below(daemon, make)
    below.answer = lambda *_: failed(NotFound("lease 5: revoked"))
    result = below.load().wait(WAIT_S)
    assert (result.good, result.arrived, result.reason) == (2, 2, "lease 5: revoked")
    below.assert_loaded(2)
    assert below.client.heartbeat()


def test_a_daemon_that_does_not_answer_the_fetch(daemon: ScriptedDaemon, make: Maker) -> None:
    below = Below(daemon, make, limits=dataclasses.replace(LIMITS, call_s=0.2))
    below.answer = lambda *_: None
    result = below.load().wait(WAIT_S)
    assert result.good <= 2
    below.assert_loaded(result.good)
    assert result.reason


def test_a_daemon_that_goes_away_leaves_what_was_seen_to_be_good(daemon: ScriptedDaemon, make: Maker) -> None:
    below = Below(daemon, make)
    below.bring(4)
    load = below.load()
    below.reached(load, 4)
    daemon.handlers[m.Heartbeat] = lambda *_: HangUp()
    assert not below.client.heartbeat()
    result = load.wait(WAIT_S)
    assert (result.good, load.progress()) == (4, 4)
    assert result.status.tolist() == [OK] * 4 + [DROPPED] * 2
    assert result.reason
    below.assert_loaded(4)


def test_a_load_that_is_cancelled(daemon: ScriptedDaemon, make: Maker) -> None:
    below = Below(daemon, make)
    below.bring(3)
    hit = below.hit()
    load = below.load(hit)
    below.reached(load, 3)
    load.cancel()
    result = load.wait(WAIT_S)
    assert (result.good, result.reason) == (3, "cancelled")
    below.client.release(hit.lease)
    daemon.await_requests(m.Release, 1)
    below.tell(3, 6)  # too late
    assert below.client.heartbeat()
    assert below.memory.block(int(below.target[4])) == bytes(len(below.memory.block(0)))


def test_a_lease_that_is_released_under_its_load(daemon: ScriptedDaemon, make: Maker) -> None:
    below = Below(daemon, make)
    below.bring(3)
    hit = below.hit()
    load = below.load(hit)
    below.reached(load, 3)
    below.client.release(hit.lease)
    result = load.wait(WAIT_S)
    assert (result.good, result.reason) == (3, "the lease ended")


def test_a_client_that_closes_under_its_load(daemon: ScriptedDaemon, make: Maker) -> None:
    below = Below(daemon, make)
    below.bring(3)
    load = below.load()
    below.reached(load, 3)
    below.client.close()
    result = load.poll()
    assert result is not None
    assert result.good == 3


# ---- bad blocks --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rotten", [0, 1, 2, 4])
def test_a_bad_block_is_reported_and_ends_the_load(daemon: ScriptedDaemon, make: Maker, rotten: int) -> None:
    below = Below(daemon, make)
    below.bring(3, 6)
    daemon.arena.view(int(below.slots[rotten]), 64)[9] ^= 1
    result = below.load().wait(WAIT_S)
    assert result.good == rotten
    assert result.status[rotten] == CORRUPT
    assert result.arrived > rotten, "a copy failed: this is not the same as a block that never came"
    assert "1 corrupt" in result.reason
    assert daemon.reported == [[rotten]]
    below.assert_loaded(rotten)
    assert below.client.counters.bad_blocks["corrupt"] == 1


# ---- fetches by themselves ---------------------------------------------------------------------------------


def test_a_fetch_that_is_cancelled_keeps_what_came(daemon: ScriptedDaemon, make: Maker) -> None:
    below = Below(daemon, make)
    below.bring(3)
    hit = below.hit()
    fetch = below.client.fetch(hit, 2, 6)
    daemon.await_requests(m.Fetch, 1)
    fetch.cancel()
    result = fetch.wait(WAIT_S)
    assert (result.ready, result.slots.tolist()) == (3, below.slots[2:3].tolist())
    assert result.reason == "cancelled"


def test_a_fetch_ends_with_its_lease(daemon: ScriptedDaemon, make: Maker) -> None:
    below = Below(daemon, make)
    below.bring(3)
    hit = below.hit()
    fetch = below.client.fetch(hit, 2, 6)
    daemon.await_requests(m.Fetch, 1)
    below.client.release(hit.lease)
    result = fetch.wait(WAIT_S)
    assert (result.ready, result.reason) == (3, "the lease ended")


def test_two_fetches_at_once(daemon: ScriptedDaemon, make: Maker) -> None:
    """Each hears its own notices, however they are mixed."""
    below = Below(daemon, make)
    leases = iter([LEASE, LEASE + 1])
    honest = below.found()
    values = {name: getattr(honest, name) for name in honest.__struct_fields__}
    daemon.handlers[m.Lookup] = lambda *_: m.Found(**{**values, "lease": next(leases)})
    below.answer = lambda _, ask: m.Fetched(ask.start, b"")
    first, second = (below.load(below.hit()) for _ in range(2))
    daemon.await_requests(m.Fetch, 2)
    send = daemon.conn(0).send
    send(0, m.Progress(LEASE + 1, 4, 6, below.packed(2, 4)))
    send(0, m.Progress(LEASE, 3, 6, below.packed(2, 3)))
    send(0, m.Progress(LEASE + 1, 4, 4, b""))
    send(0, m.Progress(LEASE, 6, 6, below.packed(3, 6)))
    assert second.wait(WAIT_S).good == 4
    assert first.wait(WAIT_S).good == 6
    below.assert_loaded(6)
