"""The KV event log: what became readable, what left, in order, bounded.

A subscriber reads a snapshot (epoch, sequence, keys by tier), then events from that sequence on. A gap (it
fell behind `events.log_max`) or another epoch means: take a snapshot again.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstore.clock import Clock, MonotonicClock
from kvstore.types import Tier

# Most events are one save of a prompt; a log of larger ones keeps fewer, so that its memory has a bound.
KEYS_PER_EVENT = 100
# What is longer becomes several events: 1 MiB, 2 ms to put on a wire.
KEYS_PER_EVENT_MAX = 32_768

__all__ = ["EventKind", "EventLag", "EventLog", "KVEvent", "Published", "Replay", "Snapshot"]


class EventKind(enum.StrEnum):
    """What happened to the keys of an event."""

    STORED = "stored"
    REMOVED = "removed"
    CLEARED = "cleared"


@dataclass(frozen=True, slots=True)
class KVEvent:
    """One change of one tier.

    Attributes:
        sequence: 1, 2, 3, … within an epoch.
        kind: stored, removed, or cleared (then keys is empty).
        tier: where.
        engine: 16-byte engine id for GPU events, b"" otherwise.
        parent: key before keys[0] for STORED, b"" when it is not known.
        keys: (n, 32) uint8.
    """

    sequence: int
    kind: EventKind
    tier: Tier
    engine: bytes
    parent: bytes
    keys: NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything readable at one moment.

    Attributes:
        epoch: 16 bytes of the daemon's boot.
        sequence: the last event that this snapshot includes.
        host, nvme: (n, 32) keys with bytes on HOST and on NVME.
        devices: engine id → (n, 32) keys.
    """

    epoch: bytes
    sequence: int
    host: NDArray[np.uint8]
    nvme: NDArray[np.uint8]
    devices: dict[bytes, NDArray[np.uint8]]


@dataclass(frozen=True, slots=True)
class Replay:
    """Events after a sequence, or `gap` when some of them are gone (take a snapshot)."""

    events: tuple[KVEvent, ...]
    gap: bool


@dataclass(frozen=True, slots=True)
class EventLag:
    """How far the slowest subscriber is behind, 0 without one: events, and the age of its next one."""

    events: int
    seconds: float


@dataclass(slots=True)
class Published:
    """What left a log over ZMQ (rpc/zmq_events.py).

    Attributes:
        batches: sent to whoever listens.
        replays, snapshots: that were asked for, and begun.
        abandoned: of these, given up because the one who asked did not read.
        refused: not begun, because too many were under way.
        bad_requests: frames that ask for nothing.
    """

    batches: int = 0
    replays: int = 0
    snapshots: int = 0
    abandoned: int = 0
    refused: int = 0
    bad_requests: int = 0


class EventLog:
    """A bounded ring of events with one wake-up callback per subscriber.

    Args:
        clock: for the age of events.
    """

    def __init__(self, epoch: bytes, log_max: int, clock: Clock | None = None) -> None:
        self.epoch = epoch
        self._clock = clock or MonotonicClock()
        self._ring: deque[KVEvent] = deque(maxlen=log_max)
        self._times_s: deque[float] = deque(maxlen=log_max)  # when each event of the ring happened
        self._keys = 0
        self._keys_max = log_max * KEYS_PER_EVENT
        self._sequence = 0
        self._listeners: dict[int, Callable[[], None]] = {}
        self._next_listener = 0
        self._heard: dict[int, int] = {}  # listener → last sequence that it has passed on
        self.published = Published()

    @property
    def sequence(self) -> int:
        """Number of the newest event, 0 before the first."""
        return self._sequence

    @property
    def oldest(self) -> int:
        """Number of the oldest event that is kept; of the next one, if none is."""
        return self._ring[0].sequence if self._ring else self._sequence + 1

    def happened_s(self, sequence: int) -> float:
        """When an event that is kept happened, on the log's clock."""
        return self._times_s[sequence - self.oldest]

    def append(
        self,
        kind: EventKind,
        tier: Tier,
        keys: NDArray[np.uint8],
        *,
        engine: bytes = b"",
        parent: bytes = b"",
    ) -> None:
        """Record one event, or several for more than KEYS_PER_EVENT_MAX keys.

        Nothing happens when `keys` is empty and the kind is not CLEARED.
        """
        if kind is EventKind.CLEARED:
            self._append(KVEvent(self._sequence + 1, kind, tier, engine, parent, keys))
            return
        for start in range(0, len(keys), KEYS_PER_EVENT_MAX):
            part = keys[start : start + KEYS_PER_EVENT_MAX]
            if start and parent:
                parent = keys[start - 1].tobytes()
            self._append(KVEvent(self._sequence + 1, kind, tier, engine, parent, part))

    def _append(self, event: KVEvent) -> None:
        self._sequence = event.sequence
        if len(self._ring) == self._ring.maxlen:
            self._keys -= len(self._ring[0].keys)
        self._ring.append(event)
        self._times_s.append(self._clock.now())
        self._keys += len(event.keys)
        while self._keys > self._keys_max and len(self._ring) > 1:
            self._keys -= len(self._ring.popleft().keys)
            self._times_s.popleft()
        for wake in tuple(self._listeners.values()):
            wake()

    def since(self, epoch: bytes, sequence: int, most: int = 1024) -> Replay:
        """Events after `sequence`.

        Args:
            epoch: epoch that the subscriber knows; another one is a gap.
            sequence: last event that it has seen.
            most: at most that many events.
        """
        oldest = self.oldest
        if epoch != self.epoch or sequence > self._sequence or sequence + 1 < oldest:
            return Replay((), gap=True)
        first = sequence + 1 - oldest
        stop = min(len(self._ring), first + most)
        return Replay(tuple(self._ring[i] for i in range(first, stop)), gap=False)

    def listen(self, wake: Callable[[], None]) -> int:
        """Call `wake` after every event; returns a number for unlisten()."""
        self._next_listener += 1
        self._listeners[self._next_listener] = wake
        return self._next_listener

    def unlisten(self, listener: int) -> None:
        """Forget a subscriber."""
        self._listeners.pop(listener, None)
        self._heard.pop(listener, None)

    def heard(self, listener: int, sequence: int) -> None:
        """A subscriber has passed on everything up to `sequence`. One that never says so has no lag."""
        if listener in self._listeners:
            self._heard[listener] = sequence

    def lag(self) -> EventLag:
        """Of the slowest subscriber that says what it has heard."""
        behind = self._sequence - min(self._heard.values(), default=self._sequence)
        if behind <= 0:
            return EventLag(0, 0.0)
        oldest_s = self._times_s[-min(behind, len(self._times_s))]  # what left the ring is older still
        return EventLag(behind, max(0.0, self._clock.now() - oldest_s))
