"""Children of bench.local: a fresh client's very first save, and a probe of the daemon's loop."""

from __future__ import annotations

import json
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
from bench.measure import Arm, Ratio, measure, working_set_bytes
from bench.paged import PagedMemory, client_of, layout_of
from kvstore.client import Client
from kvstore.types import Reuse

__all__ = ["Lag", "first_saves", "probe"]

MIB = 1 << 20
BLOCK_BYTES = 2 * MIB
FIRST_BYTES = 256 * MIB
# A client that asks this often adds nothing to the load and misses no pause worth the name.
_PROBE_PAUSE_S = 0.001
_CHILD_S = 300


def first_saves(socket: Path, clients: int) -> tuple[Ratio, Ratio]:
    """The first save of so many fresh processes, each against memcpy in that process right after it.

    Returns:
        Its speed over memcpy, and memcpy over itself.
    """
    speeds, controls = [], []
    for number in range(clients):
        run = subprocess.run(
            [sys.executable, "-m", "bench.local_children", "first", str(socket), str(number)],
            capture_output=True,
            text=True,
            check=False,
            timeout=_CHILD_S,
        )
        if run.returncode:
            raise SystemExit(f"a fresh client failed: {run.stdout}{run.stderr}")
        got = json.loads(run.stdout.splitlines()[-1])
        speeds.append(got["speed"])
        controls.append(got["control"])
    return Ratio.of(speeds), Ratio.of(controls)


def _first(socket: Path, seed: int) -> dict[str, float]:
    count = FIRST_BYTES // BLOCK_BYTES
    # The whole working set, though one save is a part of it: what it reads must not be in a cache already.
    memory = PagedMemory(layout_of(BLOCK_BYTES), working_set_bytes() // BLOCK_BYTES)
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-") as path, client_of(socket, memory) as client:
        memory.fill(seed)
        random = np.random.default_rng(seed)
        blocks = random.permutation(memory.blocks).astype(np.uint32)[:count]
        chain = client.chain(np.full(16 * count, 1000 + seed, np.uint32), "default", Reuse.OWN)
        assert chain is not None
        _read_all(memory)
        start = time.perf_counter()
        done = client.save(chain, 0, count, blocks).wait(60)
        first_s = time.perf_counter() - start
        if done is None or done.ready != count:
            raise SystemExit(f"the first save failed: {done}")
        attachment = client._core.attachment
        assert attachment is not None
        assert attachment.arena is not None
        arena, libc = memory_of(attachment.arena), LibcCopy(Path(path))
        offsets = blocks.astype(np.uint64)

        def others() -> None:
            nonlocal blocks, offsets
            blocks = random.permutation(memory.blocks).astype(np.uint32)[:count]
            places = random.permutation(arena.size // BLOCK_BYTES)[:count]
            offsets = places.astype(np.uint64) * BLOCK_BYTES
            _read_all(memory)

        def by_numpy() -> None:
            numpy_copy(arena, offsets, memory.flat, blocks.astype(np.uint64) * BLOCK_BYTES, BLOCK_BYTES)

        limits = [
            Arm("memcpy", lambda: libc.save(arena, offsets, memory.flat, blocks, BLOCK_BYTES), others),
            Arm("numpy", by_numpy, others),
        ]
        limit = measure(limits, [], turns=5, warm_turns=0)
    return {
        "speed": statistics.median(limit.wall_s[limit.limit]) / first_s,
        "control": limit.control.median,
    }


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
    if sys.argv[1] == "first":
        print(json.dumps(_first(Path(sys.argv[2]), int(sys.argv[3]))))
    else:
        _probe(Path(sys.argv[2]))
