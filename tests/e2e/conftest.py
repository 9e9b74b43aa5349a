"""Fixtures of the end-to-end tests."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite(
    "raw_session",
    "real_daemon",
    "fake_engine",
    "children",
    "scene",
    "tiny_engines",
    "kept",
    "keep_rounds",
    "disk_maker",
    "fake_vllm",
    "route_scene",
    "audited",
    "zmq_ends",
)

from stages import scene, shared_daemon, stage  # noqa: E402  (assertions are rewritten first)

__all__ = ["scene", "shared_daemon", "stage"]
