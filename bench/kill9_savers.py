"""Engines that save until the daemon is killed, and what others ask for meanwhile: flushes, and drops."""

from __future__ import annotations

import random
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import grpc
import numpy as np
from numpy.typing import NDArray

from bench.kill9_ledger import KINDS, Kind, Ledger, Offered
from bench.kill9_memory import KeyedMemory
from bench.nvme_pace import Pace
from bench.nvme_place import DiskDaemon
from kvstore.client import Client, Limits
from kvstore.errors import KVStoreError
from kvstore.types import Namespace, Reuse
from kvstore.v1 import store_pb2 as pb
from kvstore.v1 import store_pb2_grpc as rpc

__all__ = ["Savers", "Tally", "engine", "save_and_drop"]

U32 = NDArray[np.uint32]
_LIMITS = Limits(call_s=30.0, attach_s=60.0, copy_s=60.0, fetch_s=60.0, retry_s=0.005, retry_max_s=0.02)
_FLUSH_S, _DROP_S = 60.0, 30.0
_FLUSH_EVERY_S = (0.02, 0.2)
# Between two chains: engines compute. In a rush they do not.
_PAUSE_S = (0.0, 0.06)
# Of one kind in a round, rushes apart: all chains of all rounds are read again after every kill.
_CALM_BYTES_MAX = 10 << 20
_FORKS = 0.4
# Instead of a chain; of the kind whose namespace is dropped.
_DROPS = 0.2
# Some blocks are saved alone, some chains grow by what came since the last step; in a rush they come whole.
_PIECES = (1, 4, 64)


def namespace_of(kind: Kind) -> Namespace:
    """Of its engines."""
    layout = kind.layout
    return Namespace(kind.name, "w", "t", "none", "rope", layout.dtype, layout.fingerprint, "4")


def drop(daemon: DiskDaemon, kind: Kind, ledger: Ledger) -> None:
    """Drop its namespace while nobody saves under it.

    Raises:
        grpc.RpcError: the daemon has not acknowledged it.
    """
    ledger.expect_drop(kind)
    address = f"unix:{daemon.socket.with_name('kvstore-grpc.sock')}"
    with grpc.insecure_channel(address) as channel:
        request = pb.DropNamespaceRequest(digest=namespace_of(kind).digest)
        rpc.AdminStub(channel).DropNamespace(request, timeout=_DROP_S, wait_for_ready=True)
    ledger.dropped(kind)


def save_and_drop(daemon: DiskDaemon, ledger: Ledger) -> None:
    """Blocks that are flushed, and then dropped."""
    kind = next(kind for kind in KINDS if kind.drops)
    client, memory = engine(daemon, kind)
    with client:
        tokens = np.arange(kind.blocks_max * kind.layout.block_tokens, dtype=np.uint32)
        chain = client.chain(tokens, "default", Reuse.OWN)
        assert chain is not None
        ledger.offer(kind, tokens, chain, None)
        memory.fill(chain.keys)
        client.save(chain, 0, len(chain), np.arange(len(chain), dtype=np.uint32)).wait()
    with daemon.tool() as tool:
        tool.flush(_FLUSH_S)
    drop(daemon, kind, ledger)


def engine(daemon: DiskDaemon, kind: Kind) -> tuple[Client, KeyedMemory]:
    """An attached client of that kind and its memory, which holds the longest chain.

    Raises:
        SystemExit: the daemon does not want it, or has ended.
    """
    memory = KeyedMemory(kind.layout, kind.blocks_max + 1)
    client = Client(daemon.socket, namespace_of(kind), memory, scratch_block=kind.blocks_max, limits=_LIMITS)
    try:
        daemon.wait_attached(client)
    except SystemExit:
        client.close()
        raise
    return client, memory


@dataclass(slots=True)
class Tally:
    """What the savers of all rounds together did. Only grows.

    Attributes:
        chains: handed over.
        flushes: acknowledged without an error.
        unsure: of those, which vouch for nothing because the daemon had refused blocks.
        blocks_flushed: of the chains that flushes vouched for.
        drops: of namespaces, acknowledged.
        errors: what must not happen.
    """

    chains: int = 0
    flushes: int = 0
    unsure: int = 0
    blocks_flushed: int = 0
    drops: int = 0
    errors: tuple[str, ...] = ()


class Savers:
    """One saver a kind, and a flusher, each on a thread of its own, until the daemon is gone.

    Args:
        daemon: that will be killed.
        ledger: of its directory.
        room_bytes: of the disk's queue.
        tally: to count in.
        seed: of every choice.
    """

    def __init__(self, daemon: DiskDaemon, ledger: Ledger, room_bytes: int, tally: Tally, seed: int) -> None:
        self._daemon, self._ledger, self._tally, self._seed = daemon, ledger, tally, seed
        self._tool = daemon.tool()
        self._pace = Pace(self._queued_bytes, room_bytes)
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._rush = threading.Event()
        self._pool = ThreadPoolExecutor(len(KINDS) + 1)
        self._threads: list[Future[None]] = []

    def start(self) -> None:
        """Begin."""
        for number, kind in enumerate(KINDS):
            self._threads.append(self._pool.submit(self._save_on, kind, 10 * self._seed + number))
        self._threads.append(self._pool.submit(self._flush_on, random.Random(10 * self._seed + 9)))

    def rush(self) -> None:
        """From now on they save without a pause."""
        self._rush.set()

    def expect_the_end(self) -> None:
        """The daemon is about to be killed: from now on saves may fail."""
        self._stop.set()

    def join(self) -> None:
        """The daemon is gone: wait until everybody has noticed. Raises what a thread raised."""
        self._stop.set()
        try:
            for thread in self._threads:
                thread.result()
        finally:
            self._pool.shutdown()
            self._tool.close()

    def _queued_bytes(self) -> int:
        return int(self._tool.ask("status")["groups"]["default"]["nvme"]["queued_bytes"])

    # ---- saving --------------------------------------------------------------------------------------------

    def _save_on(self, kind: Kind, seed: int) -> None:
        choice = random.Random(seed)
        client, memory = engine(self._daemon, kind)
        calm_bytes = 0
        with client:
            while not self._stop.is_set() and client.attached:
                if not self._rush.is_set() and (calm_bytes >= _CALM_BYTES_MAX or choice.random() < 0.5):
                    self._rush.wait(choice.uniform(*_PAUSE_S))
                    continue
                if kind.drops and choice.random() < _DROPS and not self._drop(kind):
                    return
                offered = self._offer(client, kind, choice)
                if offered is None:
                    return
                calm_bytes += len(offered.chain) * kind.record_bytes
                try:
                    whole = self._save(client, memory, offered, choice)
                except KVStoreError:  # the pace could not be asked for: the daemon is gone
                    return
                if whole:
                    self._ledger.acknowledge(offered)

    def _drop(self, kind: Kind) -> bool:
        """False: the daemon is gone, and nobody knows whether it was dropped."""
        try:
            drop(self._daemon, kind, self._ledger)
        except grpc.RpcError as error:
            if not self._stop.is_set():
                self._fail(f"a drop: {error}")
            return False
        self._tally.drops += 1
        return True

    def _offer(self, client: Client, kind: Kind, choice: random.Random) -> Offered | None:
        """A chain that nobody has saved yet; many begin like an older one. None: the daemon is gone."""
        length = choice.randint(1, kind.blocks_max)
        size = kind.layout.block_tokens
        fresh = np.random.default_rng(choice.getrandbits(64)).integers(0, 1 << 32, length * size, np.uint32)
        tokens, like = fresh, None
        known = self._ledger.chains(kind)[-200:]
        if known and choice.random() < _FORKS:
            like = choice.choice(known)
            kept = choice.randint(1, len(like.chain)) * size
            tokens = np.concatenate([like.tokens[:kept], fresh])[: kind.blocks_max * size]
        chain = client.chain(tokens, "default", Reuse.OWN)
        if chain is None:
            return None
        with self._lock:
            self._tally.chains += 1
        return self._ledger.offer(kind, tokens, chain, like)

    def _save(self, client: Client, memory: KeyedMemory, offered: Offered, choice: random.Random) -> bool:
        """Piece by piece; whether all of it is acknowledged."""
        chain = offered.chain
        piece = _PIECES[-1] if self._rush.is_set() else choice.choice(_PIECES)
        for start in range(0, len(chain), piece):
            stop = min(start + piece, len(chain))
            size = (stop - start) * offered.kind.layout.slot_bytes
            self._pace.begin(size)
            try:
                memory.fill(chain.keys[start:stop])
                self._ledger.begin(offered, start, stop)
                blocks = np.arange(stop - start, dtype=np.uint32)
                done = client.save(chain, start, stop, blocks).wait()
            finally:
                self._pace.end(size)
            if done is None or done.ready + done.filled < stop - start:
                if not self._stop.is_set():
                    self._fail(f"a save of {stop - start} blocks: {done}")
                return False
        return True

    # ---- flushing ------------------------------------------------------------------------------------------

    def _flush_on(self, choice: random.Random) -> None:
        try:
            with self._daemon.tool() as tool:
                while not self._stop.wait(choice.uniform(*_FLUSH_EVERY_S)):
                    chains = self._ledger.acknowledged()
                    flushed = tool.flush(_FLUSH_S)
                    if flushed.error:
                        self._fail(f"flush: {flushed.error}")
                        continue
                    self._tally.flushes += 1
                    if flushed.refused:
                        self._tally.unsure += 1
                        continue
                    self._ledger.flush(chains)
                    self._tally.blocks_flushed += sum(len(offered.chain) for offered in chains)
        except KVStoreError:  # the daemon is gone
            return

    def _fail(self, what: str) -> None:
        with self._lock:
            self._tally.errors = (*self._tally.errors, what)[:20]
