"""State of one trust group: its memory, its roots, its engines, and who is asking.

A trust group is one arena and one fault domain. Everything here is owned by the daemon's event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import structlog
from numpy.typing import NDArray

from kvstore import _native, hits
from kvstore._native import NONE, SlotFormat
from kvstore.callers import Caller, Checked, Counters, Engine, Root
from kvstore.clock import Clock
from kvstore.config import Config
from kvstore.decisions import Decisions
from kvstore.errors import LimitExceeded
from kvstore.events import EventKind, EventLog
from kvstore.fetching import Fetches
from kvstore.leases import Lease, Leases, LeaseState
from kvstore.memory import GroupMemory
from kvstore.meters import Meters
from kvstore.policy.admission import Admission
from kvstore.pricing import Pricing, Source
from kvstore.probing import Probing
from kvstore.quotas import Quotas
from kvstore.roots import Roots
from kvstore.tiers.alarms import Alarms
from kvstore.tiers.gpu import OwnedPool
from kvstore.tiers.host import HostTier
from kvstore.tiers.noop import NoDisk
from kvstore.tiers.nvme import NvmeTier
from kvstore.transfers import Filling, Fillings, Handed, mark
from kvstore.types import BlockLayout, Part, Tier

__all__ = ["Group", "finish"]

log = structlog.get_logger()

# A new fleet saves for a while before anything repeats; 1,000 blocks are 16,000 tokens.
ALARM_SAVED_BLOCKS = 1000
ALARM_LOOKUPS = 100
# Reserve calls of one engine that wait for their publish; each holds at least one slot.
FILLINGS_MAX = 4096
# A stopping daemon waits this long for writes under way: a sealed segment is reopened without a scan.
DISK_CLOSE_S = 2.0
# Leases ended in one slice, about 2 µs each.
LEASES_SLICE = 512
# Fillings that a process which is gone leaves in one slice, about 15 µs each.
FILLINGS_SLICE = 64


class Group:
    """One trust group."""

    def __init__(self, name: str, memory: GroupMemory, config: Config, clock: Clock, epoch: bytes) -> None:
        self.name = name
        self.arena = memory.arena
        self.index = memory.index
        self.huge = memory.huge
        self.pricing = Pricing(clock)
        self.host = HostTier(memory)
        self.nvme: NvmeTier | NoDisk = _nvme(memory, self.host, config, clock)
        alarms = self.nvme.alarms if isinstance(self.nvme, NvmeTier) else Alarms(clock)
        self.fetches = Fetches(self.host, self.nvme, alarms)
        self.fetches.pace.set_limits(config.host.limit_bytes_per_s, config.host.added_latency_s)
        self.fetches.pace.on_transfer = partial(self.pricing.observe_transfer, Source(Tier.HOST))
        self.leases = Leases(memory.index, config.daemon.leases_max)
        self.decisions = Decisions()
        self.probing: Probing | None = None
        """None without a disk."""
        self.fillings = Fillings()
        self.events = EventLog(epoch, config.events.log_max, clock)
        self.engines: dict[bytes, Engine] = {}
        self.callers: dict[int, Caller] = {}
        self.quotas = Quotas(name, memory.index, memory.host, memory.disk, clock)
        self.quotas.configure(config)
        self.roots = Roots(memory.index, self.quotas)
        self.counters = Counters()
        self.meters = Meters([tenant.name for tenant in config.tenants if tenant.group == name])
        self.config = config
        self.clock = clock
        self.opened_s = clock.now()
        self.alarm = ""
        """What an operator should look at, "" when nothing."""
        self.checked: Checked | None = None
        self.later: Callable[[Iterator[None]], None] = finish
        """Takes work that may be done in slices; the daemon spreads them over its event loop."""
        if isinstance(self.nvme, NvmeTier):
            self.nvme.on_change = self.record_changes
            self.nvme.offers.may_write, self.nvme.offers.wrote = self.quotas.may_write, self.quotas.wrote
            self.probing = Probing(
                self.pricing, self.decisions, self.leases, self.host, self.nvme, self.clock
            )

    def reconfigure(self, config: Config) -> None:
        """Limits of a reloaded configuration hold from now on."""
        self.config = config
        self.leases.per_session_max = config.daemon.leases_max
        self.fetches.pace.set_limits(config.host.limit_bytes_per_s, config.host.added_latency_s)
        if isinstance(self.nvme, NvmeTier):
            self.nvme.reconfigure(config.nvme)
        self.meters.expect([tenant.name for tenant in config.tenants if tenant.group == self.name])
        self.quotas.configure(config)

    def record_changes(self, engine: Engine | None = None) -> None:
        """Move what the native pools report into the event log."""
        self.events.append(EventKind.REMOVED, Tier.HOST, self.host.take_removed())
        if self.nvme.configured:
            self.events.append(EventKind.STORED, Tier.HOST, self.nvme.take_promoted())
            self.events.append(EventKind.STORED, Tier.NVME, self.nvme.take_stored())
            self.events.append(EventKind.REMOVED, Tier.NVME, self.nvme.take_removed())
        if engine is not None:
            device = engine.device
            self.events.append(EventKind.STORED, Tier.GPU, device.take_stored(), engine=engine.id)
            removed = device.take_removed()
            self.counters.device_removed_blocks += len(removed)
            self.events.append(EventKind.REMOVED, Tier.GPU, removed, engine=engine.id)

    def check_room_for_filling(self, caller: Caller) -> None:
        """Raises LimitExceeded when the engine has FILLINGS_MAX fillings open."""
        if self.fillings.count(caller.engine.id) >= FILLINGS_MAX:
            raise LimitExceeded(f"fillings_max = {FILLINGS_MAX}: publish or abort some before reserving more")

    def can_fill(self, engine: Engine) -> bool:
        """Whether processes that are attached now hold every cell of a block between them."""
        layout, parts = engine.layout, self._parts(engine).values()
        if Part.whole(layout) in parts:  # an engine of one process, as most are
            return True
        held = np.zeros((layout.layers, layout.kv_heads), np.bool_)
        for part in parts:
            mark(held, part)
        return bool(held.all())

    def _parts(self, engine: Engine) -> dict[int, Part]:
        callers = [self.callers[session] for session in engine.sessions]
        return {caller.session: caller.part for caller in callers if caller.copies}

    def begin_filling(
        self, caller: Caller, nodes: NDArray[np.uint32], slots: NDArray[np.uint32], *, alone: bool = False
    ) -> Filling:
        """Record slots that were reserved for this caller's engine: every process of it may write now.

        Args:
            alone: only the caller is told of them (an order, a proof).
        """
        engine = caller.engine
        parts = self._parts(engine)
        if alone:
            parts = {caller.session: caller.part} if caller.copies else {}
        engine.writers |= parts.keys()
        handed = Handed(nodes, slots, _native.slot_generations(self.arena, slots))
        filling = self.fillings.begin(engine.id, caller.session, caller.shape, handed, parts)
        filling.block_tokens = caller.layout.block_tokens
        return filling

    def end_filling(self, filling: Filling) -> None:
        """A filling was published or aborted: whatever waited for its copy goes on."""
        self.fillings.end(filling)
        engine = self.engines.get(filling.engine)
        if engine is not None and isinstance(engine.device, OwnedPool):
            if len(filling.drain):
                engine.device.drained(filling.drain)
            if len(filling.copied):
                engine.device.unpin(filling.copied)

    def finish_filling(self, filling: Filling) -> int:
        """A filling is over: publish what every rank wrote, free the rest; how many became readable."""
        nodes, left = filling.nodes[: filling.blocks], slice(filling.blocks, None)
        ready = 0
        if len(nodes):
            keys = self.index.keys(nodes)
            above = self.index.parent(int(nodes[0]))
            parent = self.index.keys(np.array([above], np.uint32)).tobytes() if above != NONE else b""
            slots = filling.slots[: filling.blocks]
            ready = self.host.publish(nodes, slots, filling.shape, filling.checked)
            if ready == len(keys):
                self.events.append(EventKind.STORED, Tier.HOST, keys, parent=parent)
            else:
                self.events.append(EventKind.STORED, Tier.HOST, keys[self.host.readable(nodes)])
        self.host.abort(filling.nodes[left], filling.slots[left])
        if ready and (held := self.host.leading(nodes)):
            self.offer(int(nodes[held - 1]), filling.shape, filling.block_tokens, reused=False)
        if len(filling.drain):
            self.counters.demoted_blocks += ready
        self.counters.saved_blocks += ready
        self.counters.saved_bytes += ready * filling.shape.length
        self.end_filling(filling)
        return ready

    def offer(self, node: int, shape: SlotFormat, block_tokens: int, *, reused: bool) -> None:
        """The chain that ends in `node` is on HOST: NVME may want it, too."""
        if self.nvme.configured:
            speed = self.meters.prefill_tokens_per_s
            self.nvme.offer(node, shape, block_tokens / speed if speed else None, reused=reused)

    def leave_fillings(self, engine: Engine, session: int) -> Iterator[None]:
        """A process writes no more: its part of every filling is given up, FILLINGS_SLICE at a time."""
        for number, filling in enumerate(self.fillings.of_engine(engine.id), 1):
            if self.fillings.is_open(filling):  # others may have ended it between two slices
                filling.leave(session)
                if filling.over:  # given up: what every rank had written was published at once
                    self.finish_filling(filling)
            if number % FILLINGS_SLICE == 0:
                yield

    def end_lease(self, lease: Lease, state: LeaseState = LeaseState.RELEASED) -> None:
        """Unpin a lease's node and its block table."""
        table, lease.table = lease.table, np.empty(0, np.uint32)
        self.fetches.end(lease)
        caller = self.callers.get(lease.session)
        if len(table) and caller is not None and isinstance(caller.engine.device, OwnedPool):
            caller.engine.device.unpin(table)
        if state is LeaseState.RELEASED:
            caller = self.callers.get(lease.session)
            size_bytes = caller.shape.length if caller is not None else 0
            hits.count(lease, size_bytes, self.counters, self.meters, self.decisions)
        self.leases.end(lease, state)

    def end_leases(self, caller: Caller) -> Iterator[None]:
        """End the leases of a session that is closing, LEASES_SLICE at a time."""
        pool = caller.engine.device
        number = 0
        while (lease := self.leases.newest(caller.session)) is not None:
            table, lease.table = lease.table, np.empty(0, np.uint32)
            self.fetches.end(lease)
            if len(table) and isinstance(pool, OwnedPool) and caller.engine.device is pool:
                pool.unpin(table)
            hits.left(lease, self.decisions)
            self.leases.end(lease, LeaseState.REVOKED)
            number += 1
            if number % LEASES_SLICE == 0:
                yield

    def count_lookup(self, tenant: str, blocks: int, layout: BlockLayout) -> None:
        """A tenant asked about that many blocks, whatever will be found."""
        self.counters.lookups += 1
        self.counters.lookup_blocks += blocks
        self.meters.count_lookup(tenant, blocks * layout.block_tokens)
        if self.counters.lookups % ALARM_LOOKUPS == 0:
            self.watch_hits()

    def watch_hits(self) -> None:
        """Raise the alarm when blocks are saved and asked for and not one is ever found.

        That is what differing hashes, roots or tokenizers look like, and nothing else shows it: the engine
        just computes (LMCache #1139, vLLM #42625).
        """
        counters = self.counters
        if counters.matches:
            self.alarm = ""
        elif not self.alarm and counters.saved_blocks >= ALARM_SAVED_BLOCKS:
            self.alarm = (
                f"{counters.lookups} lookups found none of {counters.saved_blocks} saved blocks: do the "
                "engines agree on model, tokenizer, layout and tenant?"
            )
            log.warning("no hits at all", group=self.name, alarm=self.alarm)

    def revoke_stale(self, account: Root | None = None) -> int:
        """Take the pins of sessions that have been silent too long, LEASES_SLICE of them at most.

        Called under memory pressure only, and again when that was not enough.

        Args:
            account: only those on blocks that count for whom this root's count: no others make room there;
                None = everybody's.
        """
        now, limit = self.clock.now(), self.config.daemon.stale_after_s
        revoked = 0
        for caller in self.callers.values():
            if now - caller.heard_s <= limit:
                continue
            for lease in self.leases.of(caller.session):
                if len(lease.table):  # the engine's own memory
                    continue
                if account is not None and not self._same_account(account, lease):
                    continue
                self.end_lease(lease, LeaseState.REVOKED)
                revoked += 1
                if revoked == LEASES_SLICE:
                    break
            if revoked == LEASES_SLICE:
                break
        self.counters.revoked_leases += revoked
        return revoked

    def _same_account(self, account: Root, lease: Lease) -> bool:
        """Whoever pays for a lease under a shared root, its blocks are the trust group's."""
        root = self.roots.get(lease.root)
        return root is not None and (root.tenant, root.reuse) == (account.tenant, account.reuse)

    def close(self) -> None:
        """End the disk in order, if there is one; drop the arena."""
        self.nvme.close(DISK_CLOSE_S)
        self.fetches.close()
        self.arena.close()

    def check(self) -> None:
        """Every conservation law of the group.

        Raises:
            RuntimeError: names the first that is broken.
        """
        self.index.check()
        self.host.check()
        self.nvme.check()
        for engine in self.engines.values():
            engine.device.check()
        for session in self.callers:
            self.leases.check(session)
        self.check_counters()
        pins = sum(lease.pinned != NONE for lease in self.leases)
        slots = sum(len(filling.slots) for filling in self.fillings)
        if (pins, slots) != (self.leases.pins(), self.fillings.slots()):
            raise RuntimeError(f"leases pin {pins} nodes and fillings hold {slots} slots: miscounted")

    def check_counters(self) -> None:
        """The laws between this group's parts, by counters that each of them keeps. O(1).

        Raises:
            RuntimeError: names the first that is broken.
        """
        held = self.leases.pins() + self.nvme.pins()
        if self.index.pins() != held:
            raise RuntimeError(f"{self.index.pins()} pins in the index, {held} held by leases and by writes")
        filling = self.host.counts()["filling"]
        owned = self.fillings.slots() + self.nvme.filling_slots()
        if filling != owned:
            raise RuntimeError(f"{filling} slots are FILLING, {owned} belong to fillings and promotions")
        counted = self.counters.hit_blocks_by_tier
        if sum(counted.values()) != self.counters.hit_blocks:
            raise RuntimeError(f"{self.counters.hit_blocks} blocks hit are not the sum by tier, {counted}")
        self.meters.check()


def _nvme(memory: GroupMemory, host: HostTier, config: Config, clock: Clock) -> NvmeTier | NoDisk:
    if memory.disk is None:
        return NoDisk()
    nvme = config.nvme
    admission = Admission(nvme.budget_bytes_per_day, clock.now())
    return NvmeTier(memory, host, nvme, clock, admission, config.daemon.stall_s)


def finish(steps: Iterator[None]) -> None:
    """Do all of it now."""
    for _ in steps:
        pass
