"""Fixtures of the NVME tier's tests."""

from __future__ import annotations

from nvme_stage import disk_config, reopen

__all__ = ["disk_config", "reopen"]
