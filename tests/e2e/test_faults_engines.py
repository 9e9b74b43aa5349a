"""Engines that die, stop, hang up or fork in the middle of everything: their pins go, their slots wait."""

from __future__ import annotations

import os
import signal
import time

import pytest
from children import gone
from fake_engine import BIG
from real_daemon import WAIT_S, eventually, mapped
from scene import Scene

from kvstore.types import SaveResult

# Two slabs of seven: what a test pins or fills is a large part of it.
SMALL_ARENA = {"host__capacity_bytes": '"4MiB"'}
SLOTS = 14
# As short as the configuration allows: silent for this long, a session's pins may be taken.
SOON_STALE = {"daemon__heartbeat_s": "0.1", "daemon__stale_after_s": "0.3"}
STALE_S = 0.3


def after(seconds: float) -> None:
    """Let the daemon's clock pass a limit of its configuration."""
    until = time.monotonic() + seconds
    eventually(lambda: time.monotonic() > until, "time passes")


# ---- killed ------------------------------------------------------------------------------------------------


def test_pins_of_a_killed_engine_are_released(stage: Scene) -> None:
    daemon = stage.start_daemon(**SMALL_ARENA)
    engine, child = stage.engine(layout=BIG), stage.child(raw=True, big=True)
    engine.saved(1, SLOTS)
    assert child.ask("lookup", seed=1, blocks=SLOTS)["blocks"] == SLOTS
    assert daemon.group()["leases"] == 1
    assert engine.save(engine.chain(2, 1)).dropped == 1
    child.kill()
    eventually(lambda: daemon.group()["leases"] == 0, "the dead engine's lease is gone")
    # And with it the pin: all of its blocks may leave.
    assert engine.save(engine.chain(2, SLOTS)) == SaveResult(SLOTS, 0, 0, 0)
    engine.close()
    daemon.assert_quiet()


def test_an_engine_killed_in_the_middle_of_loads(stage: Scene) -> None:
    daemon = stage.start_daemon()
    engine = stage.engine(layout=BIG, blocks=20)
    chain = engine.saved(1, 20)
    for _ in range(2):
        child = stage.child(big=True)
        child.tell("load_for_ever", seed=1, blocks=20)
        assert child.answer()["restored"] == 20
        assert child.answer()["restored"] == 20
        child.kill()
        eventually(lambda: len(daemon.group()["engines"]) == 1, "the dead engine is forgotten")
        assert daemon.group()["leases"] == 0
        assert engine.restored(chain) == 20
        daemon.assert_sound()


def test_an_engine_killed_in_the_middle_of_saves(stage: Scene) -> None:
    """Whatever it had acknowledged is there and right; whatever it had not is not there or right."""
    daemon = stage.start_daemon()
    engine = stage.engine(layout=BIG, blocks=8)
    for seed in (100, 200):
        child = stage.child(big=True)
        child.tell("save_for_ever", seed=seed, blocks=4)
        said = [child.answer() for _ in range(3)]
        child.kill()
        assert [one["ready"] for one in said] == [4, 4, 4]
        eventually(lambda: daemon.group()["host"]["filling"] == 0, "slots of the dead engine are free")
        for one in said:
            assert engine.restored(engine.chain(one["seed"], 4)) == 4
        for later in range(seed + 3, seed + 6):
            chain = engine.chain(later, 4)
            assert engine.restored(chain) == engine.matched(chain)
        daemon.assert_sound()
    engine.close()
    daemon.assert_quiet()


def test_slots_half_written_by_a_killed_engine_are_never_read(stage: Scene) -> None:
    daemon = stage.start_daemon(**SMALL_ARENA)
    engine = stage.engine(layout=BIG)
    child = stage.child(raw=True, big=True)
    assert len(child.ask("reserve", seed=1, blocks=5)["slots"]) == 5
    child.ask("write", blocks=4, half=True)
    chain = engine.chain(1, 5)
    assert engine.matched(chain) == 0
    assert engine.save(chain) == SaveResult(0, 0, 5, 0)
    assert daemon.group()["host"]["filling"] == 5
    child.kill()
    eventually(lambda: daemon.group()["host"]["filling"] == 0, "its process is gone: the slots are free")
    assert engine.matched(chain) == 0
    assert engine.save(chain) == SaveResult(5, 0, 0, 0)
    assert engine.restored(chain) == 5
    engine.close()
    daemon.assert_quiet()


# ---- alive, but not as it seems ----------------------------------------------------------------------------


def test_a_closed_socket_does_not_free_what_a_process_may_write(stage: Scene) -> None:
    daemon = stage.start_daemon(**SMALL_ARENA)
    engine = stage.engine(layout=BIG, blocks=SLOTS)
    child = stage.child(raw=True, big=True)
    slots = set(child.ask("reserve", seed=1, blocks=5)["slots"])
    child.ask("hang_up")
    mine = child.ready["engine"]
    eventually(lambda: daemon.group()["engines"][mine]["sessions"] == 0, "the daemon saw the socket close")
    assert daemon.group()["engines"][mine]["writers"] == 1
    # Everything else is handed out and comes back right, whatever that process stores.
    chain = engine.chain(2, SLOTS)
    assert engine.save(chain).ready == SLOTS - 5
    child.ask("scribble")
    assert not slots & set(engine.hit(chain).slots.tolist())
    assert engine.restored(chain) == SLOTS - 5
    assert daemon.group()["host"]["filling"] == 5
    child.kill()
    eventually(lambda: daemon.group()["host"]["filling"] == 0, "its process is gone: the slots are free")
    engine.close()
    daemon.assert_quiet()


def test_a_forked_child_that_holds_the_socket_holds_nothing_else(stage: Scene) -> None:
    daemon = stage.start_daemon()
    engine = stage.engine()
    engine.saved(1, 3)
    child = stage.child(raw=True)
    child.ask("lookup", seed=1, blocks=3)
    child.ask("reserve", seed=2, blocks=5)
    heir = child.ask("fork")["pid"]
    try:
        assert mapped(heir) == [], "the arena went through a fork"
        child.kill()
        assert not gone(heir)
        eventually(lambda: daemon.group()["leases"] == 0, "the lease went with the process")
        eventually(lambda: daemon.group()["host"]["filling"] == 0, "the slots came back with it")
        assert not gone(heir)
        engine.close()
        daemon.assert_quiet()
    finally:
        os.kill(heir, signal.SIGKILL)


def test_slots_of_an_engine_wait_for_its_last_process(stage: Scene) -> None:
    daemon = stage.start_daemon()
    first = stage.child(raw=True)
    second = stage.child(raw=True, engine=first.ready["engine"])
    first.ask("reserve", seed=1, blocks=5)
    first.kill()
    mine = first.ready["engine"]
    eventually(lambda: daemon.group()["engines"][mine]["writers"] == 1, "one of two writers is gone")
    assert daemon.group()["host"]["filling"] == 5
    second.kill()
    eventually(lambda: daemon.group()["host"]["filling"] == 0, "both are gone")
    daemon.assert_quiet()


# ---- stopped -----------------------------------------------------------------------------------------------


def test_a_stopped_engine_loses_its_pins_only_under_pressure(stage: Scene) -> None:
    daemon = stage.start_daemon(**SMALL_ARENA, **SOON_STALE)
    engine, child = stage.engine(layout=BIG, blocks=SLOTS), stage.child(big=True)
    engine.saved(1, SLOTS)
    assert child.ask("lookup", seed=1, blocks=SLOTS)["blocks"] == SLOTS
    child.stop()
    after(2 * STALE_S)
    assert daemon.group()["leases"] == 1, "nobody needed the memory"
    other = engine.saved(2, SLOTS)
    group = daemon.group()
    assert (group["leases"], group["counters"]["revoked_leases"]) == (0, 1)
    # Its late copy is detected, block by block: nothing of it counts as loaded.
    child.resume()
    late = child.ask("load")
    assert late["good"] == 0
    assert set(late["status"]).isdisjoint({0})
    assert engine.restored(other) == SLOTS
    assert child.ask("restored", seed=2, blocks=SLOTS)["good"] == SLOTS
    assert daemon.group()["host"]["corrupt_blocks"] == 0
    daemon.assert_sound()


def test_a_stopped_engine_that_nobody_disturbs_loses_nothing(stage: Scene) -> None:
    daemon = stage.start_daemon(**SOON_STALE)
    engine = stage.engine(layout=BIG, blocks=8)
    engine.saved(1, 8)
    child = stage.child(big=True)
    assert child.ask("lookup", seed=1, blocks=8)["blocks"] == 8
    child.stop()
    after(2 * STALE_S)
    child.resume()
    assert child.ask("load")["good"] == 8
    daemon.assert_sound()


def test_slots_of_a_stopped_engine_stay_quarantined(stage: Scene) -> None:
    daemon = stage.start_daemon(**SMALL_ARENA, **SOON_STALE, daemon__stall_s="3600")
    engine = stage.engine(layout=BIG, blocks=SLOTS)
    child = stage.child(raw=True, big=True)
    slots = set(child.ask("reserve", seed=1, blocks=5)["slots"])
    child.ask("write", blocks=3, half=True)
    child.stop()
    after(2 * STALE_S)
    other = engine.chain(2, SLOTS)
    saved = engine.save(other)
    assert (saved.ready, saved.dropped) == (SLOTS - 5, 5)
    assert "no room" in saved.reason
    assert engine.save(engine.chain(1, 5)) == SaveResult(0, 0, 5, 0)
    child.resume()
    child.ask("scribble")
    hit = engine.hit(other)
    assert not slots & set(hit.slots.tolist())
    assert engine.load(hit, other).good == SLOTS - 5
    engine.client.release(hit.lease)
    child.kill()
    engine.close()
    daemon.assert_quiet()


def test_a_stalled_save_does_not_keep_others_from_saving(stage: Scene) -> None:
    """After stall_s a second slot is made for the key; the first publish wins, the loser harms nobody."""
    daemon = stage.start_daemon(daemon__stall_s="0.05")
    engine = stage.engine(layout=BIG, blocks=8)
    child = stage.child(raw=True, big=True)
    slots = set(child.ask("reserve", seed=1, blocks=5)["slots"])
    child.ask("write", blocks=5, half=True)
    child.stop()
    chain = engine.chain(1, 5)
    eventually(lambda: engine.save(chain).elsewhere == 0, "the stalled filling does not count any more")
    hit = engine.hit(chain)
    assert hit.blocks == 5
    assert not slots & set(hit.slots.tolist())
    engine.client.release(hit.lease)
    child.resume()
    child.ask("scribble")
    lost = child.ask("publish", blocks=5)
    assert (lost["kind"], lost["ready"]) == ("Published", 0)
    assert engine.restored(chain) == 5
    assert daemon.group()["host"]["filling"] == 0
    # Twice is once too often, for the loser too.
    assert child.ask("publish", blocks=5)["kind"] == "Failed"
    child.kill()
    engine.close()
    daemon.assert_quiet()


@pytest.mark.parametrize("first", ["old", "new"])
def test_of_two_writers_of_a_key_the_first_publish_wins(stage: Scene, first: str) -> None:
    daemon = stage.start_daemon(daemon__stall_s="0.05")
    old, new = stage.child(raw=True), stage.child(raw=True)
    old.ask("reserve", seed=1, blocks=3)
    eventually(lambda: new.ask("reserve", seed=1, blocks=3)["token"], "a second slot is made")
    order = [old, new] if first == "old" else [new, old]
    for child in order:
        child.ask("write", blocks=3)
    assert [child.ask("publish", blocks=3)["ready"] for child in order] == [3, 0]
    order[1].ask("scribble")  # its slots were freed: nobody else had them yet, the winner's are others
    engine = stage.engine()
    assert engine.restored(engine.chain(1, 3)) == 3
    daemon.assert_sound()


def test_an_engine_that_left_can_come_back(stage: Scene) -> None:
    """Attach and leave, in order or by death, over and over: nothing adds up in the daemon."""
    daemon = stage.start_daemon()
    stage.engine().close()
    daemon.assert_quiet()
    before = len(os.listdir(f"/proc/{daemon.pid}/fd"))  # noqa: PTH208  (a count, not paths)
    for number in range(2):
        child = stage.child(raw=number % 2 == 0)
        child.kill()
        engine = stage.engine()
        assert engine.saved(number, 3)
        engine.close()
    daemon.assert_quiet()
    eventually(
        lambda: len(os.listdir(f"/proc/{daemon.pid}/fd")) == before,  # noqa: PTH208  (a count, not paths)
        "no socket and no pidfd is left",
        WAIT_S,
    )
