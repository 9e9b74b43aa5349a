"""LMCache: `lmcache server` in multiprocess mode, its L1 in shared memory, engine-driven transfers.

Of the ways in, this is the fastest one without a GPU: `EngineDrivenContext.prepare_… / commit_…` hands out
the server's slots and the engine copies by itself, here by memcpy. `submit_store / submit_retrieve` gather
and scatter by torch operations, several times slower on a CPU; lmcache-driven transfers are slower still.
"""

from __future__ import annotations

import ctypes
import os
import random
import socket
import struct
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench.peers.serve import Blocks, Chain, Store, end, free_port, serve, start, wait_until

__all__ = ["LMCache"]

CHUNK_TOKENS = 16  # one block of ours; the default of 256 would only make lookups hash 16 times as much
INSTANCE_ID = 1000
MODEL = "bench"
_CALL_S = 120.0
_QUIET = {"LMCACHE_LOG_LEVEL": "WARNING", "LMCACHE_TRACK_USAGE": "false"}


class LMCache(Store):
    """A fresh server. Its L1 is a third larger than asked, so that its evictor (at 80 %) never runs.

    Args:
        folder: for its log.
        block_bytes, blocks: the engine's memory.
        capacity_blocks: what it must hold.
    """

    def __init__(self, folder: Path, block_bytes: int, blocks: int, capacity_blocks: int) -> None:
        import torch
        import zmq
        from lmcache.v1.multiprocess.transfer_context import create_transfer_context
        from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

        self.version = version("lmcache")
        self.blocks = Blocks(block_bytes, blocks)
        gib = max(0.25, block_bytes * capacity_blocks * 4 / 3 / (1 << 30))
        self.note = (
            f"lmcache server, L1 of {gib:.2f} GiB in shared memory, engine-driven prepare/commit around "
            f"memcpy, chunks of {CHUNK_TOKENS} tokens; cleared before a steady put; lookups hash the tokens"
        )
        port = free_port()
        self._pool = Path(f"/dev/shm/lmcache_l1_pool_bench_{os.getpid()}")
        self.leaves = (str(self._pool),)
        with (folder / "lmcache-server.log").open("ab") as log:
            self._server = start(_command(port, gib, f"bench_{os.getpid()}"), log)
        wait_until(lambda: _answers(port), self._server)
        self._requests = 0
        self._zmq = zmq.Context()
        self._client = RequestClientFactory.create(f"tcp://127.0.0.1:{port}", context=self._zmq)
        if self._client.get_chunk_size().result(timeout=_CALL_S) != CHUNK_TOKENS:
            raise RuntimeError(f"the server does not use chunks of {CHUNK_TOKENS} tokens")
        # One layer with one plane: every block is one run of bytes, the easiest case for its layout code.
        rows = torch.frombuffer(self.blocks.view, dtype=torch.bfloat16).view(blocks, CHUNK_TOKENS, -1)
        self._transfer = create_transfer_context(
            {"layer": rows}, instance_id=INSTANCE_ID, req_client=self._client, mode="engine_driven"
        )
        self._transfer.register({"layer": rows}, MODEL, 1, 1, _CALL_S)
        self._context = self._transfer.engine_driven_context
        if type(self._context).__name__ != "EngineDrivenContextShm":
            raise RuntimeError(f"no shared memory: {type(self._context).__name__}")

    def key_of(self, chain: Chain) -> tuple[int, ...]:
        """It is asked with tokens: sixteen a block."""
        return tuple(
            token for number in chain for token in struct.unpack("<16H", random.Random(number).randbytes(32))
        )

    def put(self, key: tuple[int, ...], places: Sequence[int]) -> float:
        """prepare_store, memcpy into the slots, commit_store."""
        named, size, base = self._named(key, 0), self.blocks.block_bytes, self.blocks.address
        begin = time.perf_counter()
        slots, indices = self._context.prepare_store(named, INSTANCE_ID) or ([], [])
        for slot, index in zip(slots, indices, strict=True):
            ctypes.memmove(slot.data_ptr(), base + places[index] * size, size)
        done = self._context.commit_store(named, INSTANCE_ID, slots)
        seconds = time.perf_counter() - begin
        self._client.end_session(named.request_id).result(timeout=_CALL_S)
        if not done or len(slots) != len(places):
            raise RuntimeError(f"stored {len(slots)} of {len(places)} blocks, commit_store: {done}")
        return seconds

    def get(self, key: tuple[int, ...], places: Sequence[int]) -> float:
        """prepare_retrieve, memcpy out of the slots, commit_retrieve; the lookup before it is untimed."""
        named, size, base = self._named(key, 0), self.blocks.block_bytes, self.blocks.address
        self._ask(self._named(key, None, named.request_id))
        begin = time.perf_counter()
        slots = self._context.prepare_retrieve(named, INSTANCE_ID) or []
        for slot, place in zip(slots, places, strict=False):
            ctypes.memmove(base + place * size, slot.data_ptr(), size)
        done = self._context.commit_retrieve(named, INSTANCE_ID)
        seconds = time.perf_counter() - begin
        self._client.end_session(named.request_id).result(timeout=_CALL_S)
        if not done or len(slots) != len(places):
            raise RuntimeError(f"retrieved {len(slots)} of {len(places)} blocks, commit_retrieve: {done}")
        return seconds

    def lookup(self, key: tuple[int, ...]) -> tuple[float, int]:
        """lookup and query_prefetch_status until it answers, without pauses; locks are freed untimed."""
        named = self._named(key, None)
        begin = time.perf_counter()
        found = self._ask(named)
        seconds = time.perf_counter() - begin
        if found:
            held = self._named(key, None, named.request_id, found * CHUNK_TOKENS)
            self._client.free_lookup_locks(held, 1).result(timeout=_CALL_S)
        self._client.end_session(named.request_id).result(timeout=_CALL_S)
        return seconds, found

    def forget(self, keys: Sequence[Any]) -> None:
        """Its evictor, a thread that acts at 80 %, may take what is just being stored: clear instead."""
        if keys:
            self._client.clear().result(timeout=_CALL_S)

    def close(self) -> None:
        """Leave the server, end it."""
        self._transfer.unregister().result(timeout=_CALL_S)
        self._transfer.close()
        self._client.close()
        self._zmq.destroy(0)
        end(self._server)
        self._pool.unlink(missing_ok=True)

    def _ask(self, named: Any) -> int:
        self._client.lookup(named, 1).result(timeout=_CALL_S)
        deadline = time.monotonic() + _CALL_S
        while time.monotonic() < deadline:
            found = self._client.query_prefetch_status(named.request_id).result(timeout=_CALL_S)
            if found is not None:
                return int(found)
        raise RuntimeError(f"no answer to a lookup within {_CALL_S:.0f} s")

    def _named(
        self, tokens: tuple[int, ...], worker: int | None, request: str = "", stop: int | None = None
    ) -> Any:
        from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey

        self._requests += 1
        return IPCCacheServerKey(
            model_name=MODEL,
            world_size=1,
            num_kv_readers=1,
            worker_id=worker,
            token_ids=tokens,
            start=0,
            end=len(tokens) if stop is None else stop,
            request_id=request or f"request-{self._requests}",
        )


def _command(port: int, gib: float, pool: str) -> list[str]:
    flags = {
        "--host": "127.0.0.1",
        "--port": port,
        "--http-host": "127.0.0.1",
        "--http-port": free_port(),
        "--chunk-size": CHUNK_TOKENS,
        "--l1-size-gb": f"{gib:.3f}",
        "--shm-name": pool,
        "--supported-transfer-mode": "engine_driven",
        "--eviction-policy": "LRU",
    }
    words = [str(word) for pair in flags.items() for word in pair]
    binary = str(Path(sys.executable).parent / "lmcache")
    return [binary, "server", *words, "--no-l1-use-lazy", "--disable-observability"]


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


if __name__ == "__main__":
    os.environ.update(_QUIET)
    serve(LMCache)
