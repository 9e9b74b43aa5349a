"""Arenas and pools from configuration: what one trust group owns."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from kvstore._native import Adopted, Arena, HostPool, Index, Ledger, Survey
from kvstore.config import Config
from kvstore.errors import ConfigError, OutOfMemory
from kvstore.keep.keeping import Keeping, KeptArena

__all__ = ["ASIDE_ROOT", "GroupMemory", "open_memory"]

log = structlog.get_logger()

# How often the progress callback runs while memory is made or verified.
_PROGRESS_S = 0.1
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
    """

    arena: Arena
    index: Index
    host: HostPool
    huge: bool
    adopted: Adopted | None = None


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


def _threads(config: Config) -> int:
    return config.host.threads or os.cpu_count() or 1


def _watched(
    work: Callable[[], bool],
    state: Callable[[], tuple[int, int]],
    progress: Callable[[int, int], None] | None,
) -> bool:
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
