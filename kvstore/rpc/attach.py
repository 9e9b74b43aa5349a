"""How a session begins: identity, then the layout proof.

The proof writes through the engine's *real* paged layout and back: the client fills a device block by its
own indexing, its native copy stores it, the daemon reads the canonical slot and overwrites it with another
pattern, the client loads that and compares by its own indexing. A wrong stride, order or dtype is found here,
before the first token depends on it.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from dataclasses import dataclass

import numpy as np

from kvstore import _native
from kvstore._native import NONE, SlotFormat
from kvstore.callers import Caller, Engine
from kvstore.errors import BadRequest, LayoutRefused, LimitExceeded, Refused
from kvstore.group import Group
from kvstore.keys import test_vector
from kvstore.memory import ASIDE_ROOT
from kvstore.rpc.messages import PROTOCOL_VERSION, Attach, Layout, pattern
from kvstore.store import Store
from kvstore.types import BlockLayout, Namespace, Part

__all__ = ["Proof", "caller_of", "check_hello"]

# Of a layout proof in one slice: 4 KiB each, two patterns.
CELLS_SLICE = 64

ENGINE_ID_BYTES = 16


def check_hello(ask: Attach) -> None:
    """Version and key test vector.

    Raises:
        Refused: another protocol version, or another hash.
    """
    if ask.version != PROTOCOL_VERSION:
        raise Refused(
            f"version: daemon speaks {PROTOCOL_VERSION}, client {ask.version}; upgrade the older one"
        )
    if ask.vector != test_vector():
        raise Refused("vector: client and daemon compute different block keys; upgrade the older one")


def caller_of(store: Store, ask: Attach, session: int) -> tuple[Caller, dict[str, dict[str, bytes]]]:
    """Check an attach and make its caller.

    Returns:
        The caller, not yet part of its engine, and the roots by tenant and reuse.

    Raises:
        BadRequest, Refused, LimitExceeded: the message names the field.
    """
    layout = _layout(ask.layout)
    namespace = Namespace.parse(ask.namespace)
    if namespace.layout != layout.fingerprint:
        raise BadRequest(f"namespace.layout: {namespace.layout} is not the layout's {layout.fingerprint}")
    if namespace.block_tokens != str(layout.block_tokens):
        raise BadRequest(f"namespace.block_tokens: {namespace.block_tokens} is not {layout.block_tokens}")
    part = Part(*ask.part)
    part.check(layout)
    group = store.group_of(ask.tenants)
    slab = store.config.host.slab_bytes
    if layout.slot_bytes > slab:
        raise Refused(
            f"layout: a block needs {layout.slot_bytes} bytes, host.slab_bytes is {slab}; raise it in the "
            "daemon's configuration or use smaller blocks"
        )
    if len(ask.engine) not in (0, ENGINE_ID_BYTES):
        raise BadRequest(f"engine: need {ENGINE_ID_BYTES} bytes or none, got {len(ask.engine)}")
    engine_id = ask.engine or os.urandom(ENGINE_ID_BYTES)
    tenants = tuple(ask.tenants)
    engine = group.engines.get(engine_id) or Engine(engine_id, layout, namespace, frozenset(tenants))
    # Its fillings are shaped by the first; another layout (part of the namespace) would publish cells that
    # nobody wrote.
    if engine.namespace != namespace:
        raise Refused(f"engine: {engine_id.hex()} has another layout or namespace; its processes share one")
    # Who has joined an engine may publish and abort what its other processes reserve.
    if engine.tenants != frozenset(ask.tenants):
        raise Refused("engine: its processes name the same tenants, all of them")
    roots = store.roots(group, ask.tenants, namespace)
    allowed = frozenset(key for by_reuse in roots.values() for key in by_reuse.values())
    shape = SlotFormat(layout.layers, layout.kv_heads, layout.cell_bytes)
    now, copies = store.clock.now(), ask.role != "scheduler"
    return Caller(session, group, engine, layout, shape, part, allowed, now, copies, tenants), roots


def _layout(wire: Layout | None) -> BlockLayout:
    if wire is None:
        raise BadRequest("layout: missing; only a tool may attach without one")
    return BlockLayout(
        wire.layers,
        wire.kv_heads,
        wire.head_dim,
        wire.dtype,
        wire.block_tokens,
        wire.cell_format,
        wire.kernel_block_tokens,
        wire.attention,
        wire.groups,
    )


@dataclass(slots=True)
class Proof:
    """One run of the layout proof, on a slot of its own under a root that nobody else knows."""

    group: Group
    caller: Caller
    key: bytes
    node: int
    slot: int
    generation: int
    seed: bytes
    token: int
    stored: bool = False
    published: bool = False
    ended: bool = False

    @staticmethod
    def begin(store: Store, caller: Caller) -> Proof:
        """Reserve the slot.

        Raises:
            LimitExceeded: the arena has no slot to spare now; try again later.
        """
        group = caller.group
        group.check_room_for_filling(caller)
        root, key = group.index.root(ASIDE_ROOT), os.urandom(32)
        keys = np.frombuffer(key, np.uint8).reshape(1, 32)
        now_s, stall_s = store.clock.now(), store.config.daemon.stall_s
        got = group.host.reserve(root, keys, caller.shape, now_s, stall_s, caller.engine.id)
        if not len(got.slots) or got.slots[0] == NONE:
            raise LimitExceeded("proof: the arena is full of pinned blocks; attach again later")
        filling = group.begin_filling(caller, got.nodes, got.slots, alone=True)
        group.record_changes()
        node, slot, generation = int(got.nodes[0]), int(got.slots[0]), int(filling.generations[0])
        return Proof(group, caller, key, node, slot, generation, os.urandom(16), filling.token)

    def check_store(self) -> Generator[None, None, bytes]:
        """The client stored pattern(seed): compare the canonical slot, put another pattern there.

        Pauses after every CELLS_SLICE cells (a millisecond or two); gives up when the proof was ended.

        Returns:
            The seed of the new pattern, b"" if the proof was ended meanwhile.

        Raises:
            LayoutRefused: a cell is not where the layout says, or not what was written.
        """
        caller, shape = self.caller, self.caller.shape
        self.stored = True
        view = self.group.arena.view(self.slot, shape.length)
        table = view[shape.table_offset :].view(np.uint32)
        seed = os.urandom(16)
        for number in range(shape.layers * shape.heads):
            if number and number % CELLS_SLICE == 0:
                yield
                if self.ended:
                    return b""
            layer, head = divmod(number, shape.heads)
            cell = view[number * shape.cell_stride :][: shape.cell_bytes]
            expected = pattern(self.seed, layer, head, shape.cell_bytes)
            wrong = cell.tobytes() != expected or table[number] != _native.crc32c(expected)
            if wrong and caller.part.holds(layer, head):
                raise LayoutRefused(
                    f"layout proof: cell (layer {layer}, head {head}) does not hold what the engine wrote; "
                    f"its paged memory is not {caller.layout.cell_format} with these strides"
                )
            fresh = pattern(seed, layer, head, shape.cell_bytes)
            cell[:] = np.frombuffer(fresh, np.uint8)
            table[number] = _native.crc32c(fresh)
        filling = self.group.fillings.get(caller.engine.id, self.token)
        self.group.host.publish(filling.nodes, filling.slots, shape, checked=True)
        self.group.end_filling(filling)
        self.published = True
        return seed

    def end(self) -> None:
        """Give the slot back, unless the client may still be writing to it: then its process decides."""
        self.ended = True
        if self.published:
            self.group.host.forget(self.node)
        elif self.stored:  # it said that its store is done, and failed: a retry must not cost another slot
            filling = self.group.fillings.get(self.caller.engine.id, self.token)
            filling.blocks = 0
            self.group.finish_filling(filling)
        self.group.record_changes()
