"""Block tables over the daemon's owned device pool: what makes the embedded engine reuse KV.

    begin    lookup → acquire (device hits, blocks to load, fresh blocks) → load starts
    ready    load ended: what is verified counts as reused, the rest is computed
    filled   full blocks get their keys (L1/L2 reuse from now on) and are saved to HOST in the background
    finish   what was not saved yet is, saves joined → release: L1 becomes L2

A load copies what is on HOST at once, and the rest as the daemon brings it from the disk, into blocks that
the table has already; other requests go on meanwhile. What does not come within `Limits.fetch_s` is computed.
Where the plan says so, nothing is loaded, or only a tail, while its head is computed (splitting.py).

Without a daemon every table is allocated here from blocks that nobody holds, and the engine runs uncached;
when a daemon is back, `poll` hands it the tables in use (adopt), and once it has them all reuse starts again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvstore.intent import Intent
from kvstore.types import Busy, Choice, Hit, Reuse, Tier

from .handle import Handle
from .pace import Pace
from .splitting import Split, by_tier, part
from .tables import Joined, Table, blocks_for
from .tables import Reuse as ReuseName

if TYPE_CHECKING:
    from kvstore.client import Client
    from kvstore.client import Table as DaemonTable

    from .request import Report, StepTime

__all__ = ["StoreTables"]

# Saves of one table that may wait for their copy; more are folded into the next call, or into `finish`.
SAVES_PER_TABLE_MAX = 4
# What one adoption can name; the daemon grows no table beyond it either.
TABLE_BLOCKS_MAX = 1 << 16


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
        self._live: dict[int, tuple[Table, Handle]] = {}
        self.read_only = False
        """Look up and load, but commit and save nothing."""
        self.force: Choice | None = None
        """Do this with every match, whatever its plan says (for experiments)."""
        self.can_split = True
        """Whether plans may split (False for experiments)."""
        self.on_loaded: Callable[[list[int]], None] | None = None
        """Called with the blocks that a load has just filled (for experiments)."""
        self.dropped_saves: list[str] = []
        """Reasons of saves that did not keep everything, the last 100."""
        self._plans: dict[str, int] = {}  # of unfinished requests, by their names
        self._pace = Pace()
        client.on_attach = self._adopt_all

    @property
    def block_tokens(self) -> int:
        return self._block_tokens

    @property
    def capacity_blocks(self) -> int:
        return min(self._blocks, TABLE_BLOCKS_MAX)

    @property
    def client(self) -> Client:
        """Whom it asks."""
        return self._client

    @property
    def attached(self) -> bool:
        """Is there a daemon that answers?"""
        return self._client.attached

    # ---- begin -------------------------------------------------------------------------------------------

    def begin(
        self, request_id: str, tokens: Sequence[int], reuse: ReuseName, ahead_tokens: int = 0
    ) -> Table | None:
        kind = Reuse(reuse)
        chain = self._client.chain(tokens, self._tenant, kind)
        # The last token is always computed: its logits are what was asked for.
        reusable = (len(tokens) - 1) // self._block_tokens
        found = None
        if chain is not None and reusable:
            found = self._client.lookup(chain, reusable, self._intent(request_id, len(tokens), ahead_tokens))
            if not isinstance(found, Busy):
                self._plans[request_id] = found.plan.id if isinstance(found, Hit) else found.plan
        lease = found.lease if isinstance(found, Hit) else 0
        total = blocks_for(len(tokens), self._block_tokens)
        got = self._client.acquire(lease, total)
        handle = Handle(tokens, kind, chain)
        if isinstance(got, Busy):
            if lease:
                self._client.release(lease)
            return None if self._client.attached else self._begin_here(handle, total)
        handle.lease, handle.generation = got.lease, got.generation
        table = Table(got.added.tolist(), {Tier.GPU: got.device * self._block_tokens}, handle)
        handle.full = handle.committed = got.device
        self._live[id(table)] = (table, handle)
        if isinstance(found, Hit):
            self._begin_load(table, handle, found, got)
        return table

    def _intent(self, request_id: str, tokens: int, ahead_tokens: int) -> Intent:
        """What the plan of a request depends on beside its keys."""
        mode = "" if self.force is None else "recompute" if self.force is Choice.RECOMPUTE else "load"
        pace = self._pace
        queued_s, load = pace.seconds(ahead_tokens), (pace.decodes, pace.decode_context)
        return Intent(tokens, request_id, queued_s, self.can_split, *load, mode=mode)

    def _begin_load(self, table: Table, handle: Handle, found: Hit, got: DaemonTable) -> None:
        """Begin what the plan says, from the first block that the device lacks (it may have lost some)."""
        choice = self.force or found.plan.choice
        start, stop = got.load_start, self._load_stop(choice, found, got)
        if stop <= start:
            return
        ready = min(start + len(got.slots), stop)
        split = choice is Choice.SPLIT and stop - start > 1
        # What leads on HOST is copied at once; of the rest computing takes the front, and the load the end.
        front = stop if not split else ready if ready < stop - 1 else start
        if front > start:
            hit = part(found, got, start, front)
            handle.loading, handle.saved = hit, front
            handle.load = self._client.load(hit, got.added[start:front])
        if split:
            hit = part(found, got, front, stop)
            load = self._client.load_tail(hit, got.added[front:stop])
            handle.split = Split(hit, load, got.generation, found.plan.load_start)
            table.tail_tokens = stop * self._block_tokens

    def _load_stop(self, choice: Choice, found: Hit, got: DaemonTable) -> int:
        """Behind the last block to load."""
        if choice is Choice.RECOMPUTE:
            return 0
        if self.force is not None:
            return found.blocks
        # What the table (newer than the lookup) says is on HOST, and what the lookup saw below.
        below = any(span.tier not in (Tier.GPU, Tier.HOST) for span in found.plan.spans)
        return found.plan.load_stop if below else min(found.plan.load_stop, got.load_stop)

    def _begin_here(self, handle: Handle, total: int) -> Table | None:
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
            for tier, blocks in by_tier(hit, start, start + good).items():
                table.reused_tokens[tier] = blocks * self._block_tokens
            self._commit(table, handle, start + good)
        return True

    def claim(self, table: Table, computed: int, wanted: int) -> int:
        split, size = _handle(table).split, self._block_tokens
        if split is None or computed >= table.tail_tokens:
            return wanted
        return max(computed, min(wanted, split.load.claim(blocks_for(wanted, size)) * size))

    def head_left(self, table: Table, computed: int) -> int:
        split = _handle(table).split
        if split is None or split.load.poll() is not None:
            return 1 << 31
        return split.head_left(computed, self._block_tokens, self._pace.seconds(1))

    def join(self, table: Table, computed: int) -> Joined | None:
        handle = _handle(table)
        split, size = handle.split, self._block_tokens
        result = split.load.poll() if split is not None else None
        if split is None or result is None:
            return None
        if result.bad and handle.sound is None:
            handle.sound = handle.full  # what is computed by now; LAWS A4 as for any load
        start, stop = split.stop - result.good, split.stop
        if computed < start * size:
            return None  # the load has ended early: what it did not bring is computed first
        handle.split, table.tail_tokens = None, 0
        if start == stop:
            return None
        if self.on_loaded is not None:
            self.on_loaded(table.blocks[start:stop])
        if handle.generation == split.generation:
            handle.skip = (start, stop)
        handle.full = stop
        self._key(handle, handle.tokens[: stop * size])
        self._commit(table, handle, stop)
        return Joined({tier: blocks * size for tier, blocks in by_tier(split.hit, start, stop).items()})

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
        self._key(handle, tokens[:computed])
        if handle.chain is None or not self._holds(handle):
            return
        self._commit(table, handle, full)
        self._save(table, handle, full)

    def _key(self, handle: Handle, tokens: Sequence[int]) -> None:
        """Have keys of all full blocks of these tokens."""
        handle.chain = self._client.chain(tokens, self._tenant, handle.reuse) or handle.chain

    def _holds(self, handle: Handle) -> bool:
        return bool(handle.lease) and handle.generation == self._client.generation

    def _commit(self, table: Table, handle: Handle, stop: int) -> None:
        stop = handle.may_commit(handle.chain, stop)
        if self.read_only or handle.chain is None or stop <= handle.committed or not self._holds(handle):
            return
        self._client.commit(handle.lease, handle.chain, handle.committed, stop)
        handle.committed = stop

    def _save(self, table: Table, handle: Handle, stop: int) -> None:
        """Write blocks through to HOST, in chain order, copied while the next step computes."""
        assert handle.chain is not None
        stop = min(stop, len(handle.chain))
        for start, last in handle.unsaved(stop):
            handle.behind = len(handle.saves) >= SAVES_PER_TABLE_MAX and not handle.finished
            if handle.behind:
                return
            blocks = np.asarray(table.blocks[start:last], np.uint32)
            handle.saves.append((start, self._client.save(handle.chain, start, last, blocks)))
            handle.saved = last
        handle.saved = max(handle.saved, stop)

    # ---- what the daemon counts and learns from ------------------------------------------------------------

    def computed(self, step: StepTime) -> None:
        self._pace.note(step)
        self._client.note_prefill(
            step.prefill_tokens, step.seconds, step.prefill_area, step.decodes, step.decode_context
        )

    def ended(self, report: Report) -> None:
        plan = self._plans.pop(report.request_id, 0)
        if report.prefill_s is not None:
            self._client.note_plan(plan, report.prefill_s)
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
        if handle.split is not None:
            handle.split.load.cancel()
        if handle.again is not None:
            handle.saved, handle.behind = min(handle.saved, handle.again), True
        if handle.behind and handle.chain is not None and not self.read_only and self._holds(handle):
            self._save(table, handle, handle.full)
        self._reap(table, handle)

    def poll(self) -> None:
        self._client.poll()
        for table, handle in list(self._live.values()):
            self._reap(table, handle)

    def _reap(self, table: Table, handle: Handle) -> None:
        """Take finished copies; release the table once nothing reads or writes its blocks any more."""
        while handle.saves:
            start, save = handle.saves[0]
            result = save.poll()
            if result is None:
                break
            handle.saves.pop(0)
            if result.elsewhere:
                handle.again = start if handle.again is None else min(start, handle.again)
            if result.dropped:
                self.dropped_saves = [*self.dropped_saves[-99:], result.reason]
        if not handle.finished:
            return
        if handle.load is not None and handle.load.poll() is None:
            return
        if handle.split is not None and handle.split.load.poll() is None:
            return
        if not handle.saves:
            del self._live[id(table)]
            if self._holds(handle):
                self._client.release(handle.lease)

    def settle(self, timeout_s: float) -> bool:
        """Wait until every save is done; False at the timeout."""
        for _, handle in list(self._live.values()):
            for _, save in handle.saves:
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
            handle.skip = (0, 0)
        return whole


def _handle(table: Table) -> Handle:
    assert isinstance(table.handle, Handle)
    return table.handle
