"""Save: bytes of a caller become readable blocks, all together when its stream ends, or not at all.

    data → buffer ─ full → reserve → copy into FILLING slots ─ … ─ end of stream → publish
                                                              └ broken, cancelled, late → abort

Slots are reserved only when the bytes for them are here: a caller that sends nothing takes nothing from
others. Bytes keep a stream alive, not messages: each batch has to be here within `grpc.stall_s`. The daemon
is the writer: when a stream breaks, its copy is joined before the slots go back (LAWS A1).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np

from kvstore import _native, engines
from kvstore._native import NONE, OK
from kvstore.callers import Caller
from kvstore.errors import BadRequest
from kvstore.rpc.api.chains import Asked
from kvstore.rpc.api.copies import Buffer, Copies
from kvstore.rpc.api.failures import deadline, read
from kvstore.store import Store
from kvstore.transfers import Filling
from kvstore.types import SaveResult
from kvstore.v1 import store_pb2 as pb

__all__ = ["Saving", "next_item", "saved"]

# Of 2 MiB each; one is published in some 0.25 ms.
FILLINGS_PER_SLICE = 4


async def next_item(context: Any, kind: str) -> Any:
    """The next message of a Save stream, its `header` or its `data`; None at the end.

    Raises:
        BadRequest: the other kind, or no message at all.
    """
    message = await context.read()
    if message is grpc.aio.EOF:
        return None
    message = read(message)
    if message.WhichOneof("item") != kind:
        raise BadRequest(f"{kind}: a Save stream is one header, then data")
    return getattr(message, kind)


@dataclass(slots=True)
class Saving:
    """One Save stream after its header.

    Attributes:
        asked: the chain.
        start: its first block in the stream.
        caller: of the store, for this stream alone.
        publishing: tasks of all streams that make blocks readable now.
        fillings: what was reserved and written, in chain order.
        at: blocks of the chain that were taken out of the stream.
    """

    store: Store
    copies: Copies
    asked: Asked
    start: int
    caller: Caller
    publishing: set[asyncio.Task[SaveResult]]
    task: asyncio.Task[SaveResult] | None = None
    fillings: list[Filling] = field(default_factory=list)
    at: int = 0
    filled: int = 0
    elsewhere: int = 0
    reason: str = ""

    async def run(self, context: Any, stall_s: float) -> SaveResult:
        """Take the whole stream.

        Raises:
            BadRequest: too few bytes, too many, or not those that their sum says; nothing was saved.
            LimitExceeded: no buffer, no filling, or no root is left.
            DeadlineExceeded: the caller sends nothing, or too slowly.
        """
        self.at = self.start
        engines.attach(self.caller)
        buffer = None
        try:
            buffer = self.copies.buffer(self.asked.layout, len(self.asked) - self.start)
            await self._take(context, stall_s, buffer)
            # Once begun it ends, whatever becomes of the call: half of a prompt is never published.
            self.task = asyncio.create_task(self._publish())
            self.publishing.add(self.task)
            self.task.add_done_callback(self.publishing.discard)
            return await asyncio.shield(self.task)
        finally:
            self._end(buffer)

    def _end(self, buffer: Buffer | None) -> None:
        """Give up what was not published, after the copy or the publishing that a cancelled call left."""
        if buffer is not None:
            self.copies.give_back(buffer)
        if self.task is not None and not self.task.done():
            self.task.add_done_callback(lambda _: self._leave())
        elif buffer is not None:
            self.copies.after(buffer, self._leave)
        else:
            self._leave()

    async def _take(self, context: Any, stall_s: float, buffer: Buffer) -> None:
        size, blocks, room = self.asked.layout.block_bytes, len(self.asked), len(buffer.bytes)
        left, fill = (blocks - self.start) * size, 0
        why = f"save: a batch of {room} bytes, or the end, did not come within grpc.stall_s = {stall_s} s"
        async with deadline(stall_s, why) as clock:
            while (item := await next_item(context, "data")) is not None:
                self._check(item, left)
                left -= len(item.data)
                rest = memoryview(item.data)
                while rest:
                    part = rest[: room - fill]
                    buffer.bytes[fill : fill + len(part)] = np.frombuffer(part, np.uint8)
                    rest, fill = rest[len(part) :], fill + len(part)
                    if fill == room or (not left and not rest):
                        clock.reschedule(None)  # what the daemon takes for its copy is not the caller's
                        if not await self._keep(buffer, fill // size):
                            return  # no room: what follows could not be reached without what was dropped
                        clock.reschedule(asyncio.get_running_loop().time() + stall_s)
                        fill = 0
        if left:
            raise BadRequest(
                f"data: the stream ended {left} bytes before the last block's end; nothing was saved"
            )

    def _check(self, item: Any, left: int) -> None:
        if not item.data:
            raise BadRequest("data.data: empty; send bytes, or end the stream")
        if item.HasField("crc32c") and _native.crc32c(item.data) != item.crc32c:
            raise BadRequest("data.crc32c: is not the sum of data; nothing was saved")
        if len(item.data) > left:
            blocks, size = len(self.asked) - self.start, self.asked.layout.block_bytes
            raise BadRequest(f"data.data: more than the {blocks} blocks of {size} bytes announced")

    async def _keep(self, buffer: Buffer, blocks: int) -> bool:
        """Reserve slots for the first blocks of the buffer and copy them; False when not all of them fit."""
        chain, origin = self.asked.chain, self.asked.origin
        assert origin is not None, "who reuses nothing was refused at the header"
        # Not before: a root stays for ever, and a header alone is cheap to invent.
        self.asked.group.roots.add(origin)
        keys, parent = chain.keys[self.at : self.at + blocks], chain.parent(self.at)
        got = self.store.reserve(self.caller, chain.root, parent, keys)
        self.filled += got.filled
        self.elsewhere += got.elsewhere
        self.at += blocks - got.dropped
        self.reason = got.reason
        if got.filling is not None:
            self.fillings.append(got.filling)
            ours = np.flatnonzero(got.slots != NONE).astype(np.uint32)
            arena, shape = self.caller.group.arena, self.caller.shape
            slots, generations = got.filling.slots, got.filling.generations
            status = await self.copies.store(buffer, arena, shape, ours, slots, generations)
            if (status != OK).any():  # nobody else may write these slots
                raise RuntimeError(f"slots changed hands while they were filled: {status.tolist()}")
        return not got.dropped

    async def _publish(self) -> SaveResult:
        """Everything becomes readable, in chain order, a slice at a time."""
        ready = 0
        while self.fillings:
            if len(self.fillings) % FILLINGS_PER_SLICE == 0:
                await asyncio.sleep(0)
            filling = self.fillings[0]
            done = self.store.publish(self.caller, filling.token, len(filling.slots), checked=True)
            ready += done.ready
            del self.fillings[0]
        dropped = len(self.asked) - self.start - ready - self.filled - self.elsewhere
        if dropped and not self.reason:
            self.reason = "the block before them is not readable, or another writer was first"
        return SaveResult(ready, self.filled, self.elsewhere, dropped, self.reason)

    def _leave(self) -> None:
        """Abort what was not published; nothing is left of this stream."""
        for filling in reversed(self.fillings):
            self.store.abort(self.caller, filling.token)
        self.fillings.clear()
        engines.detach(self.caller)


def saved(epoch: bytes, result: SaveResult) -> pb.SaveResponse:
    """The reply."""
    return pb.SaveResponse(
        epoch=epoch,
        ready=result.ready,
        filled=result.filled,
        elsewhere=result.elsewhere,
        dropped=result.dropped,
        reason=result.reason,
    )
