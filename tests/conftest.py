"""What every test may use, and the proof that the suite leaves nothing behind."""

from __future__ import annotations

import gc
import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import structlog

# Before torch is imported. The models of this suite are tiny: a second thread costs more than it computes,
# and OpenMP threads that spin while they wait starve the daemons that the tests talk to.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Before grpc is. Tests fork (a child asks for a signal at its parent's end before it becomes a daemon), and
# gRPC's own handlers around a fork have ended such a child before it was one.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

from kvstore.config import Config, DaemonConfig
from kvstore.testing import StoreDriver, small_config

# Every change is judged by the same examples; HYPOTHESIS=explore (make explore) looks for new ones.
hypothesis.settings.register_profile("repeatable", derandomize=True)
hypothesis.settings.register_profile("explore", derandomize=False)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS", "repeatable"))


# Processors run and capture_logs() works, but nothing is printed between the dots.
structlog.configure(logger_factory=structlog.ReturnLoggerFactory())

# What a shell runs in the background is deaf to SIGINT, and every daemon of this suite would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Threads and processes that are not ours: who starts them, and why they may stay.
FOREIGN_THREADS = (
    "pytest_timeout",  # the suite's own watchdog
    "tqdm_monitor",  # progress bars of libraries
    "_poll_wrapper",  # grpc.aio's one poller per process, there until its last channel is collected
)
FOREIGN_PROCESSES = ("resource_tracker",)  # Python's own, ends with this process


@pytest.fixture
def socket_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A path short enough for a Unix socket (107 bytes), whatever the test is called."""
    return tmp_path_factory.mktemp("s") / "kv.sock"


@pytest.fixture
def config(socket_path: Path) -> Config:
    """A small configuration whose socket lies in the test's own directory."""
    small = small_config()
    return Config(
        daemon=DaemonConfig(socket=str(socket_path)),
        host=small.host,
        index=small.index,
        events=small.events,
        tenants=small.tenants,
    )


@pytest.fixture
def driver() -> Iterator[StoreDriver]:
    """A small store without a socket; every law is checked at the end."""
    with StoreDriver() as driver:
        yield driver
        driver.store.check()


def shared_memory() -> set[str]:
    place = Path("/dev/shm")
    return {entry.name for entry in place.iterdir()} if place.is_dir() else set()


def own_leftovers() -> set[str]:
    return {entry.name for entry in Path(tempfile.gettempdir()).glob("kvstore*")}


def children() -> dict[int, str]:
    """Living processes whose parent is this one: pid → command line."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat, command = (entry / "stat").read_text(), (entry / "cmdline").read_bytes()
        except OSError:
            continue  # it ended while we looked
        parent = int(stat.rpartition(")")[2].split()[1])
        if parent == os.getpid():
            found[int(entry.name)] = command.replace(b"\0", b" ").decode(errors="replace") or stat
    return found


def threads() -> dict[str, threading.Thread]:
    alive = {thread.name: thread for thread in threading.enumerate()}
    return {name: t for name, t in alive.items() if not any(f in name for f in FOREIGN_THREADS)}


def mapped_arenas() -> list[str]:
    """Memfds that this process still has mapped."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return [line.split(maxsplit=5)[-1] for line in maps if "/memfd:" in line]


def holders(folder: Path) -> list[str]:
    """Command lines of processes that keep an arena for a daemon of this run: they are nobody's children."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if "kvstore.keep.holder" in command and str(folder) in command:
            found.append(command)
    return found


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """After the last test: no shared memory, file, process or thread that was not there before."""
    shm, files, processes, running = shared_memory(), own_leftovers(), children(), threads()
    yield
    gc.collect()
    assert not shared_memory() - shm, "left in /dev/shm"
    assert not own_leftovers() - files, "left in the temporary directory"
    left = {pid: what for pid, what in children().items() if pid not in processes}
    assert not [what for what in left.values() if not any(name in what for name in FOREIGN_PROCESSES)]
    assert not holders(tmp_path_factory.getbasetemp())
    assert not threads().keys() - running.keys(), "threads that still run"


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Every arena is unmapped; only now, when the last test's fixtures are forgotten, can that be seen."""
    gc.collect()
    arenas = mapped_arenas()
    if arenas and not session.testsfailed:  # a failure's traceback keeps its store alive
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        print(f"\nERROR arenas that are still mapped after the last test: {arenas}")
