"""The store: lookup → fetch → release, and reserve → publish | abort.

One instance lives on the daemon's event loop and owns all metadata; nothing here waits, locks, or moves block
bytes. A request costs a handful of native calls on arrays, whatever its length.

A miss, busy or dropped block is a value (`Match`, `Reservation`); exceptions are for callers' mistakes.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvstore import _native, planning, quarantine
from kvstore._native import NONE, Reserved, Walk
from kvstore.callers import Caller, Root
from kvstore.clock import Clock
from kvstore.config import Config, Salts
from kvstore.errors import BadRequest, Refused
from kvstore.events import Snapshot
from kvstore.fetching import Fetching
from kvstore.group import Group
from kvstore.intent import Intent
from kvstore.keep.keeping import Keeping
from kvstore.keys import KEY_BYTES
from kvstore.leases import Lease
from kvstore.matching import touch, walk_of
from kvstore.memory import open_disk, open_memory
from kvstore.outcomes import Match, Published, Reservation
from kvstore.planning import Held
from kvstore.progress import ShowProgress
from kvstore.rot import drop_rotten
from kvstore.tenants import Tenants
from kvstore.types import FetchPlan, Namespace

__all__ = ["Match", "Published", "Reservation", "Store"]

# Of one chain (native/src/index.h: kDepthMax).
BLOCKS_MAX = 262_144
# Of a match whose second trip is due: its plan comes with that.
_ASKED_ON = FetchPlan(0, 0, (), "the keys of a gap are asked for first")


class Store:
    """All trust groups of one daemon."""

    def __init__(self, config: Config, salts: Salts, clock: Clock, disk_faults: str = "") -> None:
        self.config = config
        self.clock = clock
        self.epoch = os.urandom(16)
        self.groups: dict[str, Group] = {}
        self.tenants = Tenants(config, salts)
        self._disk_faults = disk_faults

    def open(self, progress: ShowProgress | None = None, keeping: Keeping | None = None) -> None:
        """Make every group's arena, or take it over, and open its disk.

        Args:
            keeping: what the daemon before has left, and where this one leaves its own.

        Raises:
            OutOfMemory: names the key to lower.
            ConfigError: an NVME directory cannot be used.
        """
        for name in self.config.groups():
            report = None if progress is None else _named(progress, name)
            memory = open_memory(self.config, name, report, keeping)
            open_disk(self.config, name, memory, progress, self._disk_faults)
            group = self.groups[name] = Group(name, memory, self.config, self.clock, self.epoch)
            if memory.adopted is not None and keeping is not None:
                quarantine.begin(group, memory.adopted, keeping.writers())
        if keeping is not None:
            self.tenants = Tenants(self.config, keeping.salts)

    def close(self) -> None:
        """Drop the arenas (clients that still map them keep their own view until they unmap)."""
        for group in self.groups.values():
            group.close()
        self.groups.clear()

    # ---- identity ----------------------------------------------------------------------------------------

    def group_of(self, tenants: list[str]) -> Group:
        """The one group that all these tenants share.

        Raises:
            BadRequest: none named, or of several groups (an engine maps one arena).
            Refused: a tenant is not configured.
        """
        return self.groups[self.tenants.group_of(tenants)]

    def roots(self, group: Group, tenants: list[str], namespace: Namespace) -> dict[str, dict[str, bytes]]:
        """Roots that these tenants may use in a namespace: tenant → "own" / "group" → 32 bytes."""
        out: dict[str, dict[str, bytes]] = {}
        for name in tenants:
            origins = self.tenants.origins(name, namespace.digest).values()
            out[name] = {o.reuse: group.roots.add(o).key for o in origins}
        return out

    # ---- reading -----------------------------------------------------------------------------------------

    def lookup(
        self,
        caller: Caller,
        root: bytes,
        blocks: int,
        positions: NDArray[np.uint32],
        keys: NDArray[np.uint8],
        intent: Intent = Intent(),  # noqa: B008 it never changes
    ) -> Match:
        """Longest known prefix of a chain, with a lease on it (LAWS C13, first trip).

        Args:
            root: one of the caller's roots.
            blocks: length of the chain that may be reused.
            positions: (k,) ascending positions of the keys sent.
            keys: (k, 32).
            intent: what is known of the request, for its plan.

        Raises:
            BadRequest: malformed or contradictory keys; nothing was changed.
            LimitExceeded: too many leases.
        """
        group = caller.group
        group.roots.of(caller, root)
        tenant, payer = group.roots.tenant_of(caller, root), group.roots.payer_of(caller, root)
        if enough := group.quotas.lookup(payer, group.leases.count_of(payer)):
            group.meters.count_lookup(tenant, min(max(0, blocks), BLOCKS_MAX) * caller.layout.block_tokens)
            return Match(None, 0, 0, 0, FetchPlan(0, 0, (), enough), b"", enough)
        walk = walk_of(group, root, blocks, positions, keys)
        group.count_lookup(tenant, blocks, caller.layout)
        return self._match(caller, None, root, blocks, walk, intent)

    def extend(
        self, caller: Caller, lease_id: int, positions: NDArray[np.uint32], keys: NDArray[np.uint8]
    ) -> Match:
        """Second trip: the keys of the gap. The lease moves to the deeper node, or stays where it is."""
        group = caller.group
        lease = group.leases.get(caller.session, lease_id)
        walk = walk_of(group, lease.root, lease.blocks_max, positions, keys)
        return self._match(caller, lease, lease.root, lease.blocks_max, walk, lease.intent)

    def _match(
        self,
        caller: Caller,
        lease: Lease | None,
        root: bytes,
        blocks: int,
        walk: Walk,
        intent: Intent,
    ) -> Match:
        group = caller.group
        held = Held(caller.engine.device.match(walk), group.host.match(walk), group.nvme.match(walk))
        length = max(held.above, held.disk)
        if lease is not None and length <= len(lease.nodes):  # the gap knew nothing more
            lease.host = group.host.leading(lease.nodes[: lease.host])  # some may have been dropped since
            digest = _native.keys_digest(group.index.keys(lease.nodes))
            return self._planned(caller, lease, len(lease.nodes), walk.gap_stop, digest)
        tenant = group.roots.tenant_of(caller, root)
        if not length:
            made = planning.plan(caller, intent, blocks, held, 0, tenant)
            return Match(None, walk.depth, walk.gap_stop, 0, made.fetch_plan(), b"")
        nodes = walk.nodes[:length]
        first = lease is None
        if lease is None:
            payer = group.roots.payer_of(caller, root)
            lease = group.leases.grant(caller.session, root, blocks, nodes, payer)
            lease.tenant, lease.block_tokens, lease.intent = tenant, caller.layout.block_tokens, intent
        else:
            lease.nodes = nodes
            group.leases.repin(lease, int(nodes[-1]))
        lease.device, lease.host, lease.disk = held.device, held.host, held.disk
        group.counters.matches += 1
        touch(caller, nodes, held.host)
        digest = group.index.digest(walk, length)
        if first and walk.gap_stop > walk.depth == length:  # it will extend: then it is planned
            return Match(lease, walk.depth, walk.gap_stop, digest, _ASKED_ON, b"")
        return self._planned(caller, lease, walk.depth, walk.gap_stop, digest)

    def _planned(self, caller: Caller, lease: Lease, known: int, gap_stop: int, digest: int) -> Match:
        """The match of a lease is final: decide what to do with it."""
        group = caller.group
        held = Held(lease.device, lease.host, lease.disk)
        made = planning.plan(caller, lease.intent, lease.blocks_max, held, lease.id, lease.tenant)
        lease.planned, plan = made, made.fetch_plan()
        # Slots of what is on HOST; the rest of the load range is named by a fetch.
        at_once = 0 if group.fetches.pace.limited else lease.host
        stop = max(plan.load_start, min(plan.load_stop, at_once))
        runs = group.host.runs(lease.nodes[plan.load_start : stop], caller.shape)
        if held.disk > held.above >= plan.load_stop and group.probing is not None:
            group.probing.consider(lease.nodes[held.above : held.disk], caller.shape)
        return Match(lease, known, gap_stop, digest, plan, runs)

    def fetch(
        self,
        caller: Caller,
        lease_id: int,
        start: int,
        stop: int,
        on_progress: Callable[[Fetching], None] = lambda _: None,
        *,
        watched: bool = True,
    ) -> Fetching:
        """Bring blocks [start, stop) of a lease to the arena: see kvstore/fetching.py.

        Args:
            watched: the lag rule of the lease's plan holds; False for those who cannot compute instead.
            on_progress: called on the loop whenever more is ready, until the fetch is over; not by this call.

        Raises:
            NotFound: no such lease, or a block of the range was dropped since.
            BadRequest: the range is not inside the match, or a fetch of this lease is under way.
        """
        group = caller.group
        lease = group.leases.get(caller.session, lease_id)
        watch = lease.planned.watch(start) if watched and lease.planned is not None else None
        lease.wanted = max(lease.wanted, stop)
        return group.fetches.begin(lease, start, stop, caller.shape, on_progress, watch)

    def fetch_tail(
        self,
        caller: Caller,
        lease_id: int,
        start: int,
        stop: int,
        on_progress: Callable[[Fetching], None] = lambda _: None,
    ) -> Fetching:
        """The same from the last block down, for an engine that computes the first ones meanwhile.

        Raises:
            NotFound: no such lease.
            BadRequest: the range is not inside the match, or a fetch of this lease is under way.
        """
        group = caller.group
        lease = group.leases.get(caller.session, lease_id)
        return group.fetches.begin_tail(lease, start, stop, caller.shape, on_progress)

    def report(self, caller: Caller, lease_id: int, bad: NDArray[np.uint32]) -> int:
        """Blocks that failed a client's check: verify them here, drop the rotten; how many those were.

        Raises:
            BadRequest: a position is outside the match.
        """
        return drop_rotten(caller, caller.group.leases.get(caller.session, lease_id), bad)

    # ---- writing -----------------------------------------------------------------------------------------

    def reserve(self, caller: Caller, root: bytes, parent: bytes, keys: NDArray[np.uint8]) -> Reservation:
        """Slots for blocks that continue `parent`; room is made inline, leaves first.

        Args:
            parent: key of the block before keys[0], or the root itself.
            keys: (n, 32).

        Raises:
            BadRequest: duplicate keys, or keys that contradict the index.
            LimitExceeded: too many open fillings.
        """
        group = caller.group
        node = self.parent_node(caller, root, parent)
        if node == NONE:
            return Reservation(None, _nothing(), 0, 0, len(keys), reason="the parent block is not known here")
        if not group.can_fill(caller.engine):
            why = "not every cell of a block has a process attached that writes it"
            return Reservation(None, _nothing(), 0, 0, len(keys), reason=why)
        group.check_room_for_filling(caller)
        payer = group.roots.payer_of(caller, root)
        if enough := group.quotas.save(payer):
            group.counters.refused_saves += len(keys)
            return Reservation(None, _nothing(), 0, 0, len(keys), reason=enough)
        got = self._reserve_inline(caller, node, keys, group.roots[root])
        nodes, slots = np.concatenate([g.nodes for g in got]), np.concatenate([g.slots for g in got])
        filled, elsewhere = sum(g.filled for g in got), sum(g.elsewhere for g in got)
        dropped, ours = got[-1].dropped, slots != NONE
        filling = group.begin_filling(caller, nodes[ours], slots[ours]) if ours.any() else None
        group.quotas.saves(payer, int(ours.sum()) * caller.shape.slot_bytes)
        group.record_changes()
        reason = busy = ""
        if dropped:
            group.counters.refused_saves += dropped
            counts = group.host.counts()
            reason = f"no room: {counts['ready']} slots pinned or in use, {counts['filling']} being filled"
            if got[-1].over_limit:
                reason = group.quotas.full(group.roots[root].node)
            busy = reason if filling is None and not filled and not elsewhere else ""
        return Reservation(filling, slots, filled, elsewhere, dropped, reason, busy)

    def _reserve_inline(
        self, caller: Caller, node: int, keys: NDArray[np.uint8], root: Root
    ) -> list[Reserved]:
        """What was reserved, in one or two pieces of the chain."""
        group, now_s, stall_s = caller.group, self.clock.now(), self.config.daemon.stall_s
        owner = caller.engine.id
        try:
            got = [group.host.reserve(node, keys, caller.shape, now_s, stall_s, owner)]
        except ValueError as error:
            raise BadRequest(f"reserve: {error}") from None
        if got[0].dropped:
            # Only now do silent sessions lose their pins: they cost nothing until memory is needed.
            kept = len(got[0].nodes)
            last = int(got[0].nodes[-1]) if kept else node
            group.index.pin(last)  # a hollow parent may live by one of those pins alone
            if group.revoke_stale(root if got[0].over_limit else None):
                got.append(group.host.reserve(last, keys[kept:], caller.shape, now_s, stall_s, owner))
            group.index.unpin(last)
        return got

    def publish(self, caller: Caller, token: int, blocks: int, checked: bool) -> Published:
        """A rank has written its part of the first `blocks` slots of a filling.

        Raises:
            NotFound: no such filling of this engine (publish without reserve, twice, or after abort), or
                this process was not there when it was reserved.
            BadRequest: more blocks than the filling has.
            Refused: a scheduler writes nothing.
        """
        group = caller.group
        if not caller.copies:
            raise Refused("publish: a scheduler holds no part of a block; its workers publish")
        filling = group.fillings.get(caller.engine.id, token)
        if not 0 <= blocks <= len(filling.slots):
            raise BadRequest(f"publish.blocks: need 0 to {len(filling.slots)}, got {blocks}")
        filling.cover(caller.session, blocks, checked)
        if not filling.over:
            return Published(0, 0, pending=True)
        ready = group.finish_filling(filling)
        group.record_changes(caller.engine)
        return Published(ready, len(filling.slots) - ready, pending=False)

    def abort(self, caller: Caller, token: int) -> None:
        """Give a filling up: this process will not write (any more of) its part.

        Nothing of it becomes readable. Its slots are free once every other part has had its say too; a
        scheduler has no part, so its abort alone never frees what a worker may write.

        Raises:
            NotFound: as for publish.
        """
        group = caller.group
        filling = group.fillings.get(caller.engine.id, token)
        if caller.copies:
            filling.cover(caller.session, 0, checked=False)
        filling.blocks = 0
        if filling.over:
            group.finish_filling(filling)
            group.record_changes(caller.engine)

    def parent_node(self, caller: Caller, root: bytes, parent: bytes) -> int:
        """Node of `parent` under `root`, NONE when it is not known.

        Raises:
            BadRequest: not this caller's root, or no key.
        """
        group = caller.group
        known = group.roots.of(caller, root)
        if parent == root:
            return known.node
        if len(parent) != KEY_BYTES:
            raise BadRequest(f"parent: need {KEY_BYTES} bytes, got {len(parent)}")
        node = group.index.find(parent)
        # Of another root: as unknown as one that nobody has.
        return node if node != NONE and group.index.root_of(node) == known.node else NONE

    def snapshot(self, group: Group) -> Snapshot:
        """Everything readable now, for a new subscriber."""
        devices = {e.id: e.device.keys() for e in group.engines.values()}
        return Snapshot(self.epoch, group.events.sequence, group.host.keys(), group.nvme.keys(), devices)

    def check(self) -> None:
        """Every conservation law of every group.

        Raises:
            RuntimeError: names the first that is broken.
        """
        for name, group in self.groups.items():
            try:
                group.check()
            except RuntimeError as error:
                raise RuntimeError(f"group {name}: {error}") from error


def _named(progress: ShowProgress, name: str) -> Callable[[int, int], None]:
    return lambda done, total: progress(name, done, total)


def _nothing() -> NDArray[np.uint32]:
    return np.empty(0, np.uint32)
