"""Daemons that die and come back with their arena: what stays, what must not, and who holds it meanwhile."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from children import gone
from fake_engine import BIG, LIMITS, FakeEngine
from keep_rounds import Rounds
from real_daemon import WAIT_S, RealDaemon, eventually
from scene import Scene
from service_manager import ServiceManager

from kvstore.processes import has_ended
from kvstore.rpc import messages as m
from kvstore.types import Hit, Miss

KEEP = {"daemon__keep_arena": "true"}
IMPATIENT = replace(LIMITS, call_s=5.0, attach_s=20.0)
SLOTS = 56  # BIG ones in 16 MiB


def holders(daemon: RealDaemon) -> list[int]:
    """Pids of holder processes of this daemon's socket."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"kvstore.keep.holder" in words and f"{daemon.socket}.keep".encode() in words:
            found.append(int(entry.name))
    return [pid for pid in found if not gone(pid)]


def memfds_held(pid: int) -> list[str]:
    """Memfds that a process has open."""
    links = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            links.append(str(entry.readlink()))
        except OSError:
            continue
    return sorted(link for link in links if link.startswith("/memfd:"))


def nothing_is_left_of(daemon: RealDaemon) -> None:
    """No process, no socket."""
    assert holders(daemon) == []
    assert {entry.name for entry in daemon.folder.iterdir()} == {"kvstore.toml", "daemon.log"}


def events(daemon: RealDaemon, name: str) -> list[dict[str, Any]]:
    """What it logged under that name."""
    lines = [line for line in daemon.log.read_text().splitlines() if line.startswith("{")]
    return [line for line in map(json.loads, lines) if line["event"] == name]


def cli(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvstore", *words], capture_output=True, text=True, timeout=WAIT_S, check=False
    )


def attached_again(engine: FakeEngine, generation: int) -> None:
    eventually(lambda: engine.client.generation >= generation and engine.client.attached, "attached again")
    engine.client.poll()


def hit_of(engine: FakeEngine, seed: int, blocks: int) -> int:
    """Blocks that the next lookup of a saved chain finds on HOST and that come back right."""
    chain = engine.chain(seed, blocks)
    found = engine.client.lookup(chain)
    if not isinstance(found, Hit):
        return 0
    assert found.device == 0
    good = engine.load(found, chain).good
    engine.client.release(found.lease)
    return good


def edit(daemon: RealDaemon, before: str, after: str) -> None:
    """Change its configuration file."""
    text = daemon.config.read_text()
    assert before in text
    daemon.config.write_text(text.replace(before, after))


# ---- what stays --------------------------------------------------------------------------------------------


def test_killed_under_load_again_and_again(stage: Scene) -> None:
    rounds = stage.keep(Rounds(stage.folder))
    for _ in range(5):
        rounds.run()
    assert asdict(rounds.report) == {
        "rounds": 5,
        "host_hits": 10,
        "wrong_bytes": 0,
        "slots_lost": 0,
        "generations_back": 0,
    }


def test_a_stop_that_keeps(stage: Scene) -> None:
    daemon = stage.start_daemon(**KEEP)
    engine = stage.engine(layout=BIG, limits=IMPATIENT)
    engine.saved(1, 20)
    done = cli("stop", "--keep-arena", "--json", "--config", str(daemon.config))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"stopped": True, "pid": daemon.pid, "kept": True}
    assert daemon.process.wait(WAIT_S) == 0
    assert not daemon.socket.exists()
    (holder,) = holders(daemon)
    assert any("kvstore-arena:default" in name for name in memfds_held(holder))
    daemon.start()
    attached_again(engine, 2)
    assert hit_of(engine, 1, 20) == 20
    assert events(daemon, "kept arena adopted")[-1]["blocks"] == 20
    assert holders(daemon) == [holder]
    engine.close()
    daemon.assert_quiet()


def test_new_engines_find_it_too_and_eviction_goes_on(stage: Scene) -> None:
    daemon = stage.start_daemon(**KEEP)
    first = stage.engine(layout=BIG)
    first.saved(1, 20)
    first.saved(2, 20)
    assert first.matched(first.chain(1, 20)) == 20  # used after it: it leaves later
    first.close()
    daemon.end(signal.SIGKILL)
    daemon.start()
    second = stage.engine(layout=BIG)
    assert hit_of(second, 2, 20) == hit_of(second, 1, 20) == 20
    second.saved(3, SLOTS - 40)
    second.saved(4, 10)
    assert second.matched(second.chain(1, 20)) == 20
    assert second.matched(second.chain(2, 20)) == 10
    second.close()
    daemon.assert_quiet()


def test_rot_and_what_hangs_on_it_are_not_served(stage: Scene) -> None:
    daemon = stage.start_daemon(**KEEP)
    engine = stage.engine(layout=BIG, limits=IMPATIENT)
    chain = engine.saved(1, 10)
    hit = engine.hit(chain)
    engine.flip(int(hit.slots[4]), 1000)
    daemon.end(signal.SIGKILL)
    daemon.start()
    attached_again(engine, 2)
    adopted = events(daemon, "kept arena adopted")[-1]
    assert (adopted["blocks"], adopted["rotten"], adopted["orphaned"]) == (4, 1, 5)
    assert hit_of(engine, 1, 10) == 4
    engine.saved(2, SLOTS)  # no slot was lost by it
    engine.close()
    daemon.assert_quiet()


# ---- who may still write -----------------------------------------------------------------------------------


def test_a_stopped_writer_keeps_its_own_slots_and_no_others(stage: Scene) -> None:
    daemon = stage.start_daemon(**KEEP)
    engine = stage.engine(layout=BIG, limits=IMPATIENT)
    stopped, dying = stage.child(raw=True, big=True), stage.child(raw=True, big=True)
    mine = stopped.ask("reserve", seed=5, blocks=3)["slots"]
    dying.ask("reserve", seed=6, blocks=4)
    stopped.ask("write", blocks=2, half=True)
    stopped.stop()
    daemon.end(signal.SIGKILL)
    dying.kill()
    daemon.start()
    attached_again(engine, 2)
    eventually(lambda: daemon.group()["host"]["filling"] == 3, "slots of the dead one are free")
    assert daemon.group()["quarantined"] == 3
    daemon.assert_sound()
    # Everything else may be used (one slot is left for layout proofs), and lies where nobody else writes.
    chain = engine.saved(7, SLOTS - 4)
    assert not set(engine.hit(chain).slots.tolist()) & set(mine)
    stopped.resume()
    stopped.ask("scribble")
    assert hit_of(engine, 7, SLOTS - 4) == SLOTS - 4
    # A second crash: the quarantine goes on.
    daemon.end(signal.SIGKILL)
    daemon.start()
    attached_again(engine, 3)
    assert daemon.group()["quarantined"] == 3
    stopped.kill()
    eventually(lambda: daemon.group()["quarantined"] == 0, "they come back")
    assert hit_of(engine, 7, SLOTS - 4) == SLOTS - 4
    engine.saved(8, 3)
    engine.close()
    daemon.assert_quiet()


def test_an_engine_that_attaches_again_gets_its_slots_back_at_once(stage: Scene) -> None:
    """It says `quiesced`, and is recognised as the process that was there before."""
    daemon = stage.start_daemon(**KEEP)
    engine = stage.engine(layout=BIG, limits=IMPATIENT)
    other = stage.engine(layout=BIG, limits=IMPATIENT, model="another")
    assert len(engine.client.reserve(engine.chain(1, 5), 0, 5).slots) == 5
    assert len(other.client.reserve(other.chain(1, 4), 0, 4).slots) == 4
    assert daemon.group()["host"]["filling"] == 9
    daemon.end(signal.SIGKILL)
    daemon.start()
    assert events(daemon, "kept arena adopted")[-1]["being_filled"] == 9
    attached_again(engine, 2)
    attached_again(other, 2)
    eventually(lambda: daemon.group()["host"]["filling"] == 0, "both have quiesced")
    engine.close()
    other.close()
    daemon.assert_quiet()


# ---- what must not stay ------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["signal", "command"])
def test_a_plain_stop_leaves_nothing(stage: Scene, how: str) -> None:
    daemon = stage.start_daemon(**KEEP)
    engine = stage.engine(layout=BIG)
    engine.saved(1, 20)
    engine.close()
    (holder,) = holders(daemon)
    pidfd = os.pidfd_open(holder)
    try:
        if how == "signal":
            assert daemon.end(signal.SIGTERM) == 0
        else:
            done = cli("stop", "--config", str(daemon.config))
            assert done.returncode == 0, done.stderr
            assert done.stdout == f"stopped (pid {daemon.pid})\n"
            assert daemon.process.wait(WAIT_S) == 0
        assert has_ended(pidfd), "the holder is gone before its daemon is"
    finally:
        os.close(pidfd)
    nothing_is_left_of(daemon)
    daemon.start()
    assert events(daemon, "kept arena adopted") == []


def test_an_engine_may_not_stop_its_daemon(stage: Scene) -> None:
    daemon = stage.start_daemon()
    session = stage.session().engine()
    for keep in (True, False):
        got = session.ask(m.Stop(keep))
        assert isinstance(got, m.Failed)
        assert got.status == "PERMISSION_DENIED"
    daemon.assert_sound()


def test_stop_drops_what_a_crashed_daemon_left(stage: Scene) -> None:
    daemon = stage.start_daemon(**KEEP)
    daemon.end(signal.SIGKILL)
    assert len(holders(daemon)) == 1
    done = cli("stop", "--config", str(daemon.config))
    assert (done.returncode, done.stdout) == (0, "no daemon ran; the arena that one had left is dropped\n")
    eventually(lambda: holders(daemon) == [], "the holder is gone")
    assert not Path(f"{daemon.socket}.keep").exists()
    again = cli("stop", "--config", str(daemon.config))
    assert again.returncode == 2
    assert "no daemon answers" in again.stderr


def test_a_daemon_that_keeps_nothing_drops_what_was_kept(stage: Scene) -> None:
    daemon = stage.start_daemon(**KEEP)
    daemon.end(signal.SIGKILL)
    edit(daemon, "keep_arena = true", "keep_arena = false")
    daemon.start()
    assert holders(daemon) == []
    assert len(events(daemon, "kept arena dropped")) == 1
    refused = cli("stop", "--keep-arena", "--config", str(daemon.config))
    assert refused.returncode == 2
    assert "without daemon.keep_arena" in refused.stderr
    assert daemon.alive


def test_the_holder_waits_no_longer_than_it_was_told(stage: Scene) -> None:
    daemon = stage.start_daemon(**KEEP, daemon__keep_arena_s="1")
    (holder,) = holders(daemon)
    daemon.end(signal.SIGKILL)
    eventually(lambda: gone(holder), "the holder gave up")
    assert not Path(f"{daemon.socket}.keep").exists()
    daemon.start()
    assert events(daemon, "kept arena adopted") == []


def test_what_does_not_fit_any_more_is_dropped_with_a_reason(stage: Scene) -> None:
    daemon = stage.start_daemon('[[tenants]]\nname = "default"', **KEEP)
    engine = stage.engine(layout=BIG, limits=IMPATIENT)
    changes = [
        ('capacity_bytes = "16MiB"', 'capacity_bytes = "18MiB"', "host.capacity_bytes was 16777216"),
        ('slab_bytes = "2MiB"', 'slab_bytes = "4MiB"', "host.slab_bytes was 2097152"),
        ("[[tenants]]", '[[tenants]]\ngroup = "other"', "the group is not configured any more"),
    ]
    for generation, (before, after, reason) in enumerate(changes, 2):
        engine.saved(1, 5)  # each time it is kept like any other, and lost by the change
        daemon.end(signal.SIGKILL)
        edit(daemon, before, after)
        daemon.start()
        assert reason in events(daemon, "kept arena dropped, starting cold")[-1]["reason"]
        attached_again(engine, generation)
        assert isinstance(engine.client.lookup(engine.chain(1, 5)), Miss)
    assert len(events(daemon, "kept arena dropped, starting cold")) == 3
    engine.saved(1, 5)
    daemon.end(signal.SIGKILL)
    daemon.start()
    attached_again(engine, 5)
    assert hit_of(engine, 1, 5) == 5
    engine.close()


def test_other_salts_are_other_secrets(stage: Scene) -> None:
    secrets = stage.folder / "secrets.toml"

    def write(salt: str) -> None:
        secrets.write_text(f'[tenants]\ndefault = "{salt * 32}"\n')
        secrets.chmod(0o600)

    write("ab")
    daemon = stage.start_daemon(**KEEP, daemon__secrets_file=f'"{secrets}"')
    engine = stage.engine(layout=BIG, limits=IMPATIENT)
    engine.saved(1, 5)
    for generation, (salt, found) in enumerate([("ab", 5), ("cd", 0)], 2):
        write(salt)
        daemon.end(signal.SIGKILL)
        daemon.start()
        attached_again(engine, generation)
        assert hit_of(engine, 1, 5) == found
    (dropped,) = events(daemon, "kept arena dropped, starting cold")
    assert dropped["reason"] == "daemon.secrets_file has another salt for default"
    said = daemon.log.read_text()
    assert "abab" not in said
    assert "cdcd" not in said
    engine.close()


# ---- those who hold and those who come -------------------------------------------------------------------


def test_a_holder_that_dies_is_replaced(stage: Scene) -> None:
    daemon = stage.start_daemon(**KEEP)
    engine = stage.engine(layout=BIG, limits=IMPATIENT)
    engine.saved(1, 10)
    (first,) = holders(daemon)
    os.kill(first, signal.SIGKILL)
    (second,) = eventually(lambda: [pid for pid in holders(daemon) if pid != first], "another holder")
    eventually(
        lambda: any("kvstore-arena" in name for name in memfds_held(second)),
        "it holds what the first held",
    )
    daemon.end(signal.SIGKILL)
    daemon.start()
    attached_again(engine, 2)
    assert hit_of(engine, 1, 10) == 10
    engine.close()
    daemon.assert_quiet()
    assert daemon.end() == 0
    nothing_is_left_of(daemon)


def test_a_holder_that_does_not_answer_costs_the_warmth_and_no_more(stage: Scene) -> None:
    daemon = stage.start_daemon(**KEEP)
    (holder,) = holders(daemon)
    daemon.end(signal.SIGKILL)
    os.kill(holder, signal.SIGSTOP)
    try:
        daemon.start()
        assert events(daemon, "kept arena adopted") == []
        assert stage.engine(layout=BIG).saved(1, 5)
    finally:
        os.kill(holder, signal.SIGCONT)
    # It never was asked for anything by a living owner; its limit, or this, ends it.
    os.kill(holder, signal.SIGTERM)
    eventually(lambda: gone(holder), "the deaf one is gone")
    assert Path(f"{daemon.socket}.keep").exists(), "the address is the new holder's"


def test_killed_while_it_adopts_and_started_again(stage: Scene) -> None:
    daemon = stage.start_daemon(**KEEP)
    engine = stage.engine(layout=BIG, limits=IMPATIENT)
    engine.saved(1, 50)
    daemon.end(signal.SIGKILL)
    for _ in range(2):
        daemon.start(wait=False)
        eventually(daemon.memfds, "it has mapped the arena")
        daemon.end(signal.SIGKILL)
    daemon.start()
    eventually(lambda: engine.client.attached and engine.client.lookup(engine.chain(1, 50)), "attached")
    eventually(lambda: hit_of(engine, 1, 50) == 50, "all of it is there")
    engine.close()
    daemon.assert_quiet()


def test_a_second_daemon_gets_nothing(stage: Scene) -> None:
    """Neither while the first one runs, nor by another configuration on the same socket."""
    daemon = stage.start_daemon(**KEEP)
    engine = stage.engine(layout=BIG)
    engine.saved(1, 5)
    daemon.socket.rename(daemon.socket.with_suffix(".hidden"))  # so that it comes as far as the holder
    try:
        folder = stage.folder / "second"
        folder.mkdir()
        settings = {"daemon.socket": f'"{daemon.socket}"', "daemon.keep_arena": "true"}
        second: RealDaemon = stage.keep(RealDaemon(folder, settings)).start(wait=False)
        assert second.process.wait(WAIT_S) == 2
        assert "a daemon that runs has it" in second.said()
    finally:
        daemon.socket.with_suffix(".hidden").rename(daemon.socket)
    assert hit_of(engine, 1, 5) == 5
    engine.close()
    daemon.assert_quiet()


def test_a_service_manager_keeps_it_too(stage: Scene) -> None:
    """No holder then; what its store holds is the daemon's again at the next start."""
    manager = stage.keep(ServiceManager(stage.folder / "notify"))
    folder = stage.folder / "d"
    folder.mkdir()
    daemon: RealDaemon = stage.keep(RealDaemon(folder, {"daemon.keep_arena": "true"}))
    daemon.start(under=manager)
    manager.wait_for("READY=1")
    engine = FakeEngine(daemon.socket, layout=BIG, limits=IMPATIENT).attached()
    try:
        engine.saved(1, 10)
        assert len(engine.client.reserve(engine.chain(2, 3), 0, 3).slots) == 3
        assert holders(daemon) == []
        names = manager.names()
        assert [name for name in names if not name.startswith("peer.")] == [
            "data.default",
            "facts.1",
            "ledger.default",
            "writers",
        ]
        daemon.end(signal.SIGKILL)
        daemon.start(under=manager)
        assert events(daemon, "kept arena adopted")[-1]["being_filled"] == 3
        attached_again(engine, 2)
        assert hit_of(engine, 1, 10) == 10
        eventually(lambda: daemon.group()["host"]["filling"] == 0, "it has quiesced")
    finally:
        engine.close()
    daemon.assert_quiet()
    assert len(manager.names()) == 4, "no pidfd is left behind"
    assert daemon.end(signal.SIGTERM) == 0
    assert "STOPPING=1" in manager.said
    assert manager.names() == []


def test_the_holders_door_is_its_owners(stage: Scene) -> None:
    daemon = stage.start_daemon(**KEEP)
    assert Path(f"{daemon.socket}.keep").stat().st_mode & 0o777 == 0o600
