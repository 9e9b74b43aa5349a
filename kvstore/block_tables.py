"""Block tables of owned device pools: acquire → commit → release, and demotion of what only the device has.

    acquire   device hits (pinned), then blocks to fill from HOST, then fresh ones
    commit    a filled block gets its key and can be reused from now on
    release   pins end: L1 → L2; idle blocks beyond `idle_max` leave

An idle block that must leave and is on no lower tier is demoted first: the engine copies it to HOST by an
order (`Demotion`) and publishes. Children leave before parents, so an order covers the ancestors that HOST
lacks too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstore._native import KEYS_MAX, NONE, Allocation
from kvstore.callers import Caller
from kvstore.errors import BadRequest, KVStoreError
from kvstore.group import Group
from kvstore.leases import Lease
from kvstore.store import Store
from kvstore.tiers.gpu import OwnedPool
from kvstore.transfers import Filling

__all__ = ["Demotion", "Table", "acquire", "adopt", "commit", "release"]

# Idle blocks taken beyond idle_max by one release: bounds the copies that its reply may ask for.
TRIM_MAX = 256
# Longest table, 1 M tokens at 16 a block: bounds one acquire, and what one adopt has to name after a restart.
TABLE_MAX = 1 << 16


@dataclass(frozen=True, slots=True)
class Demotion:
    """Copy device `blocks` to the slots of `filling`, then publish it."""

    filling: Filling
    blocks: NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Table:
    """Answer to an acquire.

    Attributes:
        lease: owner of the table.
        added: blocks that this call appended.
        device: leading blocks that hold valid bytes.
        load_start, load_stop: blocks to fill from `runs`; without any they have to be fetched first.
        demotions: do these first and ask again; nothing was added.
        busy: nothing was added, for this reason.
    """

    lease: Lease
    added: NDArray[np.uint32]
    device: int
    load_start: int
    load_stop: int
    runs: bytes
    demotions: tuple[Demotion, ...] = ()
    busy: str = ""


def acquire(caller: Caller, lease_id: int, blocks: int) -> Table:
    """Make a lease's table `blocks` long: all of it, or nothing is added.

    Cost: O(blocks), below 1 µs each; at most KEYS_MAX demotions are ordered by one call.

    Args:
        lease_id: a lease, or 0 for a table without reuse.
        blocks: wanted length.

    Raises:
        NotFound: no such lease.
        BadRequest: the engine has no owned pool, or the length is out of range.
    """
    pool, group = _owned(caller), caller.group
    if not 1 <= blocks <= pool.blocks:
        raise BadRequest(f"acquire.blocks: need 1 to the pool's {pool.blocks}, got {blocks}")
    if blocks > TABLE_MAX:
        raise BadRequest(f"acquire.blocks: a table has at most {TABLE_MAX} blocks, got {blocks}")
    empty = np.empty(0, np.uint32)
    known = group.leases.get(caller.session, lease_id) if lease_id else None
    length = len(known.table) if known is not None else 0
    hits = pool.hits(known.nodes)[:blocks] if known is not None and not length else empty
    wanted = max(0, blocks - length - len(hits))
    lease = known if known is not None else group.leases.grant(caller.session, b"", 0, empty)
    pool.pin(hits)
    got, demotions = _allocate(caller, pool, wanted)
    if len(got) < wanted:
        pool.unpin(hits)
        if not lease_id:
            group.end_lease(lease)
        group.record_changes(caller.engine)  # what was evicted in vain has left all the same
        counts = pool.counts()
        busy = "" if demotions else f"device pool: {counts['mapped']} of {pool.blocks} blocks are mapped"
        return Table(lease, empty, 0, 0, 0, b"", demotions, busy)
    added = np.concatenate([hits, got])
    first = not len(lease.table)
    lease.table = np.concatenate([lease.table, added])
    group.record_changes(caller.engine)
    if not first:
        return Table(lease, added, lease.device, 0, 0, b"")
    return _first_table(caller, lease, added, len(hits), blocks)


def _first_table(caller: Caller, lease: Lease, added: NDArray[np.uint32], hits: int, blocks: int) -> Table:
    # What the lookup saw may have changed; the table tells what is there now.
    group = caller.group
    on_host = group.host.leading(lease.nodes[hits:blocks]) + hits
    lease.device, lease.host = hits, on_host
    # A limited HOST lets nothing out at once: then they are fetched.
    runs = b"" if group.fetches.pace.limited else group.host.runs(lease.nodes[hits:on_host], caller.shape)
    return Table(lease, added, hits, hits, on_host, runs)


def _allocate(
    caller: Caller, pool: OwnedPool, wanted: int
) -> tuple[NDArray[np.uint32], tuple[Demotion, ...]]:
    """All the blocks that are wanted, or none; a native call takes KEYS_MAX at a time."""
    taken = np.empty(0, np.uint32)
    if wanted > pool.blocks - pool.counts()["mapped"]:
        return taken, ()  # hopeless: nothing is evicted for a part of it
    while len(taken) < wanted:
        part = min(wanted - len(taken), KEYS_MAX)
        got, demotions = _allocate_part(caller, pool, part)
        if len(got.blocks) < part:
            pool.unpin(taken)
            return np.empty(0, np.uint32), demotions
        taken = np.concatenate([taken, got.blocks])
    return taken, ()


def _allocate_part(caller: Caller, pool: OwnedPool, wanted: int) -> tuple[Allocation, tuple[Demotion, ...]]:
    """Allocate; turn what must be drained into orders, or lose it when HOST has no room either."""
    got = pool.allocate(wanted)
    stuck = len(got.blocks) < wanted <= pool.blocks - pool.counts()["mapped"] and not len(got.draining)
    if stuck and caller.group.revoke_stale():  # leases of silent sessions kept idle blocks from leaving
        got = pool.allocate(wanted)
    while len(got.blocks) < wanted and len(got.draining):
        demotions = _demote(caller, pool, got)
        if demotions:
            return got, demotions
        got = pool.allocate(wanted)  # nothing could be saved: the drained blocks are free now
    return got, ()


def _demote(caller: Caller, pool: OwnedPool, got: Allocation) -> tuple[Demotion, ...]:
    group, store_s = caller.group, caller.group.config.daemon.stall_s
    block_of = dict(zip(got.draining_nodes.tolist(), got.draining.tolist(), strict=True))
    orders, waiting = [], set(block_of)
    for victim in got.draining_nodes.tolist():  # rare: saves are written through, so most victims are on HOST
        if victim not in waiting:
            continue  # a deeper victim's chain covered it
        chain = group.host.missing(victim)[:KEYS_MAX]
        blocks = np.array([block_of.get(int(n), NONE) for n in chain], np.uint32)
        blocks = np.where(blocks == NONE, pool.blocks_of(chain), blocks)
        if (blocks == NONE).any():
            continue  # a block above it is neither on HOST nor here: nothing below that could become readable
        parent = group.index.parent(int(chain[0]))
        keys = group.index.keys(chain)
        now_s, owner = group.clock.now(), caller.engine.id
        reserved = group.host.reserve(parent, keys, caller.shape, now_s, store_s, owner)
        ours = reserved.slots != NONE
        nodes, slots, blocks = reserved.nodes[ours], reserved.slots[ours], blocks[: len(ours)][ours]
        if not len(nodes):
            continue
        filling = group.begin_filling(caller, nodes, slots, alone=True)
        drained = np.isin(nodes, got.draining_nodes)
        filling.drain, filling.copied = blocks[drained], blocks[~drained]
        pool.pin(filling.copied)
        waiting.difference_update(nodes[drained].tolist())
        orders.append(Demotion(filling, blocks))
    if waiting:  # no room on HOST, or no way to it: their bytes are given up
        lost = np.array([block_of[node] for node in sorted(waiting)], np.uint32)
        pool.drained(lost)
        group.counters.lost_on_demote += len(lost)
    group.record_changes(caller.engine)
    return tuple(orders)


def commit(
    store: Store,
    caller: Caller,
    lease_id: int,
    root: bytes,
    start: int,
    parent: bytes,
    keys: NDArray[np.uint8],
) -> int:
    """Blocks [start, start + n) of a table hold the bytes of these keys; how many are indexed under them.

    Raises:
        NotFound: no such lease.
        BadRequest: outside the table, or keys that contradict the index.
    """
    pool, group = _owned(caller), caller.group
    lease = group.leases.get(caller.session, lease_id)
    if not 0 <= start <= start + len(keys) <= len(lease.table):
        raise BadRequest(
            f"commit: [{start}, {start + len(keys)}) is not inside a table of {len(lease.table)}"
        )
    node = store.parent_node(caller, root, parent)
    if lease.root not in (b"", root):
        raise BadRequest("commit.root: this lease is on a chain of another root")
    if node == NONE or not len(keys):
        return 0
    try:
        indexed = pool.commit(lease.table[start : start + len(keys)], node, keys)
    except ValueError as error:
        raise BadRequest(f"commit: {error}") from None
    last = group.index.find(keys[-1].tobytes())
    if last != NONE and _continues(group, lease, node, keys):
        lease.root = root
        group.leases.repin(lease, last)  # so that the chain's nodes live as long as its table
    group.record_changes(caller.engine)
    return indexed


def _continues(group: Group, lease: Lease, parent: int, keys: NDArray[np.uint8]) -> bool:
    """Whether a chain of `keys` after `parent` ends at or below the node that the lease pins."""
    if lease.pinned in (NONE, parent):
        return True
    pinned = group.index.keys(np.array([lease.pinned], np.uint32))
    return bool((keys == pinned).all(axis=1).any())


def adopt(
    store: Store, caller: Caller, root: bytes, table: NDArray[np.uint32], keys: NDArray[np.uint8]
) -> Lease:
    """A table that was in use before this daemon knew the engine; its full blocks are indexed again.

    Tables may share a prefix: each gets a pin of its own on the blocks, and the first indexes them. Where a
    key has another block already, the table's own stays private.

    Raises:
        BadRequest: a block is out of range, named twice, or holds another key's bytes by an earlier adoption;
            there are more keys than blocks; the table is longer than TABLE_MAX.
    """
    pool, group = _owned(caller), caller.group
    if len(keys) > len(table):
        raise BadRequest(f"adopt: {len(keys)} keys for a table of {len(table)} blocks")
    if len(table) > TABLE_MAX or len(np.unique(table)) < len(table):
        raise BadRequest(f"adopt.table: need at most {TABLE_MAX} blocks, each named once")
    if root:
        group.roots.of(caller, root)
    lease = group.leases.grant(caller.session, root, 0, np.empty(0, np.uint32))
    try:
        for start in range(0, len(table), KEYS_MAX):
            pool.adopt(table[start : start + KEYS_MAX])
            lease.table = table[: start + KEYS_MAX]  # what the end of the lease unpins
        if root and len(keys):
            _commit_new(store, caller, lease, root, keys)
    except KVStoreError:
        group.end_lease(lease)
        raise
    return lease


def _commit_new(store: Store, caller: Caller, lease: Lease, root: bytes, keys: NDArray[np.uint8]) -> None:
    """Commit those blocks of an adopted table whose keys have no block here yet, in chain order."""
    pool, group = _owned(caller), caller.group
    nodes = np.array([group.index.find(key.tobytes()) for key in keys], np.uint32)
    known = pool.blocks_of(nodes)  # NONE for a NONE node too
    at = 0
    while at < len(keys):
        stop = at
        while stop < len(keys) and known[stop] == NONE:
            stop += 1
        if stop > at:
            parent = keys[at - 1].tobytes() if at else root
            commit(store, caller, lease.id, root, at, parent, keys[at:stop])
        at = stop + 1
    lease.root = root
    # The deepest node of the chain: the others live as long as it does.
    deepest = next((n for key in keys[::-1] if (n := group.index.find(key.tobytes())) != NONE), NONE)
    group.leases.repin(lease, deepest)


def release(caller: Caller, lease_id: int) -> tuple[Demotion, ...]:
    """End a lease; with an owned pool, orders for idle blocks that must leave.

    Raises:
        NotFound: no such lease (released twice, revoked).
    """
    group = caller.group
    group.end_lease(group.leases.get(caller.session, lease_id))
    pool = caller.engine.device
    if not isinstance(pool, OwnedPool):
        return ()
    orders = _demote(caller, pool, pool.trim(TRIM_MAX))
    group.record_changes(caller.engine)
    return orders


def _owned(caller: Caller) -> OwnedPool:
    pool = caller.engine.device
    if not isinstance(pool, OwnedPool):
        raise BadRequest("pool: this engine has no owned device pool; send Pool(kind=owned) after the proof")
    return pool
