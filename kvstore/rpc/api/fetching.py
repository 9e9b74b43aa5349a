"""Fetch: verified block bytes, a batch at a time, as fast as the caller reads and no faster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import structlog

from kvstore import _native
from kvstore._native import CORRUPT, OK
from kvstore.errors import NotFound
from kvstore.rpc.api.copies import Buffer, Copies
from kvstore.rpc.api.failures import deadline
from kvstore.rpc.api.holding import Held, Holdings
from kvstore.store import Store
from kvstore.v1 import store_pb2 as pb

__all__ = ["DATA_BYTES_MAX", "Fetching"]

log = structlog.get_logger()

# Of one message, framing not counted. Each is copied three times on the loop (out of the buffer, into the
# message, into the wire format): 256 KiB hold it for some 0.3 ms, and the rate is that of large messages.
DATA_BYTES_MAX = 256 << 10


@dataclass(frozen=True, slots=True)
class _Batch:
    """Leading blocks of a batch that are verified in the buffer, and why not all of them are."""

    blocks: int
    reason: str = ""


@dataclass(slots=True)
class Fetching:
    """One Fetch stream.

    Attributes:
        held: the lease it reads under.
        context: of the call; writing waits for the caller to read.
        stall_s: longest wait for that.
    """

    store: Store
    copies: Copies
    holdings: Holdings
    held: Held
    context: Any
    stall_s: float

    async def run(self, start: int, stop: int) -> None:
        """Send blocks [start, stop) of the lease: header, data, end.

        Raises:
            LimitExceeded: no buffer is left.
            DeadlineExceeded: the caller does not read.
        """
        layout = self.held.layout
        buffer = self.copies.buffer(layout, stop - start)
        self.held.streams += 1
        try:
            header = pb.FetchHeader(
                epoch=self.store.epoch, start=start, stop=stop, block_bytes=layout.block_bytes
            )
            await self._write(pb.FetchResponse(header=header))
            at, batch = start, _Batch(0)
            while at < stop:
                wanted = min(buffer.blocks, stop - at)
                batch = await self._load(buffer, at, wanted)
                await self._send(buffer, at, batch.blocks)
                at += batch.blocks
                if self.held.sent >= at - batch.blocks:
                    self.held.sent = max(self.held.sent, at)
                if batch.blocks < wanted:
                    break
            await self._write(pb.FetchResponse(end=pb.FetchEnd(stop=at, reason=batch.reason)))
        finally:
            self.held.streams -= 1
            self.copies.give_back(buffer)

    async def _load(self, buffer: Buffer, at: int, wanted: int) -> _Batch:
        """Bring blocks [at, at + wanted) into the buffer, as far as they are there and sound."""
        caller, lease, group = self.held.caller, self.held.lease, self.held.caller.group
        nodes = lease.nodes[at : at + wanted]
        if not self.holdings.lives(self.held):
            return _Batch(0, "the lease ended: its caller released it, or its memory was needed")
        here = min(group.host.leading(nodes), max(0, lease.host - at))
        if not here:
            return _Batch(0, f"block {at} is not on HOST any more")
        try:
            packed = self.store.fetch(caller, lease.id, at, at + here)
        except NotFound as error:
            return _Batch(0, str(error))
        pages = caller.shape.slot_bytes // _native.PAGE_BYTES
        slots = _native.unpack_slots(packed, here, pages, group.arena.pages)
        keys = group.index.keys(nodes[:here])
        status = await self.copies.load(buffer, group.arena, caller.shape, slots, keys)
        bad = np.flatnonzero(status != OK)
        if not len(bad):
            return _Batch(here, "" if here == wanted else f"block {at + here} is not on HOST any more")
        good = int(bad[0])
        return _Batch(good, self._why_not(at + good, int(status[good])))

    def _why_not(self, block: int, status: int) -> str:
        """A block failed its check: if it is rotten drop it, for everybody."""
        caller, lease = self.held.caller, self.held.lease
        if status == CORRUPT and self.holdings.lives(self.held):
            dropped = self.store.report(caller, lease.id, np.array([block], np.uint32))
            if dropped:
                log.error("corrupt blocks dropped", lease=lease.id, block=block, blocks=dropped)
                return f"block {block} is corrupt; it was dropped"
        return f"block {block} changed while it was read"

    async def _send(self, buffer: Buffer, at: int, blocks: int) -> None:
        """The first `blocks` blocks of the buffer, cut into messages."""
        total = blocks * buffer.block_bytes
        for offset in range(0, total, DATA_BYTES_MAX):
            data = buffer.bytes[offset : min(total, offset + DATA_BYTES_MAX)].tobytes()
            block, inside = divmod(offset, buffer.block_bytes)
            message = pb.FetchData(block=at + block, offset=inside, data=data, crc32c=_native.crc32c(data))
            await self._write(pb.FetchResponse(data=message))
            self.holdings.renew(self.held)

    async def _write(self, message: pb.FetchResponse) -> None:
        async with deadline(self.stall_s, f"fetch: nothing was read for grpc.stall_s = {self.stall_s} s"):
            await self.context.write(message)
