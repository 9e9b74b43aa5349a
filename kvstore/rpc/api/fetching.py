"""Fetch: verified block bytes, a batch at a time, as fast as the caller reads and no faster.

What is below HOST is brought there for the whole stream at once; a batch leaves as soon as its blocks have
come.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import structlog

from kvstore import _native
from kvstore._native import CORRUPT, OK
from kvstore.errors import BadRequest, NotFound
from kvstore.fetching import Fetching as Bringing
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
# How often a stream that waits for blocks looks whether its lease still lives.
_LOOK_S = 0.1
_ENDED = "the lease ended: its caller released it, or its memory was needed"


@dataclass(frozen=True, slots=True)
class _Batch:
    """Leading blocks of a batch that are verified in the buffer, and why nothing can follow them ("")."""

    blocks: int
    reason: str = ""


@dataclass(slots=True)
class Fetching:
    """One Fetch stream.

    Attributes:
        held: the lease it reads under.
        context: of the call; writing waits for the caller to read.
        stall_s: longest wait for that, and for the next block to come.
    """

    store: Store
    copies: Copies
    holdings: Holdings
    held: Held
    context: Any
    stall_s: float
    _news: asyncio.Event = field(default_factory=asyncio.Event)

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
            bringing = await self._bring(start, stop)
            while at < stop:
                wanted = min(buffer.blocks, stop - at)
                batch = await self._load(buffer, bringing, at, wanted)
                await self._send(buffer, at, batch.blocks)
                at += batch.blocks
                if self.held.sent >= at - batch.blocks:
                    self.held.sent = max(self.held.sent, at)
                if batch.reason:
                    break
            await self._write(pb.FetchResponse(end=pb.FetchEnd(stop=at, reason=batch.reason)))
        finally:
            self.held.streams -= 1
            self.copies.give_back(buffer)

    async def _bring(self, start: int, stop: int) -> Bringing | str:
        """Let the store bring the blocks to HOST, as far as they are anywhere; or why it does not."""
        lease, group = self.held.lease, self.held.caller.group
        try:
            async with asyncio.timeout(self.stall_s):
                while any(other.lease is lease for other in group.fetches):  # noqa: ASYNC110  another stream's
                    await asyncio.sleep(_LOOK_S)  # rare, and nothing tells of its end
        except TimeoutError:
            return "another stream of this lease waits for its blocks"
        if not self.holdings.lives(self.held):
            return _ENDED
        stop = min(stop, max(lease.host, lease.disk))
        if not group.nvme.configured and start < stop:
            stop = start + group.host.leading(lease.nodes[start:stop])
        if start >= stop:
            return f"block {start} is not on HOST any more"
        try:
            return self.store.fetch(
                self.held.caller, lease.id, start, stop, lambda _: self._news.set(), watched=False
            )
        except (BadRequest, NotFound) as error:  # gone meanwhile, or the disk stalled under this lease
            return str(error)

    async def _load(self, buffer: Buffer, bringing: Bringing | str, at: int, wanted: int) -> _Batch:
        """Copy blocks from `at` on into the buffer, as many of `wanted` as have come, once some have."""
        if isinstance(bringing, str):
            return _Batch(0, bringing)
        caller, lease, group = self.held.caller, self.held.lease, self.held.caller.group
        why = await self._come(bringing, at)
        if why:
            return _Batch(0, why)
        here = min(wanted, bringing.ready - at, group.host.leading(lease.nodes[at : at + wanted]))
        if here <= 0:
            return _Batch(0, f"block {at} is not on HOST any more")
        pages = caller.shape.slot_bytes // _native.PAGE_BYTES
        slots = _native.unpack_slots(bringing.runs(at, at + here), here, pages, group.arena.pages)
        keys = group.index.keys(lease.nodes[at : at + here])
        status = await self.copies.load(buffer, group.arena, caller.shape, slots, keys)
        bad = np.flatnonzero(status != OK)
        if not len(bad):
            return _Batch(here)
        good = int(bad[0])
        return _Batch(good, self._why_not(at + good, int(status[good])))

    async def _come(self, bringing: Bringing, at: int) -> str:
        """Wait until block `at` is on HOST; "", or why it will not be."""
        clock, heard_s, ready = self.store.clock, self.store.clock.now(), bringing.ready
        while self.holdings.lives(self.held):
            if bringing.ready > at:
                return ""
            if bringing.over:
                return f"block {at} cannot be had: {bringing.reason or 'it is not on HOST any more'}"
            if bringing.ready > ready:
                heard_s, ready = clock.now(), bringing.ready
            if clock.now() - heard_s > self.stall_s:
                return f"block {at} did not come within grpc.stall_s = {self.stall_s} s"
            self._news.clear()
            with contextlib.suppress(TimeoutError):  # a lease that ends says nothing
                async with asyncio.timeout(_LOOK_S):
                    await self._news.wait()
        return _ENDED

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
