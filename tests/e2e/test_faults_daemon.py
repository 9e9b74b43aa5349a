"""Daemons that die, stop, restart, start twice or are told to end while they start."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fake_engine import BIG, LIMITS, FakeEngine
from raw_session import RawSession
from real_daemon import RealDaemon, eventually, mapped
from scene import Scene

from kvstore.client import PoolSpec
from kvstore.client import loading as loads
from kvstore.client.effects import Job
from kvstore.client.loading import Loading
from kvstore.types import Busy, Miss, SaveResult

# Short, so that every wait of a client ends soon; nothing here depends on how soon.
IMPATIENT = replace(LIMITS, call_s=0.5, attach_s=2.0)
SHM = Path("/dev/shm")


def reattached(engine: FakeEngine, generation: int) -> None:
    """Until the client has attached that often, by itself."""
    eventually(lambda: engine.client.generation >= generation and engine.client.attached, "attached again")
    engine.client.poll()


# ---- killed while engines run ------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_engines_survive_their_daemon_and_find_the_next_one(stage: Scene, number: int) -> None:
    daemon = stage.start_daemon()
    before = mapped(os.getpid())
    engine = stage.engine()
    old_epoch = engine.client.epoch
    chain = engine.saved(1, 10)
    hit = engine.hit(chain)
    daemon.end(number)
    # Whatever is asked meanwhile is a miss, a drop, a no-op; nothing raises, nothing hangs.
    assert engine.load(hit, chain).good == 0
    engine.client.release(hit.lease)
    engine.client.release(hit.lease)
    assert isinstance(engine.client.lookup(chain), Miss)
    assert engine.save(chain) == SaveResult(0, 0, 0, 10, engine.save(chain).reason)
    assert engine.client.report(hit.lease, [0]) is False
    assert engine.client.status()["attached"] is False
    eventually(lambda: not engine.client.attached, "the loss was noticed")
    eventually(lambda: mapped(os.getpid()) == before, "the old arena is unmapped")
    assert engine.client.chain(np.arange(8, dtype=np.uint32), "default", engine.reuse) is None
    # The next daemon is found without anybody's help.
    daemon.start()
    reattached(engine, 2)
    assert engine.client.epoch != old_epoch
    again = engine.chain(1, 10)
    assert isinstance(engine.client.lookup(again), Miss)
    assert engine.save(again) == SaveResult(10, 0, 0, 0)
    assert engine.restored(again) == 10
    assert engine.client.counters.reattaches == 1
    assert mapped(os.getpid()) != before
    engine.close()
    assert mapped(os.getpid()) == before
    daemon.assert_quiet()


def test_a_load_that_ends_after_its_daemon_counts_as_failed(stage: Scene) -> None:
    """The copy succeeds, our mapping is still there; but another daemon could have handed the slots on."""
    daemon = stage.start_daemon()
    engine = stage.engine()
    chain = engine.saved(1, 10)
    hit, core = engine.hit(chain), engine.client._core
    attachment = core.attachment
    assert attachment is not None
    assert core.copier is not None
    for good in (10, 0):
        loading = Loading(core, attachment, 0, 0, chain.keys, np.arange(10, dtype=np.uint32))
        loading.begin(10, hit.slots)
        load = loads.load(core, loading)
        job = next(load)
        assert isinstance(job, Job)
        copied = core.copier.wait(job.id, 60.0)
        assert copied is not None
        assert not copied.status.any()
        if not good:
            daemon.end(signal.SIGKILL)
        with pytest.raises(StopIteration) as ended:
            load.send(copied)
        result = ended.value.value
        assert result.good == good
        assert (result.reason == "the daemon went away") == (good == 0)


def test_a_daemon_killed_while_loads_and_saves_run(stage: Scene) -> None:
    """A thread works through it; `FakeEngine.load` fails on any wrong byte that counts as good."""
    daemon = stage.start_daemon()
    engine = stage.engine(layout=BIG, blocks=16, limits=IMPATIENT)
    problems: list[BaseException] = []
    done = threading.Event()
    restored = threading.Semaphore(0)

    def work() -> None:
        seed = 0
        try:
            while not done.is_set():
                seed += 1
                if not engine.client.attached:
                    done.wait(0.01)
                    continue
                tokens = np.random.default_rng(seed).integers(0, 1 << 32, 64, dtype=np.uint32)
                chain = engine.client.chain(tokens, "default", engine.reuse)
                if chain is None:
                    continue
                engine.save(chain)
                if engine.restored(chain) == 16:
                    restored.release()
        except BaseException as error:  # noqa: BLE001  (whatever a thread raises, the test must say)
            problems.append(error)

    worker = threading.Thread(target=work, name="engine")
    worker.start()
    try:
        for _ in range(2):
            for _ in range(2):
                eventually(lambda: problems or restored.acquire(blocking=False), "it works")
            daemon.end(signal.SIGKILL)
            daemon.start()
        eventually(lambda: problems or engine.client.generation == 3, "attached again")
        eventually(lambda: problems or restored.acquire(blocking=False), "it works")
    finally:
        done.set()
        worker.join()
    assert problems == []
    engine.close()
    daemon.assert_quiet()


# ---- stopped -----------------------------------------------------------------------------------------------


def test_a_stopped_daemon_costs_a_deadline_and_no_more(stage: Scene) -> None:
    daemon = stage.start_daemon()
    engine = stage.engine(limits=IMPATIENT, pool=PoolSpec("owned", 64, 64), blocks=64)
    chain = engine.saved(1, 10)
    daemon.stopped()
    began = time.monotonic()
    missed = engine.client.lookup(chain)
    assert isinstance(missed, Miss)
    assert "in time" in missed.reason
    saved = engine.save(chain)
    assert (saved.ready, saved.dropped) == (0, 10)
    assert saved.reason
    assert isinstance(engine.client.acquire(0, 4), Busy)
    assert engine.client.status()["attached"] is False
    assert engine.client.heartbeat() is False
    # One deadline for the first; the others know by then that nobody answers.
    assert time.monotonic() - began < 30
    daemon.send(signal.SIGCONT)
    reattached(engine, 2)
    assert engine.restored(chain) == 10
    engine.close()
    daemon.assert_quiet()  # what it answered too late is nobody's lease


# ---- start and end -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_of_a_daemon(stage: Scene, number: int) -> None:
    shm = set(SHM.iterdir())
    daemon = stage.start_daemon()
    engine = stage.engine()
    chain = engine.saved(1, 10)
    hit = engine.hit(chain)
    files = {"kvstore.toml", "daemon.log"}
    status = daemon.end(number)
    if number == signal.SIGKILL:
        assert status == -signal.SIGKILL
        files |= {"kv.sock", "kv-grpc.sock"}  # nobody was left to remove them; the next daemon does
    else:
        assert status == 0
        assert "kvstore stops" in daemon.said()
    assert {entry.name for entry in daemon.folder.iterdir()} == files
    assert set(SHM.iterdir()) == shm
    engine.load(hit, chain)
    engine.close()
    daemon.start()
    assert stage.engine().saved(1, 10)


def test_a_second_daemon_is_refused_and_harms_nobody(stage: Scene) -> None:
    daemon = stage.start_daemon()
    engine = stage.engine()
    chain = engine.saved(1, 10)
    folder = stage.folder / "second"
    folder.mkdir()
    # An arena that no machine has: it must not even begin to make it.
    huge = {"daemon.socket": f'"{daemon.socket}"', "host.capacity_bytes": '"8TiB"'}
    second: RealDaemon = stage.keep(RealDaemon(folder, huge)).start(wait=False)
    assert second.process.wait(60) == 2
    said = second.said().strip()
    assert "\n" not in said
    assert str(daemon.socket) in said
    assert "another daemon" in said
    assert engine.restored(chain) == 10
    assert engine.client.generation == 1


def test_a_stale_socket_is_taken_over(stage: Scene) -> None:
    daemon = stage.start_daemon()
    daemon.end(signal.SIGKILL)
    assert daemon.socket.is_socket()
    daemon.start()
    assert stage.engine().saved(1, 3)
    assert daemon.end() == 0
    assert not daemon.socket.exists()


def test_something_else_at_the_path_is_left_alone(stage: Scene) -> None:
    daemon = stage.start_daemon()
    assert daemon.end() == 0
    daemon.socket.write_text("precious")
    daemon.start(wait=False)
    assert daemon.process.wait(60) == 2
    assert "not a socket" in daemon.said().splitlines()[-1]
    assert daemon.socket.read_text() == "precious"


def test_a_socket_taken_over_is_not_removed_by_its_former_owner(stage: Scene) -> None:
    daemon = stage.start_daemon()
    daemon.socket.unlink()
    with socket.socket(socket.AF_UNIX) as usurper:
        usurper.bind(str(daemon.socket))
        usurper.listen()
        assert daemon.end() == 0
        assert daemon.socket.is_socket()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_while_it_starts(stage: Scene, number: int) -> None:
    """Early (Python is still importing) and late (the arena is being made): it ends and leaves nothing."""
    shm = set(SHM.iterdir())
    for early in (True, False):
        folder = stage.folder / f"early{early}"
        folder.mkdir()
        daemon = stage.keep(RealDaemon(folder, {"host.capacity_bytes": '"256MiB"'})).start(wait=False)
        if not early:
            eventually(daemon.memfds, "the arena is being made")
        status = daemon.end(number)
        assert status in (0, 1, 130, -number), daemon.said()
        assert not (folder / "kv.sock").is_socket() or number == signal.SIGKILL
        assert set(SHM.iterdir()) == shm


def test_the_socket_has_its_mode_from_the_start(stage: Scene) -> None:
    daemon = stage.start_daemon()
    assert daemon.socket.stat().st_mode & 0o777 == 0o600


def test_silence_before_the_first_word_is_cut_off(stage: Scene) -> None:
    daemon = stage.start_daemon(daemon__attach_timeout_s="0.2")
    with RawSession(daemon.socket) as silent, RawSession(daemon.socket) as half:
        half.sock.sendall(b"\x40\x00")  # two bytes of a length
        assert silent.receive() is None
        assert half.receive() is None
    with RawSession(daemon.socket) as tool:
        tool.tool()
        until = time.monotonic() + 0.5
        eventually(lambda: time.monotonic() > until, "the timeout has passed")
        assert tool.check() == {"ok": True}  # who has attached may be silent
    daemon.assert_quiet()
