"""The fuzzers use the stage of the end-to-end tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "e2e"))
pytest.register_assert_rewrite("raw_session", "real_daemon", "fake_engine")
