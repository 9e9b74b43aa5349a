"""Arenas and pools from configuration: what one trust group owns."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass

from kvstore._native import Arena, HostPool, Index
from kvstore.config import Config
from kvstore.errors import ConfigError, OutOfMemory

__all__ = ["GroupMemory", "open_memory"]

# How often the progress callback runs while the arena is prefaulted.
_PROGRESS_S = 0.1


@dataclass(slots=True)
class GroupMemory:
    """The arena of one trust group with its index and host pool.

    Attributes:
        arena: mapped and prefaulted.
        index: every block key of the group.
        host: slots of the arena.
        huge: whether the arena got 2 MiB pages throughout.
    """

    arena: Arena
    index: Index
    host: HostPool
    huge: bool


def open_memory(config: Config, name: str, progress: Callable[[int, int], None] | None = None) -> GroupMemory:
    """Make the memory of one group.

    Args:
        config: sizes.
        name: group, shown by the kernel as the name of the memfd.
        progress: called with (bytes ready, bytes in all) while pages are being made.

    Cost: about 1.2 s per GiB with huge pages.

    Raises:
        OutOfMemory: the machine cannot give that much; the message names the key to lower.
        ConfigError: slab_bytes and capacity_bytes do not fit each other.
    """
    host = config.host
    try:
        arena = Arena.create(name, host.capacity_bytes)
        huge = _prefault(arena, config, progress)
    except (MemoryError, OSError, RuntimeError, ValueError) as error:  # ValueError: more than there is
        raise OutOfMemory(f"host.capacity_bytes = {host.capacity_bytes}: {error}") from error
    index = Index(config.index.nodes_max)
    try:
        pool = HostPool(index, arena, host.slab_bytes)
    except ValueError as error:
        raise ConfigError(f"host.slab_bytes: {error}") from None
    return GroupMemory(arena, index, pool, huge)


def _prefault(arena: Arena, config: Config, progress: Callable[[int, int], None] | None) -> bool:
    threads = config.host.threads or os.cpu_count() or 1
    if progress is None:
        return arena.prefault(threads, config.host.huge_pages, config.host.lock)
    done = threading.Event()

    def watch() -> None:  # prefault() holds this thread, so the reports come from another
        while not done.wait(_PROGRESS_S):
            progress(arena.prefaulted_bytes, arena.capacity_bytes)

    watcher = threading.Thread(target=watch, name="kvstore-prefault", daemon=True)
    watcher.start()
    try:
        return arena.prefault(threads, config.host.huge_pages, config.host.lock)
    finally:
        done.set()
        watcher.join()
        progress(arena.prefaulted_bytes, arena.capacity_bytes)
