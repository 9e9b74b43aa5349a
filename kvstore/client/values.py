"""What a client is made of and what its operations give back. No I/O here."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from kvstore._native import CORRUPT, DROPPED, OK, STALE, PagedLayout
from kvstore.clock import Clock, MonotonicClock
from kvstore.errors import BadRequest
from kvstore.types import BlockLayout, Namespace, Part

__all__ = [
    "Counters",
    "FetchResult",
    "KVMemory",
    "Limits",
    "LoadResult",
    "PoolSpec",
    "Reservation",
    "Role",
    "Setup",
    "Table",
]

Role = Literal["both", "scheduler", "worker", "tool"]
STATUS_NAMES = {OK: "ok", STALE: "stale", CORRUPT: "corrupt", DROPPED: "dropped"}


class KVMemory(Protocol):
    """An engine's paged KV memory, as far as a client needs to know it.

    `layer` and `head` count over the whole model: layer in [part.layer_start, +part.layers), head in
    [part.head_start, +part.heads). `read_cell` and `write_cell` go through the engine's own indexing, never
    through `paged()`: the layout proof compares the two.
    """

    @property
    def layout(self) -> BlockLayout:
        """Shape of a block."""
        ...

    @property
    def part(self) -> Part:
        """The cells that this process holds."""
        ...

    @property
    def blocks(self) -> int:
        """Device blocks."""
        ...

    def paged(self) -> PagedLayout:
        """Where the cells lie; the memory must outlive the client."""
        ...

    def read_cell(self, block: int, layer: int, head: int) -> bytes:
        """`layout.cell_bytes` bytes of one cell in canonical order."""
        ...

    def write_cell(self, block: int, layer: int, head: int, data: bytes) -> None:
        """Set one cell from `layout.cell_bytes` bytes in canonical order."""
        ...


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """The device pool that an engine declares.

    Attributes:
        kind: "owned": the daemon allocates its blocks; "borrowed": the engine does and tells (`observe`).
        blocks: size of the pool.
        idle_max: most idle blocks kept (owned).
    """

    kind: Literal["owned", "borrowed"]
    blocks: int
    idle_max: int = 0


@dataclass(frozen=True, slots=True)
class Limits:
    """Every wait and every queue of a client.

    Attributes:
        call_s: deadline of one operation without copies; when it passes, the connection is given up.
        attach_s: deadline of each step of an attach, and of a check.
        copy_s: after this long a copy is cancelled (its blocks become "dropped").
        fetch_s: after this long a fetch is given up; what has come by then is kept.
        retry_s, retry_max_s: first and last pause between two tries to attach (doubling, jittered).
        refused_s: pause after a refusal, unless another socket appears at the path.
        demote_rounds_max: rounds of copying down that one acquire may be asked for.
        handles_max: saves and loads under way at once.
        leases_max: leases held at once.
        populate_threads: threads that fill page tables at attach.
    """

    call_s: float = 1.0
    attach_s: float = 30.0
    copy_s: float = 10.0
    fetch_s: float = 10.0
    retry_s: float = 0.05
    retry_max_s: float = 2.0
    refused_s: float = 30.0
    demote_rounds_max: int = 8
    handles_max: int = 1024
    leases_max: int = 65_536
    populate_threads: int = 1

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not getattr(self, name) > 0:
                raise BadRequest(f"limits.{name}: need more than 0, got {getattr(self, name)!r:.80}")


@dataclass(frozen=True, slots=True)
class Setup:
    """Everything a client was told at construction.

    Attributes:
        path: the daemon's session socket.
        namespace: identity of every block, None for tools.
        memory: paged KV memory, None for schedulers and tools.
        layout: block layout, None for tools.
        tenants: names whose roots are wanted.
        role: see `rpc.messages.Attach`.
        pool: device pool to declare, or None.
        engine: id to join an engine that exists, b"" to be given one.
        copy_threads: threads that copy.
        scratch_block: device block for the layout proof, not in use by the engine.
        scratch_lock: held during the layout proof; None = nobody else writes to the scratch block.
        scratch_restore: put the scratch block's content back after the proof.
        limits, clock: waits, and the time they run on.
    """

    path: Path
    namespace: Namespace | None
    memory: KVMemory | None
    layout: BlockLayout | None
    tenants: tuple[str, ...]
    role: Role
    pool: PoolSpec | None
    engine: bytes
    copy_threads: int
    scratch_block: int
    scratch_lock: threading.Lock | None
    scratch_restore: bool
    limits: Limits
    clock: Clock = field(default_factory=MonotonicClock)

    def __post_init__(self) -> None:
        if self.role in ("both", "worker"):
            if self.memory is None:
                raise BadRequest(f"memory: role {self.role!r} copies, so it needs the engine's KVMemory")
            self.memory.part.check(self.memory.layout)
            if not 0 <= self.scratch_block < self.memory.blocks:
                raise BadRequest(
                    f"scratch_block: need 0 to {self.memory.blocks - 1}, got {self.scratch_block}"
                )
        elif self.memory is not None:
            raise BadRequest(f"memory: role {self.role!r} does not copy; leave memory out or be a worker")
        if self.role not in ("both", "scheduler", "worker", "tool"):
            raise BadRequest(f"role: need both, scheduler, worker or tool, got {self.role!r:.80}")
        if self.role != "tool":
            self._check_identity()
        if self.pool is not None and self.role in ("worker", "tool"):
            raise BadRequest("pool: only the process that schedules declares the device pool")
        owned = self.pool.blocks if self.pool is not None and self.pool.kind == "owned" else 0
        if self.copies and self.scratch_block < owned:
            # A proof after a restart would write into a table that is in use.
            raise BadRequest(f"scratch_block: need one beyond the {owned} blocks of the owned pool")
        if self.engine and len(self.engine) != 16:
            raise BadRequest(f"engine: need 16 bytes or none, got {len(self.engine)}")
        if not 1 <= self.copy_threads <= 64:
            raise BadRequest(f"copy_threads: need 1 to 64, got {self.copy_threads}")

    def _check_identity(self) -> None:
        if self.layout is None:
            raise BadRequest(f"layout: role {self.role!r} needs the block layout")
        if self.namespace is None:
            raise BadRequest(f"namespace: role {self.role!r} needs the identity of its blocks")
        if self.layout.fingerprint != self.namespace.layout:
            raise BadRequest("namespace.layout: is not layout.fingerprint; set it from the layout")
        if str(self.layout.block_tokens) != self.namespace.block_tokens:
            raise BadRequest("namespace.block_tokens: is not layout.block_tokens; set it from the layout")

    @property
    def copies(self) -> bool:
        """Does this process map the arena?"""
        return self.memory is not None


@dataclass(slots=True)
class Counters:
    """What happened since the client was made. Every operation ends in exactly one of them.

    Attributes:
        lookups: asked; = hits + busy + Σ misses.
        hits, busy: answers of these kinds.
        misses: by cause: "unknown", "detached", "digest", "error".
        digest_mismatches: answers whose walk was not our chain.
        loads: begun.
        blocks_loaded: good blocks of loads.
        bad_blocks: by status: "stale", "corrupt", "dropped".
        saves: begun.
        blocks_saved, blocks_dropped: what became of saved blocks.
        attaches: successful; the first one included.
    """

    lookups: int = 0
    hits: int = 0
    busy: int = 0
    misses: dict[str, int] = field(default_factory=dict)
    digest_mismatches: int = 0
    loads: int = 0
    blocks_loaded: int = 0
    bad_blocks: dict[str, int] = field(default_factory=dict)
    saves: int = 0
    blocks_saved: int = 0
    blocks_dropped: int = 0
    attaches: int = 0

    @property
    def reattaches(self) -> int:
        """Attaches after the first."""
        return max(0, self.attaches - 1)


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What became of a load.

    Attributes:
        good: leading blocks whose bytes are verified; everything from here on must be recomputed.
        status: (n,) uint8 per block: `_native.OK`, STALE, CORRUPT or DROPPED. A block whose status is not OK
            holds undefined bytes.
        arrived: leading blocks that were where they could be copied. good < arrived: a copy failed its check,
            or was dropped. good == arrived < n: the others are still on lower tiers, and nothing is wrong
            with what was loaded.
        bytes, seconds: of the copies.
        reason: why blocks are missing; "" if none is.
    """

    good: int
    status: NDArray[np.uint8]
    arrived: int
    bytes: int
    seconds: float
    reason: str = ""

    @property
    def bad(self) -> int:
        """Blocks whose copy failed its check."""
        return int(np.isin(self.status, (STALE, CORRUPT)).sum())


@dataclass(frozen=True, slots=True)
class FetchResult:
    """What became of a fetch.

    Attributes:
        ready: blocks [start, ready) can be copied.
        slots: (ready - start,) their arena slots.
        reason: why ready < stop; "" if it is not.
    """

    ready: int
    slots: NDArray[np.uint32]
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Reservation:
    """Arena slots to write, and what became of the blocks that need no writing.

    Made by `reserve`, written by `write` in every process that holds cells of a block, once in each. It is
    worth nothing to a process that attached, or said `quiesced`, after it was made: then `write` drops it.

    Attributes:
        token: names the filling, 0 = nothing to write.
        slots: (m,) slot per block of the first m, `_native.NONE` where it is not ours to write.
        filled, elsewhere, dropped: see `SaveResult`.
        reason: why blocks were dropped.
        generations: (k,) of the slots that are ours to write, in order.
        epoch, engine: daemon and engine that it belongs to.
    """

    token: int
    slots: NDArray[np.uint32]
    filled: int
    elsewhere: int
    dropped: int
    reason: str = ""
    generations: NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, np.uint64))
    epoch: bytes = b""
    engine: bytes = b""


@dataclass(frozen=True, slots=True)
class Table:
    """A block table of the owned device pool.

    Attributes:
        lease: id to extend, commit under and release.
        added: (k,) device blocks that this call added, in order.
        device: leading blocks of the whole table that hold valid bytes.
        load_start, load_stop: blocks of the table to load.
        slots: (load_stop - load_start,) arena slots to load them from; none where they have to be fetched
            first: HOST is limited.
        generation: attach (`Client.generation`) that the lease belongs to; after another one it is gone.
    """

    lease: int
    added: NDArray[np.uint32]
    device: int
    load_start: int
    load_stop: int
    slots: NDArray[np.uint32]
    generation: int


Callback = Callable[[], None]
