"""Children of bench.local: a fresh client's very first save, and a probe of the daemon's loop."""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from bench.limits import LibcCopy, memory_of, numpy_copy
from bench.measure import Ratio, working_set_bytes
from bench.paged import PagedMemory, client_of, layout_of
from kvstore.client import Client
from kvstore.types import Reuse

__all__ = ["Lag", "first_saves", "probe"]

MIB = 1 << 20
BLOCK_BYTES = 2 * MIB
# A client that asks this often adds nothing to the load and misses no pause worth the name.
_PROBE_PAUSE_S = 0.001
_CHILD_S = 300


def first_saves(socket: Path, clients: int, bytes_: int) -> tuple[Ratio, Ratio]:
    """The very first save of fresh processes, against the very first memcpy of others that were made alike.

    All find everything prefaulted and mapped, nothing in a cache, the daemon and the copy threads idle for a
    while: what a first access still costs on this machine, memcpy pays too. The limit is the better of the C
    library's and numpy's; they write over the arena, so blocks saved before are rotten afterwards.

    Args:
        socket: the daemon's.
        clients: processes of each kind, in turns.
        bytes_: of one save.

    Returns:
        Its speed over memcpy, and memcpy over itself.
    """
    seconds: dict[str, list[float]] = {"save": [], "memcpy": [], "numpy": [], "memcpy again": []}
    for turn in range(clients):
        for at, kind in enumerate(seconds if turn % 2 == 0 else reversed(seconds)):
            seconds[kind].append(_child_s(socket, kind, 10 * turn + at, bytes_))
    both = [math.sqrt(a * b) for a, b in zip(seconds["memcpy"], seconds["memcpy again"], strict=True)]
    limit = min(both, seconds["numpy"], key=statistics.median)
    speeds = [limit_s / save_s for limit_s, save_s in zip(limit, seconds["save"], strict=True)]
    controls = [a / b for a, b in zip(seconds["memcpy"], seconds["memcpy again"], strict=True)]
    return Ratio.of(speeds), Ratio.of(controls)


def _child_s(socket: Path, kind: str, seed: int, bytes_: int) -> float:
    run = subprocess.run(
        [sys.executable, "-m", "bench.local_children", kind, str(socket), str(seed), str(bytes_)],
        capture_output=True,
        text=True,
        check=False,
        timeout=_CHILD_S,
    )
    if run.returncode:
        raise SystemExit(f"a fresh client failed: {run.stdout}{run.stderr}")
    return float(run.stdout.splitlines()[-1])


def _first_s(socket: Path, kind: str, seed: int, bytes_: int) -> float:
    """Seconds of the first transfer of this process."""
    count = bytes_ // BLOCK_BYTES
    # The whole working set, though one save is a part of it: what it reads must not be in a cache already.
    memory = PagedMemory(layout_of(BLOCK_BYTES), max(working_set_bytes(), 2 * bytes_) // BLOCK_BYTES)
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-") as path, client_of(socket, memory) as client:
        memory.fill(seed)
        random = np.random.default_rng(seed)
        blocks = random.permutation(memory.blocks).astype(np.uint32)[:count]
        prompt = np.random.default_rng([seed, count]).integers(0, 1 << 31, 16 * count, np.uint32)
        chain = client.chain(prompt, "default", Reuse.OWN)
        attachment = client._core.attachment
        assert chain is not None
        assert attachment is not None
        assert attachment.arena is not None
        arena, libc = memory_of(attachment.arena), LibcCopy(Path(path))
        places = random.permutation(arena.size // BLOCK_BYTES)[:count].astype(np.uint64) * BLOCK_BYTES
        _read_all(memory)
        if not len(blocks) == len(places) == count:
            raise SystemExit(f"{count} blocks do not fit the memory or the arena")
        start = time.perf_counter()
        if kind == "save":
            done = client.save(chain, 0, count, blocks).wait(60)
            if done is None or done.ready != count:
                raise SystemExit(f"the first save failed: {done}")
        elif kind == "numpy":
            numpy_copy(arena, places, memory.flat, blocks.astype(np.uint64) * BLOCK_BYTES, BLOCK_BYTES)
        else:
            libc.save(arena, places, memory.flat, blocks, BLOCK_BYTES)
        return time.perf_counter() - start


def _read_all(memory: PagedMemory) -> None:
    """What filled the memory left dirty lines in the cache; whoever comes next must not pay for them."""
    memory.flat.view(np.uint64).max()


@dataclass(slots=True)
class Lag:
    """How long the daemon's loop let a heartbeat wait.

    Attributes:
        report: p50, p99, most, in milliseconds, and how many; filled when the probe has ended.
    """

    report: dict[str, float] = field(default_factory=dict)


@contextmanager
def probe(socket: Path) -> Iterator[Lag]:
    """Ask the daemon for a heartbeat every millisecond, from another process, while the block runs."""
    lag = Lag()
    child = subprocess.Popen(
        [sys.executable, "-m", "bench.local_children", "probe", str(socket)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    if child.stdout.readline() != "ready\n":
        raise SystemExit("the probe could not attach")
    try:
        yield lag
    finally:
        answer, _ = child.communicate("stop\n", timeout=30)
        if answer:
            lag.report = json.loads(answer)


def _probe(socket: Path) -> None:
    """Round trips until stdin says stop. A round trip holds the loop's lag and a little more."""
    import select

    with Client(socket, None, role="tool") as client:
        if not client.wait_attached(10):
            raise SystemExit(f"no daemon at {socket}")
        print("ready", flush=True)
        waits: list[float] = []
        while not select.select([sys.stdin], [], [], _PROBE_PAUSE_S)[0]:
            start = time.perf_counter()
            alive = client.heartbeat()
            waits.append(1000 * (time.perf_counter() - start))
            if not alive:
                raise SystemExit("a heartbeat was not answered")
    waits.sort()
    report = {
        "p50": waits[len(waits) // 2],
        "p99": waits[int(len(waits) * 0.99)],
        "most": waits[-1],
        "asked": len(waits),
    }
    print(json.dumps({name: round(value, 3) for name, value in report.items()}))


if __name__ == "__main__":
    if sys.argv[1] == "probe":
        _probe(Path(sys.argv[2]))
    else:
        print(_first_s(Path(sys.argv[2]), sys.argv[1], int(sys.argv[3]), int(sys.argv[4])))
