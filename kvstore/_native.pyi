"""Typed face of libkvcore (native/src). Python sees batches, native sees blocks.

Ids are uint32, `NONE` (2**32 - 1) stands for "nothing here". Every call that moves bytes releases the GIL.
A caller's mistake raises ValueError; a broken invariant raises RuntimeError.
"""

import numpy as np
from numpy.typing import NDArray

from kvstore._native_disk import *  # noqa: F403 one module at run time, three stubs to read
from kvstore._native_router import *  # noqa: F403

U8 = NDArray[np.uint8]
U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]
Bytes = bytes | bytearray | memoryview

NONE: int
PAGE_BYTES: int
KEYS_MAX: int

# Status of one block in a Completion.
OK: int
STALE: int
CORRUPT: int
DROPPED: int

# Slot states, as in a control entry.
FREE: int
FILLING: int
READY: int
DRAINING: int

def blake2b(data: Bytes, *, key: Bytes = b"", person: Bytes = b"", digest_size: int = 32) -> bytes: ...
def chain_keys(
    parent: Bytes,
    tokens: U32,
    block_tokens: int,
    extra: Bytes = b"",
    extra_offsets: U32 | None = None,
) -> U8:
    """Keys (n_full_blocks, 32) of the full blocks of `tokens`; the tail is ignored.

    extra_offsets: (n_full_blocks + 1,) cuts `extra` into one piece per block; None = no extras.
    """

def keys_digest(keys: U8) -> int:
    """Order-sensitive 64-bit digest of (n, 32) keys: Σ first8(key_i) · (2i + 1) mod 2⁶⁴."""

def keys_digests(keys: U8) -> U64: ...  # (n,) keys_digest of the first key, of the first two, …
def crc32c(data: Bytes, value: int = 0) -> int: ...
def crc_paths() -> list[str]:
    """Copy+CRC implementations this CPU can run, best first: vpclmulqdq512, pclmul128, sse42, plain."""

def crc_path() -> str: ...
def set_crc_path(name: str) -> None:
    """For tests: force one of crc_paths(). Raises ValueError for others."""

def copy_crc(target: U8, source: U8) -> int:
    """Non-temporal copy that returns the CRC32C of the bytes on their way. Equal lengths."""

class Arena:
    @staticmethod
    def create(name: str, capacity_bytes: int) -> Arena: ...
    @staticmethod
    def adopt(name: str, data_fd: int, capacity_bytes: int) -> Arena:
        """Go on with the bytes of an arena that another process made."""
    @staticmethod
    def attach(data_fd: int, control_fd: int, capacity_bytes: int) -> Arena: ...
    def prefault(self, threads: int, huge_pages: bool = True, lock: bool = False) -> bool: ...
    def populate(self, threads: int) -> None: ...
    def close(self) -> None:
        """Drop this holder's mapping. Anything that still uses it keeps it alive (shared ownership)."""
    prefaulted_bytes: int
    capacity_bytes: int
    pages: int
    data_fd: int
    control_fd: int
    def view(self, slot: int, length: int) -> U8:
        """Writable window on a slot's bytes (tests, layout proof, repair)."""
    def control(self, slot: int) -> ControlSnapshot: ...

class ControlSnapshot:
    generation: int
    state: int
    length: int
    crc: int
    checked: int
    fingerprint: bytes

class SlotFormat:
    """[layer][head][cell] with cells padded to 64 B, then a CRC32C per cell, rounded to 4 KiB."""
    def __init__(self, layers: int, heads: int, cell_bytes: int) -> None: ...
    layers: int
    heads: int
    cell_bytes: int
    cell_stride: int
    @property
    def table_offset(self) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def slot_bytes(self) -> int: ...

class PagedLayout:
    """Where one rank's cells lie in an engine's paged KV memory.

    A cell is, for each plane, `pieces` runs of `piece_bytes` at
    base[layer, plane] + block * block_stride + head * head_stride + piece * piece_stride;
    planes · pieces · piece_bytes == cell_bytes. Cells land in rows [layer_start, +layers) and columns
    [head_start, +heads) of the slot. The caller keeps the memory alive.
    """
    def __init__(
        self,
        bases: U64,
        *,
        blocks: int,
        heads: int,
        block_stride: int,
        head_stride: int,
        piece_stride: int,
        piece_bytes: int,
        pieces: int,
        layer_start: int = 0,
        head_start: int = 0,
    ) -> None: ...

class Completion:
    job: int
    status: U8
    """(n,) one of OK, STALE, CORRUPT, DROPPED per block, in the order of the call."""
    bytes: int
    seconds: float

class Copier:
    """Threads that copy between an arena and paged KV memory; one submission and one completion queue."""
    def __init__(self, threads: int, *, queue_max: int = 1024) -> None: ...
    @property
    def eventfd(self) -> int:
        """Readable while completions() has something."""
    def store(
        self, arena: Arena, format: SlotFormat, layout: PagedLayout, blocks: U32, slots: U32, generations: U64
    ) -> int:
        """Copy device blocks into FILLING slots, cells summed on the way. Returns a job id.

        generations: (n,) of each slot when it was reserved. A slot that is not FILLING in that generation any
        more is somebody else's: its block is STALE and nothing was written.

        Raises BlockingIOError when queue_max jobs wait.
        """
    def load(
        self, arena: Arena, format: SlotFormat, layout: PagedLayout, blocks: U32, slots: U32, keys: U8
    ) -> int:
        """Copy READY slots into device blocks, in order, each checked by LAWS A4 + A5 (fingerprint,
        generation, cell sums). A block whose status is not OK holds undefined bytes."""
    def progress(self, job: int) -> int:
        """Blocks of a running load that are finished, counted from the front (chain order)."""
    def cancel(self, job: int) -> None:
        """Blocks not yet begun become DROPPED; the job still completes, exactly once."""
    def completions(self) -> list[Completion]: ...
    def wait(self, job: int, timeout_s: float) -> Completion | None:
        """Take that job's completion, or None at the timeout. Releases the GIL."""
    def quiesce(self, timeout_s: float) -> bool:
        """Cancel what waits, join what runs; True when nothing can write any more."""
    def close(self) -> None: ...

def verify_slots(arena: Arena, format: SlotFormat, slots: U32, keys: U8) -> U8:
    """(n,) status of READY slots, recomputed from their bytes. Releases the GIL."""

def table_crcs(arena: Arena, format: SlotFormat, slots: U32) -> U32:
    """(n,) CRC32C of each slot's CRC table, as publish() needs it. Reads 4 bytes per cell."""

def slot_generations(arena: Arena, slots: U32) -> U64:
    """(n,) generation of each slot: a FILLING slot's names the hand-out that its writer was given."""

# ---- metadata: one thread (the daemon's loop) owns all of it ----------------------------------------

class Walk:
    """A path in the index from the first block of a chain to the deepest known node that was asked for."""
    @property
    def root(self) -> int: ...
    @property
    def depth(self) -> int:
        """Blocks on the path; 0 = nothing known."""
    @property
    def deepest(self) -> int:
        """Node at depth, or the root's node when depth == 0 and the root is known, else NONE."""
    @property
    def gap_stop(self) -> int:
        """First asked position that is unknown (or n): [depth, gap_stop) is not decided yet."""
    @property
    def nodes(self) -> U32: ...  # (depth,) in chain order
    def packed(self, start: int, stop: int, pages_per_slot: int) -> bytes:
        """pack_slots() of blocks [start, stop), as they lay when the walk was made."""

class Index:
    """Ancestor-closed tree of block keys (LAWS C). Holds no bytes; pools say where bytes are."""
    def __init__(self, nodes_max: int) -> None: ...
    def __len__(self) -> int:
        """Nodes, roots not counted."""
    @property
    def nodes_max(self) -> int: ...
    def root(self, key: Bytes) -> int:
        """Node of a root, made if absent (never reaped)."""
    def find(self, key: Bytes) -> int: ...
    def walk(self, root: Bytes, n: int, positions: U32, keys: U8) -> Walk:
        """positions ascending in [0, n), n <= 262144 blocks, keys (k, 32). ValueError on more than KEYS_MAX
        keys, and where one up to the deepest known key is unknown, or known at another depth, on another
        chain or under another root (its position is named); later keys are only sampled."""
    def digest(self, walk: Walk, length: int) -> int: ...  # of its first keys; its nodes must still be there
    def keys(self, nodes: U32) -> U8: ...
    def parent(self, node: int) -> int: ...
    def depth(self, node: int) -> int: ...
    def root_of(self, node: int) -> int:
        """The root's node above `node`, by the ancestor jumps: depth / 64 steps."""
    def pin(self, node: int) -> None:
        """Keep the node, its ancestors, and the bytes any of them has on the host (holes and hollow nodes in
        between included); on a device, the block of this node. Counts as a use of the chain. O(1) for a node
        with host bytes, else O(hollow nodes above it)."""
    def unpin(self, node: int) -> None: ...
    def pins(self) -> int:
        """Σ pins."""
    @property
    def memory_bytes(self) -> int: ...
    def check(self) -> None:
        """Every invariant of LAWS C11 that the index alone can see; RuntimeError names the first broken."""

class Ledger:
    """What the pool writes down about every slot of a kept arena, for a process that comes after this one."""
    @staticmethod
    def create(name: str, pages: int) -> Ledger: ...
    @staticmethod
    def adopt(fd: int, pages: int) -> Ledger:
        """One that another process has left; ValueError unless it is of an arena of that many pages."""
    def close(self) -> None: ...
    fd: int

class Survey:
    """Every entry of a ledger, judged: first by its own sum, then (verify) by the bytes of its slot."""
    def __init__(self, ledger: Ledger, arena: Arena) -> None:
        """ValueError: somebody is writing, and the ledger cannot say where."""
    def verify(self, threads: int) -> None: ...
    claimed_bytes: int
    verified_bytes: int

class Adopted:
    """What became of the slots, and FILLING ones with stand-in nodes and owners: native/src/pool.h."""

    ready: int
    torn: int
    rotten: int
    orphaned: int
    no_room: int
    nodes: U32
    slots: U32
    owners: U8  # (f, 16)

class Reserved:
    nodes: U32
    """(m,) nodes of the first m keys, m <= n."""
    slots: U32
    """(m,) slot to fill, NONE where the block is READY or someone else is filling it."""
    filled: int  # blocks that were READY already
    elsewhere: int  # blocks another reservation is filling
    dropped: int  # keys beyond m: no room
    over_limit: bool  # because the account's limit is reached, and nothing more of it may leave

class HostPool:
    """Slots of one arena and which node's bytes each holds; leaf-first LRU. One per index (ValueError)."""
    def __init__(self, index: Index, arena: Arena, slab_bytes: int, ledger: Ledger | None = None) -> None: ...
    def adopt(self, survey: Survey, aside: int) -> Adopted:
        """Go on with a kept arena, once: see native/src/pool.h. ValueError: throw pool and index away."""
    def match(self, walk: Walk) -> int:
        """Leading blocks of the walk with READY bytes here."""
    def slots(self, nodes: U32) -> U32:
        """READY slot of each node, or NONE."""
    def missing(self, node: int) -> U32:
        """The blocks from the nearest above with READY bytes here (not it) to node, in chain order."""
    @property
    def slabs(self) -> int: ...
    def ready_nodes(self, start: int = 0, most: int = ...) -> U32:
        """Every node with READY bytes in the slabs [start, start + most)."""
    def touch(self, node: int) -> None:
        """The chain that ends in node was used now. O(1)."""
    def reserve(
        self, parent: int, keys: U8, format: SlotFormat, now_s: float, stall_s: float, owner: Bytes = b""
    ) -> Reserved:
        """Make nodes and FILLING slots for keys, whose chain continues `parent` (a node; pinned until every
        slot of this call is published or aborted). Evicts inline, leaves first, never `parent`'s chain.
        A slot someone else has been filling for longer than stall_s does not count: a second is made.
        owner: 16 bytes for the ledger.
        ValueError: duplicate keys, a key known elsewhere in the tree, more than KEYS_MAX keys."""
    def publish(self, nodes: U32, slots: U32, crcs: U32, length: int, checked: int) -> U8:
        """(n,) 1 = READY now; 0 = freed instead (another writer was first, or its parent holds no bytes)."""
    def abort(self, nodes: U32, slots: U32) -> None:
        """FILLING → FREE; the writer is known to be done."""
    def drop(self, node: int) -> bool:
        """Rot: the node is hollow at once, although children may hold bytes. False if it has no bytes.
        The slot is FREE, or, while a node at or below is pinned, DRAINING until those pins are gone."""
    def forget(self, node: int) -> bool:
        """drop() for bytes that nobody will miss: not counted as rot."""
    def evict(self, format: SlotFormat, slots: int) -> int:
        """Evict up to that many idle leaves of the class (at most KEYS_MAX in one call); how many."""
    def claim(self, root: int, account: int) -> None:
        """The root (a node of depth 0) is this account's (0: nobody's); then settle_lanes()."""
    def set_limit(
        self, account: int, bytes: int | None
    ) -> None: ...  # then settle_lanes(); ValueError: 255 have
    def settle_lanes(self) -> None: ...
    def used_bytes(self, account: int) -> int: ...
    def take_removed(self) -> U8:
        """(n, 32) keys whose bytes left since the last call and are not back."""
    def take_dropped(self) -> dict[str, int]:
        """evicted, orphaned, lost, no_room, over_limit, rot, events_lost (keys not in take_removed())."""
    @property
    def memory_bytes(self) -> int: ...
    @property
    def capacity_slots(self) -> int:
        """free + filling + ready + draining, in slots of the classes that exist now."""
    def counts(self) -> dict[str, int]:
        """free, filling, ready, draining (slots), free_slabs, used_bytes."""
    def check(self) -> None: ...

class Allocation:
    blocks: U32
    """(m,) fresh blocks, pinned once; m == wanted or 0"""
    draining: U32
    """(d,) idle blocks whose bytes are on no lower tier: copy down, then drained(); ask again"""
    draining_nodes: U32

class DevicePool:
    """Blocks of one engine's device pool. L1 = pins > 0, L2 = indexed with pins == 0."""
    def __init__(self, index: Index, host: HostPool | None, blocks: int, idle_max: int) -> None: ...
    def match(self, walk: Walk) -> int: ...
    def blocks_of(self, nodes: U32) -> U32:
        """Block of each node, or NONE."""
    def pin(self, blocks: U32) -> None: ...
    def unpin(self, blocks: U32) -> None:
        """A block without a node becomes FREE at its last unpin, one with a node becomes idle (L2)."""
    def touch(self, node: int) -> None:
        """The chain that ends in node was used now. Nothing happens if the node has no block here."""
    def allocate(self, wanted: int) -> Allocation:
        """Fresh blocks, evicting idle leaves as needed. blocks and draining both empty = Busy. ValueError if
        wanted exceeds the pool or KEYS_MAX. Draining is leaf-first, but the host takes parents first: save
        HostPool.missing(node) (the parents are still here) when copying a draining block down."""
    def trim(self, most: int) -> Allocation:
        """Bring idle blocks down to idle_max, at most `most` at a time (blocks is empty)."""
    def drained(self, blocks: U32) -> None:
        """DRAINING → FREE, whether the copy was published or given up."""
    def adopt(self, blocks: U32) -> None:
        """A table that the engine was using before it attached: FREE → pinned once, in use (by another table,
        or idle) → one pin more. ValueError: a block out of range, draining or named twice."""
    def commit(self, blocks: U32, parent: int, keys: U8) -> U8:
        """Pinned blocks now hold the bytes of keys, a chain after `parent`. (n,) 1 = indexed here, 0 = this
        one stays private: the key has a block here already, its parent has none, or the index is full.
        ValueError: a block named twice, not pinned or holding a key; keys as for HostPool.reserve."""
    def drop(self, node: int) -> bool:
        """Rot: the node's block is no longer matched; FREE now, or at its last unpin. False if absent."""
    def indexed_nodes(self, start: int = 0, most: int = ...) -> U32:
        """Every node with one of the blocks [start, start + most) here."""
    def take_removed(self) -> U8:
        """(n, 32) keys that left since the last call and are not here now."""
    def take_stored(self) -> U8:
        """(n, 32) keys that came since the last call and are here now."""
    def counts(self) -> dict[str, int]:
        """free, mapped, idle, draining; events_lost: keys the two calls above could not keep (resync)."""
    @property
    def memory_bytes(self) -> int: ...
    def close(self) -> None:
        """The engine is gone: every block leaves the index. Later changes raise ValueError."""
    def close_some(self, most: int) -> bool:
        """The same for about `most` blocks; True when none is left. Nothing is found here any more."""
    def check(self) -> None: ...

class Checker:
    """The laws of an index and its host pool in slices, so that nobody waits for a whole check.

    A law about one node or slot is asked when the cursor gets there; counts are compared at the end, and only
    if nothing changed since the checker was made (`settled`). A settled check proves what check() proves.
    Takes 12 bytes a node while it lives.
    """
    def __init__(self, index: Index, host: HostPool | None = None) -> None: ...
    def step(self, most: int) -> bool:
        """Look at about `most` more slots and nodes (0.1 to 0.2 µs each); True when all is done. RuntimeError
        names the first broken law."""
    @property
    def settled(self) -> bool: ...

class DeviceChecker:
    """The same for one device pool: blocks, then nodes. Takes 4 bytes a node while it lives."""
    def __init__(self, pool: DevicePool) -> None: ...
    def step(self, most: int) -> bool: ...
    @property
    def settled(self) -> bool: ...

def pack_slots(slots: U32, pages_per_slot: int) -> bytes:
    """Slots in order as little-endian u32: one each or, if shorter, a pair [first, count] per run."""

def unpack_slots(packed: bytes, count: int, pages_per_slot: int, pages: int) -> U32:
    """(count,) slots as packed; ValueError unless exactly so many, all inside an arena of `pages` pages."""
