"""Daemons with a disk: their settings, what they have written, and one wrong byte in it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import faulty_daemon
from real_daemon import RealDaemon, eventually

__all__ = ["faulty", "flip", "nvme_settings", "on_disk"]


def nvme_settings(directory: Path, **more: str) -> dict[str, str]:
    """Settings of a disk without a write budget, from which all is loaded; `stall_s="0.3"` sets nvme.stall_s.

    Engines of tests compute so fast that a plan would hardly ever load.
    """
    values = {
        "directory": f'"{directory}"',
        "capacity_bytes": '"64MiB"',
        "segment_bytes": '"4MiB"',
        "write_budget_bytes_per_day": "0",
        **more,
    }
    return {f"nvme.{key}": value for key, value in values.items()} | {"plan.mode": '"load"'}


def faulty(faults: str) -> tuple[str, str]:
    """`program` of a RealDaemon whose disk does this wrong."""
    return faulty_daemon.__file__, faults


def on_disk(daemon: RealDaemon, blocks: int, group: str = "default") -> None:
    """Wait until so many blocks are readable on NVME, and nothing is on its way there."""

    def written() -> bool:
        nvme: Mapping[str, int] = daemon.group(group)["nvme"]
        return nvme["records"] >= blocks and not nvme["writing"] and not nvme["queued_bytes"]

    eventually(written, f"{blocks} blocks are written: {daemon.group(group)['nvme']}")


def flip(directory: Path, piece: bytes) -> None:
    """Change one bit in every copy of these bytes in the segment files; no daemon may have them open."""
    found = 0
    for path in sorted(path for path in directory.rglob("*") if path.is_file()):
        data = path.read_bytes()
        at = data.find(piece)
        while at >= 0:
            found += 1
            with path.open("r+b") as file:
                file.seek(at + len(piece) // 2)
                file.write(bytes([data[at + len(piece) // 2] ^ 0x10]))
                os.fsync(file.fileno())
            at = data.find(piece, at + 1)
    assert found, "these bytes are in no file"
