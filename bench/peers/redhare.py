"""redhare: its store lives in the engine's process, its metadata in a Redis of its own on loopback.

Transport "inmemory": nothing here is read by another node. With "tcp" it keeps evicted slots back for remote
readers and then has no room for the next put; "nixl" needs a NIXL runtime and a local get does not use it.
"""

from __future__ import annotations

import random
import shutil
import socket
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from bench.peers.serve import Blocks, Chain, Store, end, free_port, serve, start, wait_until

__all__ = ["Redhare"]

# Its own connector's keys are a name, group and rank around a 16-byte hash in hex.
_KEY_PREFIX = "bench@g0@r0@"
# A block that it refuses to exchange for an older one is offered again, within the time measured.
OFFERS_MAX = 4


class Redhare(Store):
    """A fresh Redis and a fresh store with room for an eighth more than asked; it evicts by itself.

    Args:
        folder: for Redis' files.
        block_bytes, blocks: the engine's memory.
        capacity_blocks: what it must hold.

    Raises:
        RuntimeError: no redis-server.
    """

    def __init__(self, folder: Path, block_bytes: int, blocks: int, capacity_blocks: int) -> None:
        from redhare import KvStore

        self.version = version("redhare")
        redis = shutil.which("redis-server")
        if redis is None:
            raise RuntimeError("redis-server is not installed: apt-get install redis-server")
        self.blocks = Blocks(block_bytes, blocks)
        capacity_bytes = block_bytes * capacity_blocks * 9 // 8
        self.note = (
            f"in process, transport inmemory, {capacity_bytes >> 20} MiB, one batch_… call per 256 MiB"
        )
        port = free_port()
        settings = ("--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", str(folder))
        with (folder / "redis.log").open("ab") as log:
            self._redis = start([redis, "--port", str(port), *settings], log)
        wait_until(lambda: _answers(port), self._redis)
        self._store = KvStore(
            redis_url=f"redis://127.0.0.1:{port}",
            client_id="rank0",
            data_plane_addr=f"127.0.0.1:{free_port()}",
            capacity=capacity_bytes,
            transport="inmemory",
        )
        self._store.register_buffer(self.blocks.address, block_bytes * blocks)
        self._store.set_block_size_bytes(block_bytes)

    def key_of(self, chain: Chain) -> list[str]:
        """A string a block."""
        return [_KEY_PREFIX + random.Random(number).randbytes(16).hex() for number in chain]

    def put(self, key: list[str], places: Sequence[int]) -> float:
        """One batch_put_from_multi_buffers, and one more for the few that its admission filter refused."""
        addresses, sizes = self._lists(places)
        begin = time.perf_counter()
        for _ in range(OFFERS_MAX):
            done = self._store.batch_put_from_multi_buffers(key, addresses, sizes)
            refused = [i for i, one in enumerate(done) if one < 0]
            if not refused:
                break
            key = [key[i] for i in refused]
            addresses, sizes = [addresses[i] for i in refused], [sizes[i] for i in refused]
        seconds = time.perf_counter() - begin
        _all_done("batch_put_from_multi_buffers", done)
        return seconds

    def get(self, key: list[str], places: Sequence[int]) -> float:
        """One batch_get_into_multi_buffers."""
        addresses, sizes = self._lists(places)
        begin = time.perf_counter()
        done = self._store.batch_get_into_multi_buffers(key, addresses, sizes)
        seconds = time.perf_counter() - begin
        _all_done("batch_get_into_multi_buffers", done)
        return seconds

    def lookup(self, key: list[str]) -> tuple[float, int]:
        """One batch_is_exist of all keys, as its connector does; the prefix is counted untimed."""
        begin = time.perf_counter()
        exists = self._store.batch_is_exist(key)
        seconds = time.perf_counter() - begin
        return seconds, next((i for i, one in enumerate(exists) if one != 1), len(exists))

    def close(self) -> None:
        """The store, then its Redis."""
        self._store.close()
        end(self._redis)

    def _lists(self, places: Sequence[int]) -> tuple[list[list[int]], list[list[int]]]:
        size = self.blocks.block_bytes
        return [[self.blocks.address + place * size] for place in places], [[size]] * len(places)


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _all_done(call: str, done: list[int]) -> None:
    failed = sum(one < 0 for one in done)
    if failed:
        raise RuntimeError(f"{call} failed for {failed} of {len(done)} blocks")


if __name__ == "__main__":
    serve(Redhare)
