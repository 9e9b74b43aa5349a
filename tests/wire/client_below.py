"""For the client's tests: blocks that are partly below HOST, and a daemon that brings them as a test says."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from client_daemon import Conn, ScriptedDaemon
from client_kit import Maker, chain_of
from client_memory import WAIT_S, Memory

from kvstore import _native
from kvstore.rpc import messages as m
from kvstore.types import Hit

LEASE = 5
_never = threading.Event()


def until(what: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not what():
        assert time.monotonic() < deadline, "did not happen"
        _never.wait(0.001)


class Below:
    """Blocks of one chain, the first `host` of them on HOST for whoever looks up, the others on NVME.

    All of them are in the arena really: a test says when a fetch names them.
    """

    def __init__(
        self, daemon: ScriptedDaemon, make: Maker, blocks: int = 6, host: int = 2, **options: Any
    ) -> None:
        self.daemon, self.blocks, self.host = daemon, blocks, host
        self.memory = Memory(3 * blocks + 4)
        self.client = make.attached(self.memory, **options)
        self.chain = chain_of(self.client, blocks)
        for block in range(blocks):
            self.memory.fill(1 + block, b"block %d" % block)
        source = np.arange(1, 1 + blocks, dtype=np.uint32)
        assert self.client.save(self.chain, 0, blocks, source).wait(WAIT_S).ready == blocks
        self.slots = np.array([daemon.slots[key.tobytes()] for key in self.chain.keys], np.uint32)
        self.fetches: list[m.Fetch] = []
        self.answer: Callable[[Conn, m.Fetch], Any] = lambda _, ask: m.Fetched(ask.start, b"")
        daemon.handlers[m.Lookup] = lambda *_: self.found()
        daemon.handlers[m.Fetch] = self._on_fetch
        self.target = np.arange(1 + blocks, 1 + 2 * blocks, dtype=np.uint32)

    def found(self) -> m.Found:
        n, host = self.blocks, self.host
        spans = [("HOST", 0, host), ("NVME", host, n)]
        return m.Found(
            LEASE, n, 0, n, n, self.chain.digest(n), (0, n), self.packed(0, host), spans, "all of it"
        )

    def packed(self, start: int, stop: int) -> bytes:
        pages = self.daemon.format.slot_bytes // _native.PAGE_BYTES
        return _native.pack_slots(self.slots[start:stop], pages)

    def _on_fetch(self, conn: Conn, ask: m.Fetch) -> Any:
        self.fetches.append(ask)
        return self.answer(conn, ask)

    def bring(self, *reached: int, stop: int | None = None) -> None:
        """From the next fetch on: the first of them at once, the others by notices, the last to `stop`."""

        def answer(conn: Conn, ask: m.Fetch) -> None:
            conn.send(len(conn.requests), m.Fetched(reached[0], self.packed(ask.start, reached[0])))
            for before, ready in itertools.pairwise(reached):
                self.tell(before, ready, self.blocks if ready < reached[-1] else stop)

        self.answer = answer

    def tell(self, before: int, ready: int, stop: int | None = None) -> None:
        """One notice."""
        until_block = self.blocks if stop is None else stop
        self.daemon.conn(0).send(0, m.Progress(LEASE, ready, until_block, self.packed(before, ready)))

    def hit(self) -> Hit:
        hit = self.client.lookup(self.chain)
        assert isinstance(hit, Hit), hit
        return hit

    def load(self, hit: Hit | None = None) -> Any:
        return self.client.load(hit or self.hit(), self.target)

    def reached(self, load: Any, blocks: int) -> None:
        """Wait until so many blocks are copied."""

        def there() -> bool:
            self.client.poll()
            return bool(load.progress() >= blocks)

        until(there)

    def assert_loaded(self, blocks: int) -> None:
        """The first target blocks hold what was saved."""
        for block in range(blocks):
            assert self.memory.block(int(self.target[block])) == self.memory.block(1 + block), block
