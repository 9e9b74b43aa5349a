"""Our own store behind the protocol of bench/peers: the turns, memcpy and sums that the others have.

What differs is against us: blocks lie in paged memory (a block of 2 MiB is 32 runs of 64 KiB, not one), and a
get includes its lookup.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import numpy as np

from bench.limits import memory_of
from bench.paged import BenchDaemon, PagedMemory, client_of, layout_of
from bench.peers.serve import Blocks, Chain, Store, serve
from kvstore import _native
from kvstore.client import Client
from kvstore.keys import KeyChain
from kvstore.types import Hit, Miss, Reuse

__all__ = ["Ours"]

_COPY_S = 120.0


class _Paged(Blocks):
    """Our paged memory; memcpy's other end is the arena itself."""

    def __init__(self, memory: PagedMemory, client: Client) -> None:
        attachment = client._core.attachment
        assert attachment is not None
        assert attachment.arena is not None
        self._paged, self._arena = memory, memory_of(attachment.arena)
        self.block_bytes, self.count = memory.layout.block_bytes, memory.blocks
        self.address, self.other_address = memory.flat.ctypes.data, self._arena.ctypes.data
        self.view = memory.flat.data

    def fill(self, source: object) -> None:
        self._paged.fill(seed=1)

    def sum_of(self, block: int) -> int:
        return _native.crc32c(self._paged.block(block).tobytes())


class Ours(Store):
    """A fresh daemon and a client with one copy thread.

    Args:
        folder: for the socket and the log.
        block_bytes, blocks: the engine's memory.
        capacity_blocks: what it must hold.
    """

    def __init__(self, folder: Path, block_bytes: int, blocks: int, capacity_blocks: int) -> None:
        self.version = version("kvstored")
        self.note = "daemon and client, one copy thread, every cell checked; a get includes the lookup"
        memory = PagedMemory(layout_of(block_bytes), blocks)
        # A slot carries a table of sums and is a whole number of pages.
        capacity = (block_bytes + 4096) * capacity_blocks * 9 // 8 + (64 << 20)
        settings = {"host.capacity_bytes": capacity, "index.nodes_max": max(1 << 20, 4 * capacity_blocks)}
        self._daemon = BenchDaemon(folder, settings)
        try:
            self._client = client_of(self._daemon.socket, memory)
        except SystemExit as error:
            self._daemon.__exit__(None, None, None)
            raise RuntimeError(str(error)) from None
        self.blocks = _Paged(memory, self._client)

    def key_of(self, chain: Chain) -> KeyChain:
        """Hashed here, as an engine does once a request."""
        tokens = np.array(chain, np.uint64).view(np.uint32)
        chained = self._client.chain(np.repeat(tokens, 8), "default", Reuse.OWN)
        assert chained is not None
        return chained

    def put(self, key: KeyChain, places: Sequence[int]) -> float:
        """One save."""
        sources = np.array(places, np.uint32)
        begin = time.perf_counter()
        done = self._client.save(key, 0, len(key), sources).wait(_COPY_S)
        seconds = time.perf_counter() - begin
        if done is None or done.ready != len(key):
            raise RuntimeError(f"a save failed: {done}")
        return seconds

    def get(self, key: KeyChain, places: Sequence[int]) -> float:
        """One lookup, one load; the release is untimed."""
        targets = np.array(places, np.uint32)
        begin = time.perf_counter()
        hit = self._client.lookup(key)
        if not isinstance(hit, Hit) or hit.blocks != len(key):
            raise RuntimeError(f"a lookup of {len(key)} blocks found {hit}")
        done = self._client.load_slots(hit.slots, key.keys, targets).wait(_COPY_S)
        seconds = time.perf_counter() - begin
        self._client.release(hit.lease)
        if done is None or done.reason:
            raise RuntimeError(f"a load failed: {done}")
        return seconds

    def lookup(self, key: KeyChain) -> tuple[float, int]:
        """The match with its lease and all slots; the release is untimed."""
        begin = time.perf_counter()
        found = self._client.lookup(key)
        seconds = time.perf_counter() - begin
        if isinstance(found, Hit):
            self._client.release(found.lease)
            return seconds, found.blocks
        if isinstance(found, Miss):
            return seconds, 0
        raise RuntimeError(f"a lookup of {len(key)} blocks: {found}")

    def close(self) -> None:
        """The client, then the daemon."""
        self._client.close()
        self._daemon.__exit__(None, None, None)


if __name__ == "__main__":
    serve(Ours)
