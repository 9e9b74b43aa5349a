"""Saves and fetches through the daemon, as an engine with a few requests under way would make them.

A chain is one prompt's KV. A turn of saves is a set of new chains, REQUESTS of them at a time, a piece of
each in turn (as prefill steps finish them), never more than the disk's queue takes: an engine's saves beyond
that would stay on HOST. It ends with the flush that makes all of it durable. A turn of fetches is the same
set, REQUESTS leases at a time: lookup, load into paged memory with every sum checked, release. The daemon's
own counters must say that every block of a turn was written to, or read from, the disk.

Chains are of different lengths, as prompts are: with equal ones all requests would end at the same moment,
and the disk would have nothing to do until all of them had asked again.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bench.nvme_pace import Pace
from bench.nvme_place import DiskDaemon
from bench.paged import PagedMemory
from kvstore import _native
from kvstore.client import Client
from kvstore.client.threads import Save
from kvstore.keys import KeyChain
from kvstore.types import Hit, Reuse, Span, Tier

__all__ = ["REQUESTS", "WRITE_QUEUE_BYTES", "Moves", "Saved"]

REQUESTS = 4
"""Chains under way at once."""
PIECE_BYTES = 16 << 20
"""Of a chain in one save."""
WRITE_QUEUE_BYTES = 256 << 20
"""`nvme.write_queue_bytes`, its default; HOST gives a quarter of itself at most."""
_SAVES = 2  # one is copied while the other one's answer is on its way
_WAIT_S = 300.0
_STAMP_BYTES = 8
U32 = NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Saved:
    """A chain and where in paged memory it was saved from.

    Attributes:
        number: in its stamps; nobody else has it.
        chain: its keys.
        start: block of the memory.
    """

    number: int
    chain: KeyChain
    start: int

    @property
    def source(self) -> U32:
        """Blocks of the memory that it was saved from."""
        return np.arange(self.start, self.start + len(self.chain), dtype=np.uint32)


class Moves:
    """One client of one daemon.

    Args:
        daemon: with an NVME tier.
        client: attached, with `memory`.
        memory: REQUESTS times the longest chain.
        lengths: of chains, in blocks, in turn: REQUESTS of them.
        host_bytes: `host.capacity_bytes`.
        first_number: of the first chain.
    """

    def __init__(
        self,
        daemon: DiskDaemon,
        client: Client,
        memory: PagedMemory,
        lengths: Sequence[int],
        host_bytes: int,
        first_number: int = 1,
    ) -> None:
        self._daemon, self._client, self._memory = daemon, client, memory
        self._lengths, self._region_blocks = lengths, memory.blocks // REQUESTS
        if len(lengths) != REQUESTS or max(lengths) > self._region_blocks:
            raise ValueError(
                f"lengths: need {REQUESTS} of at most {self._region_blocks} blocks, got {lengths}"
            )
        self._slot_bytes = memory.layout.slot_bytes
        room_bytes = min(WRITE_QUEUE_BYTES, host_bytes // 4)
        self._pace = Pace(lambda: int(daemon.nvme()["queued_bytes"]), room_bytes)
        self._flying: deque[tuple[Save, int]] = deque()
        self._random = np.random.default_rng(first_number)
        self._number = first_number
        self._ready: list[Saved] = []
        self.saved: list[Saved] = []
        """The set of the last save, oldest first."""

    # ---- saves ---------------------------------------------------------------------------------------------

    def prepare(self, chains: int) -> None:
        """Make keys that nobody has used before, and bytes to save."""
        self._memory.fill(seed=1)
        self._ready = [self._fresh() for _ in range(chains)]

    def _fresh(self) -> Saved:
        number, self._number = self._number, self._number + 1
        region = number % REQUESTS
        tokens = self._random.integers(0, 1 << 31, 16 * self._lengths[region], np.uint32)
        chain = self._client.chain(tokens, "default", Reuse.OWN)
        if chain is None:
            raise SystemExit("the daemon is gone")
        return Saved(number, chain, region * self._region_blocks)

    def save(self) -> float:
        """Save what was prepared, until all of it is durable; the seconds.

        Raises:
            SystemExit: a block was not saved, not let in, or not written.
        """
        chains, blocks = self._ready, _blocks(self._ready)
        before, refused = self._daemon.nvme(), self._daemon.flush().refused
        began = time.perf_counter()
        for first in range(0, len(chains), REQUESTS):
            self._save_together(chains[first : first + REQUESTS])
        flushed = self._daemon.flush()
        seconds = time.perf_counter() - began
        after = self._daemon.nvme()
        if flushed.refused > refused:
            raise SystemExit(f"{flushed.refused - refused} of {blocks} blocks were not let in")
        _compare("written", after["written"] - before["written"], blocks)
        self.saved, self._ready = chains, []
        return seconds

    def _save_together(self, chains: Sequence[Saved]) -> None:
        """A piece of each in turn."""
        for saved in chains:
            self._stamp(saved)
        count = max(1, PIECE_BYTES // self._memory.layout.block_bytes)
        for start in range(0, max(self._lengths), count):
            for saved in chains:
                blocks = saved.source[start : start + count]
                if not len(blocks):
                    continue
                size = len(blocks) * self._slot_bytes
                self._pace.begin(size)
                save = self._client.save(saved.chain, start, start + len(blocks), blocks)
                self._flying.append((save, size))
                if len(self._flying) == _SAVES:
                    self._end_save()
        while self._flying:
            self._end_save()

    def _end_save(self) -> None:
        save, size = self._flying.popleft()
        done = save.wait(_WAIT_S)
        if done is None or done.ready * self._slot_bytes != size:
            raise SystemExit(f"a save failed: {done}")
        self._pace.end(size)

    # ---- fetches -------------------------------------------------------------------------------------------

    def shuffle(self) -> None:
        """Another order, in which no chain comes soon after itself: what HOST holds is never what is next."""
        half = len(self.saved) // 2
        for part in (self.saved[:half], self.saved[half:]):
            self._ready += [part[at] for at in self._random.permutation(len(part))]

    def fetch(self) -> float:
        """Load the whole set in the order that `shuffle` made; the seconds.

        Raises:
            SystemExit: a block was not found on NVME, or not loaded, or not read from the disk.
        """
        todo, self._ready = deque(self._ready), []
        before, blocks = self._daemon.nvme(), _blocks(todo)
        places = [self._random.permutation(self._region(number)) for number in range(REQUESTS)]
        began = time.perf_counter()
        with ThreadPoolExecutor(REQUESTS) as pool:
            workers = [pool.submit(self._fetch_some, todo, place) for place in places]
            for worker in workers:
                worker.result()
        seconds = time.perf_counter() - began
        after = self._daemon.nvme()
        _compare("read", after["read"] - before["read"], blocks)
        return seconds

    def _fetch_some(self, todo: deque[Saved], place: U32) -> None:
        while todo:
            try:
                saved = todo.popleft()
            except IndexError:  # another worker was faster
                return
            self.fetch_one(saved, place)

    def fetch_one(self, saved: Saved, place: U32) -> None:
        """All of a chain, from the disk, into these blocks.

        Raises:
            SystemExit: that is not what happened.
        """
        count = len(saved.chain)
        hit = self._client.lookup(saved.chain)
        if not isinstance(hit, Hit) or hit.plan.spans != (Span(Tier.NVME, 0, count),):
            raise SystemExit(f"chain {saved.number} is not on NVME alone: {hit}")
        done = self._client.load(hit, place[:count]).wait(_WAIT_S)
        if done is None or done.good != count:
            raise SystemExit(f"chain {saved.number} was not loaded: {done}")
        self._client.release(hit.lease)

    # ---- bytes ---------------------------------------------------------------------------------------------

    def wrong_blocks(self, chains: Sequence[Saved]) -> int:
        """Load these chains once more; how many blocks have not the very bytes they were saved with."""
        self._memory.fill(seed=1)
        everything = np.arange(self._memory.blocks, dtype=np.uint32)
        self._stamps(everything)[:] = 0
        sums = [_native.crc32c(self._memory.block(block).tobytes()) for block in everything.tolist()]
        wrong = 0
        for saved in chains:
            place = self._region(0)[: len(saved.chain)]
            self.fetch_one(saved, place)
            wrong += int((self._stamps(place) != self._stamp_of(saved)).any(axis=1).sum())
            self._stamps(place)[:] = 0
            wrong += sum(
                _native.crc32c(self._memory.block(block).tobytes()) != sums[source]
                for source, block in zip(saved.source.tolist(), place.tolist(), strict=True)
            )
        return wrong

    def _region(self, number: int) -> U32:
        return np.arange(number * self._region_blocks, (number + 1) * self._region_blocks, dtype=np.uint32)

    def _stamp(self, saved: Saved) -> None:
        self._stamps(saved.source)[:] = self._stamp_of(saved)

    def _stamps(self, blocks: U32) -> NDArray[np.uint8]:
        """(n, 8) view: the first bytes of each of these consecutive blocks."""
        start, stop = int(blocks[0]), int(blocks[-1]) + 1
        return self._memory.cells[0, start:stop, 0, 0, :_STAMP_BYTES]

    def _stamp_of(self, saved: Saved) -> NDArray[np.uint8]:
        """(n, 8) bytes that no other block of any chain begins with."""
        numbers = (np.uint64(saved.number) << np.uint64(32)) + np.arange(len(saved.chain), dtype=np.uint64)
        return numbers.view(np.uint8).reshape(-1, _STAMP_BYTES)


def _blocks(chains: Iterable[Saved]) -> int:
    return sum(len(saved.chain) for saved in chains)


def _compare(what: str, counted: int, blocks: int) -> None:
    if counted != blocks:
        raise SystemExit(f"the daemon has {what} {counted} blocks, not {blocks}")
