"""Which call holds the daemon's event loop longest? Drives a real store with 1 M shuffled nodes.

python -m bench.loop_audit [--nodes N] [--json] [--save]

Every kind of request is made at its largest (8,192 blocks, a full pool, as many leases as a session may hold)
and a few times; the table shows the worst call of each kind, in CPU time of the calling thread: nothing here
waits, so on a quiet machine that is what the loop stands still for. More than BAR_MS is a bug.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from bench.machine import RESULTS, where
from kvstore import _native, block_tables
from kvstore.checks import in_slices
from kvstore.config import Config, DaemonConfig, EventsConfig, HostConfig, IndexConfig
from kvstore.keys import KeyChain
from kvstore.rpc.attach import Proof
from kvstore.rpc.messages import pattern
from kvstore.snapshots import snapshot_parts
from kvstore.status import status
from kvstore.testing import StoreDriver
from kvstore.types import BlockLayout

__all__ = ["Audit", "main"]

BAR_MS = 5.0
T = TypeVar("T")
U8 = NDArray[np.uint8]
KEYS = _native.KEYS_MAX
# One cell of 3 KiB: a slot of one page, so that an arena of 512 MiB holds 131,072 blocks.
SMALL = BlockLayout(1, 1, 96, "float32", block_tokens=4)
# 2 MiB a block, 512 cells: what a layout proof and a report read.
LARGE = BlockLayout(64, 8, 128, "bfloat16", block_tokens=8)
ARENA_BYTES = 512 << 20
CHAIN_BLOCKS = 8000
TURN_BLOCKS = 64


class Audit:
    """A store, and the worst time of each kind of call.

    Args:
        nodes: nodes that a full device pool keeps in the index.
    """

    def __init__(self, nodes: int) -> None:
        config = Config(
            daemon=DaemonConfig(leases_max=1 << 20),
            host=HostConfig(ARENA_BYTES, slab_bytes=32 << 20, huge_pages=False),
            index=IndexConfig(nodes_max=2 * nodes + (1 << 18)),
            events=EventsConfig(),
        )
        self.driver = StoreDriver(config)
        self.worst_ms: dict[str, float] = {}
        self.calls: dict[str, int] = {}
        self.random = np.random.default_rng(1)
        self.session = self.driver.attach(layout=SMALL, model="grown")
        self.root = self.session.roots["default"]["own"]
        self.nodes = nodes

    def timed(self, kind: str, call: Callable[..., T], *arguments: Any) -> T:
        """Make a call and note how long it took."""
        start = time.thread_time()
        result = call(*arguments)
        took_ms = 1000 * (time.thread_time() - start)
        self.worst_ms[kind] = max(self.worst_ms.get(kind, 0.0), took_ms)
        self.calls[kind] = self.calls.get(kind, 0) + 1
        return result

    def each(self, kind: str, steps: Iterable[Any]) -> None:
        """Time every step of something that is done in slices."""
        rest = iter(steps)
        while self.timed(kind, next, rest, self) is not self:
            pass

    def keys(self, count: int) -> U8:
        """(count, 32) keys that nobody else has."""
        return np.frombuffer(self.random.bytes(32 * count), np.uint8).reshape(-1, 32)

    def chain(self, count: int = KEYS) -> KeyChain:
        """A chain of fresh keys under this session's root."""
        return KeyChain(self.root, self.keys(count))

    # ---- the calls ----------------------------------------------------------------------------------------

    def grow(self) -> None:
        """Fill a device pool: chains that grow in turns, so that neighbours on a chain lie far apart."""
        driver, chains = self.session, max(1, self.nodes // CHAIN_BLOCKS)
        driver.own_pool(self.nodes, self.nodes)
        tips = [self.root] * chains
        made = 0
        while made + TURN_BLOCKS <= self.nodes:
            number = int(self.random.integers(chains))
            keys = self.keys(TURN_BLOCKS)
            lease = self.timed("acquire 64", driver.acquire, 0, TURN_BLOCKS).lease
            commit = (driver.store, driver.caller, lease.id, self.root, 0, tips[number], keys)
            self.timed("commit 64", block_tables.commit, *commit)
            self.timed("release 64", driver.release, lease)
            tips[number] = keys[-1].tobytes()
            made += TURN_BLOCKS

    def save(self) -> None:
        """Reserve and publish 8,192 blocks at a time: first into free slots, then by evicting as many."""
        slots = ARENA_BYTES // 4096
        for number in range(2 * slots // KEYS):
            chain = self.chain()
            full = "evicting" if number >= slots // KEYS else "into free slots"
            got = self.timed(f"reserve 8192 {full}", self.session.reserve, chain)
            assert got.filling is not None
            self.timed(f"publish 8192 {full}", self.session.publish, got.filling)
            self.last = chain
        chain = self.chain()
        again = self.session.reserve(chain).filling
        assert again is not None
        self.timed("abort 8192", self.session.abort, again)

    def read(self) -> None:
        """Full hits and misses with every key sent, and the second trip."""
        store, caller = self.driver.store, self.session.caller
        positions = np.arange(KEYS, dtype=np.uint32)
        for chain, what in ((self.last, "hit"), (self.chain(), "miss")):
            lookup = (caller, chain.root, KEYS, positions, chain.keys)
            for _ in range(5):
                lease = self.timed(f"lookup 8192, {what}", store.lookup, *lookup).lease
                if lease is not None:
                    self.timed("fetch 8192", store.fetch, caller, lease.id, 0, KEYS)
                    self.timed("release 8192", self.session.release, lease)
        rest, keys = positions[1:], self.last.keys[1:]
        for _ in range(5):
            first = store.lookup(caller, self.root, KEYS, positions[:1], self.last.keys[:1]).lease
            assert first is not None
            self.timed("extend 8191", store.extend, caller, first.id, rest, keys)
            self.session.release(first)

    def look(self) -> None:
        """What operators and subscribers ask, and checks in slices."""
        store, group = self.driver.store, self.driver.group()
        for _ in range(3):
            self.timed("status", lambda: json.dumps(status(store)))
        self.each("snapshot, a part", snapshot_parts(group))
        self.each("check, a slice", in_slices([group]))

    def prove_and_report(self) -> None:
        """What reads block bytes: the layout proof, and a report of bad blocks."""
        session = self.driver.attach(layout=LARGE, model="large")
        proof = Proof.begin(self.driver.store, session.caller)
        view = session.caller.group.arena.view(proof.slot, session.caller.shape.length)
        write_pattern(view, session.caller.shape, proof.seed)
        self.each("layout proof, 512 cells: a slice", proof.check_store())
        self.timed("layout proof, its end", proof.end)
        root = session.roots["default"]["own"]
        chain = KeyChain(root, self.keys(64))
        session.save(chain)
        lease = session.lookup(chain).lease
        bad = np.arange(len(lease.nodes), dtype=np.uint32)
        self.timed("report 64 blocks of 2 MiB", session.store.report, session.caller, lease.id, bad)
        session.release(lease)

    def leave(self) -> None:
        """A session with many leases, a process with many fillings, an engine with a full pool."""
        reader = self.driver.attach(layout=SMALL, model="grown")
        leases_max = DaemonConfig().leases_max
        for _ in range(leases_max):
            self.driver.store.lookup(
                reader.caller, self.root, KEYS, np.array([KEYS - 1], np.uint32), self.last.keys[-1:]
            )
        self.slices("detach, leases_max leases", reader.disconnect)
        writer = self.driver.attach(layout=SMALL, model="grown")
        for _ in range(1000):
            writer.reserve(self.chain(8))
        self.slices("process gone, 1,000 fillings", writer.die)
        self.slices("engine gone, full pool", self.session.disconnect)

    def slices(self, kind: str, call: Callable[[], object]) -> None:
        """A call, and whatever it leaves to be done in slices."""
        later: list[Iterable[None]] = []
        self.driver.group().later = later.append
        self.timed(kind, call)
        for steps in later:
            self.each(f"{kind}: a slice", steps)


def write_pattern(view: U8, shape: _native.SlotFormat, seed: bytes) -> None:
    """What an engine's copier leaves in a slot of a layout proof."""
    table = view[shape.table_offset :].view(np.uint32)
    for number in range(shape.layers * shape.heads):
        layer, head = divmod(number, shape.heads)
        cell = pattern(seed, layer, head, shape.cell_bytes)
        view[number * shape.cell_stride :][: shape.cell_bytes] = np.frombuffer(cell, np.uint8)
        table[number] = _native.crc32c(cell)


def main() -> int:
    """Returns 1 when a call held the loop for longer than BAR_MS."""
    parser = argparse.ArgumentParser(prog="python -m bench.loop_audit", description=__doc__)
    parser.add_argument("--nodes", type=int, default=1_000_000)
    parser.add_argument("--json", action="store_true", help="print the JSON object only")
    parser.add_argument("--save", action="store_true", help="write bench/results/loop_audit.json")
    options = parser.parse_args()
    audit = Audit(options.nodes)
    gc.disable()  # the collector's pauses are its own question, not one kind of call's
    for step in (audit.grow, audit.save, audit.read, audit.look, audit.prove_and_report, audit.leave):
        step()
    gc.enable()
    audit.driver.close()
    worst = {kind: round(ms, 3) for kind, ms in sorted(audit.worst_ms.items(), key=lambda kv: -kv[1])}
    if not options.json:
        for kind, ms in worst.items():
            print(f"{ms:9.3f} ms  {kind}  ({audit.calls[kind]} calls){'  OVER' if ms > BAR_MS else ''}")
    result = {
        "worst_ms": worst,
        "bar_ms": BAR_MS,
        "nodes": options.nodes,
        "command": "python -m bench.loop_audit --save",
        "where": where(),
    }
    if options.save:
        (RESULTS / "loop_audit.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return int(any(ms > BAR_MS for ms in worst.values()))


if __name__ == "__main__":
    raise SystemExit(main())
