"""The demo's disk: a folder on a real one where there is one, and an arena too small for all of it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .smollm2 import default_cache_dir
from .spec import ModelSpec

__all__ = ["disk_folder", "disk_settings", "small_arena_bytes"]

_MIB = 1 << 20
# Beside the question's own blocks: room for the warm-up and for one block of an attach's proof.
_SPARE_BYTES = 24 * _MIB


@contextmanager
def disk_folder() -> Iterator[Path]:
    """A folder beside the downloaded model, gone afterwards: temporary folders are often memory."""
    home = default_cache_dir()
    home.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="demo-", dir=home) as name:
        yield Path(name)


def disk_settings(folder: Path) -> dict[str, object]:
    """Settings of a daemon that keeps blocks there; through the page cache where O_DIRECT is refused."""
    return {
        "nvme.directory": folder / "nvme",
        "nvme.capacity_bytes": 1024 * _MIB,
        "nvme.segment_bytes": 64 * _MIB,
        "nvme.write_budget_bytes_per_day": 0,
        "nvme.direct": str(_takes_direct(folder)).lower(),
    }


def _takes_direct(folder: Path) -> bool:
    probe = folder / "probe"
    try:
        os.close(os.open(probe, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600))
    except OSError:
        return False
    finally:
        probe.unlink(missing_ok=True)
    return True


def small_arena_bytes(spec: ModelSpec, prompt_tokens: int) -> int:
    """An arena for the KV of one prompt in float32 and little else, in whole slabs of 32 MiB."""
    size = prompt_tokens * 2 * spec.layers * spec.kv_heads * spec.head_dim * 4 + _SPARE_BYTES
    return -(-size // (32 * _MIB)) * 32 * _MIB
