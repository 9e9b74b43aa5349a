"""The cases run on the stage of the end-to-end tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "e2e"))
pytest.register_assert_rewrite(
    "raw_session", "real_daemon", "fake_engine", "children", "scene", "tiny_engines"
)

from stages import scene, shared_daemon, stage  # noqa: E402  (its folder is known first)

__all__ = ["scene", "shared_daemon", "stage"]
