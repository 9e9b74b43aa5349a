"""How close to the memory bus is the local path, and how close to a bare socket is a lookup?

A client loads from and saves to a daemon in another process, every cell checked, random slots, one copy
thread. The limit is memcpy (the better of the C library's and numpy's) between the very same pages, one
thread too, both sides prefaulted, over a working set of four times the last-level cache. The very first save
of a fresh process is held against the very first memcpy of another that was made alike. A lookup (with its
lease and all slots) is held against an echo of all the chain's keys by a bare asyncio server on the same kind
of socket, at a daemon that holds a million nodes in random order.

A ratio `…_over_memcpy_…` is speed (1.25 = a quarter faster than memcpy), `…_over_echo` is time.
"""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.limits import LibcCopy, memory_of, numpy_copy
from bench.local_children import first_saves, probe
from bench.local_lookup import lookups
from bench.local_peers import arguments, compare
from bench.machine import huge_bytes
from bench.measure import CONTROL_BOUND, Arm, Measured, finish, measure, parser, working_set_bytes
from bench.paged import BenchDaemon, PagedMemory, client_of, layout_of
from kvstore import _native
from kvstore.client import Client
from kvstore.keys import KeyChain
from kvstore.types import Hit, Reuse

__all__ = ["Copies", "main"]

MIB = 1 << 20
SIZES = {"2m": 2 * MIB, "256k": 256 << 10, "64k": 64 << 10}
BATCH_BYTES = 256 * MIB
# The first save of a client must be quick too: it is what its users see first. 1 GiB is a prompt of 8,192
# tokens in blocks of 2 MiB; in smaller ones the first answers of an idle daemon (20 ms here) weigh more.
FIRST_CLIENTS = 5
FIRST_BYTES = {"": 1024 * MIB, "_512m": 512 * MIB, "_256m": 256 * MIB}
_SAMPLES = 32
U32 = NDArray[np.uint32]


class Copies:
    """One block size: a client with paged memory of the whole working set, and one chain that fills it.

    Args:
        client: attached, with `memory`.
        folder: for the compiled limit.
    """

    def __init__(self, client: Client, memory: PagedMemory, folder: Path) -> None:
        self.client, self.memory = client, memory
        self.block_bytes = memory.layout.block_bytes
        self.libc = LibcCopy(folder)
        attachment = client._core.attachment
        assert attachment is not None
        assert attachment.arena is not None
        self.arena = memory_of(attachment.arena)
        self.random = np.random.default_rng(1)
        self.turn = 0
        self._blocks = np.arange(memory.blocks, dtype=np.uint32)

    # ---- loads -------------------------------------------------------------------------------------------

    def save_all(self) -> tuple[KeyChain, Hit]:
        """Every block of the memory as one chain, leased."""
        chain = self.chain(self.memory.blocks)
        saved = self.client.save(chain, 0, len(chain), self._blocks).wait(300)
        hit = self.client.lookup(chain)
        if saved is None or not isinstance(hit, Hit) or hit.blocks < len(chain):
            raise SystemExit(f"could not save {len(chain)} blocks: {saved}, then {hit}")
        return chain, hit

    def loads(self, chain: KeyChain, hit: Hit, turns: int) -> Measured:
        """All blocks, in a new random order every turn, to random places."""
        slots, keys, targets = hit.slots, chain.keys, self._blocks
        offsets = slots.astype(np.uint64) * _native.PAGE_BYTES
        flat, size = self.memory.flat, self.block_bytes
        batch = max(1, BATCH_BYTES // size)

        def shuffle() -> None:
            nonlocal slots, keys, offsets, targets
            order = self.random.permutation(len(chain))
            slots, keys, targets = hit.slots[order], chain.keys[order], self._shuffled()
            offsets = slots.astype(np.uint64) * _native.PAGE_BYTES

        def ours() -> None:
            for start in range(0, len(slots), batch):
                part = slice(start, start + batch)
                done = self.client.load_slots(slots[part], keys[part], targets[part]).wait(120)
                if done is None or done.reason:
                    raise SystemExit(f"a load failed: {done}")

        def by_libc() -> None:
            self.libc.load(flat, targets, self.arena, offsets, size)

        def by_numpy() -> None:
            numpy_copy(flat, targets.astype(np.uint64) * size, self.arena, offsets, size)

        limits = [
            Arm("memcpy", by_libc, shuffle, settle=True),
            Arm("numpy", by_numpy, shuffle, settle=True),
        ]
        return measure(limits, [Arm("load", ours, shuffle, settle=True)], turns=turns)

    def verify(self, chain: KeyChain, hit: Hit, sums: dict[int, int]) -> int:
        """Load a sample of blocks once more; how many have not the bytes they were saved with."""
        sample = np.array(sorted(sums), np.uint32)
        self.client.load_slots(hit.slots[sample], chain.keys[sample], sample).wait(60)
        return sum(_native.crc32c(self.memory.block(block).tobytes()) != crc for block, crc in sums.items())

    def sums(self) -> dict[int, int]:
        """CRC32C of some blocks as they are now."""
        some = self.random.choice(self.memory.blocks, min(_SAMPLES, self.memory.blocks), replace=False)
        return {int(block): _native.crc32c(self.memory.block(int(block)).tobytes()) for block in some}

    # ---- saves -------------------------------------------------------------------------------------------

    def saves(self, turns: int) -> Measured:
        """New chains of all blocks in random order; the pool is full: every save evicts what it brings."""
        size, flat, count = self.block_bytes, self.memory.flat, self.memory.blocks
        batch = max(1, BATCH_BYTES // size)
        sources, offsets = self._blocks, self._blocks.astype(np.uint64)
        chains: list[KeyChain] = []

        def fresh() -> None:
            nonlocal sources, offsets, chains
            sources = self._shuffled()
            chains = [self.chain(min(batch, count - start)) for start in range(0, count, batch)]
            places = self.random.permutation(self.arena.size // size)[:count].astype(np.uint64)
            offsets = places * size

        def ours() -> None:
            at = 0
            for chain in chains:
                done = self.client.save(chain, 0, len(chain), sources[at : at + len(chain)]).wait(120)
                if done is None or done.ready != len(chain):
                    raise SystemExit(f"a save failed: {done}")
                at += len(chain)

        def by_numpy() -> None:
            numpy_copy(self.arena, offsets, flat, sources.astype(np.uint64) * size, size)

        limits = [
            Arm(
                "memcpy", lambda: self.libc.save(self.arena, offsets, flat, sources, size), fresh, settle=True
            ),
            Arm("numpy", by_numpy, fresh, settle=True),
        ]
        return measure(limits, [Arm("save", ours, fresh, settle=True)], turns=turns)

    def chain(self, blocks: int) -> KeyChain:
        """Keys that nobody has used before."""
        self.turn += 1
        tokens = self.random.integers(0, 1 << 31, 16 * blocks, np.uint32)
        made = self.client.chain(tokens, "default", Reuse.OWN)
        assert made is not None
        return made

    def _shuffled(self) -> U32:
        return self.random.permutation(self.memory.blocks).astype(np.uint32)


def copies(name: str, turns: int, threads: int) -> tuple[dict[str, Any], list[str]]:
    """Loads and saves of one block size.

    Returns:
        Figures, and reasons why they may not be believed.
    """
    size, working_set = SIZES[name], max(working_set_bytes(), 2 * max(FIRST_BYTES.values()))
    memory = PagedMemory(layout_of(size), working_set // size)
    # Slots carry a table of sums: 68 KiB for 64 KiB. Room for all blocks and one proof.
    settings = {"host.capacity_bytes": working_set * 9 // 8 + 64 * MIB}
    with (
        tempfile.TemporaryDirectory(prefix="kvstore-bench-") as path,
        BenchDaemon(Path(path), settings) as daemon,
    ):
        with client_of(daemon.socket, memory, threads=threads) as client:
            memory.fill(seed=1)
            ends = Copies(client, memory, Path(path))
            sums = ends.sums()
            chain, hit = ends.save_all()
            with probe(daemon.socket) as lag:
                load = ends.loads(chain, hit, turns)
            wrong = ends.verify(chain, hit, sums)
            client.release(hit.lease)
            with probe(daemon.socket) as more_lag:
                save = ends.saves(turns)
            pages = {"arena_huge_bytes": huge_bytes("memfd:kvstore"), "paged_huge_bytes": huge_bytes("")}
        figures: dict[str, Any] = {
            f"load_over_memcpy_{name}": load.speed("load").json(),
            f"save_steady_over_memcpy_{name}": save.speed("save").json(),
            f"load_over_memcpy_cpu_{name}": load.cpu_speed("load").json(),
            f"save_steady_over_memcpy_cpu_{name}": save.cpu_speed("save").json(),
            f"load_{name}": load.json(len(chain) * size),
            f"save_{name}": save.json(len(chain) * size),
            f"wrong_blocks_{name}": wrong,
            f"loop_lag_ms_{name}": {"load": lag.report, "save": more_lag.report},
            f"pages_{name}": pages,
        }
        voids = [load.void, save.void]
        if name == "2m":
            for suffix, bytes_ in FIRST_BYTES.items():
                first, control = first_saves(daemon.socket, FIRST_CLIENTS, bytes_)
                figures[f"save_first{suffix}_over_memcpy_2m"] = first.json()
                figures[f"save_first{suffix}_control"] = control.json()
                if abs(control.median - 1) > CONTROL_BOUND:
                    voids.append(f"void: noise (first memcpy over itself: {control.median:.3f})")
    return figures, voids


def hashes(turns: int) -> tuple[dict[str, Any], list[str]]:
    """One key per block of 16 tokens, against one bare compression each."""
    tokens = np.arange(16 * 8192, dtype=np.uint32)
    root = bytes(32)
    message = bytes(128 * 8192)
    limits = [
        Arm("blake2b of the C library binding", lambda: _drop(hashlib.blake2b(message).digest())),
        Arm("own blake2b", lambda: _drop(_native.blake2b(message))),
    ]
    done = measure(limits, [Arm("keys", lambda: _drop(_native.chain_keys(root, tokens, 16)))], turns=turns)
    return {"hash_over_compression": done.cost("keys").json(), "hash": done.json()}, [done.void]


def _drop(_: object) -> None:
    """What was made is not wanted: an arm that returns seconds would have timed itself."""


def summary(figures: dict[str, Any]) -> dict[str, Any]:
    """The plain numbers first, then their spread, then the arms they were made from."""
    ratios = {key: value for key, value in figures.items() if isinstance(value, dict) and "median" in value}
    plain: dict[str, Any] = {key: value["median"] for key, value in ratios.items()}
    lags = [
        kind["p99"] for key, value in figures.items() if key.startswith("loop_lag") for kind in value.values()
    ]
    if lags:
        plain["loop_lag_ms_p99"] = max(lags)
    rest = {key: value for key, value in figures.items() if key not in ratios}
    return {**plain, "spread": ratios, **rest}


def show(figures: dict[str, Any]) -> None:
    """A part's ratios as text, as soon as it is done."""
    for key, value in figures.items():
        if isinstance(value, dict) and "median" in value:
            print(
                f"{key:34} {value['median']:6.3f}   quartiles {value['low']:.3f} … {value['high']:.3f}",
                flush=True,
            )
        elif key.startswith(("loop_lag", "pages", "wrong", "lookup_nodes", "lookup_planting")):
            print(f"{key:34} {value}", flush=True)


def main() -> int:
    """Returns the exit status: 0, 1 a block was wrong, 3 void, 4 a peer asked for by name failed."""
    command = parser("local", __doc__)
    command.add_argument("--turns", type=int, default=9, help="repetitions that count (9)")
    command.add_argument("--threads", type=int, default=1, help="copy threads (1, as memcpy has)")
    every = [*SIZES, "hash", "lookup"]
    command.add_argument("--only", choices=[*every, "peers"], action="append", help="a part of it")
    command.add_argument(
        "--nodes", type=int, default=1_000_000, help="nodes in the daemon's index (1,000,000)"
    )
    arguments(command)
    options = command.parse_args()
    parts = [part for part in options.only or every if part != "peers"]
    figures: dict[str, Any] = {}
    voids: list[str] = []
    for part in parts:
        if part in SIZES:
            some, why = copies(part, options.turns, options.threads)
        elif part == "hash":
            some, why = hashes(4 * options.turns)
        else:
            some, why = lookups(options.nodes, 4 * options.turns)
        figures.update(some)
        voids += why
        if not options.json:
            show(some)
    compared, missing = compare(options)
    figures.update(compared)
    wrong = sum(figures[key] for key in figures if key.startswith("wrong_blocks"))
    status = finish("local", options, summary(figures), voids)
    return 1 if wrong else status or missing


if __name__ == "__main__":
    raise SystemExit(main())
