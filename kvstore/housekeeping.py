"""What a daemon does beside answering: metrics, reloads, learnt state. All on its one loop."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path

import structlog

from kvstore import learnt
from kvstore.clock import unix_time_s
from kvstore.config import Salts
from kvstore.config.tokens import Tokens
from kvstore.keep.keeping import Keeping
from kvstore.learnt import StateDir
from kvstore.logs import log_limit
from kvstore.reloading import Reloader
from kvstore.rpc.metrics import LoopLag, MetricsServer, Sources, StoreCollector
from kvstore.rpc.server import SessionServer
from kvstore.small_files import read_small, write_atomic
from kvstore.store import Store

__all__ = ["Housekeeping"]

log = structlog.get_logger()

# What was learnt in the last minute is learnt again in a minute.
SAVE_PERIOD_S = 60.0


class Housekeeping:
    """Metrics server, loop lag, reload on SIGHUP, and what is kept in `daemon.state_dir`.

    Args:
        store: opened.
        salts: that the store runs with.
        keeping: what outlives this daemon, None = nothing.
    """

    def __init__(self, store: Store, salts: Salts, keeping: Keeping | None = None) -> None:
        self._store = store
        self._salts = salts
        self._keeping = keeping
        self._hang_up = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._lag: LoopLag | None = None
        self._state: StateDir | None = None
        self._saved: object = None  # what was known then
        self.metrics: MetricsServer | None = None

    async def restore(self) -> None:
        """Take up what an earlier daemon learnt, before anybody can ask.

        Raises:
            ConfigError: `daemon.state_dir` cannot be used.
        """
        path = self._store.config.daemon.state_dir
        if path:
            self._state = StateDir(Path(path))
            await self._restore(self._state)

    async def open(
        self, sessions: SessionServer, take_tokens: Callable[[Tokens | None], None] | None = None
    ) -> None:
        """Start everything else.

        Args:
            sessions: the session server, listening.
            take_tokens: of the gRPC server: told after each reload; None = there is no such server.

        Raises:
            ConfigError: `metrics.listen` cannot be used.
        """
        config, loop = self._store.config, asyncio.get_running_loop()
        keep = self._keeping.reconfigure if self._keeping is not None else None
        reloader = Reloader(self._store, self._salts, sessions.reconfigure, keep, take_tokens)
        self._lag = LoopLag(loop)
        started_s = unix_time_s()
        sources = Sources(self._store, sessions.requests, self._lag, started_s, log_limit())
        self.metrics = MetricsServer(config.metrics, StoreCollector(sources), config.daemon.socket_mode)
        await self.metrics.open()
        loop.add_signal_handler(signal.SIGHUP, self._hang_up.set)
        self._tasks = [loop.create_task(self._reload_always(reloader), name="kvstore-reload")]
        if self._state is not None:
            self._tasks.append(loop.create_task(self._save_always(), name="kvstore-learnt"))

    async def close(self) -> None:
        """Stop everything; what was learnt is saved. Idempotent."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._tasks:
            asyncio.get_running_loop().remove_signal_handler(signal.SIGHUP)
        self._tasks = []
        state, self._state = self._state, None
        try:
            if self.metrics is not None:
                await self.metrics.close()
            if self._lag is not None:
                self._lag.close()
            if state is not None:
                await self._save(state)
        finally:
            if state is not None:
                state.close()

    async def _reload_always(self, reloader: Reloader) -> None:
        while True:
            await self._hang_up.wait()
            self._hang_up.clear()
            try:
                await reloader.reload()
            except Exception:  # a bug of ours costs this reload, not every later one
                log.exception("configuration not reloaded; the old one goes on")

    async def _save_always(self) -> None:
        while self._state is not None:
            await asyncio.sleep(SAVE_PERIOD_S)
            await self._save(self._state)

    async def _restore(self, state: StateDir) -> None:
        """What an earlier daemon learnt; a file that is no such thing is put aside, never overwritten."""
        try:
            learnt.restore(await read_small(state.file), self._store.groups)
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            aside = state.file.with_suffix(".bad")
            log.warning("learnt state not used; it starts empty", reason=str(error), aside=str(aside))
            await asyncio.to_thread(_put_aside, state.file, aside)

    async def _save(self, state: StateDir) -> None:
        news = learnt.news(self._store.groups)
        if news == self._saved:
            return
        try:
            await write_atomic(state.file, learnt.written(self._store.groups))
        except (OSError, ValueError) as error:
            log.warning(
                "learnt state not saved",
                path=str(state.file),
                reason=str(error),
                fix="make room in daemon.state_dir, or unset it",
            )
            return
        self._saved = news


def _put_aside(file: Path, aside: Path) -> None:
    try:
        file.replace(aside)
    except OSError as error:
        fix = "make daemon.state_dir writable, or unset it"
        log.warning("cannot put a file aside", path=str(file), reason=error.strerror, fix=fix)
