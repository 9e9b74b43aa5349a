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
from kvstore.checks import Checks
from kvstore.clock import Clock, MonotonicClock
from kvstore.config import Config, Salts
from kvstore.disks import DiskLoop
from kvstore.heap import collapse_heap
from kvstore.housekeeping import Housekeeping
from kvstore.keep.keeping import Keeping, let_go_of_leftovers
from kvstore.keep.systemd import notify
from kvstore.logs import configure_logs
from kvstore.progress import ShowProgress
from kvstore.rpc.endpoints import free_endpoints
from kvstore.rpc.request_log import RequestLog
from kvstore.rpc.server import SessionServer, free_path
from kvstore.store import Store

if TYPE_CHECKING:
    from kvstore.rpc.api.server import GrpcServer
    from kvstore.rpc.zmq_events import ZmqEvents

__all__ = ["Daemon", "configure_logs", "serve"]

log = structlog.get_logger()


class Daemon:
    """A store with its edges, on one event loop.

    Args:
        config: checked configuration.
        clock: for leases and deadlines.
        disk_faults: for tests: what every disk shall do wrong (native/src/disk_faulty.h).
    """

    def __init__(self, config: Config, clock: Clock | None = None, disk_faults: str = "") -> None:
        self.config = config
        self.salts = Salts.load(config)
        self.store = Store(config, self.salts, clock or MonotonicClock(), disk_faults)
        self.keeping: Keeping | None = None
        self._requests = RequestLog(self.store.clock, every=config.daemon.log_level == "debug")
        self._server: SessionServer | None = None
        self._checks: Checks | None = None
        self._disks: DiskLoop | None = None
        self.api: GrpcServer | None = None
        """The public API, while it listens."""
        self.events: ZmqEvents | None = None
        """Publishes KV events, while it does."""

    def open(self, progress: ShowProgress | None = None) -> None:
        """Make the arenas (slow: every page is touched), read the disks.

        Raises:
            ConfigError: another daemon listens on the socket (asked first: two arenas may not fit).
            OutOfMemory: names the key to lower.
        """
        free_path(Path(self.config.daemon.socket))
        free_endpoints(self.config)
        _raise_file_limit()
        if self.config.daemon.keep_arena:
            self.keeping = Keeping.open(self.config, os.environ)
            self.salts = self.keeping.salts
        else:
            let_go_of_leftovers(self.config, os.environ)
        self.store.open(progress, self.keeping)

    def listen(self, loop: asyncio.AbstractEventLoop, on_stop: Callable[[bool], None] | None = None) -> None:
        """Open the socket: from now on engines may attach; `on_stop(keep)` when a tool asks for the end."""
        if self.keeping is not None:
            self.keeping.serve(loop)
        checks = self._checks_on(loop)
        self._disks = DiskLoop(self.store, loop)
        self._server = SessionServer(self.store, loop, self.keeping, on_stop, self._requests, checks)
        self._server.open()

    @property
    def sessions(self) -> SessionServer:
        """The session server, once it listens."""
        assert self._server is not None, "listen() comes first"
        return self._server

    async def open_api(self) -> None:
        """Open the gRPC API where `grpc.listen` says, publish events where `events.zmq` does, if anywhere.

        Raises:
            ConfigError: an address is in use or cannot be bound.
        """
        if self.config.grpc.listen:
            from kvstore.rpc.api.server import GrpcServer  # half of a start-up's imports, not needed when off

            checks = self._checks_on(asyncio.get_running_loop())
            self.api = GrpcServer(self.store, requests=self._requests, checks=checks)
            await self.api.open()
        events = self.config.events
        if events.zmq or events.zmq_replay:
            from kvstore.rpc.zmq_events import ZmqEvents  # needs pyzmq, which only a router's machine has

            self.events = ZmqEvents(self.store)
            self.events.open()

    def _checks_on(self, loop: asyncio.AbstractEventLoop) -> Checks:
        """One for all doors: two that run at once would check everything twice."""
        if self._checks is None:
            self._checks = Checks(self.store, loop)
        return self._checks

    async def close_api(self) -> None:
        """End the publishing of events and the gRPC API: calls may finish within `grpc.stop_s`."""
        api, self.api = self.api, None
        events, self.events = self.events, None
        try:
            if events is not None:
                await events.close()
        finally:
            if api is not None:
                await api.close()

    def close(self, *, keep: bool = False) -> None:
        """Close every session, remove the socket, drop the arenas (`keep`: the next daemon gets them)."""
        if self.keeping is not None and keep:
            self.keeping.leave()  # first: what the sessions may still write to must not look free
        try:
            if self._server is not None:
                self._server.close()
                self._server = None
            if self._checks is not None:  # the sessions' door may never have opened
                self._checks.close()
            if self._disks is not None:
                self._disks.close()
        finally:
            self.store.close()
            keeping, self.keeping = self.keeping, None
            if keeping is not None and not keep:
                keeping.end()


async def serve(
    config: Config,
    progress: ShowProgress | None = None,
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
    keep = True  # until somebody asks for a plain stop: a failed start must not cost what is kept

    def on_stop(keep_arena: bool) -> None:
        nonlocal keep
        keep = keep_arena
        stop.set()

    # Prefaulting can take minutes inside one native call, and nothing exists yet that needs an orderly end.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a reload: there is nothing yet that could be reloaded
    daemon = Daemon(config)
    house: Housekeeping | None = None
    started = False
    try:
        daemon.open(progress)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, on_stop, False)
        house = Housekeeping(daemon.store, daemon.salts, daemon.keeping)
        await house.restore()
        await daemon.open_api()
        if config.host.huge_pages:
            collapse_heap()
        daemon.listen(loop, on_stop)  # last of the doors: who waits for this socket finds the others open
        await house.open(daemon.sessions, daemon.api.take_tokens if daemon.api is not None else None)
        # What start-up made lives as long as the daemon; a full collection that walks it takes 30 ms.
        gc.collect()
        gc.freeze()
        log.info(
            "kvstore serves",
            version=__version__,
            socket=config.daemon.socket,
            grpc=daemon.api.addresses if daemon.api is not None else [],
            events=daemon.events.addresses if daemon.events is not None else [],
            pid=os.getpid(),
            groups=config.groups(),
            capacity_bytes=config.host.capacity_bytes,
        )
        if not config.salts_kept and not config.daemon.keep_arena:
            fix = "set daemon.secrets_file, or accept that a restarted daemon knows none of its old keys"
            log.warning("no daemon.secrets_file: salts are random and end with this process", fix=fix)
        started = True
        if ready is not None:
            ready()
        notify("READY=1")
        await stop.wait()
        notify("STOPPING=1")
        log.info("kvstore stops", keep_arena=keep and daemon.keeping is not None)
    finally:
        if not started and keep and daemon.keeping is not None:
            keep = daemon.keeping.give_up_fresh()
        await _end(daemon, house, keep)


async def _end(daemon: Daemon, house: Housekeeping | None, keep: bool) -> None:
    """Close every part, whatever another one raises: a plain stop must not leave the arena behind."""
    try:
        await daemon.close_api()
    finally:
        try:
            if house is not None:
                await house.close()
        finally:
            daemon.close(keep=keep)


def _raise_file_limit() -> None:
    """Two descriptors a session, three with a kept arena: take what the hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
