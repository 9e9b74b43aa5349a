"""How soon after it begins to open a directory of 100,000 blocks has a daemon its first hit from there?

Blocks are 64 KiB of KV: one layer with 8 heads of 128 in bfloat16. With its sums such a block is a slot of 68
KiB, with its header 72 KiB on the disk. They are saved and flushed; then, again and again:

    1. some more chains are saved and flushed: a segment is open and has no footer
    2. kill -9, the kernel's caches are dropped
    3. a daemon is started on an empty directory: from now on the program's own files are in the cache, since
       reading them from a cold disk varies by more than what is measured
    4. a daemon is started and asked for a chain, until the first 16 blocks of it are loaded and verified
    5. the same with an empty directory, until the answer (there is nothing)

`reopen_s_100k_blocks` is the end of step 4 after the moment at which the daemon began to open the directory
(by its log): reading footers, scanning what has none, the index, the rest of the start, attach with its
proof, lookup, fetch, copy; `opened_s` is the first part of it, by the same log. `restart_to_first_hit_s` is
all of step 4, from the start of the process, `restart_empty_s` step 5, `reopen_over_empty_s` the difference
within a turn, `cold_start_s` step 3; medians all. Afterwards every chain is looked up: all that was flushed
must be there.
"""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from bench.nvme_moves import REQUESTS, Moves, Saved
from bench.nvme_place import DiskDaemon, client_for, drop_caches
from bench.paged import PagedMemory, layout_of
from kvstore.client import Client
from kvstore.types import BlockLayout, Hit, Miss

__all__ = ["REOPEN_BLOCKS", "need_bytes", "opening_s", "reopen"]

REOPEN_BLOCKS = 100_000
BLOCK_BYTES = 64 << 10
CHAIN_BLOCKS = 500
_LENGTHS = (CHAIN_BLOCKS,) * REQUESTS
SEGMENT_BYTES = 128 << 20
MORE_CHAINS = 2
"""Saved before every kill: 70 MiB, half of a segment."""
_FIRST_BLOCKS = 16
_SAMPLE_CHAINS = 20
_SAVING_HOST_BYTES, _HOST_BYTES = 1 << 30, 256 << 20


@dataclass(frozen=True, slots=True)
class Restart:
    """One start of a daemon.

    Attributes:
        seconds: from the start of the process to the first answer.
        opening_s: the same from the moment at which it began to open the directory.
        opened: what its log says of the directory.
    """

    seconds: float
    opening_s: float
    opened: dict[str, Any]


def _median(values: Iterable[float]) -> float:
    return round(statistics.median(values), 3)


def opening_s(opened: dict[str, Any], until_s: float) -> float:
    """From the beginning of an opening, by the log line of its end, to a moment (`time.time()`)."""
    ended_s = datetime.fromisoformat(opened["timestamp"]).timestamp()
    return until_s - ended_s + float(opened["seconds"])


def need_bytes(blocks: int, turns: int) -> int:
    """Capacity that holds everything, and the segments that kills leave half empty."""
    return (
        _on_disk(blocks)
        + (turns + 2) * (_on_disk(MORE_CHAINS * CHAIN_BLOCKS) + 2 * SEGMENT_BYTES)
        + (1 << 30)
    )


def _on_disk(blocks: int) -> int:
    return blocks * (layout_of(BLOCK_BYTES).slot_bytes + 4096)


class Reopening:
    """A directory with blocks, and daemons that come and go on it.

    Args:
        home: for sockets and logs.
        disk: a folder for the directories.
        blocks: how many.
        turns: that count.
    """

    def __init__(self, home: Path, disk: Path, blocks: int, turns: int) -> None:
        self._home, self._full, self._empty = home, disk / "full", disk / "empty"
        self._chains, self._turns = blocks // CHAIN_BLOCKS, turns
        self._layout: BlockLayout = layout_of(BLOCK_BYTES)
        self._memory = PagedMemory(self._layout, REQUESTS * CHAIN_BLOCKS)
        self._capacity_bytes = need_bytes(blocks, turns)
        self._saved: list[Saved] = []
        self._caches = ""

    def _settings(self, host_bytes: int) -> dict[str, object]:
        return {
            "host.capacity_bytes": host_bytes,
            "nvme.capacity_bytes": self._capacity_bytes,
            "nvme.segment_bytes": SEGMENT_BYTES,
        }

    def run(self) -> dict[str, Any]:
        """Everything; figures."""
        with DiskDaemon(self._home, self._full, self._settings(_SAVING_HOST_BYTES)) as daemon:
            with client_for(daemon, self._memory) as client:
                self._save(daemon, client, self._chains, _SAVING_HOST_BYTES)
                self._save(daemon, client, MORE_CHAINS, _SAVING_HOST_BYTES)
            daemon.kill()
        cold, pairs = [], []
        for _ in range(self._turns):
            self._caches = drop_caches(self._full.parent)
            cold.append(self._restart(self._empty))
            pairs.append((self._restart(self._full), self._restart(self._empty)))
        return {
            "reopen_s_100k_blocks": _median(full.opening_s for full, _ in pairs),
            "opened_s": _median(full.opened["seconds"] for full, _ in pairs),
            "reopen_over_empty_s": _median(full.seconds - empty.seconds for full, empty in pairs),
            "restart_to_first_hit_s": _median(full.seconds for full, _ in pairs),
            "restart_empty_s": _median(empty.seconds for _, empty in pairs),
            "cold_start_s": _median(start.seconds for start in cold),
            "reopen": {
                "seconds": [round(full.opening_s, 3) for full, _ in pairs],
                "opened": [full.opened for full, _ in pairs],
                "block_bytes": self._layout.block_bytes,
                "record_bytes": _on_disk(1),
                "caches": self._caches,
                "turns": self._turns,
                **self._count(),
            },
        }

    def _save(self, daemon: DiskDaemon, client: Client, chains: int, host_bytes: int) -> None:
        """Some more chains, durable."""
        moves = Moves(daemon, client, self._memory, _LENGTHS, host_bytes, 1 + len(self._saved))
        moves.prepare(chains)
        moves.save()
        self._saved += moves.saved

    def _restart(self, directory: Path) -> Restart:
        """Start a daemon there and ask; then save some more if it had something, and kill it."""
        full = directory == self._full
        asked = self._saved[len(self._saved) // 2]
        began = time.perf_counter()
        with DiskDaemon(self._home, directory, self._settings(_HOST_BYTES)) as daemon:
            with client_for(daemon, self._memory) as client:
                answer = client.lookup(asked.chain, _FIRST_BLOCKS)
                if full:
                    self._load(client, answer)
                elif not isinstance(answer, Miss):
                    raise SystemExit(f"an empty directory has answered {answer}")
                seconds, now_s = time.perf_counter() - began, time.time()
                opened = daemon.said("disk opened")
                restart = Restart(seconds, opening_s(opened, now_s), opened)
                if full:
                    self._save(daemon, client, MORE_CHAINS, _HOST_BYTES)
                    if not daemon.nvme()["filling"]:
                        raise SystemExit("no segment is open: a kill now would prove nothing")
            daemon.kill()
        if full and not restart.opened["unsealed"]:
            raise SystemExit("the daemon found no unsealed segment")
        if not full:
            shutil.rmtree(directory)
        return restart

    def _load(self, client: Client, answer: object) -> None:
        if not isinstance(answer, Hit) or answer.blocks != _FIRST_BLOCKS:
            raise SystemExit(f"not found after the restart: {answer}")
        done = client.load(answer, np.arange(_FIRST_BLOCKS, dtype=np.uint32)).wait()
        if done is None or done.good != _FIRST_BLOCKS:
            raise SystemExit(f"not loaded after the restart: {done}")
        client.release(answer.lease)

    def _count(self) -> dict[str, int]:
        """Every chain is looked up, some are loaded; blocks found, and of those loaded the wrong ones.

        Raises:
            SystemExit: one is missing.
        """
        with (
            DiskDaemon(self._home, self._full, self._settings(_HOST_BYTES)) as daemon,
            client_for(daemon, self._memory) as client,
        ):
            found = 0
            for saved in self._saved:
                hit = client.lookup(saved.chain)
                if isinstance(hit, Hit):
                    found += hit.blocks
                    client.release(hit.lease)
            moves = Moves(daemon, client, self._memory, _LENGTHS, _HOST_BYTES)
            step = max(1, len(self._saved) // _SAMPLE_CHAINS)
            wrong = moves.wrong_blocks(self._saved[::step])
        saved_blocks = len(self._saved) * CHAIN_BLOCKS
        if found != saved_blocks:
            raise SystemExit(f"{found} of {saved_blocks} flushed blocks were found after the last restart")
        return {"blocks_saved": saved_blocks, "blocks_found": found, "wrong_blocks": wrong}


def reopen(home: Path, disk: Path, blocks: int, turns: int) -> dict[str, Any]:
    """Figures of `turns` restarts over that many blocks. See the top of this file."""
    return Reopening(home, disk, blocks, turns).run()
