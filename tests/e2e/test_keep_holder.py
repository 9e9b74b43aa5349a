"""Who holds an arena without a daemon, for how long, for whom, and when it must be gone."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest
from children import gone
from fake_engine import BIG, FakeEngine
from kept import (
    IMPATIENT,
    KEEP,
    attached_again,
    cli,
    edit,
    events,
    hit_of,
    holders,
    memfds_held,
    nothing_is_left_of,
)
from real_daemon import WAIT_S, RealDaemon, eventually
from scene import Scene
from systemd_end import SystemdEnd

from kvstore.processes import has_ended
from kvstore.rpc import messages as m
from kvstore.types import Miss

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
    assert dropped["reason"] == "daemon.secrets_file or nvme.directory has another salt for default"
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
        settings = {"daemon.socket": f'"{daemon.socket}"', "daemon.keep_arena": "true", "grpc.listen": '""'}
        second: RealDaemon = stage.keep(RealDaemon(folder, settings)).start(wait=False)
        assert second.process.wait(WAIT_S) == 2
        assert "a daemon that runs has it" in second.said()
    finally:
        daemon.socket.with_suffix(".hidden").rename(daemon.socket)
    assert hit_of(engine, 1, 5) == 5
    engine.close()
    daemon.assert_quiet()


def test_systemd_keeps_it_too(stage: Scene) -> None:
    """No holder then; what its store holds is the daemon's again at the next start."""
    systemd = stage.keep(SystemdEnd(stage.folder / "notify"))
    folder = stage.folder / "d"
    folder.mkdir()
    daemon: RealDaemon = stage.keep(RealDaemon(folder, {"daemon.keep_arena": "true"}))
    daemon.start(under=systemd)
    systemd.wait_for("READY=1")
    engine = FakeEngine(daemon.socket, layout=BIG, limits=IMPATIENT).attached()
    try:
        engine.saved(1, 10)
        assert len(engine.client.reserve(engine.chain(2, 3), 0, 3).slots) == 3
        assert holders(daemon) == []
        names = systemd.names()
        assert [name for name in names if not name.startswith("peer.")] == [
            "data.default",
            "facts.1",
            "ledger.default",
            "writers",
        ]
        daemon.end(signal.SIGKILL)
        daemon.start(under=systemd)
        assert events(daemon, "kept arena adopted")[-1]["being_filled"] == 3
        attached_again(engine, 2)
        assert hit_of(engine, 1, 10) == 10
        eventually(lambda: daemon.group()["host"]["filling"] == 0, "it has quiesced")
    finally:
        engine.close()
    daemon.assert_quiet()
    assert len(systemd.names()) == 4, "no pidfd is left behind"
    assert daemon.end(signal.SIGTERM) == 0
    assert "STOPPING=1" in systemd.said
    assert systemd.names() == []


def test_the_holders_door_is_its_owners(stage: Scene) -> None:
    daemon = stage.start_daemon(**KEEP)
    assert Path(f"{daemon.socket}.keep").stat().st_mode & 0o777 == 0o600


def test_a_start_that_fails_keeps_what_was_there_and_nothing_of_its_own(stage: Scene) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f'listen = "127.0.0.1:{taken.getsockname()[1]}"'
        folder = stage.folder / "d"
        folder.mkdir()
        settings = {"daemon.keep_arena": "true", "metrics.listen": '""'}
        daemon: RealDaemon = stage.keep(RealDaemon(folder, settings))
        edit(daemon, '[metrics]\nlisten = ""', f"[metrics]\n{address}")
        daemon.start(wait=False)
        assert daemon.process.wait(WAIT_S) == 2
        assert "metrics.listen" in daemon.said()
        nothing_is_left_of(daemon)

        edit(daemon, address, 'listen = ""')
        daemon.start()
        engine = FakeEngine(daemon.socket, layout=BIG, limits=IMPATIENT).attached()
        try:
            engine.saved(1, 5)
            daemon.end(signal.SIGKILL)
            edit(daemon, '[metrics]\nlisten = ""', f"[metrics]\n{address}")
            daemon.start(wait=False)
            assert daemon.process.wait(WAIT_S) == 2
            edit(daemon, address, 'listen = ""')
            daemon.start()
            attached_again(engine, 2)
            assert hit_of(engine, 1, 5) == 5
        finally:
            engine.close()
    daemon.assert_quiet()
