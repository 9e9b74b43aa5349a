"""The disks of all trust groups on the event loop: what they have done, time that passes, and flushes."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass

from kvstore import quarantine
from kvstore.clock import Clock
from kvstore.group import Group
from kvstore.store import Store
from kvstore.tiers.alarms import Alarms
from kvstore.tiers.nvme import Flushed, NvmeTier
from kvstore.tiers.promotions import OWNER

__all__ = ["DiskLoop", "FlushReport", "flush"]

# How often promotions that stall and disks that were left alone are looked at.
_TICK_S = 0.1


class DiskLoop:
    """Lets every group's disk go on whenever it has something to say.

    Args:
        loop: that owns the store.
    """

    def __init__(self, store: Store, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._disks = [group.nvme for group in store.groups.values() if isinstance(group.nvme, NvmeTier)]
        self._timer: asyncio.TimerHandle | None = None
        # Those of a disk, or without one of what waits for a limited HOST.
        self._wakes = [_Wake(group.fetches.alarms, store.clock, loop) for group in store.groups.values()]
        for disk in self._disks:
            loop.add_reader(disk.eventfd, disk.pump)
            disk.pump()
        if self._disks:
            self._tick()
        # Reads into a kept arena that the daemon before had under way have ended by then.
        self._settled = loop.call_later(quarantine.DISK_SETTLES_S, _settled, store)

    def _tick(self) -> None:
        self._timer = self._loop.call_later(_TICK_S, self._tick)
        for disk in self._disks:
            disk.tick()

    def close(self) -> None:
        """Look no more. Idempotent."""
        self._settled.cancel()
        if self._timer is not None:
            self._timer.cancel()
        for wake in self._wakes:
            wake.close()
        for disk in self._disks:
            self._loop.remove_reader(disk.eventfd)
        self._disks = []


class _Wake:
    """One group's alarms, rung at their moment: a timer of the loop is late by a millisecond or two."""

    def __init__(self, alarms: Alarms, clock: Clock, loop: asyncio.AbstractEventLoop) -> None:
        self._alarms = alarms
        self._clock = clock
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None
        self._at_s = math.inf
        alarms.wake_at = self._wake_at
        if alarms.next_s is not None:
            self._wake_at(alarms.next_s)

    def _wake_at(self, at_s: float) -> None:
        if at_s < self._at_s:
            self._forget()
            self._at_s = at_s
            self._timer = self._loop.call_later(max(0.0, at_s - self._clock.now()), self._ring)

    def _ring(self) -> None:
        self._forget()
        self._alarms.ring()  # tells of the next, also of this one if the timer was early by a rounding

    def _forget(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._at_s = None, math.inf

    def close(self) -> None:
        """Ring no more."""
        self._forget()
        self._alarms.wake_at = _nothing


def _nothing(_: float) -> None:
    """The loop ends."""


def _settled(store: Store) -> None:
    for group in store.groups.values():
        quarantine.writer_done(group, OWNER, quarantine.DISK_WRITER)


@dataclass(frozen=True, slots=True)
class FlushReport:
    """What a flush of all trust groups has found.

    Attributes:
        durable: every block that admission let in before the flush survives from now on whatever happens.
        blocks, bytes: readable on NVME in all.
        refused: blocks that admission did not let in since start: they were never meant to be there.
        seconds: how long it took.
        error: why it is not durable, "" = it is.
    """

    durable: bool
    blocks: int
    bytes: int
    refused: int
    seconds: float
    error: str


def flush(store: Store, answer: Callable[[FlushReport], None]) -> None:
    """Flush every group's disk and call `answer`, at once where no NVME tier is configured."""
    began_s = store.clock.now()
    disks = [(group, group.nvme) for group in store.groups.values() if isinstance(group.nvme, NvmeTier)]
    if not disks:
        answer(
            FlushReport(
                False, 0, 0, 0, 0.0, "no NVME tier: set nvme.directory, and blocks outlive the daemon"
            )
        )
        return
    errors: dict[str, str] = {}

    def done(group: Group, flushed: Flushed) -> None:
        errors[group.name] = f"group {group.name}: {flushed.error}" if flushed.error else ""
        if len(errors) == len(disks):
            answer(_report(disks, [error for error in errors.values() if error], store.clock.now() - began_s))

    for group, nvme in disks:
        nvme.flush(lambda flushed, group=group: done(group, flushed))  # type: ignore[misc]


def _report(disks: list[tuple[Group, NvmeTier]], errors: list[str], seconds: float) -> FlushReport:
    counts = [nvme.counts() for _, nvme in disks]
    return FlushReport(
        not errors,
        sum(count["records"] for count in counts),
        sum(count["live_bytes"] for count in counts),
        sum(nvme.admission.refused_blocks for _, nvme in disks),
        seconds,
        "; ".join(errors),
    )
