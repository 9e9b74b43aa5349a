"""What one test starts: daemons, engines, raw connections, children. All of it is ended with the test."""

from __future__ import annotations

import itertools
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from children import Child
from fake_engine import FakeEngine
from raw_session import RawSession
from real_daemon import RealDaemon

__all__ = ["Scene"]


class Scene:
    """Makes things and ends them, last made first.

    Args:
        folder: short path for sockets, configurations and logs.
        name: of the test; the model of its namespaces, so that tests may share a daemon.
        shared: daemon that several tests use, if this one does.
    """

    def __init__(self, folder: Path, name: str, shared: RealDaemon | None = None) -> None:
        self.folder = folder
        self.name = name
        self._shared = shared
        self._made = ExitStack()
        self._numbers = itertools.count()

    def __enter__(self) -> Scene:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._made.close()

    @property
    def daemon(self) -> RealDaemon:
        """The daemon that engines attach to unless told otherwise."""
        assert self._shared is not None, "start a daemon first"
        return self._shared

    def start_daemon(self, tenants: str = "", **settings: str) -> RealDaemon:
        """A daemon of this test's own; `daemon__stall_s="0.1"` sets daemon.stall_s."""
        folder = self.folder / f"d{next(self._numbers)}"
        folder.mkdir()
        daemon = RealDaemon(folder, {k.replace("__", "."): v for k, v in settings.items()}, tenants)
        self._made.callback(daemon.close)
        self._shared = daemon
        return daemon.start()

    def engine(self, *, attach: bool = True, **options: Any) -> FakeEngine:
        """An engine in this process."""
        options.setdefault("model", self.name)
        engine = FakeEngine(self.daemon.socket, **options)
        self._made.callback(engine.close)
        return engine.attached() if attach else engine

    def session(self) -> RawSession:
        """A raw connection."""
        session = RawSession(self.daemon.socket)
        self._made.callback(session.close)
        return session

    def child(self, **options: Any) -> Child:
        """An engine in a process of its own."""
        options.setdefault("model", self.name)
        child = Child(self.folder / f"c{next(self._numbers)}.log", socket=str(self.daemon.socket), **options)
        self._made.callback(child.close)
        return child

    def keep(self, thing: Any) -> Any:
        """Close this with the rest."""
        self._made.callback(thing.close)
        return thing
