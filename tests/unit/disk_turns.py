"""The daemon's loop over a disk in simulated time: the disk's own work takes none of it, timers all of it."""

from __future__ import annotations

import asyncio
import heapq
import select
from collections.abc import Callable
from pathlib import Path
from typing import cast

import msgspec
from nvme_stage import MIB

from kvstore.config import Config, PlanConfig
from kvstore.disks import DiskLoop
from kvstore.testing import StoreDriver, small_config, small_disk

__all__ = ["MB", "STALL_S", "DiskTurns", "paced", "set_limits"]

MB = 1_000_000
STALL_S = 1.0

_WAIT_S = 30.0


def paced(folder: Path, *, limit: int = 0, latency_s: float = 0.0) -> Config:
    """A HOST of 120 blocks over a disk that is that slow."""
    disk = small_disk(folder / "disk", capacity_bytes=32 * MIB)
    disk = msgspec.structs.replace(disk, limit_bytes_per_s=limit, added_latency_s=latency_s, stall_s=STALL_S)
    config = small_config(capacity_bytes=16 * MIB, nvme=disk)
    return msgspec.structs.replace(config, plan=PlanConfig(mode="load"))  # it is the disk that is timed


def set_limits(driver: StoreDriver, limit: int, latency_s: float = 0.0) -> None:
    """As a reload does."""
    config = driver.nvme.config
    config = msgspec.structs.replace(config, limit_bytes_per_s=limit, added_latency_s=latency_s)
    driver.nvme.reconfigure(config)


class _Timer:
    def __init__(self) -> None:
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class DiskTurns:
    """What DiskLoop needs of a loop.

    Args:
        driver: whose disk, and whose clock.
        late_s: by how much every timer is late, as those of a real loop are.
    """

    def __init__(self, driver: StoreDriver, late_s: float = 0.0) -> None:
        self.driver = driver
        self.late_s = late_s
        self.wakes = 0
        self._timers: list[tuple[float, int, _Timer, Callable[..., object], tuple[object, ...]]] = []
        self._last = 0
        self.disks = DiskLoop(driver.store, cast(asyncio.AbstractEventLoop, self))

    def call_later(self, delay_s: float, call: Callable[..., object], *args: object) -> _Timer:
        timer, at_s = _Timer(), self.driver.clock.now() + delay_s + self.late_s
        self._last += 1
        heapq.heappush(self._timers, (at_s, self._last, timer, call, args))
        return timer

    def add_reader(self, fd: int, call: Callable[[], object]) -> None:
        assert fd == self.driver.nvme.eventfd

    def remove_reader(self, fd: int) -> None:
        pass

    def run(self, done: Callable[[], bool], seconds: float = 100.0) -> None:
        """Until `done`; fails after so many simulated seconds."""
        clock, nvme = self.driver.clock, self.driver.nvme
        until_s = clock.now() + seconds
        while not done():
            assert clock.now() <= until_s, f"not done within {seconds} s"
            if nvme._promotions._by_job:  # simulated time stands still while the disk reads
                assert select.select([nvme.eventfd], [], [], _WAIT_S)[0], "the disk says nothing"
                nvme.pump()
                continue
            at_s, _, timer, call, args = heapq.heappop(self._timers)
            if not timer.cancelled:
                clock.advance(max(0.0, at_s - clock.now()))
                self.wakes += 1
                call(*args)
