"""What does the daemon's memory cost? Two bars, each with the process that pays it.

python -m bench.memory [--json] [--save]

1. A real daemon with an arena of 1 GiB; a real client saves 100,000 blocks of 8 KiB. Anonymous memory and
   page tables of the daemon (RssAnon + VmPTE: everything but the arena itself) must stay below 200 MiB.
2. A process of its own saves 100,000 blocks, then 1,000,000, through the native index and host pool. The
   slope of its anonymous memory, less what the pool keeps per slot, is what a node costs: at most 96 bytes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.machine import RESULTS, where
from kvstore import _native
from kvstore.client import Client, Limits
from kvstore.daemon import configure_logs
from kvstore.keys import KeyChain
from kvstore.testing.driver import namespace_of
from kvstore.types import BlockLayout, Namespace, Part, Reuse

__all__ = ["BARS", "daemon_mib", "main", "node_bytes"]

# What is measured → the most that it may be.
BARS = {"daemon_anon_and_page_tables_mib": 200.0, "index_bytes_per_node": 96.0}
LAYOUT = BlockLayout(1, 1, 960, "float32", block_tokens=1)  # a cell of 7,680 B and its sum: a slot of 8 KiB
BLOCKS = 100_000
BATCH = 1000
# native/src/pool.h keeps 24 B for every slot of a slab that is in use, whatever lies in it.
RECORD_BYTES = 24
_READY_S = 120.0


class PagedRows:
    """Device memory of an engine that saves the same BATCH blocks again and again under other keys."""

    def __init__(self, layout: BlockLayout, blocks: int) -> None:
        self.layout, self.part, self.blocks = layout, Part.whole(layout), blocks
        self._rows = np.zeros((blocks, layout.cell_bytes), np.uint8)

    def paged(self) -> _native.PagedLayout:
        """Where the cells lie."""
        cell = self.layout.cell_bytes
        return _native.PagedLayout(
            np.array([[self._rows.ctypes.data]], np.uint64),
            blocks=self.blocks,
            heads=1,
            block_stride=cell,
            head_stride=cell,
            piece_stride=cell,
            piece_bytes=cell,
            pieces=1,
        )

    def read_cell(self, block: int, layer: int, head: int) -> bytes:
        """The one cell of a block."""
        return bytes(self._rows[block])

    def write_cell(self, block: int, layer: int, head: int, data: bytes) -> None:
        """Set it."""
        self._rows[block] = np.frombuffer(data, np.uint8)


def memory_kib(pid: int | str) -> dict[str, int]:
    """RssAnon and VmPTE of a process, in KiB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    fields = {name: value.split() for name, _, value in (line.partition(":") for line in lines)}
    return {name: int(fields[name][0]) for name in ("RssAnon", "VmPTE")}


def fresh_keys(random: np.random.Generator, count: int) -> NDArray[np.uint8]:
    """(count, 32) keys."""
    return np.frombuffer(random.bytes(32 * count), np.uint8).reshape(-1, 32)


def daemon_mib(blocks: int = BLOCKS) -> dict[str, float]:
    """Save blocks through a real client into a real daemon; its anonymous memory and page tables.

    Raises:
        RuntimeError: the daemon did not start, or not every block was saved.
    """
    with tempfile.TemporaryDirectory(prefix="kv") as folder:
        path = Path(folder) / "kv.sock"
        command = [sys.executable, "-m", "kvstore", "serve", "--set", f"daemon.socket={path}"]
        command += ["--set", "host.capacity_bytes=1GiB"]
        with (Path(folder) / "log").open("wb") as sink:
            daemon = subprocess.Popen(command, stdout=sink, stderr=sink)
        try:
            ready = _save(path, blocks)
            kib = memory_kib(daemon.pid)
        finally:
            daemon.terminate()
            daemon.wait()
    if ready < blocks:
        raise RuntimeError(f"only {ready} of {blocks} blocks were saved")
    return {
        "daemon_anon_and_page_tables_mib": sum(kib.values()) / 1024,
        "daemon_anon_mib": kib["RssAnon"] / 1024,
        "daemon_page_tables_mib": kib["VmPTE"] / 1024,
    }


def _save(path: Path, blocks: int) -> int:
    """Blocks that became readable."""
    random = np.random.default_rng(1)
    namespace = Namespace(**namespace_of(LAYOUT, "memory"))
    rows = np.arange(BATCH, dtype=np.uint32)
    deadline = time.monotonic() + _READY_S
    ready = 0
    limits = Limits(call_s=30.0, attach_s=60.0, copy_s=60.0)
    with Client(path, namespace, memory=PagedRows(LAYOUT, BATCH), limits=limits) as client:
        while not client.wait_attached(1.0):
            if client.refusal or time.monotonic() > deadline:
                raise RuntimeError(f"no daemon at {path}: {client.refusal}")
        root = client.roots("default", Reuse.OWN)
        if root is None:
            raise RuntimeError("no root for the default tenant")
        for _ in range(blocks // BATCH):
            chain = KeyChain(root, fresh_keys(random, BATCH))
            done = client.save(chain, 0, BATCH, rows).wait()
            ready += done.ready if done is not None else 0
    return ready


def node_bytes(first: int = 100_000, last: int = 1_000_000) -> dict[str, float]:
    """Slope of a fresh process's anonymous memory between two sizes of the index, in bytes per node."""
    command = [sys.executable, "-m", "bench.memory", "--grow", str(first), str(last)]
    root = Path(__file__).parent.parent
    run = subprocess.run(command, capture_output=True, text=True, check=True, cwd=root)
    result: dict[str, float] = json.loads(run.stdout)
    return result


def grow(first: int, last: int) -> dict[str, float]:
    """Save chains of BATCH blocks of one page until `first`, then until `last` nodes are known."""
    random = np.random.default_rng(1)
    index = _native.Index(2 * last)
    slab_bytes = 32 << 20
    arena = _native.Arena.create("memory", last * _native.PAGE_BYTES + slab_bytes)
    pool = _native.HostPool(index, arena, slab_bytes)
    shape = _native.SlotFormat(1, 1, 64)
    root = index.root(bytes(32))
    used = []
    for nodes in (first, last):
        while len(index) < nodes:
            got = pool.reserve(root, fresh_keys(random, BATCH), shape, 0.0, 1.0)
            pool.publish(got.nodes, got.slots, np.zeros(BATCH, np.uint32), shape.length, 1)
        pool.take_removed()
        used.append(1024 * memory_kib("self")["RssAnon"])
    index.check()
    slope = (used[1] - used[0]) / (last - first)
    return {"index_bytes_per_node": slope - RECORD_BYTES, "index_and_slot_bytes": slope}


def main() -> int:
    """Returns 1 when a bar is missed."""
    parser = argparse.ArgumentParser(prog="python -m bench.memory", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the JSON object only")
    parser.add_argument("--save", action="store_true", help="write bench/results/memory.json")
    parser.add_argument("--grow", nargs=2, type=int, metavar=("FIRST", "LAST"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.grow:
        print(json.dumps(grow(*options.grow)))
        return 0
    configure_logs("error")
    result: dict[str, Any] = {**daemon_mib(), **node_bytes()}
    result = {name: round(value, 2) for name, value in result.items()}
    if not options.json:
        for name, bar in BARS.items():
            print(f"{name}: {result[name]} (bar: {bar})")
    result |= {"bars": BARS, "command": "python -m bench.memory --save", "where": where()}
    if options.save:
        (RESULTS / "memory.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return int(any(result[name] > bar for name, bar in BARS.items()))


if __name__ == "__main__":
    raise SystemExit(main())
