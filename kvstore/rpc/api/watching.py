"""Subscribe: a snapshot in parts, then events as they happen; or only events, from a known position on."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import KVStoreError, Unavailable
from kvstore.events import EventKind, KVEvent
from kvstore.group import Group
from kvstore.rpc.api.asking import TIERS
from kvstore.rpc.api.failures import deadline
from kvstore.snapshots import snapshot_parts
from kvstore.types import Tier
from kvstore.v1 import store_pb2 as pb

__all__ = ["Watching"]

# 256 KiB of keys, some 0.2 ms to gather.
KEYS_PER_MESSAGE = 8192
# Whoever sets the machine's clock moves the moment at which a token expires: so it is looked at again.
CHECK_S_MAX = 60.0
# Events taken out of the log at a time; meanwhile it may grow and lose its oldest.
EVENTS_PER_TURN = 64
_KINDS = {
    EventKind.STORED: pb.EVENT_KIND_STORED,
    EventKind.REMOVED: pb.EVENT_KIND_REMOVED,
    EventKind.CLEARED: pb.EVENT_KIND_CLEARED,
}


class Watching:
    """One Subscribe stream.

    Args:
        group: whose events.
        context: of the call.
        stall_s: longest wait for the caller to read.
        may: whether it may hear of them; for how many seconds, as far as is known now, or raises.
    """

    def __init__(
        self, group: Group, context: Any, stall_s: float, may: Callable[[], float] = lambda: math.inf
    ) -> None:
        self._group = group
        self._context = context
        self._stall_s = stall_s
        self._may = may
        self._wake = asyncio.Event()
        self._over: KVStoreError | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._unsure = True

    def stop(self) -> None:
        """The daemon stops: end the stream."""
        self._end(Unavailable("the daemon stops; subscribe again with your epoch and sequence"))

    def _end(self, why: KVStoreError) -> None:
        self._over = self._over or why
        self._wake.set()

    def doubt(self) -> None:
        """Rights have changed: whether the caller may hear of all this is asked soon, and before it does."""
        self._unsure = True
        self._ask_in(0.0)

    def _ask_in(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(min(max(seconds, 0.0), CHECK_S_MAX), self._check)

    def _check(self) -> None:
        """If the caller may not hear of all this any more, it is told nothing but why."""
        self._unsure = False
        try:
            left_s = self._may()
        except KVStoreError as error:
            self._end(error)
            return
        if left_s < math.inf:
            self._ask_in(left_s)

    async def run(self, epoch: bytes, sequence: int) -> None:
        """Until the caller leaves: everything after (epoch, sequence).

        Raises:
            DeadlineExceeded: the caller does not read.
            Unavailable: the daemon stops.
            Refused, Unauthenticated: it may not hear of them any more.
        """
        log, wake = self._group.events, self._wake
        listener = log.listen(wake.set)
        try:
            self._check()
            await self._context.send_initial_metadata(())  # who resumes may have nothing to hear for hours
            while self._over is None:
                wake.clear()
                replay = log.since(epoch, sequence, EVENTS_PER_TURN)
                if replay.gap:
                    epoch, sequence = log.epoch, await self._snapshot()
                    log.heard(listener, sequence)
                    continue
                for event in replay.events:
                    await self._event(event)
                    sequence = event.sequence
                log.heard(listener, sequence)
                if not replay.events:
                    await wake.wait()
            raise self._over
        finally:
            log.unlisten(listener)
            if self._timer is not None:
                self._timer.cancel()

    async def _snapshot(self) -> int:
        """Send what is readable; the sequence from which events complete it.

        The parts are read one after the other while the store goes on. What changes meanwhile is in the
        events after the sequence that was current at the beginning, so that the sum is right.
        """
        sequence = self._group.events.sequence
        await self._part(sequence, pb.Snapshot(first=True, tier=pb.TIER_HOST))
        for part in snapshot_parts(self._group):
            for keys in _parts(part.keys):
                snapshot = pb.Snapshot(tier=TIERS[part.tier], engine=part.engine, keys=keys.tobytes())
                await self._part(sequence, snapshot)
        await self._part(sequence, pb.Snapshot(tier=pb.TIER_HOST), last=True)
        return sequence

    async def _part(self, sequence: int, snapshot: pb.Snapshot, *, last: bool = False) -> None:
        await self._write(pb.SubscribeResponse(sequence=sequence, last=last, snapshot=snapshot))

    async def _event(self, event: KVEvent) -> None:
        """Send one event; more keys than one message takes are sent in several, each after the one before."""
        parts = _parts(event.keys) or [event.keys]
        parent = event.parent
        for number, keys in enumerate(parts, 1):
            message = pb.Event(
                kind=_KINDS[event.kind],
                tier=TIERS[Tier(event.tier)],
                engine=event.engine,
                parent=parent,
                keys=keys.tobytes(),
            )
            last = number == len(parts)
            await self._write(pb.SubscribeResponse(sequence=event.sequence, last=last, event=message))
            parent = keys[-1].tobytes() if parent and len(keys) else b""

    async def _write(self, message: pb.SubscribeResponse) -> None:
        if self._unsure:
            self._check()
        if self._over is not None:
            raise self._over
        message.epoch = self._group.events.epoch
        why = f"subscribe: nothing was read for grpc.stall_s = {self._stall_s} s"
        async with deadline(self._stall_s, why):
            await self._context.write(message)


def _parts(keys: NDArray[np.uint8]) -> list[NDArray[np.uint8]]:
    return [keys[start : start + KEYS_PER_MESSAGE] for start in range(0, len(keys), KEYS_PER_MESSAGE)]
