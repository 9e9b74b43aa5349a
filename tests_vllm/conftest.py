"""Models, daemons and engines for every test, and the proof that the suite leaves nothing behind."""

from __future__ import annotations

import ctypes
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from scratch import scratch

from bench.vllm_settings import environment

# Before torch and vLLM are imported.
os.environ.update({**environment(), **scratch()})

from daemon import Daemon
from engines import ApiServer, Engine, EngineProcess, settings_of

from bench.vllm_models import make_random, make_smollm2

_PR_SET_CHILD_SUBREAPER = 36
_FOREIGN_PROCESSES = ("resource_tracker",)  # Python's own, ends with this process
_GONE_S = 20.0


# ---- models -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where models are written, once a session; gone after it."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def tiny(models: Path) -> Path:
    """4 layers, 2 KV heads, 512 words, sharp: one wrong KV block changes the next token."""
    return make_random(models / "tiny")


@pytest.fixture(scope="session")
def other_tiny(models: Path) -> Path:
    """The same shape and names, other weights."""
    return make_random(models / "other_tiny", seed=1)


@pytest.fixture(scope="session")
def smollm2(models: Path) -> Path:
    """SmolLM2-135M-Instruct with its tokenizer and chat template."""
    return make_smollm2(models / "smollm2")


# ---- daemons and engines: everything is ended with the test -----------------------------------------------


@pytest.fixture
def ending() -> Iterator[ExitStack]:
    """What is entered here is left with the test, last first."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def new_daemon(tmp_path_factory: pytest.TempPathFactory, ending: ExitStack) -> Callable[..., Daemon]:
    """Start a daemon; arguments: its settings."""

    def make(settings: Mapping[str, str] | None = None) -> Daemon:
        made = Daemon(tmp_path_factory.mktemp("d"), settings)
        ending.callback(made.close)
        return made.start()

    return make


@pytest.fixture
def daemon(new_daemon: Callable[..., Daemon]) -> Daemon:
    """A daemon with an arena of 256 MiB."""
    return new_daemon()


@pytest.fixture
def new_engine(ending: ExitStack) -> Callable[..., Engine]:
    """Start an engine in this process, one at a time; arguments as `settings_of`."""

    def make(model: Path, socket: Path | None = None, **settings: Any) -> Engine:
        return ending.enter_context(Engine(settings_of(model, socket, **settings)))

    return make


@pytest.fixture
def new_process(tmp_path: Path, ending: ExitStack) -> Callable[..., EngineProcess]:
    """Start an engine in a process of its own; arguments as `settings_of`."""
    count = 0

    def make(model: Path, socket: Path | None = None, **settings: Any) -> EngineProcess:
        nonlocal count
        count += 1
        return ending.enter_context(
            EngineProcess(tmp_path, settings_of(model, socket, **settings), f"engine{count}")
        )

    return make


@pytest.fixture
def new_server(tmp_path: Path, ending: ExitStack) -> Callable[..., ApiServer]:
    """Start an OpenAI server, not yet healthy; arguments as `settings_of`."""
    count = 0

    def make(model: Path, socket: Path | None = None, **settings: Any) -> ApiServer:
        nonlocal count
        count += 1
        return ending.enter_context(
            ApiServer(tmp_path, settings_of(model, socket, **settings), f"server{count}")
        )

    return make


# ---- nothing is left --------------------------------------------------------------------------------------


def shared_memory() -> set[str]:
    place = Path("/dev/shm")
    return {entry.name for entry in place.iterdir()} if place.is_dir() else set()


def children() -> dict[int, str]:
    """Living processes whose parent is this one, those of dead children included: pid → command line."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            stat, command = (entry / "stat").read_text(), (entry / "cmdline").read_bytes()
        except OSError:
            continue  # it ended while we looked
        state, parent = stat.rpartition(")")[2].split()[:2]
        if int(parent) == os.getpid() and state != "Z":
            found[int(entry.name)] = command.replace(b"\0", b" ").decode(errors="replace") or stat
    return found


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """After the last test: no shared memory or process that was not there before, no file of ours."""
    # Orphans of a killed engine become our children, so that they are seen.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    # vLLM leaves sockets and locks in the temporary directory.
    os.environ["TMPDIR"] = os.environ["VLLM_RPC_BASE_PATH"] = tempfile.tempdir = str(
        tmp_path_factory.mktemp("t")
    )
    shm, processes = shared_memory(), children()
    yield
    deadline = time.monotonic() + _GONE_S

    def left() -> list[str]:
        living = [what for pid, what in children().items() if pid not in processes]
        return [what for what in living if not any(name in what for name in _FOREIGN_PROCESSES)]

    while (left() or shared_memory() - shm) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left()
    assert not shared_memory() - shm, "left in /dev/shm"
    assert not list(Path(tempfile.gettempdir()).glob("kvstore*"))
