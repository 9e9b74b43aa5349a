"""For the client's tests: one face for both clients, and what a client may leave behind."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from client_memory import LIMITS, NAMESPACE, WAIT_S, Memory

from kvstore.client import AsyncClient, Client
from kvstore.client.tasks import AsyncPending
from kvstore.types import Reuse

# ---- one face for both clients ---------------------------------------------------------------------------


class OnLoop:
    """An object of the asyncio API, called from a test's thread; awaitables are awaited on its loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, target: Any) -> None:
        object.__setattr__(self, "_loop", loop)
        object.__setattr__(self, "_target", target)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._target, name, value)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._target, name)
        if not callable(value) or name.startswith("on_"):
            return value

        async def call(*args: Any, **kwargs: Any) -> Any:
            result = value(*args, **kwargs)
            return await result if inspect.isawaitable(result) else result

        def here(*args: Any, **kwargs: Any) -> Any:
            result = asyncio.run_coroutine_threadsafe(call(*args, **kwargs), self._loop).result(3 * WAIT_S)
            return OnLoop(self._loop, result) if isinstance(result, AsyncPending) else result

        return here


class Maker:
    """Makes clients of one kind and closes those that a test forgot."""

    def __init__(self, kind: str, path: Path) -> None:
        self.kind = kind
        self.path = path
        self.made: list[Any] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        if kind == "async":
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="test-loop", daemon=True)
            self._thread.start()

    def __call__(self, memory: Any = None, **kwargs: Any) -> Any:
        if memory is None and kwargs.get("role", "both") in ("both", "worker"):
            memory = Memory()
        kwargs.setdefault("limits", LIMITS)
        if memory is not None:
            kwargs.setdefault("scratch_block", memory.blocks - 1)
        namespace = None if kwargs.get("role") == "tool" else NAMESPACE
        client: Any
        if self._loop is None:
            client = Client(self.path, namespace, memory, **kwargs)
        else:

            async def make() -> AsyncClient:
                return AsyncClient(self.path, namespace, memory, **kwargs)

            client = OnLoop(self._loop, asyncio.run_coroutine_threadsafe(make(), self._loop).result(WAIT_S))
        self.made.append(client)
        return client

    def attached(self, memory: Any = None, **kwargs: Any) -> Any:
        """A client that is attached already and has told so."""
        client = self(memory, **kwargs)
        assert client.wait_attached(WAIT_S), client.refusal
        client.poll()
        return client

    def close(self) -> None:
        for client in self.made:
            client.close()
        if self._loop is not None and self._thread is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(WAIT_S)
            self._loop.close()


class Changes:
    """Lets a test wait for a client's background: every attach, detach and refusal is an event."""

    def __init__(self, client: Any) -> None:
        self._core = client._core
        self._news = threading.Condition()
        before = self._core.changed

        def changed() -> None:
            before()
            with self._news:
                self._news.notify_all()

        self._core.changed = changed

    def until(self, what: Callable[[], bool]) -> None:
        with self._news:
            assert self._news.wait_for(what, WAIT_S), "the client's background did not come to it"


def chain_of(client: Any, blocks: int, first_token: int = 0) -> Any:
    tokens = np.arange(first_token, first_token + 4 * blocks, dtype=np.uint32)
    chain = client.chain(tokens, "default", Reuse.OWN)
    assert chain is not None
    return chain


def descriptors() -> list[str]:
    """What every open descriptor is, sockets and files by their inode."""
    found = []
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the listing itself was one of them
            found.append(str(fd.readlink()))
    return sorted(found)


def arena_descriptors() -> int:
    """Open descriptors of arenas; those that the scripted daemon holds count too."""
    gc.collect()
    return sum("memfd:" in what for what in descriptors())


def arena_mappings() -> list[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sorted(line.split()[-2] + line.split("-")[0] for line in lines if "memfd:" in line)


def kvstore_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("kvstore-client")]


@contextlib.contextmanager
def nothing_left(threads: bool = True, descriptors_too: bool = True) -> Iterator[None]:
    """Mappings, and if asked threads and descriptors, after are those before."""

    def now() -> list[Any]:
        gc.collect()  # arenas of earlier tests live as long as the garbage that shares them
        found: list[Any] = [arena_mappings(), kvstore_threads() if descriptors_too else []]
        found.append(threading.active_count() if threads else 0)
        found.append(descriptors() if descriptors_too else [])
        return found

    before = now()
    yield
    assert now() == before
