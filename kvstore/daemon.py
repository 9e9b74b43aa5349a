"""The daemon: the only place where parts are wired together."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from kvstore import __version__
from kvstore.clock import Clock, MonotonicClock
from kvstore.config import Config, Salts
from kvstore.housekeeping import Housekeeping
from kvstore.logs import configure_logs
from kvstore.rpc.endpoints import free_endpoints
from kvstore.rpc.server import SessionServer, free_path
from kvstore.store import Store

if TYPE_CHECKING:
    from kvstore.rpc.api.server import GrpcServer

__all__ = ["Daemon", "configure_logs", "serve"]

log = structlog.get_logger()


class Daemon:
    """A store with its edges, on one event loop.

    Args:
        config: checked configuration.
        clock: for leases and deadlines.
    """

    def __init__(self, config: Config, clock: Clock | None = None) -> None:
        self.config = config
        self.salts = Salts.load(config)
        self.store = Store(config, self.salts, clock or MonotonicClock())
        self._server: SessionServer | None = None
        self.api: GrpcServer | None = None
        """The public API, while it listens."""

    def open(self, progress: Callable[[str, int, int], None] | None = None) -> None:
        """Make the arenas (slow: every page is touched); `progress(group, bytes ready, bytes in all)`.

        Raises:
            ConfigError: another daemon listens on the socket (asked first: two arenas may not fit).
            OutOfMemory: names the key to lower.
        """
        free_path(Path(self.config.daemon.socket))
        free_endpoints(self.config)
        _raise_file_limit()
        self.store.open(progress)

    def listen(self, loop: asyncio.AbstractEventLoop) -> None:
        """Open the socket: from now on engines may attach."""
        self._server = SessionServer(self.store, loop)
        self._server.open()

    @property
    def sessions(self) -> SessionServer:
        """The session server, once it listens."""
        assert self._server is not None, "listen() comes first"
        return self._server

    async def open_api(self) -> None:
        """Open the gRPC API where `grpc.listen` says, if anywhere.

        Raises:
            ConfigError: an address is in use or cannot be bound.
        """
        if self.config.grpc.listen:
            from kvstore.rpc.api.server import GrpcServer  # half of a start-up's imports, not needed when off

            self.api = GrpcServer(self.store)
            await self.api.open()

    async def close_api(self) -> None:
        """End the gRPC API: calls may finish within `grpc.stop_s`."""
        api, self.api = self.api, None
        if api is not None:
            await api.close()

    def close(self) -> None:
        """Close every session, remove the socket, drop the arenas."""
        if self._server is not None:
            self._server.close()
            self._server = None
        self.store.close()


async def serve(
    config: Config,
    progress: Callable[[str, int, int], None] | None = None,
    ready: Callable[[], None] | None = None,
) -> None:
    """Run until SIGTERM or SIGINT.

    Args:
        progress: see `Daemon.open`.
        ready: called once engines may attach.

    Raises:
        KVStoreError: the daemon cannot start; the message names the key and the fix.
    """
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    # Prefaulting can take minutes inside one native call, and nothing exists yet that needs an orderly end.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a reload: there is nothing yet that could be reloaded
    daemon = Daemon(config)
    house: Housekeeping | None = None
    try:
        daemon.open(progress)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        house = Housekeeping(daemon.store, daemon.salts)
        await house.restore()
        await daemon.open_api()
        daemon.listen(loop)  # last of the doors: who waits for this socket finds the others open
        await house.open(daemon.sessions)
        # What start-up made lives as long as the daemon; a full collection that walks it takes 30 ms.
        gc.collect()
        gc.freeze()
        log.info(
            "kvstore serves",
            version=__version__,
            socket=config.daemon.socket,
            grpc=daemon.api.addresses if daemon.api is not None else [],
            pid=os.getpid(),
            groups=config.groups(),
            capacity_bytes=config.host.capacity_bytes,
        )
        if not config.daemon.secrets_file:
            fix = "set daemon.secrets_file, or accept that a restarted daemon knows none of its old keys"
            log.warning("no daemon.secrets_file: salts are random and end with this process", fix=fix)
        if ready is not None:
            ready()
        await stop.wait()
        log.info("kvstore stops")
    finally:
        await daemon.close_api()
        if house is not None:
            await house.close()
        daemon.close()


def _raise_file_limit() -> None:
    """Two descriptors a session: take what the hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
