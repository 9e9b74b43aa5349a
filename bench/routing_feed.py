"""KV events of which 1 % are lost, on real sockets, and what the index is worth afterwards."""

from __future__ import annotations

import asyncio
from collections import deque
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np
import zmq
from numpy.typing import NDArray
from zmq.asyncio import Context

from kvstore.clock import MonotonicClock
from kvstore.router.feeding import FeedTimes
from kvstore.router.kv_schema import Removed, Stored
from kvstore.router.placing import RouteRequest
from kvstore.router.prefixes import Holdings, Prefixes
from kvstore.router.vllm_feed import VllmFeed
from kvstore.router.vllm_wire import VllmSource
from kvstore.simulate.lru import BlockLru
from kvstore.simulate.queueing import QueueSettings
from kvstore.simulate.workload import Workload

__all__ = ["IdNames", "lossy_feed", "packed_events"]

LOST_SHARE = 0.01
_BUFFER = 10_000  # batches that vLLM keeps for replays
_WAIT_S = 30.0


class IdNames:
    """Blocks of a trace are named by its ids, one more each: no fingerprint is 0."""

    block_tokens = 512

    def of_prompt(self, request: RouteRequest) -> NDArray[np.uint64]:
        """Traces have ids instead of tokens."""
        return request.tokens.astype(np.uint64) + 1

    def of_event(self, event: Stored, engine: Any, tier: int) -> bytes:
        """As they come."""
        return event.hashes

    def of_removal(self, event: Removed, engine: Any, tier: int) -> bytes:
        """As they come."""
        return event.hashes


def packed_events(stored: list[int], removed: list[int], at_s: float) -> bytes:
    """One batch in vLLM's schema."""
    events: list[list[Any]] = []
    if stored:
        events.append(["BlockStored", [each + 1 for each in stored], None, [], 512, None, "GPU"])
    if removed:
        events.append(["BlockRemoved", [each + 1 for each in removed], "GPU"])
    return msgspec.msgpack.encode([at_s, events, None])


class _Publisher:
    """As vLLM's: a PUB socket, and a ROUTER that repeats the latest batches."""

    def __init__(self, context: Context, folder: Path, random: Random) -> None:
        self.source = VllmSource(f"ipc://{folder}/pub", f"ipc://{folder}/replay", b"kv")
        self._pub = context.socket(zmq.PUB)
        self._pub.set_hwm(0)
        self._pub.bind(self.source.publish)
        self._replay = context.socket(zmq.ROUTER)
        self._replay.bind(self.source.replay)
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=_BUFFER)
        self._random = random
        self._answering = asyncio.create_task(self._answer())
        self.sent = 0
        self.lost = 0

    async def publish(self, payload: bytes) -> None:
        """Kept always, sent in 99 of 100 cases."""
        sequence, self.sent = self.sent, self.sent + 1
        self._kept.append((sequence, payload))
        if self._random.random() < LOST_SHARE:
            self.lost += 1
            return
        await self._pub.send_multipart([b"kv", sequence.to_bytes(8, "big"), payload])

    async def _answer(self) -> None:
        while True:
            who, empty, start = await self._replay.recv_multipart()
            first = int.from_bytes(start, "big")
            for sequence, payload in list(self._kept):
                if sequence >= first:
                    frames = [who, empty, b"kv", sequence.to_bytes(8, "big"), payload]
                    await self._replay.send_multipart(frames)
            await self._replay.send_multipart([who, empty, b"kv", (-1).to_bytes(8, "big", signed=True), b""])

    async def close(self) -> None:
        self._answering.cancel()
        await asyncio.gather(self._answering, return_exceptions=True)
        self._pub.close(0)
        self._replay.close(0)


async def lossy_feed(
    folder: Path, workload: Workload, fleet: QueueSettings, random: Random
) -> dict[str, Any]:
    """One replica serves the whole trace; its feed must end with exactly what it holds.

    Returns:
        lost_messages, replays, resyncs (truths begun anew), wrong_entries_after_resync.
    """
    context, clock = Context(), MonotonicClock()
    publisher = _Publisher(context, folder, random)
    prefixes = Prefixes(IdNames(), 4 * fleet.capacity_blocks, 1, clock)
    holdings = prefixes.join(fleet.capacity_blocks, told=True)
    feed = VllmFeed(publisher.source, holdings, FeedTimes(probe_s=0.5, retry_s=0.05), context=context)
    following = asyncio.create_task(feed.run())
    held = BlockLru(fleet.capacity_blocks)
    try:
        for number, ids in enumerate(workload.chains):
            touched = held.touch(ids)
            await publisher.publish(packed_events(touched.stored, touched.removed, float(number)))
            if number % 64 == 0:
                await asyncio.sleep(0.001)
        truth = {each + 1 for each in set().union(*workload.chains) if each in held}
        until_s = clock.now() + _WAIT_S
        # What was lost at the very end is found when the feed asks, after half a second of silence.
        while (known := _known(prefixes, holdings)) != truth and clock.now() < until_s:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await publisher.close()
        context.term()
    return {
        "messages": publisher.sent,
        "lost_messages": publisher.lost,
        "replays": feed.counts.replays,
        "resyncs": feed.counts.resets,
        "wrong_entries_after_resync": len(known ^ truth),
        "entries": len(known),
    }


def _known(prefixes: Prefixes, holdings: Holdings) -> set[int]:
    return set(prefixes.index.keys_of(holdings.column, 0).tolist())
