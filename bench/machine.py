"""Where a figure was measured: machine, kernel, versions, commit."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path

__all__ = ["RESULTS", "huge_bytes", "where"]

RESULTS = Path(__file__).parent / "results"


def where() -> dict[str, str | int]:
    """Facts to keep beside every result."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": _git("rev-parse", "--short", "HEAD") + ("+" if _git("status", "--porcelain") else ""),
        "cpu": _cpu(),
        "cores": os.cpu_count() or 0,
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    return run.stdout.strip()


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def huge_bytes(name: str) -> int:
    """Bytes of this process's mappings that lie on huge pages.

    Args:
        name: part of the mapping's name in the kernel's list; "" = private memory without one.
    """
    total, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        fields = line.split()
        if "-" in fields[0] and not fields[0].endswith(":"):
            ours = name in line if name else len(fields) < 6
        elif ours and fields[0] in ("AnonHugePages:", "ShmemPmdMapped:", "FilePmdMapped:"):
            total += int(fields[1]) << 10
    return total
