"""Writing: reserve → copy → publish | abort, and copies downwards that the daemon orders.

Every token ends in exactly one Publish or Abort, unless the connection ends first: then the daemon ends the
filling when it hears Quiesced or sees the process gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

from kvstore import _native
from kvstore._native import Completion
from kvstore.client.core import Attachment, Core, ask, u32s, u64s
from kvstore.client.effects import Job, Op
from kvstore.client.values import Reservation
from kvstore.errors import BadRequest, DeadlineExceeded, KVStoreError
from kvstore.keys import KeyChain
from kvstore.rpc.messages import Abort, Demote, Done, Publish, Published, Reserve, Reserved
from kvstore.types import SaveResult

__all__ = ["abort", "demote", "reserve", "save", "write"]

U32 = NDArray[np.uint32]


@dataclass(slots=True)
class _Tally:
    """A SaveResult in the making. `patient`: a handle waits for its copies, a blocked caller gives up.

    `kind`: of the transfer, for timings.
    """

    asked: int
    patient: bool = True
    kind: str = "store"
    ready: int = 0
    filled: int = 0
    elsewhere: int = 0
    reason: str = ""

    def why(self, reason: str) -> None:
        self.reason = self.reason or reason

    def result(self) -> SaveResult:
        """What is not accounted for was dropped."""
        dropped = self.asked - self.ready - self.filled - self.elsewhere
        return SaveResult(self.ready, self.filled, self.elsewhere, dropped, self.reason if dropped else "")


def check_range(chain: KeyChain, start: int, stop: int) -> None:
    """Raises BadRequest unless 0 <= start <= stop <= len(chain)."""
    if not 0 <= start <= stop <= len(chain):
        raise BadRequest(f"[{start}, {stop}) is not inside a chain of {len(chain)} blocks")


def reserve(core: Core, chain: KeyChain, start: int, stop: int) -> Op[Reservation]:
    """Slots for blocks [start, stop) of a chain, at most `keys_max` of them; the others count as dropped."""
    attachment = core.attachment
    if attachment is None:
        return Reservation(0, np.empty(0, np.uint32), 0, 0, stop - start, "no daemon is attached")
    try:
        return (yield from _reserve(core, attachment, chain, start, stop))
    except KVStoreError as error:
        return Reservation(0, np.empty(0, np.uint32), 0, 0, stop - start, str(error))


def write(core: Core, reservation: Reservation, blocks: U32) -> Op[SaveResult]:
    """Copy device blocks, one per slot of the reservation, and publish this process's part of them."""
    tally = _Tally(len(reservation.slots) + reservation.dropped, filled=reservation.filled)
    tally.elsewhere = reservation.elsewhere
    tally.why(reservation.reason)
    attachment = core.attachment
    core.counters.saves += 1
    if attachment is None:
        tally.why("no daemon is attached")
        return _counted(core, tally.result())
    refusal = core.begin_write(attachment, reservation) if reservation.token else ""
    if refusal:  # nothing to end: where it is not ours any more, the daemon has given our part up
        tally.why(refusal)
        return _counted(core, tally.result())
    with core.under_way():  # never refused for limits.handles_max: its token has to be ended
        try:
            yield from _fill(core, attachment, reservation, blocks, tally)
        except KVStoreError as error:
            tally.why(str(error))
        finally:
            core.end_write(reservation)
    return _counted(core, tally.result())


def abort(core: Core, reservation: Reservation) -> Op[None]:
    """End a reservation that this process will not write; a no-op for one that is not ours any more.

    Raises:
        BadRequest: a write of it is under way, and that will end it.
    """
    attachment = core.attachment
    if reservation.token in core.writing:
        raise BadRequest("abort: a write of this reservation is under way; its end ends the reservation")
    if not reservation.token or attachment is None:
        return
    if (reservation.epoch, reservation.engine) != (attachment.epoch, attachment.engine):
        return
    try:
        yield from ask(core, attachment.link, Abort(reservation.token), Done, core.call_deadline())
    except KVStoreError:
        return  # it has ended already, or the connection is over


def save(core: Core, chain: KeyChain, start: int, stop: int, blocks: U32) -> Op[SaveResult]:
    """Reserve, copy and publish blocks [start, stop) of a chain, round by round, parents first."""
    tally = _Tally(stop - start)
    attachment = core.attachment
    core.counters.saves += 1
    if attachment is None or core.full:
        tally.why(core.full or "no daemon is attached")
        return _counted(core, tally.result())
    with core.under_way():
        yield from _rounds(core, attachment, chain, range(start, stop), blocks, tally)
    return _counted(core, tally.result())


def _rounds(
    core: Core, attachment: Attachment, chain: KeyChain, positions: range, blocks: U32, tally: _Tally
) -> Op[None]:
    start, stop = positions.start, positions.stop
    at = start
    whole = True
    try:
        while at < stop and whole:
            until = min(stop, at + attachment.keys_max)
            got = yield from _reserve(core, attachment, chain, at, until)
            tally.filled += got.filled
            tally.elsewhere += got.elsewhere
            tally.why(got.reason)
            m = len(got.slots)
            whole = yield from _fill(core, attachment, got, blocks[at - start : at - start + m], tally)
            whole = whole and not got.dropped  # what follows would have no parent
            at = until
    except KVStoreError as error:
        tally.why(str(error))


def _reserve(core: Core, attachment: Attachment, chain: KeyChain, start: int, stop: int) -> Op[Reservation]:
    some = min(stop, start + attachment.keys_max)
    message = Reserve(chain.root, chain.parent(start), chain.keys[start:some].tobytes())
    got = yield from ask(core, attachment.link, message, Reserved, core.call_deadline())
    slots = u32s(got.slots)
    if (
        slots is None
        or min(got.filled, got.elsewhere, got.dropped) < 0
        or len(slots) + got.dropped != some - start
    ):
        raise core.broken(attachment.link, f"Reserved does not account for {some - start} blocks")
    ours, generations = int((slots != _native.NONE).sum()), u64s(got.generations)
    if generations is None or len(generations) != ours:
        raise core.broken(attachment.link, "Reserved: need one generation for each slot that is ours")
    if ours + got.filled + got.elsewhere != len(slots) or (ours > 0) != (got.token > 0):
        raise core.broken(attachment.link, "Reserved: slots, filled, elsewhere and token disagree")
    _check_slots(core, attachment, slots[slots != _native.NONE])
    return Reservation(
        got.token,
        slots,
        got.filled,
        got.elsewhere,
        got.dropped + stop - some,
        got.busy or got.reason,
        generations,
        attachment.epoch,
        attachment.engine,
    )


def _fill(core: Core, attachment: Attachment, got: Reservation, blocks: U32, tally: _Tally) -> Op[bool]:
    """Copy and publish one reservation; whether every slot of it was written."""
    if not got.token:
        return True
    ours = got.slots != _native.NONE
    count = int(ours.sum())
    written = 0
    try:
        job = core.submit_store(attachment, got, blocks[ours])
        copied = cast(Completion, (yield Job(job, core.copy_deadline(), tally.patient)))
        core.timings.note_copy(tally.kind, int(copied.bytes), float(copied.seconds))
        written = _leading(copied)
        if written < count:
            tally.why(f"{count - written} blocks were not copied")
    except DeadlineExceeded as error:
        attachment.link.fail(str(error))  # it may still write: neither Publish nor Abort would be true
        raise
    except KVStoreError as error:
        tally.why(str(error))
    done = yield from _end(core, attachment, got.token, written, tally)
    if done is not None:
        tally.ready += done.ready
        if done.pending:
            tally.elsewhere += written - done.ready - done.dropped  # readable when every rank has written
        elif done.dropped:
            tally.why(f"{done.dropped} blocks lost a race or have no parent")
    return written == count


def _end(core: Core, attachment: Attachment, token: int, written: int, tally: _Tally) -> Op[Published | None]:
    """Publish what was written, or give the token up."""
    link = attachment.link
    if written and core.attachment is attachment:
        try:
            message = Publish(token, written, True)
            done = yield from ask(core, link, message, Published, core.call_deadline())
        except KVStoreError as error:
            tally.why(str(error))
        else:
            if not 0 <= done.ready <= written or not 0 <= done.dropped <= written - done.ready:
                raise core.broken(link, f"Published does not account for {written} blocks")
            return done
    if not link.dead:
        try:
            yield from ask(core, link, Abort(token), Done, core.call_deadline())
        except KVStoreError as error:
            tally.why(str(error))
    return None


def demote(core: Core, attachment: Attachment, orders: Sequence[Demote]) -> Op[None]:
    """Copy device blocks down as ordered. What cannot be copied is given up: the daemon counts it as lost.

    Raises:
        KVStoreError: the connection is over.
    """
    memory = core.setup.memory
    for order in orders:
        blocks, slots, generations = u32s(order.blocks), u32s(order.slots), u64s(order.generations)
        if blocks is None or slots is None or generations is None:
            raise core.broken(attachment.link, "Demote: blocks, slots or generations are cut short")
        if not blocks.size == slots.size == generations.size:
            raise core.broken(attachment.link, "Demote: blocks, slots and generations do not pair up")
        _check_slots(core, attachment, slots)
        tally = _Tally(len(blocks), patient=False, kind="demote")
        got = Reservation(order.token if blocks.size else 0, slots, 0, 0, 0, generations=generations)
        if memory is None:
            yield from _end(core, attachment, order.token, 0, tally)
            continue
        if blocks.size and int(blocks.max()) >= memory.blocks:
            raise core.broken(attachment.link, f"Demote: block {blocks.max()} of a pool of {memory.blocks}")
        yield from _fill(core, attachment, got, blocks, tally)


def _leading(done: Completion) -> int:
    """Blocks of a store before the first that was not copied."""
    status = np.asarray(done.status)
    wrong = np.flatnonzero(status != _native.OK)
    return int(wrong[0]) if wrong.size else int(status.size)


def _check_slots(core: Core, attachment: Attachment, slots: U32) -> None:
    if slots.size and int(slots.max()) > attachment.pages - core.slot_pages:
        raise core.broken(attachment.link, f"slot {int(slots.max())} is outside the arena")


def _counted(core: Core, result: SaveResult) -> SaveResult:
    core.counters.blocks_saved += result.ready
    core.counters.blocks_dropped += result.dropped
    return result
