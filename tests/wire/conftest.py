"""Fixtures of the client's tests: every body runs with both drivers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.register_assert_rewrite("client_below", "client_daemon", "client_kit", "client_running")

from client_daemon import ScriptedDaemon  # noqa: E402  (its assertions are rewritten first)
from client_kit import Maker  # noqa: E402
from client_running import Running  # noqa: E402


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "s"


@pytest.fixture(params=["sync", "async"])
def make(request: pytest.FixtureRequest, path: Path) -> Iterator[Maker]:
    maker = Maker(request.param, path)
    yield maker
    maker.close()


@pytest.fixture
def daemon(path: Path) -> Iterator[ScriptedDaemon]:
    scripted = ScriptedDaemon(path)
    yield scripted
    scripted.stop()


@pytest.fixture
def running(path: Path) -> Iterator[Running]:
    real = Running(path)
    yield real
    real.stop()
