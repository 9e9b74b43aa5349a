"""The client for threads.

One background thread attaches, sends heartbeats and re-attaches. Everything else runs in its caller's thread,
and any thread may call.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvstore.client import asking, pooling, reading, writing
from kvstore.client.effects import Op
from kvstore.client.face import Face, as_blocks, as_keys
from kvstore.client.link import ThreadLink
from kvstore.client.threads import Fetch, Load, Save, TailLoad, Threads
from kvstore.client.upkeep import upkeep
from kvstore.client.values import Reservation, Table
from kvstore.intent import Intent
from kvstore.keys import KeyChain
from kvstore.rpc.messages import Check, Status
from kvstore.types import Busy, Hit, LookupResult

__all__ = ["Client"]

T = TypeVar("T")
U32 = NDArray[np.uint32]
U8 = NDArray[np.uint8]


class Client(Face):
    """A session with the node's daemon, kept alive in the background. See `Face` for the arguments.

    Nothing here raises because a daemon is absent, slow, dying or new: the answer is then `Miss`, `Busy` or a
    result with everything dropped, within the deadlines of `Limits`. What raises `BadRequest` is a mistake of
    the caller: a malformed argument, or a client carried through a fork.
    """

    def _start(self) -> None:
        self._threads = Threads(self._core)
        self._changed = threading.Condition()
        self._closed = False
        self._core.changed = self._on_changed
        self._thread = threading.Thread(
            target=self._threads.run, args=(upkeep(self._core),), name="kvstore-client", daemon=True
        )
        self._thread.start()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Join every copy, tell the daemon, close the socket, unmap. Idempotent.

        Handles that are out get their result. In a forked child only the child's copy of the socket goes.
        """
        core = self._core
        if os.getpid() != self._pid:
            attachment = core.attachment
            if attachment is not None and isinstance(attachment.link, ThreadLink):
                attachment.link.abandon()
            return
        if self._closed:
            return
        self._closed = core.closing = True
        core.stop_attaching()
        self._threads.wake()
        self._thread.join()
        for pending in list(self._threads.active):
            pending.wait()
        if core.copier is not None:
            core.copier.close()
            core.copier = None  # its eventfd lives as long as the object
        self._threads.close()

    def wait_attached(self, timeout_s: float) -> bool:
        """Wait until attached or refused; whether attached."""
        self._check()
        core = self._core
        with self._changed:
            self._changed.wait_for(lambda: core.attachment is not None or core.refusal is not None, timeout_s)
        return self.attached

    def poll(self) -> None:
        """Advance saves, loads and fetches that are out, then run the callbacks that are due, here."""
        self._check()
        for pending in list(self._threads.active):
            pending.poll()
        for callback in self._due():
            callback()

    # ---- reading ---------------------------------------------------------------------------------------

    def lookup(
        self, chain: KeyChain, blocks: int | None = None, intent: Intent | None = None
    ) -> LookupResult:
        """How much of a chain may be reloaded, and from where. A `Hit` is a lease: `release` it.

        Args:
            chain: keys under one of our roots.
            blocks: use only the first so many (default: all).
            intent: what the daemon should know of the request to plan it; None = nothing but its blocks.

        Cost: one round trip; beyond 1,024 blocks of about 2·√n keys, and a second one if the deepest known
            block lies between them.

        Raises:
            BadRequest: blocks is outside the chain.
        """
        return self._run(reading.lookup(self._core, chain, blocks, intent))

    def load(self, hit: Hit, blocks: U32) -> Load:
        """Begin to copy a hit's load range into device blocks, in chain order, every block verified.

        What has no slot in the hit is fetched first, within `limits.fetch_s`; what has come is copied
        meanwhile.

        Args:
            hit: a lease that is held; keep it until the load is done. After `acquire`, a hit with the
                table's load range and slots in place of its own.
            blocks: (load_stop - load_start,) device blocks to fill.

        Raises:
            BadRequest: blocks is malformed.
        """
        self._check()
        return Load(self._threads, self._begin_load(hit, blocks))

    def load_tail(self, hit: Hit, blocks: U32) -> TailLoad:
        """Begin to copy a hit's load range from its last block down; the caller computes from its first.

        What has no slot in the hit is fetched in that order; it ends where the two meet, and has no deadline.

        Args:
            hit, blocks: as for `load`. The caller writes a block only after it has claimed it.

        Raises:
            BadRequest: blocks is malformed.
        """
        self._check()
        return TailLoad(self._threads, self._begin_tail(hit, blocks))

    def load_slots(self, slots: U32, keys: U8, blocks: U32) -> Load:
        """Same for a worker whose scheduler holds the lease; the scheduler reports bad blocks (`report`).

        Args:
            slots: (n,) arena slots, from `Hit.slots`.
            keys: (n, 32) keys that the slots must hold.
            blocks: (n,) device blocks.
        """
        self._check()
        return Load(self._threads, self._begin_load_slots(slots, keys, blocks))

    def fetch(self, hit: Hit, start: int, stop: int) -> Fetch:
        """Bring blocks [start, stop) of a hit to where they can be copied: for a process that does not copy
        itself (`load` fetches what it needs). HOST blocks are there already, unless HOST is limited. One at a
        time for a hit.
        """
        self._check()
        return Fetch(self._threads, hit.lease, start, stop)

    def report(self, lease: int, bad: Iterable[int]) -> bool:
        """Tell the daemon which positions of a lease's chain failed their check, each at most once."""
        return self._run(reading.report(self._core, lease, bad))

    def release(self, lease: int) -> None:
        """End a lease. Twice, or after the daemon it came from is gone, is a no-op."""
        self._run(reading.release(self._core, lease))

    # ---- writing ---------------------------------------------------------------------------------------

    def save(self, chain: KeyChain, start: int, stop: int, blocks: U32) -> Save:
        """Begin to hand blocks [start, stop) of a chain to the daemon.

        The device blocks must stay untouched until the handle is done.

        Args:
            blocks: (stop - start,) device blocks that hold them.

        Raises:
            BadRequest: the range is outside the chain, or blocks is malformed.
        """
        self._check()
        writing.check_range(chain, start, stop)
        source = as_blocks(self._core, blocks, stop - start)
        return Save(self._threads, writing.save(self._core, chain, start, stop, source), chain.root)

    def reserve(self, chain: KeyChain, start: int, stop: int) -> Reservation:
        """First half of a save by several ranks: slots that every rank then writes its part of (`write`)."""
        writing.check_range(chain, start, stop)
        return self._run(writing.reserve(self._core, chain, start, stop))

    def write(self, reservation: Reservation, blocks: U32) -> Save:
        """Second half: copy this rank's part of one device block per slot of the reservation, publish it.

        The device blocks must stay untouched until the handle is done.
        """
        self._check()
        source = as_blocks(self._core, blocks, len(reservation.slots))
        return Save(self._threads, writing.write(self._core, reservation, source))

    def abort(self, reservation: Reservation) -> None:
        """Give a reservation up that this process will not write; the slots wait for the other ranks.

        Raises:
            BadRequest: a write of it is under way here.
        """
        self._run(writing.abort(self._core, reservation))

    # ---- the device pool -------------------------------------------------------------------------------

    def acquire(self, lease: int, blocks: int) -> Table | Busy:
        """Make the block table of a lease (0 = a new one) `blocks` long; copies down first what must leave.

        All or nothing: a table is never left part of the way. After every attach this is `Busy` until
        `poll()` has run `on_attach`, and `on_attach` has not answered False.
        """
        return self._run(pooling.acquire(self._core, lease, blocks))

    def commit(self, lease: int, chain: KeyChain, start: int, stop: int) -> int:
        """Blocks [start, stop) of the lease's table hold these keys; how many were indexed under them."""
        writing.check_range(chain, start, stop)
        return self._run(pooling.commit(self._core, lease, chain, start, stop))

    def adopt(self, table: U32, chain: KeyChain | None, stop: int) -> Table | Busy:
        """In `on_attach`: this table is in use, its first `stop` blocks hold these keys. Gives it a lease."""
        if chain is not None:
            writing.check_range(chain, 0, stop)
        return self._run(pooling.adopt(self._core, as_blocks(self._core, table), chain, stop))

    def observe(self, mapped: int, idle: int, free: int, stored: U8, removed: U8) -> bool:
        """State of a borrowed pool: its counts, and (n, 32) keys stored and removed since the last call.

        Returns:
            False if the daemon did not hear it: after the next attach, tell everything again.
        """
        counts = (mapped, idle, free)
        return self._run(pooling.observe(self._core, counts, as_keys(stored), as_keys(removed)))

    # ---- the session -----------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """The daemon's status; {"attached": False, "reason": …} without one."""
        return self._run(asking.report_of(self._core, Status()))

    def check(self) -> dict[str, Any]:
        """Let the daemon check its conservation laws: {"ok": …}; {"attached": False, …} without one."""
        return self._run(asking.report_of(self._core, Check()))

    def explain(self, request: str = "") -> dict[str, Any]:
        """Why a request of this client's tenants was reloaded or recomputed, and what came of it.

        Args:
            request: the engine's name for it, or the number of its lease; "" = the latest.

        Returns:
            "words", sentences for a person, and the facts behind them; {"known": False, "reason": …} when
            nothing is remembered of it, or there is no daemon.
        """
        return self._run(asking.explained(self._core, request))

    def heartbeat(self) -> bool:
        """Is the daemon alive? (The background thread asks often enough for the daemon.)"""
        return self._run(asking.heartbeat(self._core))

    def quiesced(self) -> bool:
        """Join every copy of this process and say so; what it was filling is aborted, reservations end."""
        return self._run(asking.quiesced(self._core))

    # ---- inside ----------------------------------------------------------------------------------------

    def _run(self, op: Op[T]) -> T:
        self._check()
        return self._threads.run(op)

    def _on_changed(self) -> None:
        with self._changed:
            self._changed.notify_all()
