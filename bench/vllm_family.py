"""A process and all that descend from it: what they use, and what they leave behind."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

__all__ = ["await_end", "cpu_seconds", "family", "is_tracker", "shared_memory", "thread_cpu_seconds"]

_GONE_S = 30.0
_TICKS = os.sysconf("SC_CLK_TCK")


def family(pid: int) -> list[int]:
    """`pid` and all that descend from it."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # it ended while we looked
        children.setdefault(parent, []).append(int(stat.parent.name))
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found


def cpu_seconds(pid: int) -> float:
    """Of `pid`, all that descend from it and children that ended: all threads, in user and kernel."""
    ticks = 0
    for one in family(pid):
        try:
            fields = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        ticks += sum(map(int, fields[11:15]))
    return ticks / _TICKS


def thread_cpu_seconds(pid: int, thread: int) -> float:
    """Of one thread, in user and kernel; 0 when it has ended."""
    try:
        return int(Path(f"/proc/{pid}/task/{thread}/schedstat").read_text().split()[0]) / 1e9
    except OSError:
        return 0.0


def is_tracker(pid: int) -> bool:
    """Whether it is Python's own process that removes semaphores when all others are gone."""
    try:
        return b"resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def shared_memory(pid: int) -> set[str]:
    """Files in /dev/shm that a process has mapped."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return set()
    return {line.split(maxsplit=5)[-1] for line in lines if " /dev/shm/" in line and "(deleted)" not in line}


def await_end(pid: int) -> None:
    """Until a process is gone, which may be nobody's child any more; killed when it stays."""
    deadline = time.monotonic() + _GONE_S
    while Path(f"/proc/{pid}").exists():
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
        except (OSError, ProcessLookupError):
            return
        time.sleep(0.02)
