"""Why blocks do not go through aiofiles: what a block's way through it costs beside the bare system calls.

python -m bench.aiofiles_cost --json     one JSON object; --save writes bench/results/aiofiles_cost.json

In one run, by turns: aiofiles (seek and read or write on a thread), `os.preadv`/`os.pwritev` into one buffer
on the same thread pool, and the same calls straight on the loop; plus the bare hop to a thread and back. The
file stays in the page cache, as the fastest disk there is: what differs is the way and not the disk.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import resource
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiofiles

from bench.machine import RESULTS, where

__all__ = ["main"]

SIZES = {"64k": 64 << 10, "256k": 256 << 10, "2m": 2 << 20}
FILE_BYTES = 128 << 20
HOPS = 2000
Way = Callable[[int, list[int]], Awaitable[None]]


class Ways:
    """Three ways to move blocks between one file and memory, in both directions."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self.block = bytearray(os.urandom(max(SIZES.values())))
        for at in range(0, FILE_BYTES, len(self.block)):
            os.pwrite(self.fd, self.block, at)

    def close(self) -> None:
        """The file goes with its directory."""
        os.close(self.fd)

    async def read_aiofiles(self, size: int, offsets: list[int]) -> None:
        """As a block store on aiofiles would: seek, read, keep the bytes."""
        async with aiofiles.open(self.path, "rb", buffering=0) as file:
            for offset in offsets:
                await file.seek(offset)
                _ = await file.read(size)

    async def read_pool(self, size: int, offsets: list[int]) -> None:
        """One system call a block, on a thread, into memory that is there."""
        loop, buffer = asyncio.get_running_loop(), [memoryview(self.block)[:size]]
        for offset in offsets:
            await loop.run_in_executor(None, os.preadv, self.fd, buffer, offset)

    async def read_direct(self, size: int, offsets: list[int]) -> None:
        """The same on the loop: what it costs by itself, and for how long it holds everybody up."""
        buffer = [memoryview(self.block)[:size]]
        for offset in offsets:
            os.preadv(self.fd, buffer, offset)

    async def write_aiofiles(self, size: int, offsets: list[int]) -> None:
        """See read_aiofiles."""
        data = memoryview(self.block)[:size]
        async with aiofiles.open(self.path, "r+b", buffering=0) as file:
            for offset in offsets:
                await file.seek(offset)
                await file.write(data)

    async def write_pool(self, size: int, offsets: list[int]) -> None:
        """See read_pool."""
        loop, buffer = asyncio.get_running_loop(), [memoryview(self.block)[:size]]
        for offset in offsets:
            await loop.run_in_executor(None, os.pwritev, self.fd, buffer, offset)

    async def write_direct(self, size: int, offsets: list[int]) -> None:
        """See read_direct."""
        buffer = [memoryview(self.block)[:size]]
        for offset in offsets:
            os.pwritev(self.fd, buffer, offset)


async def measure(ways: Ways, repeats: int, seed: int) -> dict[str, Any]:
    """Medians over `repeats` rounds; in each, every way moves the same blocks, the ways in random order."""
    kinds: dict[str, Way] = {
        f"{verb}_{way}": getattr(ways, f"{verb}_{way}")
        for verb in ("read", "write")
        for way in ("aiofiles", "pool", "direct")
    }
    rng = random.Random(seed)
    wall_us: dict[str, list[float]] = {}
    cpu_us: dict[str, list[float]] = {}
    for round_ in range(repeats + 1):  # the first one warms up
        for name, size in SIZES.items():
            offsets = list(range(0, FILE_BYTES, size))
            rng.shuffle(offsets)
            order = list(kinds)
            rng.shuffle(order)
            for kind in order:
                cpu_s, began_s = _cpu_s(), time.perf_counter()
                await kinds[kind](size, offsets)
                spent_s, cpu_spent_s = time.perf_counter() - began_s, _cpu_s() - cpu_s
                if round_:
                    wall_us.setdefault(f"{kind}_{name}", []).append(spent_s * 1e6 / len(offsets))
                    cpu_us.setdefault(f"{kind}_{name}", []).append(cpu_spent_s * 1e6 / len(offsets))
    return {
        "us_per_block": {key: round(statistics.median(values), 1) for key, values in wall_us.items()},
        "spread_us": {key: [round(min(v), 1), round(max(v), 1)] for key, v in wall_us.items()},
        "cpu_us_per_block": {key: round(statistics.median(values), 1) for key, values in cpu_us.items()},
        "hop_us": round(statistics.median([await _hop_us() for _ in range(repeats)]), 1),
    }


async def _hop_us() -> float:
    """To a thread of the pool and back, with nothing to do there."""
    loop = asyncio.get_running_loop()
    began_s = time.perf_counter()
    for _ in range(HOPS):
        await loop.run_in_executor(None, _nothing)
    return (time.perf_counter() - began_s) * 1e6 / HOPS


def _nothing() -> None:
    return


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.aiofiles_cost", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the JSON object only")
    parser.add_argument("--save", action="store_true", help="write bench/results/aiofiles_cost.json")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dir", type=Path, default=None, help="where the file lies (default: temporary)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="bench-aiofiles-") as folder:
        ways = Ways(Path(folder) / "blocks")
        try:
            found = asyncio.run(measure(ways, options.repeats, options.seed))
        finally:
            ways.close()
    us = found["us_per_block"]
    ratios = {
        f"{verb}_{way}_over_direct_{name}": round(us[f"{verb}_{way}_{name}"] / us[f"{verb}_direct_{name}"], 2)
        for verb in ("read", "write")
        for way in ("aiofiles", "pool")
        for name in SIZES
    }
    result = {
        **ratios,
        **found,
        "repeats": options.repeats,
        "seed": options.seed,
        "file_bytes": FILE_BYTES,
        "command": "python -m bench.aiofiles_cost --save",
        "where": where(),
    }
    if not options.json:
        print(table(result))
    if options.save:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "aiofiles_cost.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return 0


def table(result: dict[str, Any]) -> str:
    """µs per block, one row for each direction and size."""
    us = result["us_per_block"]
    lines = [f"hop to a thread and back: {result['hop_us']} µs", "µs per block     aiofiles    pool  direct"]
    for verb in ("read", "write"):
        for name in SIZES:
            cells = [us[f"{verb}_{way}_{name}"] for way in ("aiofiles", "pool", "direct")]
            lines.append(f"{verb:<6}{name:>6}" + "".join(f"{cell:>11.1f}" for cell in cells))
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
