"""The state that all operations of a client share.

    DETACHED ─upkeep: connect, attach, proof─▶ ATTACHED ─link dead, or closing─▶ DETACHED

`attachment` is replaced as a whole and never changed in place: an operation takes it once at its start, and a
copy is submitted only while it is still the current one. Ids of leases are our own and never reused, so a
lease of an older attach cannot be mistaken for one of this daemon's.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from kvstore import _native
from kvstore._native import Arena, Completion, Copier, PagedLayout, SlotFormat
from kvstore.client.effects import Call, Link, Op
from kvstore.client.timings import Outbox
from kvstore.client.values import Counters, Reservation, Setup, Table
from kvstore.errors import BadRequest, KVStoreError, LimitExceeded, Unavailable, from_status
from kvstore.keys import KeyChain
from kvstore.rpc.messages import Failed, Progress, Reply, Request
from kvstore.types import FetchPlan, Tier

__all__ = [
    "Attachment",
    "Core",
    "Fetching",
    "Grant",
    "ask",
    "u32_bytes",
    "u32s",
    "u64s",
]

R = TypeVar("R", bound=Reply)
U32 = NDArray[np.uint32]
TIERS = frozenset(tier.value for tier in Tier)


@dataclass(frozen=True, slots=True, eq=False)
class Attachment:
    """One successful attach: what the daemon said, and the memory it shares.

    Attributes:
        generation: 1 for a client's first attach, then counting.
        link: the connection.
        epoch, session, engine: see `rpc.messages.Attached`.
        roots: tenant → reuse → root.
        keys_max: most keys in one message.
        heartbeat_s: longest silence the daemon takes for life.
        pages: size of the arena in pages.
        token: last filling that is older than this attach: it must not be written.
        arena, paged: both ends of every copy; None where this process does not copy.
    """

    generation: int
    link: Link
    epoch: bytes
    session: int
    engine: bytes
    roots: Mapping[str, Mapping[str, bytes]]
    keys_max: int
    heartbeat_s: float
    pages: int
    token: int
    arena: Arena | None
    paged: PagedLayout | None


@dataclass(frozen=True, slots=True)
class Grant:
    """A lease as the daemon knows it.

    Attributes:
        daemon_id: its id there.
        attachment: the attach it belongs to.
        chain: keys it was asked for, None for a table without reuse.
        load_start: first block of its load range.
        blocks: length of the match.
        plan, at_s: what the daemon decided, and when it was asked.
        unseen: what an acquire added whose caller was gone when the answer came; the next one gets it.
    """

    daemon_id: int
    attachment: Attachment
    chain: KeyChain | None
    load_start: int = 0
    blocks: int = 0
    unseen: Table | None = None
    plan: FetchPlan | None = None
    at_s: float = 0.0


@dataclass(slots=True)
class Fetching:
    """What the daemon has said about one fetch so far.

    Attributes:
        stop: where it will end.
        news: notices that nobody has looked at yet.
        begun: the daemon has accepted it.
        over: it has ended.
        left: nobody follows it any more, but it has not ended.
    """

    stop: int
    news: list[Progress] = field(default_factory=list)
    begun: bool = False
    over: bool = False
    left: bool = False


class Core:
    """Everything but I/O. `lock` guards `attachment`, `leases`, tokens and the submission of copies."""

    def __init__(self, setup: Setup) -> None:
        layout = setup.layout
        self.setup = setup
        self.counters = Counters()
        self.timings = Outbox()
        self.lock = threading.Lock()
        self.attachment: Attachment | None = None
        self.attaching: Link | None = None  # of an attach under way: failing it ends the attach early
        self.generation = 0
        self.engine = setup.engine
        self.refusal: KVStoreError | None = None
        self.closing = False
        self.changed: Callable[[], None] = lambda: None  # attached, detached or refused: set by the driver
        self.told = 0  # generation that the engine's callbacks know about
        self.leases: dict[int, Grant] = {}
        self.fetches: dict[int, Fetching] = {}  # by the daemon's lease id
        self.reported: dict[int, set[int]] = {}
        self._last_lease = 0
        self._under_way = 0
        self.void_token = 0  # fillings up to this one are not ours to write (any more)
        self._quiescing = 0
        self.writing: set[int] = set()  # tokens of reservations that are being written
        self.slot_pages = layout.slot_bytes // _native.PAGE_BYTES if layout else 1
        self.format = SlotFormat(layout.layers, layout.kv_heads, layout.cell_bytes) if layout else None
        self.copier = Copier(setup.copy_threads) if setup.copies else None
        self.done: dict[int, Completion] = {}  # taken by the driver, not yet seen by their operations

    def stop_attaching(self) -> None:
        """The client closes: an attach that waits for a daemon must not hold it up."""
        link = self.attaching
        if link is not None:
            link.fail("closing")

    def call_deadline(self) -> float:
        """Now + `limits.call_s`."""
        return self.setup.clock.now() + self.setup.limits.call_s

    def copy_deadline(self) -> float:
        """Now + `limits.copy_s`."""
        return self.setup.clock.now() + self.setup.limits.copy_s

    # ---- leases ----------------------------------------------------------------------------------------

    def grant(self, grant: Grant) -> int:
        """Our id of a lease that the daemon just granted.

        Raises:
            LimitExceeded: too many are held.
            Unavailable: its attach is over.
        """
        with self.lock:
            if self.attachment is not grant.attachment:
                raise Unavailable("detached")
            if len(self.leases) >= self.setup.limits.leases_max:
                raise LimitExceeded(f"limits.leases_max = {self.setup.limits.leases_max} leases are held")
            self._last_lease += 1
            self.leases[self._last_lease] = grant
            return self._last_lease

    def end_lease(self, lease: int) -> Grant | None:
        """Forget a lease; None if it is not held (released, or of an older attach)."""
        with self.lock:
            self.reported.pop(lease, None)
            grant = self.leases.pop(lease, None)
            if grant is not None:
                self.fetches.pop(grant.daemon_id, None)
            return grant

    def keep_unseen(self, table: Table) -> None:
        """An acquire grew a lease's table, and nobody is there to be told: the next acquire tells."""
        with self.lock:
            grant = self.leases.get(table.lease)
            if grant is not None:
                self.leases[table.lease] = replace(grant, unseen=table)

    def with_unseen(self, table: Table) -> Table:
        """An acquire's answer, and before it what an earlier one added unseen."""
        with self.lock:
            grant = self.leases.get(table.lease)
            if grant is None or grant.unseen is None:
                return table
            self.leases[table.lease] = replace(grant, unseen=None)
        before = grant.unseen
        first = before if before.load_stop > before.load_start else table  # only a first table is loaded
        return replace(
            table,
            added=np.concatenate([before.added, table.added]),
            load_start=first.load_start,
            load_stop=first.load_stop,
            slots=first.slots,
        )

    def on_notice(self, notice: Progress) -> None:
        """Keep a notice for the fetch that waits for it (any thread that reads the link)."""
        with self.lock:
            fetching = self.fetches.get(notice.lease)
            if fetching is not None and not fetching.left:
                fetching.news.append(notice)
            elif fetching is not None and notice.ready == notice.stop:
                del self.fetches[notice.lease]

    def end_fetch(self, grant: Grant, fetching: Fetching) -> None:
        """Nobody follows a fetch any more. Its last notices must not be taken for those of another one: there
        is none for this lease until the daemon has ended it."""
        with self.lock:
            if self.fetches.get(grant.daemon_id) is not fetching:
                return
            ended = fetching.over or any(notice.ready == notice.stop for notice in fetching.news)
            if ended or not fetching.begun or grant.attachment.link.dead:
                del self.fetches[grant.daemon_id]
            else:
                fetching.left = True

    # ---- operations with copies ------------------------------------------------------------------------

    @property
    def full(self) -> str:
        """Why no save or load may begin now, "" if one may."""
        most = self.setup.limits.handles_max
        return f"limits.handles_max = {most} saves and loads are under way" if self._under_way >= most else ""

    @contextlib.contextmanager
    def under_way(self) -> Iterator[None]:
        """Count an operation that holds a handle."""
        with self.lock:
            self._under_way += 1
        try:
            yield
        finally:
            with self.lock:
                self._under_way -= 1

    # ---- copies ----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def quiescing(self) -> Iterator[None]:
        """No store begins meanwhile: between joining the copies and saying so nothing may start to write."""
        with self.lock:
            self._quiescing += 1
        try:
            yield
        finally:
            with self.lock:
                self._quiescing -= 1

    def give_up(self, attachment: Attachment, token: int) -> None:
        """The daemon gave our part of every filling up to `token` up."""
        with self.lock:
            if self.attachment is attachment:
                self.void_token = max(self.void_token, token)

    def begin_write(self, attachment: Attachment, reservation: Reservation) -> str:
        """Why a reservation must not be written now; "": it is ours until `end_write`."""
        token = reservation.token
        if (reservation.epoch, reservation.engine) != (attachment.epoch, attachment.engine):
            return "the slots were reserved from another daemon, or for another engine"
        with self.lock:
            if token <= self.void_token:
                return "the slots were reserved before this process attached, or given up by quiesced"
            if token in self.writing:
                return "a write of this reservation is under way"
            self.writing.add(token)
        return ""

    def end_write(self, reservation: Reservation) -> None:
        """The write has ended, whatever came of it."""
        with self.lock:
            self.writing.discard(reservation.token)

    def submit_store(self, attachment: Attachment, to: Reservation, blocks: U32) -> int:
        """Begin to copy device blocks into the slots that are ours; returns the job.

        Raises:
            Unavailable, LimitExceeded: not now, or not any more.
        """
        with self.lock:
            copier, arena, paged, form = self._copy_ends(attachment)
            if self._quiescing or attachment.link.dead:
                raise Unavailable("detached" if attachment.link.dead else "quiescing")
            if to.token <= self.void_token:
                raise Unavailable("given up by quiesced")
            try:
                return copier.store(
                    arena, form, paged, blocks, to.slots[to.slots != _native.NONE], to.generations
                )
            except BlockingIOError:
                raise LimitExceeded("the copy queue is full") from None
            except ValueError as error:
                raise BadRequest(str(error)) from None

    def submit_load(self, attachment: Attachment, blocks: U32, slots: U32, keys: NDArray[np.uint8]) -> int:
        """Begin to copy slots into device blocks; returns the job. Raises Unavailable, LimitExceeded."""
        with self.lock:
            copier, arena, paged, form = self._copy_ends(attachment)
            try:
                return copier.load(arena, form, paged, blocks, slots, keys)
            except BlockingIOError:
                raise LimitExceeded("the copy queue is full") from None
            except ValueError as error:
                raise BadRequest(str(error)) from None

    def _copy_ends(self, attachment: Attachment) -> tuple[Copier, Arena, PagedLayout, SlotFormat]:
        if self.attachment is not attachment or self.closing:
            raise Unavailable("detached")
        if not (self.copier and attachment.arena and attachment.paged and self.format):
            raise BadRequest(f"role {self.setup.role!r} does not copy; make this call in a worker")
        return self.copier, attachment.arena, attachment.paged, self.format

    def progress(self, job: int) -> int:
        """Leading blocks of a job that are copied and verified; 0 once its operation has seen its end."""
        done = self.done.get(job)
        if done is not None:
            wrong = np.flatnonzero(done.status != _native.OK)
            return int(wrong[0]) if wrong.size else int(done.status.size)
        try:
            return self.copier.progress(job) if self.copier is not None else 0
        except ValueError:
            return 0

    def cancel(self, job: int) -> None:
        """Drop what a job has not begun."""
        if self.copier is not None:
            self.copier.cancel(job)

    # ---- checks ----------------------------------------------------------------------------------------

    def slots_of(self, attachment: Attachment, runs: bytes, expected: int) -> U32:
        """(expected,) slots that `runs` names. Fails the link when it names anything else."""
        try:
            return _native.unpack_slots(runs, expected, self.slot_pages, attachment.pages)
        except ValueError as error:
            raise self.broken(attachment.link, str(error)) from None

    def broken(self, link: Link, reason: str) -> Unavailable:
        """The daemon broke the protocol: this connection is over."""
        link.fail(f"malformed reply: {reason}")
        return Unavailable(f"malformed reply: {reason}")


def ask(core: Core, link: Link, message: Request, kind: type[R], deadline: float) -> Op[R]:
    """Send a request, expect one kind of reply.

    Raises:
        KVStoreError: what the daemon's `Failed` stands for, or `Unavailable`, or `DeadlineExceeded`.
    """
    reply = yield Call(link, message, deadline)
    if isinstance(reply, kind):
        return reply
    if isinstance(reply, Failed):
        raise from_status(reply.status, reply.message)
    raise core.broken(link, f"{type(reply).__name__} answers {type(message).__name__}")


def u32s(data: bytes) -> U32 | None:
    """Little-endian numbers off the wire, None if the length is not a multiple of four."""
    return np.frombuffer(data, "<u4") if len(data) % 4 == 0 else None


def u64s(data: bytes) -> NDArray[np.uint64] | None:
    """The same for numbers of eight bytes."""
    return np.frombuffer(data, "<u8") if len(data) % 8 == 0 else None


def u32_bytes(numbers: U32) -> bytes:
    """Numbers as they travel."""
    return numbers.astype("<u4", copy=False).tobytes()
