"""Messages that begin a session: identity, layout proof, device pool."""

from __future__ import annotations

import hashlib
from typing import Literal

from kvstore.rpc.messages.base import Message

__all__ = [
    "Attach",
    "Attached",
    "Layout",
    "Pool",
    "Prove",
    "ProveLoad",
    "ProveSlot",
    "Proved",
    "ProvedStore",
    "pattern",
]


class Layout(Message, frozen=True):
    """`types.BlockLayout` on the wire."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    block_tokens: int
    cell_format: str
    kernel_block_tokens: int
    attention: str
    groups: str


class Attach(Message, tag="attach", frozen=True):
    """First message of a session.

    Attributes:
        version: PROTOCOL_VERSION.
        role: "both" (one process schedules and copies), "scheduler", "worker", or "tool" (status only).
        engine: id that an earlier session of this engine was given; empty = mint one.
        namespace: the eight identity fields.
        layout: the block layout; its fingerprint must equal namespace["layout"].
        part: [layer_start, layers, head_start, heads] this process holds.
        tenants: names whose roots are wanted.
        vector: `keys.test_vector()` as this process computes it.
    """

    version: int
    role: Literal["both", "scheduler", "worker", "tool"]
    engine: bytes
    namespace: dict[str, str]
    layout: Layout | None
    part: tuple[int, int, int, int]
    tenants: list[str]
    vector: bytes


class Attached(Message, tag="attached", frozen=True):
    """Welcome. Two fds come with it (none for a tool).

    Attributes:
        epoch: 16 random bytes minted when the daemon started; another epoch = another daemon.
        session: number for logs.
        engine: 16 bytes to hand to the engine's other processes.
        roots: tenant → reuse ("own" / "group") → 32-byte root.
        capacity_bytes: size of the arena.
        keys_max: most keys in one message.
        heartbeat_s: send something at least this often.
        token: fillings up to this one are older than this session: it must not write them.
    """

    epoch: bytes
    session: int
    engine: bytes
    roots: dict[str, dict[str, bytes]]
    capacity_bytes: int
    keys_max: int
    heartbeat_s: float
    token: int


class Prove(Message, tag="prove", frozen=True):
    """Begin the layout proof. Reply: ProveSlot."""


class ProveSlot(Message, tag="prove_slot", frozen=True):
    """Write `pattern(seed, layer, head)` into a device block by your own indexing, store it to `slot`.

    `generation`: of the slot, see Reserved.
    """

    slot: int
    generation: int
    key: bytes
    seed: bytes


class ProvedStore(Message, tag="proved_store", frozen=True):
    """The store is done. Reply: ProveLoad with a new seed, already in the slot, or Failed."""


class ProveLoad(Message, tag="prove_load", frozen=True):
    """Load the slot under the same key; the device block must read as the pattern of this seed."""

    seed: bytes


class Proved(Message, tag="proved", frozen=True):
    """What the load gave. Reply: Done; after ok = False the session stays without a cache."""

    ok: bool


class Pool(Message, tag="pool", frozen=True):
    """Declare this engine's device pool. Reply: Done.

    Attributes:
        kind: "owned": the daemon allocates its blocks; "borrowed": the engine does and tells (Observe).
        blocks: size of the pool.
        idle_max: `l2_blocks_max`, most idle blocks kept (owned).
    """

    kind: Literal["owned", "borrowed"]
    blocks: int
    idle_max: int


def pattern(seed: bytes, layer: int, head: int, length: int) -> bytes:
    """Bytes of one cell in the layout proof: SHAKE-128(seed ‖ u32le layer ‖ u32le head).

    Both ends compute it without the native core, so a wrong copy cannot agree with itself.
    """
    shake = hashlib.shake_128(seed + layer.to_bytes(4, "little") + head.to_bytes(4, "little"))
    return shake.digest(length)
