"""The device pool: block tables of an owned one, the state of a borrowed one.

A daemon that restarted knows nothing of the tables that are in use. So after every attach the pool of an
engine that owns one stays closed (`Busy`) until `poll()` has run `on_attach`, where the engine adopts its
tables, and that did not answer False; only then does the daemon know which blocks are free.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvstore.client.core import Attachment, Core, Grant, ask, u32_bytes, u32s
from kvstore.client.effects import Op
from kvstore.client.values import Table
from kvstore.client.writing import demote
from kvstore.errors import BadRequest, KVStoreError
from kvstore.keys import KeyChain
from kvstore.rpc.messages import NUMBERS_MAX, Acquire, Acquired, Adopt, Commit, Committed, Done, Observe
from kvstore.types import Busy

__all__ = ["acquire", "adopt", "commit", "observe"]

U32 = NDArray[np.uint32]
U8 = NDArray[np.uint8]


def acquire(core: Core, lease: int, blocks: int) -> Op[Table | Busy]:
    """Make the table of a lease (0 = a new one) `blocks` long, copying down first what has to leave.

    All or nothing, up to numbers_max blocks; `Busy` leaves the lease as it was.
    """
    attachment = core.attachment
    if attachment is None:
        return Busy("no daemon is attached")
    if core.told != attachment.generation:
        return Busy("attached anew: call poll() so that on_attach can adopt the tables in use")
    grant = core.leases.get(lease)
    if lease and (grant is None or grant.attachment is not attachment):
        return Busy("the lease is not held any more")
    daemon_id = grant.daemon_id if grant is not None else 0
    try:
        for _ in range(core.setup.limits.demote_rounds_max):
            message = Acquire(daemon_id, blocks)
            got = yield from ask(core, attachment.link, message, Acquired, core.call_deadline())
            if got.busy:
                return Busy(got.busy)
            if not got.demote:
                return _table(core, attachment, lease, grant, got)
            yield from demote(core, attachment, got.demote)
    except KVStoreError as error:
        return Busy(str(error))
    return Busy(f"still no room after {core.setup.limits.demote_rounds_max} rounds of copying down")


def _table(core: Core, attachment: Attachment, lease: int, grant: Grant | None, got: Acquired) -> Table:
    added = u32s(got.table)
    start, stop = got.load
    if added is None or got.device < 0 or not 0 <= start <= stop:
        raise core.broken(attachment.link, "Acquired: table, device or load is malformed")
    memory = core.setup.memory
    if memory is not None and added.size and int(added.max()) >= memory.blocks:
        raise core.broken(attachment.link, f"Acquired: block {added.max()} of a pool of {memory.blocks}")
    slots = core.slots_of(attachment, got.runs, stop - start if got.runs else 0)
    if grant is None:
        if got.lease <= 0:
            raise core.broken(attachment.link, "Acquired: a table without a lease")
        lease = core.grant(Grant(got.lease, attachment, None))
    return Table(lease, added.copy(), got.device, start, stop, slots, attachment.generation)


def commit(core: Core, lease: int, chain: KeyChain, start: int, stop: int) -> Op[int]:
    """Blocks [start, stop) of the lease's table hold these keys; how many were indexed under them."""
    grant = core.leases.get(lease)
    if grant is None:
        return 0
    attachment = grant.attachment
    indexed = 0
    try:
        for at in range(start, stop, attachment.keys_max):
            until = min(stop, at + attachment.keys_max)
            keys = chain.keys[at:until].tobytes()
            message = Commit(grant.daemon_id, chain.root, at, chain.parent(at), keys)
            done = yield from ask(core, attachment.link, message, Committed, core.call_deadline())
            if not 0 <= done.indexed <= until - at:
                raise core.broken(attachment.link, f"Committed: {done.indexed} of {until - at} blocks")
            indexed += done.indexed
    except KVStoreError:
        return indexed
    return indexed


def adopt(core: Core, table: U32, chain: KeyChain | None, stop: int) -> Op[Table | Busy]:
    """Tell a new daemon that this table is in use and which keys its first `stop` blocks hold."""
    attachment = core.attachment
    if attachment is None:
        return Busy("no daemon is attached")
    keys = min(stop, attachment.keys_max) if chain is not None else 0
    if len(table) > NUMBERS_MAX:
        raise BadRequest(f"table: {len(table)} blocks are more than numbers_max = {NUMBERS_MAX}")
    root = chain.root if chain is not None else b""
    raw = chain.keys[:keys].tobytes() if chain is not None else b""
    try:
        message = Adopt(u32_bytes(table), root, raw)
        got = yield from ask(core, attachment.link, message, Acquired, core.call_deadline())
        if got.busy:
            return Busy(got.busy)
        adopted = _table(core, attachment, 0, None, got)
    except KVStoreError as error:
        return Busy(str(error))
    if chain is not None and keys < stop:
        yield from commit(core, adopted.lease, chain, keys, stop)
    return adopted


def observe(core: Core, counts: tuple[int, int, int], stored: U8, removed: U8) -> Op[bool]:
    """Tell what a borrowed pool holds; False if it did not arrive (tell everything again after re-attach)."""
    attachment = core.attachment
    if attachment is None:
        return False
    most = attachment.keys_max
    try:
        for at in range(0, max(len(stored), len(removed), 1), most):
            message = Observe(*counts, stored[at : at + most].tobytes(), removed[at : at + most].tobytes())
            yield from ask(core, attachment.link, message, Done, core.call_deadline())
    except KVStoreError:
        return False
    return True
