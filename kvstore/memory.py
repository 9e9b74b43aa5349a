"""Arenas, pools and disks from configuration: what one trust group owns."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import structlog

from kvstore._native import (
    Adopted,
    Arena,
    DiskDirectory,
    DiskPool,
    DiskSurvey,
    HostPool,
    Index,
    Ledger,
    Survey,
)
from kvstore.config import Config
from kvstore.disk_drops import DiskDrops
from kvstore.errors import ConfigError, OutOfMemory
from kvstore.keep.keeping import Keeping, KeptArena
from kvstore.progress import READING, SEGMENTS, ShowProgress

__all__ = ["ASIDE_ROOT", "GroupMemory", "open_disk", "open_memory"]

log = structlog.get_logger()

R = TypeVar("R")

# How often the progress callback runs while memory is made or verified.
_PROGRESS_S = 0.1
# Segments that are made before anybody is served: two at most, and no longer than that.
_FIRST_SEGMENTS, _FIRST_SEGMENTS_S = 2, 10.0
# Root of what nobody looks up: layout proofs, and stand-ins for slots that processes of an earlier daemon's
# time may still be writing. No client is ever given it.
ASIDE_ROOT = b"kvstore: kept aside".ljust(32, b"\0")


@dataclass(slots=True)
class GroupMemory:
    """The arena of one trust group with its index and host pool.

    Attributes:
        arena: mapped and prefaulted.
        index: every block key of the group.
        host: slots of the arena.
        huge: whether the arena got 2 MiB pages throughout.
        adopted: what was taken over from the daemon before, None for a fresh arena.
        disk: records in segment files, None where no NVME tier is configured.
        directory: that holds them; held as long as the disk is used.
        drops: what was dropped from the disk and must not come back.
        disk_error: errno of the first thing that the disk refused, 0 = nothing so far.
    """

    arena: Arena
    index: Index
    host: HostPool
    huge: bool
    adopted: Adopted | None = None
    disk: DiskPool | None = None
    directory: DiskDirectory | None = None
    disk_error: int = 0
    drops: DiskDrops | None = None


def open_memory(
    config: Config,
    name: str,
    progress: Callable[[int, int], None] | None = None,
    keeping: Keeping | None = None,
) -> GroupMemory:
    """Make the memory of one group, or take it over from the daemon before.

    Args:
        config: sizes.
        name: group, shown by the kernel as the name of the memfd.
        progress: called with (bytes ready, bytes in all) while pages are being made and blocks verified.
        keeping: what is kept for the next daemon, None = nothing.

    Cost: about 1.2 s per GiB with huge pages; of a kept arena every block is read once (about 0.1 s per GiB
    and thread).

    Raises:
        OutOfMemory: the machine cannot give that much; the message names the key to lower.
        ConfigError: slab_bytes and capacity_bytes do not fit each other.
    """
    kept = keeping.arena(name) if keeping is not None else None
    if kept is not None and keeping is not None:
        try:
            memory = _adopt(config, name, progress, kept)
        except (MemoryError, OSError, RuntimeError, ValueError) as error:
            keeping.refuse(name, str(error))
        else:
            keeping.adopted(name)
            return memory
    host = config.host
    try:
        arena = Arena.create(name, host.capacity_bytes)
        huge = _watched(
            lambda: arena.prefault(_threads(config), host.huge_pages, host.lock),
            lambda: (arena.prefaulted_bytes, arena.capacity_bytes),
            progress,
        )
        ledger = Ledger.create(name, arena.pages) if keeping is not None else None
    except (MemoryError, OSError, RuntimeError, ValueError) as error:  # ValueError: more than there is
        raise OutOfMemory(f"host.capacity_bytes = {host.capacity_bytes}: {error}") from error
    index = Index(config.index.nodes_max)
    try:
        pool = HostPool(index, arena, host.slab_bytes, ledger)
    except ValueError as error:
        raise ConfigError(f"host.slab_bytes: {error}") from None
    if keeping is not None and ledger is not None:
        keeping.hold(name, {"data": arena.data_fd, "ledger": ledger.fd})
    return GroupMemory(arena, index, pool, huge)


def _adopt(
    config: Config, name: str, progress: Callable[[int, int], None] | None, kept: KeptArena
) -> GroupMemory:
    """Go on with a kept arena. Raises what native code raises; nothing of it stays then."""
    host, began_s = config.host, time.monotonic()
    threads = _threads(config)
    capacity = max(host.capacity_bytes >> 21, 1) << 21
    arena = Arena.adopt(name, kept.data_fd, capacity)
    ledger = Ledger.adopt(kept.ledger_fd, arena.pages)
    survey = Survey(ledger, arena)

    def work() -> bool:
        huge = arena.prefault(threads, host.huge_pages, host.lock)
        survey.verify(threads)
        return huge

    huge = _watched(
        work,
        lambda: (
            arena.prefaulted_bytes + survey.verified_bytes,
            arena.capacity_bytes + survey.claimed_bytes,
        ),
        progress,
    )
    index = Index(config.index.nodes_max)
    pool = HostPool(index, arena, host.slab_bytes, ledger)
    adopted = pool.adopt(survey, index.root(ASIDE_ROOT))
    log.info(
        "kept arena adopted",
        group=name,
        blocks=adopted.ready,
        bytes=survey.verified_bytes,
        seconds=round(time.monotonic() - began_s, 3),
        being_filled=len(adopted.slots),
        rotten=adopted.rotten,
        torn=adopted.torn,
        orphaned=adopted.orphaned,
        no_room=adopted.no_room,
    )
    return GroupMemory(arena, index, pool, huge, adopted)


def open_disk(
    config: Config,
    name: str,
    memory: GroupMemory,
    progress: ShowProgress | None = None,
    faults: str = "",
) -> None:
    """Open the NVME directory of one group, if one is configured, and take up what it holds.

    Args:
        memory: of the group; gets the disk.
        progress: told of what is read, and of the first segments that are made.
        faults: for tests: what the disk shall do wrong (native/src/disk_faulty.h).

    Cost: two reads a sealed segment, and every byte of those that a crash left unsealed.

    Raises:
        ConfigError: the directory cannot be used; the message says why, and what to do.
    """
    nvme, began_s = config.nvme, time.monotonic()
    if not nvme.directory:
        return
    path = Path(nvme.directory) / name
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory = DiskDirectory.open(
            str(path),
            capacity_bytes=nvme.capacity_bytes,
            segment_bytes=nvme.segment_bytes,
            direct=nvme.direct,
        )
        survey = DiskSurvey(directory)
        reading = None if progress is None else partial(_show, progress, name, READING)
        _watched(
            lambda: survey.read(_threads(config)), lambda: (survey.bytes_read, survey.bytes_in_all), reading
        )
        memory.disk = DiskPool(
            memory.index,
            memory.arena,
            directory,
            io=nvme.io,
            depth=nvme.depth,
            threads=nvme.threads,
            write_bytes_max=nvme.write_queue_bytes,
            records_max=config.index.nodes_max * 4 // 5,  # the last fifth is for what is only on HOST
            faults=faults,
        )
        found = memory.disk.adopt(survey)
        memory.drops = DiskDrops(path)
        found["dropped"] = memory.drops.apply(memory.disk, memory.index)
        memory.disk.put_below(memory.host)
        making = None if progress is None else partial(_show, progress, name, SEGMENTS)
        memory.disk_error = _make_first(memory.disk, nvme.segment_bytes, making)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"nvme.directory: {path}: {error}") from error
    _sync_directory(path.parent)  # or a crash may forget that the group's directory was ever made
    memory.directory = directory
    log.info(
        "disk opened",
        group=name,
        path=str(path),
        io=memory.disk.io,
        seconds=round(time.monotonic() - began_s, 3),
        removed_segments=directory.removed,
        over_capacity_bytes=max(0, memory.disk.counts()["file_bytes"] - nvme.capacity_bytes),
        **found,
    )


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _show(progress: ShowProgress, group: str, what: str, done: int, total: int) -> None:
    progress(group, done, total, what)


def _make_first(disk: DiskPool, segment_bytes: int, progress: Callable[[int, int], None] | None) -> int:
    """Wait for the first segments, so that the first saves find room; errno if the disk refuses."""
    poll, deadline_s = select.poll(), time.monotonic() + _FIRST_SEGMENTS_S
    poll.register(disk.eventfd, select.POLLIN)
    while time.monotonic() < deadline_s:
        errors = [event.error for event in disk.pump() if event.error]
        counts = disk.counts()
        ready = counts["filling"] + counts["free"] + counts["opening"]
        if progress is not None:
            progress(min(ready, _FIRST_SEGMENTS) * segment_bytes, _FIRST_SEGMENTS * segment_bytes)
        if errors:
            return errors[0]
        if ready >= _FIRST_SEGMENTS or not counts["creating"]:
            return 0
        poll.poll(_PROGRESS_S * 1000)
    return 0


def _threads(config: Config) -> int:
    return config.host.threads or os.cpu_count() or 1


def _watched(
    work: Callable[[], R],
    state: Callable[[], tuple[int, int]],
    progress: Callable[[int, int], None] | None,
) -> R:
    """Run `work`, and report `state` meanwhile."""
    if progress is None:
        return work()
    done = threading.Event()

    def watch() -> None:  # the work holds this thread, so the reports come from another
        while not done.wait(_PROGRESS_S):
            progress(*state())

    watcher = threading.Thread(target=watch, name="kvstore-prefault", daemon=True)
    watcher.start()
    try:
        return work()
    finally:
        done.set()
        watcher.join()
        progress(*state())
