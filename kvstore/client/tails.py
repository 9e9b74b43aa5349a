"""Load of a tail: from its last block down, while the engine computes from its first block up.

    blocks   first          front            low            lowest                 stop
             |-- COMPUTE ---|--- unclaimed ---|--- LOAD, being copied ---|--- LOAD, verified ---|

Every block is claimed before it is written for the first time, by whoever will write it: `claim` for the
engine, this load before it submits a copy. Claims only grow towards each other until they meet, so two
numbers under one lock stand for a word per block; a block is never both's. A copy that fails gives its block,
and all below, back once nothing is copied any more: then `low` rises, and the engine may claim them.

The lock is there because any thread may drive a load (`poll`), and another one the engine. Copier threads
claim nothing: they write what was submitted, and that is claimed.

Nobody waits for a tail, so it has no deadline: it ends where computing meets it, or as the daemon says.
"""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray

from kvstore import _native
from kvstore.client.core import Attachment, Core, Fetching, Grant, ask
from kvstore.client.effects import Hear, Op
from kvstore.client.loading import Loading, count_bad
from kvstore.client.reading import report
from kvstore.client.values import LoadResult
from kvstore.errors import KVStoreError
from kvstore.rpc.messages import Done, Enough, Fetch, Fetched

__all__ = ["TailLoading", "load_tail"]

U32 = NDArray[np.uint32]
U8 = NDArray[np.uint8]
# What is submitted at once, so that the engine never waits long for a copy: 1 to 2 ms.
_PIECE_BYTES = 8 << 20
# Of those at once: between two looks of an engine, which may be a step apart, 256 MiB are copied.
_PIECES_MAX = 32
# A wait for notices looks so often whether the lease is still held.
_LOOK_S = 0.05


class TailLoading(Loading):
    """A load whose blocks are numbered from the last one down: number 0 is block `top` - 1.

    Args:
        bottom: position in the chain of the first block.
        keys: (n, 32) keys that the slots must hold, in chain order.
        blocks: (n,) device blocks to fill, in chain order.
    """

    pieces_max = _PIECES_MAX

    def __init__(
        self, core: Core, attachment: Attachment | None, lease: int, bottom: int, keys: U8, blocks: U32
    ) -> None:
        super().__init__(core, attachment, lease, 0, keys[::-1], np.ascontiguousarray(blocks[::-1]))
        self.bottom, self.top = bottom, bottom + len(blocks)
        self._lock = threading.Lock()
        self._front = bottom  # blocks before it are COMPUTE
        self._low = self.top  # blocks from it on are LOAD
        self.fetched = False  # the daemon has begun to bring it

    @staticmethod
    def refuse_tail(core: Core, bottom: int, count: int, reason: str) -> TailLoading:
        """A load of `count` blocks that does not begin."""
        keys, blocks = np.empty((0, 32), np.uint8), np.zeros(count, np.uint32)
        loading = TailLoading(core, None, 0, bottom, keys, blocks)
        loading.refused = reason
        return loading

    # ---- any thread --------------------------------------------------------------------------------------

    @property
    def submitted(self) -> int:
        """Blocks whose copy was begun."""
        return self._submitted

    @property
    def lowest(self) -> int:
        """Blocks [lowest, top) are copied and verified."""
        return self.top - self.progress()

    @property
    def met(self) -> bool:
        """Every block is claimed: nothing more is to be loaded."""
        with self._lock:
            return self._front >= self._low

    def claim(self, stop: int) -> int:
        """Claim blocks before `stop` for computing; before which block the caller may write now."""
        with self._lock:
            self._front = max(self._front, min(stop, self._low))
            return self._front

    # ---- whoever drives the load ---------------------------------------------------------------------------

    @property
    def _waits(self) -> bool:
        return super()._waits and not self.met

    @property
    def due(self) -> bool:
        """There is something to do but to wait for the daemon."""
        return self.met or (self._waits and len(self._pieces) < self.pieces_max)

    def _submit(self) -> None:
        """What has come, a piece at a time, as far as the engine has not claimed it."""
        size = max(1, _PIECE_BYTES // (self._core.slot_pages * _native.PAGE_BYTES))
        while self._waits and self._attachment is not None and len(self._pieces) < self.pieces_max:
            start = self._submitted
            with self._lock:
                self._low = max(self._front, self.top - min(self.reached, start + size))
                count = self.top - self._low - start
            if not count:
                return
            slots = np.concatenate(self._parts)
            self._parts[:] = [slots[count:]]
            self._submit_piece(self._attachment, slots[:count])

    def close(self, good: int) -> None:
        """Nothing is copied any more, and so many of the last blocks are good: the others go back."""
        with self._lock:
            self._low = self.top - good


def load_tail(core: Core, loading: TailLoading) -> Op[LoadResult]:
    """Fetch, copy and verify from the last block down, until computing meets it; report bad blocks."""
    why = loading.refused
    if loading.count and not why:
        with core.under_way():
            why = yield from _fetch(core, loading)
            why = (yield from loading.finish()) or why
    status = loading.status
    wrong = np.flatnonzero(status != _native.OK)
    good = int(wrong[0]) if wrong.size else loading.count
    loading.close(good)
    core.counters.blocks_loaded += good
    if loading.lost:
        why = "the daemon went away"
    else:
        bad = np.flatnonzero((status == _native.STALE) | (status == _native.CORRUPT))
        why = (count_bad(core, status[bad]) if bad.size else "") or why
        yield from _account(core, loading, good, (loading.top - 1 - bad).tolist())
    return LoadResult(good, status[::-1].copy(), loading.reached, loading.bytes, loading.seconds, why)


def _account(core: Core, loading: TailLoading, good: int, bad: list[int]) -> Op[None]:
    """Tell the daemon which blocks are used, and which were bad."""
    grant = core.leases.get(loading.lease)
    if grant is None or not loading.fetched:
        return
    try:
        message = Enough(grant.daemon_id, loading.top - good)
        yield from ask(core, grant.attachment.link, message, Done, core.call_deadline())
        if bad:
            yield from report(core, loading.lease, bad)
    except KVStoreError:
        return  # the connection is over, and its leases with it; or the lease has ended already


def _fetch(core: Core, loading: TailLoading) -> Op[str]:
    """From the question until nothing more comes, or is wanted; why it brought less than was asked for."""
    with core.lock:
        grant = core.leases.get(loading.lease)
        if grant is None:
            return "the lease is not held"
        if grant.daemon_id in core.fetches:
            return "a fetch of this lease is under way"
        fetching = core.fetches[grant.daemon_id] = Fetching(loading.bottom)
    try:
        return (yield from _follow(core, grant, fetching, loading))
    except KVStoreError as error:
        loading.unwanted = loading.unwanted or str(error)
        return str(error)
    finally:
        core.end_fetch(grant, fetching)


def _follow(core: Core, grant: Grant, fetching: Fetching, loading: TailLoading) -> Op[str]:
    link = grant.attachment.link
    message = Fetch(grant.daemon_id, loading.bottom, loading.top, descending=True)
    first = yield from ask(core, link, message, Fetched, core.call_deadline())
    fetching.begun = loading.fetched = True
    _take(core, grant, fetching, loading, (first.ready, loading.bottom, first.runs))
    while True:
        while fetching.news:
            news = fetching.news.pop(0)
            _take(core, grant, fetching, loading, (news.ready, news.stop, news.runs))
        yield from loading.use()
        if loading.met:
            return "" if loading.submitted == loading.count else "computing has met it"
        if fetching.over:
            return f"the daemon could bring no more than down to {loading.top - loading.reached}"
        if loading.unwanted:
            return loading.unwanted
        if core.leases.get(loading.lease) is not grant:
            return "the lease ended"
        look_again = core.setup.clock.now() + _LOOK_S
        yield Hear(link, lambda: bool(fetching.news or loading.unwanted or loading.due), look_again)


def _take(
    core: Core, grant: Grant, fetching: Fetching, loading: TailLoading, told: tuple[int, int, bytes]
) -> None:
    """The daemon has told: how far down it is, where it will end, and the slots of what is new."""
    ready, stop, runs = told
    before = loading.top - loading.reached
    if not fetching.stop <= stop <= ready <= before:
        gone = f"from {before} to {ready}, to end at {stop} and before at {fetching.stop}"
        raise core.broken(grant.attachment.link, f"a descending fetch went {gone}")
    slots = core.slots_of(grant.attachment, runs, before - ready)
    fetching.stop, fetching.over = stop, ready == stop
    loading.add(loading.top - ready, slots[::-1])
