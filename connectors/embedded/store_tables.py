"""Block tables over the daemon's owned device pool: what makes the embedded engine reuse KV.

    begin    lookup → acquire (device hits, blocks to load, fresh blocks) → load starts
    ready    load ended: what is verified counts as reused, the rest is computed
    filled   full blocks get their keys (L1/L2 reuse from now on) and are saved to HOST in the background
    finish   what was not saved yet is, saves joined → release: L1 becomes L2

A load copies what is on HOST at once, and the rest as the daemon brings it from the disk, into blocks that
the table has already; other requests go on meanwhile. What does not come within `Limits.fetch_s` is computed.

Without a daemon every table is allocated here from blocks that nobody holds, and the engine runs uncached;
when a daemon is back, `poll` hands it the tables in use (adopt), and once it has them all reuse starts again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from kvstore.keys import KeyChain
from kvstore.types import Busy, Hit, Reuse, Tier

from .tables import Reuse as ReuseName
from .tables import Table, blocks_for

if TYPE_CHECKING:
    from kvstore.client import Client, Load, Save
    from kvstore.client import Table as DaemonTable

    from .request import Report, StepTime

__all__ = ["StoreTables"]

# Saves of one table that may wait for their copy; more are folded into the next call, or into `finish`.
SAVES_PER_TABLE_MAX = 4
# What one adoption can name; the daemon grows no table beyond it either.
TABLE_BLOCKS_MAX = 1 << 16


@dataclass(slots=True)
class _Handle:
    """What StoreTables knows of one table.

    Attributes:
        tokens: the tokens that the table is for, as far as known.
        chain: keys of those tokens' full blocks, None when nothing may be reused or no daemon was there.
        full: leading blocks that hold valid KV.
        lease: of the table, 0 when it was allocated here.
        generation: attach that the lease belongs to.
        committed: of those, leading blocks whose keys the daemon knows.
        saved: leading blocks handed to a save (or on HOST before).
        behind: a save is still owed: one was put off, or a new daemon has not got these blocks.
        sound: after a load with a bad block, leading blocks whose bytes are verified; only those are
            committed, and nothing is saved (LAWS A4). None: no block was bad (some may never have come).
        load: the load under way.
        loading: what it loads.
        saves: under way, oldest first.
        finished: only the saves keep the table alive.
    """

    tokens: Sequence[int]
    reuse: Reuse
    chain: KeyChain | None
    full: int = 0
    lease: int = 0
    generation: int = 0
    committed: int = 0
    saved: int = 0
    behind: bool = False
    sound: int | None = None
    load: Load | None = None
    loading: Hit | None = None
    saves: list[Save] = field(default_factory=list)
    finished: bool = False

    def may_commit(self, chain: KeyChain | None, stop: int) -> int:
        """Of the first `stop` blocks, those that have keys and bytes to stand for."""
        keys = len(chain) if chain is not None else 0
        return min(stop, keys) if self.sound is None else min(stop, keys, self.sound)


class StoreTables:
    """`Tables` over a client whose engine declared an owned pool.

    Args:
        client: attached or not; it re-attaches by itself.
        blocks: size of the device pool.
        block_tokens: tokens per block.
        tenant: whose roots to use.
    """

    def __init__(self, client: Client, blocks: int, block_tokens: int, tenant: str = "default") -> None:
        self._client = client
        self._blocks = blocks
        self._block_tokens = block_tokens
        self._tenant = tenant
        self._live: dict[int, tuple[Table, _Handle]] = {}
        self.read_only = False
        """Look up and load, but commit and save nothing."""
        self.on_loaded: Callable[[list[int]], None] | None = None
        """Called with the blocks that a load has just filled (for experiments)."""
        self.dropped_saves: list[str] = []
        """Reasons of saves that did not keep everything, the last 100."""
        client.on_attach = self._adopt_all

    @property
    def block_tokens(self) -> int:
        return self._block_tokens

    @property
    def capacity_blocks(self) -> int:
        return min(self._blocks, TABLE_BLOCKS_MAX)

    @property
    def attached(self) -> bool:
        """Is there a daemon that answers?"""
        return self._client.attached

    # ---- begin -------------------------------------------------------------------------------------------

    def begin(self, request_id: str, tokens: Sequence[int], reuse: ReuseName) -> Table | None:
        kind = Reuse(reuse)
        chain = self._client.chain(tokens, self._tenant, kind)
        # The last token is always computed: its logits are what was asked for.
        reusable = (len(tokens) - 1) // self._block_tokens
        found = self._client.lookup(chain, reusable) if chain is not None and reusable else None
        lease = found.lease if isinstance(found, Hit) else 0
        total = blocks_for(len(tokens), self._block_tokens)
        got = self._client.acquire(lease, total)
        handle = _Handle(tokens, kind, chain)
        if isinstance(got, Busy):
            if lease:
                self._client.release(lease)
            return None if self._client.attached else self._begin_here(handle, total)
        handle.lease, handle.generation = got.lease, got.generation
        table = Table(got.added.tolist(), {Tier.GPU: got.device * self._block_tokens}, handle)
        handle.full = handle.committed = got.device
        self._live[id(table)] = (table, handle)
        if isinstance(found, Hit):
            self._begin_load(handle, found, got)
        return table

    def _begin_load(self, handle: _Handle, found: Hit, got: DaemonTable) -> None:
        """Load what the table (newer than the lookup) says is on HOST, and what the lookup saw below."""
        below = any(span.tier not in (Tier.GPU, Tier.HOST) for span in found.plan.spans)
        stop = max(got.load_stop, found.plan.load_stop) if below else got.load_stop
        if stop <= got.load_start:
            return
        plan = replace(found.plan, load_start=got.load_start, load_stop=stop)
        handle.loading, handle.saved = replace(found, plan=plan, slots=got.slots), stop
        handle.load = self._client.load(handle.loading, got.added[got.load_start : stop])

    def _begin_here(self, handle: _Handle, total: int) -> Table | None:
        """No daemon: take blocks that no table holds."""
        taken = self._take(total)
        if taken is None:
            return None
        table = Table(taken, {}, handle)
        self._live[id(table)] = (table, handle)
        return table

    def _take(self, count: int) -> list[int] | None:
        held = np.zeros(self._blocks, np.bool_)
        for table, _ in self._live.values():
            held[table.blocks] = True
        free = np.flatnonzero(~held)
        return free[:count].tolist() if len(free) >= count else None

    # ---- while it runs -----------------------------------------------------------------------------------

    def ready(self, table: Table) -> bool:
        handle = _handle(table)
        if handle.load is None or handle.loading is None:
            return True
        result = handle.load.poll()
        if result is None:
            return False
        hit, handle.load, handle.loading = handle.loading, None, None
        start, good = hit.plan.load_start, result.good
        if good < result.arrived:
            handle.sound = start + good
        loaded = table.blocks[start : start + good]
        if self.on_loaded is not None and loaded:
            self.on_loaded(loaded)
        handle.full = start + good
        handle.saved = min(handle.saved, start + good)
        if good:
            for tier, blocks in _by_tier(hit, good).items():
                table.reused_tokens[tier] = blocks * self._block_tokens
            self._commit(table, handle, start + good)
        return True

    def grow(self, table: Table, blocks: int) -> bool:
        handle = _handle(table)
        if handle.lease and handle.generation == self._client.generation and self._client.attached:
            got = self._client.acquire(handle.lease, len(table.blocks) + blocks)
            if isinstance(got, Busy):
                return False
            table.blocks.extend(got.added.tolist())
            return True
        if self._client.attached:
            return False  # a table of ours that is not adopted yet: poll() will do it
        taken = self._take(blocks)
        if taken is None:
            return False
        table.blocks.extend(taken)
        return True

    def filled(self, table: Table, tokens: Sequence[int], computed: int) -> None:
        handle = _handle(table)
        full = computed // self._block_tokens
        if full <= handle.full:
            return
        handle.full, handle.tokens = full, tokens
        if handle.reuse is Reuse.NONE or self.read_only:
            return
        handle.chain = self._client.chain(tokens[:computed], self._tenant, handle.reuse) or handle.chain
        if handle.chain is None or not self._holds(handle):
            return
        self._commit(table, handle, full)
        self._save(table, handle, full)

    def _holds(self, handle: _Handle) -> bool:
        return bool(handle.lease) and handle.generation == self._client.generation

    def _commit(self, table: Table, handle: _Handle, stop: int) -> None:
        stop = handle.may_commit(handle.chain, stop)
        if self.read_only or handle.chain is None or stop <= handle.committed or not self._holds(handle):
            return
        self._client.commit(handle.lease, handle.chain, handle.committed, stop)
        handle.committed = stop

    def _save(self, table: Table, handle: _Handle, stop: int) -> None:
        """Write blocks through to HOST, in chain order, copied while the next step computes."""
        assert handle.chain is not None
        start, stop = handle.saved, min(stop, len(handle.chain))
        if stop <= start or handle.sound is not None:
            return
        handle.behind = len(handle.saves) >= SAVES_PER_TABLE_MAX and not handle.finished
        if handle.behind:
            return
        blocks = np.asarray(table.blocks[start:stop], np.uint32)
        handle.saves.append(self._client.save(handle.chain, start, stop, blocks))
        handle.saved = stop

    # ---- what the daemon counts and learns from ------------------------------------------------------------

    def computed(self, step: StepTime) -> None:
        self._client.note_prefill(
            step.prefill_tokens, step.seconds, step.prefill_area, step.decodes, step.decode_context
        )

    def ended(self, report: Report) -> None:
        if report.ttft_s is not None:
            reused = sum(report.reused.values())
            self._client.note_request(self._tenant, report.ttft_s, report.prompt_tokens, reused)

    # ---- the end -----------------------------------------------------------------------------------------

    def finish(self, table: Table) -> None:
        handle = _handle(table)
        if handle.finished:
            raise RuntimeError("a table was finished twice")
        handle.finished = True
        if handle.load is not None:
            handle.load.cancel()
        if handle.behind and handle.chain is not None and not self.read_only and self._holds(handle):
            self._save(table, handle, handle.full)
        self._reap(table, handle)

    def poll(self) -> None:
        self._client.poll()
        for table, handle in list(self._live.values()):
            self._reap(table, handle)

    def _reap(self, table: Table, handle: _Handle) -> None:
        """Take finished copies; release the table once nothing reads or writes its blocks any more."""
        while handle.saves:
            result = handle.saves[0].poll()
            if result is None:
                break
            handle.saves.pop(0)
            if result.dropped:
                self.dropped_saves = [*self.dropped_saves[-99:], result.reason]
        if not handle.finished:
            return
        if handle.load is not None and handle.load.poll() is None:
            return
        if not handle.saves:
            del self._live[id(table)]
            if self._holds(handle):
                self._client.release(handle.lease)

    def settle(self, timeout_s: float) -> bool:
        """Wait until every save is done; False at the timeout."""
        for _, handle in list(self._live.values()):
            for save in handle.saves:
                if save.wait(timeout_s) is None:
                    return False
        self.poll()
        return True

    def close(self) -> None:
        """Give what still waits a moment, then let the client go."""
        self.settle(5.0)
        self._client.close()

    # ---- a daemon came (back) ----------------------------------------------------------------------------

    def _adopt_all(self) -> bool:
        """Tell a new daemon which blocks are in use and what they hold, before it hands any out.

        Returns:
            Whether it knows all of them: until then no block is anybody's, and `poll` asks again.
        """
        whole = True
        for table, handle in list(self._live.values()):
            if self._holds(handle):
                continue
            # Hashed again: another daemon may hold other salts, and then the old keys mean nothing to it.
            kept = list(handle.tokens[: handle.full * self._block_tokens])
            chain = None if self.read_only else self._client.chain(kept, self._tenant, handle.reuse)
            keys = handle.may_commit(chain, handle.full)
            blocks = np.asarray(table.blocks, np.uint32)
            got = self._client.adopt(blocks, chain, keys)
            if isinstance(got, Busy) and keys:
                keys = 0  # refused for them, perhaps: that the blocks are in use matters more
                got = self._client.adopt(blocks, None, 0)
            if isinstance(got, Busy):
                whole = False
                continue
            handle.lease, handle.generation = got.lease, got.generation
            handle.chain, handle.committed, handle.saved, handle.behind = chain, keys, 0, keys > 0
        return whole


def _handle(table: Table) -> _Handle:
    assert isinstance(table.handle, _Handle)
    return table.handle


def _by_tier(hit: Hit, good: int) -> dict[Tier, int]:
    """Blocks by the tier they came from, of the first `good` of a hit's load range."""
    at_once = min(good, len(hit.slots))
    counts = {Tier.HOST: at_once} if at_once else {}
    start, stop = hit.plan.load_start + at_once, hit.plan.load_start + good
    for span in hit.plan.spans:
        # What was on the device or on HOST when it was looked up, and is not now, has come from NVME.
        tier = Tier.NVME if span.tier in (Tier.GPU, Tier.HOST) else span.tier
        blocks = min(stop, span.stop) - max(start, span.start)
        if blocks > 0:
            counts[tier] = counts.get(tier, 0) + blocks
    return counts
