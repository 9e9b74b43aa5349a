"""The process between bench.local_peers and one store: lines in, JSON out, the store's own seconds.

    open FOLDER LIMIT_LIBRARY BLOCK_BYTES BLOCKS CAPACITY_BLOCKS    → {version, note, leaves}
    put BLOCKS            new chains from random places             → {seconds}
    get                   the chains put last, to random places     → {seconds, wrong}
    memcpy put|get BLOCKS the same moves by memcpy, one thread      → {seconds}; no get after one of put
    plant LENGTH CHAINS   chains to look up                         → {}
    lookup LENGTH hit|half|miss                                     → {seconds, blocks}
    close                                                           → {}

An error is {error} and the process lives on. Only the standard library is needed here.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

__all__ = [
    "BATCH_BYTES",
    "Blocks",
    "Memory",
    "Service",
    "Store",
    "end",
    "free_port",
    "serve",
    "start",
    "wait_until",
]

BATCH_BYTES = 256 << 20
"""What one call of a store moves: what an engine hands over for some long prompts."""
_WITNESSES = 32
_HUGE_BYTES = 2 << 20
_POOL_BYTES = 4 << 20
_PR_SET_PDEATHSIG = 1
Chain = tuple[int, ...]
"""One number a block; equal beginnings are equal prefixes."""


class Memory:
    """(bytes_,) private memory on huge pages where the kernel gives them, every page touched.

    Attributes:
        address: of its first byte, on a 2 MiB boundary.
        view: its bytes.
    """

    def __init__(self, bytes_: int) -> None:
        self._area = mmap.mmap(-1, bytes_ + _HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._area.madvise(mmap.MADV_HUGEPAGE)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._area))
        skip = -start % _HUGE_BYTES
        self.address = start + skip
        self.view = memoryview(self._area)[skip : skip + bytes_]
        for at in range(0, bytes_, mmap.PAGESIZE):
            self.view[at] = 1


class Blocks:
    """An engine's KV memory as a row of blocks, and as much plain memory for memcpy's other end.

    Args:
        block_bytes, count: the row.
    """

    def __init__(self, block_bytes: int, count: int) -> None:
        self.block_bytes, self.count = block_bytes, count
        self._memory, self._other = Memory(block_bytes * count), Memory(block_bytes * count)
        self.address, self.other_address = self._memory.address, self._other.address
        self.view = self._memory.view

    def fill(self, source: random.Random) -> None:
        """Random bytes, no two blocks equal."""
        pool = source.randbytes(_POOL_BYTES + self.block_bytes)
        view, size = self.view, self.block_bytes
        for block in range(self.count):
            skip = source.randrange(_POOL_BYTES)
            view[block * size : (block + 1) * size] = pool[skip : skip + size]
            struct.pack_into("<Q", view, block * size, block)

    def sum_of(self, block: int) -> int:
        """A checksum of one block's bytes."""
        size = self.block_bytes
        return zlib.crc32(self.view[block * size : (block + 1) * size])


class Store(ABC):
    """One store as an engine in this process uses it.

    Attributes:
        blocks: the engine's memory.
        version: of the store's package.
        note: settings worth a word in the result.
        leaves: shell patterns of what a crash of this process would leave behind.
    """

    blocks: Blocks
    version: str
    note = ""
    leaves: tuple[str, ...] = ()

    @abstractmethod
    def key_of(self, chain: Chain) -> Any:
        """How the store wants that chain named. Not timed."""

    @abstractmethod
    def put(self, key: Any, places: Sequence[int]) -> float:
        """Keep block places[i] as block i of the chain.

        Returns:
            Seconds of the store's own calls.

        Raises:
            RuntimeError: not every block was kept.
        """

    @abstractmethod
    def get(self, key: Any, places: Sequence[int]) -> float:
        """Block i of the chain → block places[i].

        Returns:
            Seconds of the store's own calls.

        Raises:
            RuntimeError: not every block came.
        """

    @abstractmethod
    def lookup(self, key: Any) -> tuple[float, int]:
        """Seconds of the store's own calls, and how many leading blocks it has."""

    def forget(self, keys: Sequence[Any]) -> None:  # noqa: B027 most stores need not
        """Called, untimed, with what was put before, ahead of the next put: for stores that need it."""

    @abstractmethod
    def close(self) -> None:
        """End what was started, remove what it leaves."""


Opened = Callable[[Path, int, int, int], Store]


class _Limit:
    """memcpy of the C library over lists of blocks, from the library that bench.limits compiled."""

    def __init__(self, path: str) -> None:
        library = ctypes.CDLL(path)
        size, pointer = ctypes.c_size_t, ctypes.c_void_p
        self._out, self._in = library.copy_blocks_out, library.copy_blocks
        for function in (self._out, self._in):
            function.argtypes = [pointer, pointer, pointer, pointer, size, size]
            function.restype = None

    def copy(self, blocks: Blocks, places: Sequence[int], *, outward: bool) -> float:
        """Block places[i] → the i-th of the other end, or back."""
        count, size = len(places), blocks.block_bytes
        here = (ctypes.c_uint32 * count)(*places)
        there = (ctypes.c_uint64 * count)(*(i * size for i in range(count)))
        start = time.perf_counter()
        if outward:
            self._out(blocks.other_address, there, blocks.address, here, count, size)
        else:
            self._in(blocks.address, here, blocks.other_address, there, count, size)
        return time.perf_counter() - start


class Service:
    """The protocol's state.

    Args:
        opened: makes the store: (folder, block_bytes, blocks, capacity_blocks) → Store.
    """

    def __init__(self, opened: Opened) -> None:
        self._opened = opened
        self._random = random.Random(1)
        self._store: Store | None = None
        self._limit: _Limit | None = None
        self._kept: list[tuple[Any, Chain]] = []
        # memcpy's other end may be the store's own pages (ours is): what was put is gone then.
        self._overwritten = False
        self._witnesses: dict[tuple[int, int], int] = {}
        self._planted: dict[int, list[Chain]] = {}

    def answer(self, line: str) -> dict[str, Any]:
        """The reply to one request.

        Raises:
            ValueError: no such request.
        """
        match line.split():
            case ["open", folder, library, block_bytes, blocks, capacity_blocks]:
                store = self._open(Path(folder), int(block_bytes), int(blocks), int(capacity_blocks))
                self._limit = _Limit(library)
                return {"version": store.version, "note": store.note, "leaves": list(store.leaves)}
            case ["put", blocks]:
                return self._put(int(blocks))
            case ["get"]:
                return self._get()
            case ["memcpy", ("put" | "get") as way, blocks]:
                return self._memcpy(way == "put", int(blocks))
            case ["plant", length, chains]:
                return self._plant(int(length), int(chains))
            case ["lookup", length, ("hit" | "half" | "miss") as kind]:
                return self._lookup(int(length), kind)
            case ["close"]:
                self.close()
                return {}
        raise ValueError(f"no such request: {line.strip()!r}")

    def close(self) -> None:
        """End the store if there is one."""
        store, self._store = self._store, None
        if store is not None:
            store.close()

    @property
    def _now(self) -> Store:
        if self._store is None:
            raise ValueError("open comes first")
        return self._store

    def _open(self, folder: Path, block_bytes: int, blocks: int, capacity_blocks: int) -> Store:
        if self._store is not None:
            raise ValueError("one store a process")
        store = self._store = self._opened(folder, block_bytes, blocks, capacity_blocks)
        store.blocks.fill(self._random)
        return store

    def _put(self, count: int) -> dict[str, Any]:
        store = self._now
        store.forget([key for key, _ in self._kept])
        places = self._random.sample(range(store.blocks.count), count)
        self._kept, self._witnesses, self._overwritten = [], {}, False
        seconds, batch = 0.0, max(1, BATCH_BYTES // store.blocks.block_bytes)
        for start in range(0, count, batch):
            part = places[start : start + batch]
            chain = self._chain(len(part))
            key = store.key_of(chain)
            seconds += store.put(key, part)
            self._kept.append((key, chain))
        for at in self._random.sample(range(count), min(_WITNESSES, count)):
            self._witnesses[divmod(at, batch)] = store.blocks.sum_of(places[at])
        return {"seconds": seconds}

    def _get(self) -> dict[str, Any]:
        store = self._now
        if not self._kept or self._overwritten:
            raise ValueError("put comes first")
        places = self._random.sample(range(store.blocks.count), sum(len(chain) for _, chain in self._kept))
        seconds, at, starts = 0.0, 0, []
        for key, chain in self._kept:
            seconds += store.get(key, places[at : at + len(chain)])
            starts.append(at)
            at += len(chain)
        wrong = sum(
            store.blocks.sum_of(places[starts[number] + block]) != expected
            for (number, block), expected in self._witnesses.items()
        )
        return {"seconds": seconds, "wrong": wrong}

    def _memcpy(self, outward: bool, count: int) -> dict[str, Any]:
        assert self._limit is not None
        blocks = self._now.blocks
        places = self._random.sample(range(blocks.count), count)
        self._overwritten |= outward
        return {"seconds": self._limit.copy(blocks, places, outward=outward)}

    def _plant(self, length: int, chains: int) -> dict[str, Any]:
        store = self._now
        for _ in range(chains):
            chain = self._chain(length)
            store.put(store.key_of(chain), range(length))
            self._planted.setdefault(length, []).append(chain)
        return {}

    def _lookup(self, length: int, kind: str) -> dict[str, Any]:
        chain = self._random.choice(self._planted[length])
        if kind == "half":
            chain = chain[: length // 2] + self._chain(length - length // 2)
        elif kind == "miss":
            chain = self._chain(length)
        seconds, found = self._now.lookup(self._now.key_of(chain))
        expected = {"hit": length, "half": length // 2, "miss": 0}[kind]
        if found != expected:
            raise RuntimeError(f"a lookup of {length} blocks ({kind}) found {found}, expected {expected}")
        return {"seconds": seconds, "blocks": found}

    def _chain(self, length: int) -> Chain:
        """A chain that nobody has used before."""
        return tuple(self._random.getrandbits(62) for _ in range(length))


def serve(opened: Opened) -> None:
    """Answer until stdin ends. What the store prints goes to stderr, so that stdout is the protocol's alone.

    Args:
        opened: (folder, block_bytes, blocks, capacity_blocks) → Store.
    """
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    service = Service(opened)
    try:
        for line in sys.stdin:
            try:
                reply = service.answer(line)
            except Exception as error:  # noqa: BLE001 what a foreign store raises is a line in the table
                reply = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(reply), file=replies, flush=True)
    finally:
        service.close()


def free_port(count: int = 1) -> int:
    """The first of `count` neighbouring TCP ports that are free on loopback now.

    Raises:
        RuntimeError: none found.
    """
    for _ in range(100):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
        if all(_is_free(port + more) for more in range(count)):
            return port
    raise RuntimeError("no free port on loopback")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        return port < 1 << 16 and probe.connect_ex(("127.0.0.1", port)) != 0


def start(command: Sequence[str], log: IO[bytes]) -> subprocess.Popen[bytes]:
    """A daemon of the store that ends when this process does."""
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=_end_with_us
    )


def _end_with_us() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def end(process: subprocess.Popen[bytes], seconds: float = 30.0) -> None:
    """Ask it to end, insist after so many seconds."""
    process.terminate()
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(seconds)


def wait_until(ready: Callable[[], bool], process: subprocess.Popen[bytes], seconds: float = 120.0) -> None:
    """Until a daemon answers.

    Raises:
        RuntimeError: it ended, or did not answer in time.
    """
    deadline = time.monotonic() + seconds
    while not ready():
        if process.poll() is not None:
            raise RuntimeError(f"{process.args!r} ended with status {process.returncode}")
        if time.monotonic() > deadline:
            raise RuntimeError(f"{process.args!r} did not answer within {seconds:.0f} s")
        time.sleep(0.05)
