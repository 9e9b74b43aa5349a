"""A store of the benchmark's protocol that is a dict, with faults by name in PEER_FAULT. Run as a process."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from bench.peers.serve import Blocks, Chain, Store, serve

__all__ = ["DictStore"]


class DictStore(Store):
    """Blocks by number."""

    version = "1.0"
    note = "a dict"

    def __init__(self, folder: Path, block_bytes: int, blocks: int, capacity_blocks: int) -> None:
        self.blocks = Blocks(block_bytes, blocks)
        self._kept: dict[int, bytes] = {}
        self._fault = os.environ.get("PEER_FAULT", "")
        left = folder / "left-by-dict-store"
        left.touch()
        self.leaves = (f"{folder}/left-by-*",)

    def key_of(self, chain: Chain) -> Chain:
        return chain

    def put(self, key: Chain, places: Sequence[int]) -> float:
        if self._fault == "refuse":
            raise RuntimeError("the store is full")
        if self._fault == "die":
            print("last words", flush=True)
            os._exit(7)
        if self._fault == "hang":
            signal.pause()
        begin = time.perf_counter()
        size = self.blocks.block_bytes
        for name, place in zip(key, places, strict=True):
            self._kept[name] = bytes(self.blocks.view[place * size : (place + 1) * size])
        return time.perf_counter() - begin

    def get(self, key: Chain, places: Sequence[int]) -> float:
        begin = time.perf_counter()
        size = self.blocks.block_bytes
        for name, place in zip(key, places, strict=True):
            self.blocks.view[place * size : (place + 1) * size] = self._kept[name]
            if self._fault == "flip":
                self.blocks.view[place * size + size // 2] ^= 1
        return time.perf_counter() - begin

    def lookup(self, key: Chain) -> tuple[float, int]:
        begin = time.perf_counter()
        found = next((i for i, name in enumerate(key) if name not in self._kept), len(key))
        return time.perf_counter() - begin, found

    def close(self) -> None:
        self._kept.clear()


if __name__ == "__main__":
    serve(DictStore)
