"""Loads from the last block down, on a daemon that brings blocks as a test says: claims, and every end."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from client_below import LEASE, Below, until
from client_daemon import Conn, HangUp, ScriptedDaemon, failed
from client_kit import Maker
from client_memory import WAIT_S

from kvstore import _native
from kvstore.errors import NotFound
from kvstore.rpc import messages as m

OK, CORRUPT, DROPPED = _native.OK, _native.CORRUPT, _native.DROPPED


class Down(Below):
    """The same, told of from the last block down."""

    def __init__(self, daemon: ScriptedDaemon, make: Maker, **options: Any) -> None:
        super().__init__(daemon, make, **options)
        self.enough: list[int] = []
        self.answer = lambda _, ask: m.Fetched(ask.stop, b"")
        daemon.handlers[m.Enough] = self._on_enough

    def _on_enough(self, _: Conn, ask: m.Enough) -> m.Done:
        self.enough.append(ask.start)
        return m.Done()

    def tail(self) -> Any:
        load = self.client.load_tail(self.hit(), self.target)
        self.daemon.await_requests(m.Fetch, 1)
        return load

    def tell_down(self, before: int, ready: int, stop: int = 0) -> None:
        """One notice."""
        self.daemon.conn(0).send(0, m.Progress(LEASE, ready, stop, self.packed(ready, before)))

    def lowest(self, load: Any, block: int) -> None:
        """Wait until blocks from this one on are copied."""

        def there() -> bool:
            self.client.poll()
            return bool(load.lowest <= block)

        until(there)

    def assert_tail(self, block: int) -> None:
        """Blocks from this one on hold what was saved, those before it nothing."""
        for number in range(self.blocks):
            held = self.memory.block(int(self.target[number]))
            assert held == (self.memory.block(1 + number) if number >= block else bytes(len(held))), number


def test_it_comes_from_the_last_block_down(daemon: ScriptedDaemon, make: Maker) -> None:
    down = Down(daemon, make)
    load = down.tail()
    assert down.fetches == [m.Fetch(LEASE, 0, 6, descending=True)]
    assert load.lowest == 6
    down.tell_down(6, 4)
    down.lowest(load, 4)
    down.assert_tail(4)
    down.tell_down(4, 1)
    down.tell_down(1, 0)
    result = load.wait(WAIT_S)
    assert (result.good, result.arrived, result.reason, result.bad) == (6, 6, "", 0)
    assert result.status.tolist() == [OK] * 6
    assert (load.lowest, down.enough) == (0, [0])
    down.assert_tail(0)


def test_what_is_there_at_once_is_copied_at_once(daemon: ScriptedDaemon, make: Maker) -> None:
    down = Down(daemon, make)
    down.answer = lambda _, ask: m.Fetched(0, down.packed(0, 6))
    assert down.tail().wait(WAIT_S).good == 6
    down.assert_tail(0)


def test_what_is_claimed_is_never_written(daemon: ScriptedDaemon, make: Maker) -> None:
    down = Down(daemon, make)
    load = down.tail()
    down.tell_down(6, 5)
    down.lowest(load, 5)
    assert load.claim(3) == 3
    assert load.claim(2) == 3, "a claim is for ever"
    down.tell_down(5, 0)
    result = load.wait(WAIT_S)
    assert (result.good, result.reason) == (3, "computing has met it")
    assert result.status.tolist() == [DROPPED] * 3 + [OK] * 3
    assert load.claim(6) == 3
    assert down.enough == [3]
    down.assert_tail(3)


def test_computing_that_has_all_of_it_leaves_nothing_to_load(daemon: ScriptedDaemon, make: Maker) -> None:
    down = Down(daemon, make)
    load = down.tail()
    assert load.claim(9) == 6
    result = load.wait(WAIT_S)
    assert (result.good, down.enough) == (0, [6])
    down.tell_down(6, 3)
    down.tell_down(3, 3, 3)
    assert down.client.heartbeat()
    down.assert_tail(6)


def test_an_end_that_is_higher_is_followed_by_computing(daemon: ScriptedDaemon, make: Maker) -> None:
    down = Down(daemon, make)
    load = down.tail()
    down.tell_down(6, 5)
    down.tell_down(5, 4, 4)
    result = load.wait(WAIT_S)
    assert (result.good, load.lowest) == (2, 4)
    assert "no more than down to 4" in result.reason
    assert [load.claim(stop) for stop in (3, 4, 5, 6)] == [3, 4, 4, 4]
    down.assert_tail(4)


@pytest.mark.parametrize("rotten", [5, 3, 0])
def test_a_bad_block_goes_back_to_computing(daemon: ScriptedDaemon, make: Maker, rotten: int) -> None:
    down = Down(daemon, make)
    daemon.arena.view(int(down.slots[rotten]), 64)[9] ^= 1
    load = down.tail()
    down.tell_down(6, 2)
    down.tell_down(2, 0)
    result = load.wait(WAIT_S)
    assert (result.good, result.bad, load.lowest) == (5 - rotten, 1, rotten + 1)
    assert result.status[rotten] == CORRUPT
    assert "1 corrupt" in result.reason
    assert load.claim(6) == rotten + 1, "it, and all before it"
    assert (down.enough, daemon.reported) == ([rotten + 1], [[rotten]])
    for block in range(rotten + 1, 6):
        assert down.memory.block(int(down.target[block])) == down.memory.block(1 + block)


def test_a_block_that_is_being_copied_cannot_be_claimed(daemon: ScriptedDaemon, make: Maker) -> None:
    """Claimed by the load from the submission on, whether or not its copy has ended or was seen to."""
    down = Down(daemon, make)
    load = down.tail()
    fronts = []
    loading = load._loading
    submit = loading._core.submit_load

    def watched(*args: Any) -> int:
        fronts.append(loading.claim(6))
        return int(submit(*args))

    loading._core.submit_load = watched
    down.tell_down(6, 4)
    down.lowest(load, 4)
    assert fronts == [4]
    assert load.wait(WAIT_S).good == 2
    down.assert_tail(4)


def test_claims_of_two_threads_never_overlap(daemon: ScriptedDaemon, make: Maker) -> None:
    """One computes from the front, writing what it claims; another drives the load."""
    down = Down(daemon, make, blocks=60)
    load = down.tail()
    mark = np.uint16(0xBEEF)
    computed = 0

    def compute() -> None:
        nonlocal computed
        while computed < 60 and (front := load.claim(computed + 1)) > computed:
            down.memory.cells[:, :, int(down.target[computed])] = mark
            computed = front

    thread = threading.Thread(target=compute)
    thread.start()
    for block in range(60, 0, -1):
        if load.done:
            break
        down.tell_down(block, block - 1)
        down.client.poll()
    thread.join(WAIT_S)
    result = load.wait(WAIT_S)
    assert result.good == 60 - computed or (result.good, computed) == (0, 60)
    for block in range(60):
        held = down.memory.cells[:, :, int(down.target[block])]
        if block < computed:
            assert (held == mark).all(), block
        else:
            assert held.tobytes() == down.memory.block(1 + block), block


@pytest.mark.parametrize(("ready", "stop"), [(5, -1), (7, 0), (3, 4), (4, 5)])
def test_a_notice_that_makes_no_sense(daemon: ScriptedDaemon, make: Maker, ready: int, stop: int) -> None:
    down = Down(daemon, make)
    load = down.tail()
    down.tell_down(6, 5)
    down.lowest(load, 5)
    daemon.conn(0).send(0, m.Progress(LEASE, ready, stop, b""))
    result = load.wait(WAIT_S)
    assert result.good == 1
    assert "malformed" in result.reason or "went away" in result.reason
    assert load.claim(6) == 5


def test_a_fetch_that_is_refused(daemon: ScriptedDaemon, make: Maker) -> None:
    down = Down(daemon, make)
    down.answer = lambda *_: failed(NotFound("lease 5: revoked"))
    load = down.tail()
    assert load.wait(WAIT_S).reason == "lease 5: revoked"
    assert (load.claim(6), down.enough) == (6, [])


def test_a_lease_that_is_not_held(daemon: ScriptedDaemon, make: Maker) -> None:
    down = Down(daemon, make)
    hit = down.hit()
    down.client.release(hit.lease)
    load = down.client.load_tail(hit, down.target)
    assert "not held" in load.wait(WAIT_S).reason
    assert (load.claim(6), down.fetches) == (6, [])


def test_a_daemon_that_goes_away_leaves_what_was_seen_to_be_good(daemon: ScriptedDaemon, make: Maker) -> None:
    down = Down(daemon, make)
    load = down.tail()
    down.tell_down(6, 3)
    down.lowest(load, 3)
    daemon.handlers[m.Heartbeat] = lambda *_: HangUp()
    assert not down.client.heartbeat()
    result = load.wait(WAIT_S)
    assert (result.good, load.lowest, load.claim(6)) == (3, 3, 3)
    assert result.reason
    down.assert_tail(3)


def test_a_load_that_is_cancelled(daemon: ScriptedDaemon, make: Maker) -> None:
    down = Down(daemon, make)
    load = down.tail()
    down.tell_down(6, 4)
    down.lowest(load, 4)
    load.cancel()
    result = load.wait(WAIT_S)
    assert (result.good, result.reason) == (2, "cancelled")
    down.tell_down(4, 0)  # too late
    assert down.client.heartbeat()
    assert load.claim(6) == 4
    down.assert_tail(4)


def test_a_client_that_closes_under_its_load(daemon: ScriptedDaemon, make: Maker) -> None:
    down = Down(daemon, make)
    load = down.tail()
    down.tell_down(6, 4)
    down.lowest(load, 4)
    down.client.close()
    result = load.poll()
    assert result is not None and result.good == 2
