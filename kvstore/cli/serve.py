"""`kvstore serve`: the daemon in the foreground."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from kvstore.cli.answers import console
from kvstore.cli.options import AsJson, ConfigFile, SetFlags, load

__all__ = ["serve_command"]


def serve_command(*, config: ConfigFile = None, overrides: SetFlags = None, as_json: AsJson = False) -> None:
    """Run the daemon until SIGTERM.

    Flags win over environment (KVSTORE_HOST__CAPACITY_BYTES=8GiB), which wins over the file. Logs go to
    stderr: one JSON object a line, or coloured text on a terminal; --json makes them JSON there too, and a
    daemon that cannot start says why in one JSON object on stdout.

    Examples:
        kvstore serve --set host.capacity_bytes=8GiB
        kvstore serve --config /etc/kvstore.toml
        kvstore serve --set daemon.socket=/run/user/1000/kv.sock --set daemon.log_level=debug
    """
    from kvstore.daemon import configure_logs, serve

    settings = load(config, overrides)
    configure_logs(settings.daemon.log_level, as_json=as_json)
    with _arena_bar() as progress:
        asyncio.run(serve(settings, progress=progress))


def _arena_bar() -> AbstractContextManager[Callable[[str, int, int], None] | None]:
    """A progress bar on a terminal, nothing in a log file."""
    return _ArenaBar() if sys.stderr.isatty() else nullcontext()


class _ArenaBar:
    """Shows how far each arena is prefaulted; disappears when all are."""

    def __init__(self) -> None:
        self._bar = Progress(
            TextColumn("arena {task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TimeRemainingColumn(),
            console=console(stderr=True),
            transient=True,
        )
        self._tasks: dict[str, Any] = {}

    def __enter__(self) -> Callable[[str, int, int], None]:
        self._bar.start()
        return self._update

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def _update(self, group: str, done: int, total: int) -> None:
        if group not in self._tasks:
            self._tasks[group] = self._bar.add_task(group, total=total)
        self._bar.update(self._tasks[group], completed=done)
        if done >= total and all(task.finished for task in self._bar.tasks):
            self._bar.stop()
