"""Fixtures for tests on real daemons; the conftest of each folder imports them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from real_daemon import RealDaemon
from scene import Scene

__all__ = ["scene", "shared_daemon", "stage"]


@pytest.fixture(scope="module")
def shared_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealDaemon]:
    """One daemon for a module's tests that leave it as they found it; nothing of them may stay in it."""
    daemon = RealDaemon(tmp_path_factory.mktemp("s"))
    try:
        yield daemon.start()
        assert daemon.end() == 0, daemon.said()
    finally:
        daemon.close()


@pytest.fixture
def scene(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, shared_daemon: RealDaemon
) -> Iterator[Scene]:
    """Engines on the shared daemon; afterwards it is alive, sound, and free of pins, leases and fillings."""
    with Scene(tmp_path_factory.mktemp("s"), request.node.name, shared_daemon) as scene:
        yield scene
    shared_daemon.assert_quiet()


@pytest.fixture
def stage(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """The same without a daemon: the test starts its own, and may do anything to it."""
    with Scene(tmp_path_factory.mktemp("s"), request.node.name) as scene:
        yield scene
