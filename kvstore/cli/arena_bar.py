"""How far it is with what takes long when `kvstore serve` starts, and in `kvstore check DIRECTORY`."""

from __future__ import annotations

import threading
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from kvstore.cli.answers import console
from kvstore.progress import ARENA, ShowProgress

__all__ = ["ArenaBar"]


class ArenaBar:
    """One bar for each kind of work of each trust group; gone whenever nothing is under way.

    It may be told from any thread, and again after everything was done: then the bars come back.

    Args:
        screen: where; None = stderr.
    """

    def __init__(self, screen: Console | None = None) -> None:
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TimeRemainingColumn(),
            console=screen or console(stderr=True),
            transient=True,
        )
        self._tasks: dict[tuple[str, str], Any] = {}
        self._lock = threading.Lock()
        self._shown = False

    def __enter__(self) -> ShowProgress:
        return self._update

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._hide()

    def _update(self, group: str, done: int, total: int, what: str = ARENA) -> None:
        with self._lock:
            task = self._tasks.get((what, group))
            if task is None:
                if done >= total:  # over before anybody could have looked
                    return
                task = self._tasks[what, group] = self._bar.add_task(
                    f"{what} {group}", total=total, completed=done
                )
            if not self._shown and done < total:
                self._bar.start()
                self._shown = True
            self._bar.update(task, completed=done, total=max(total, 1))
            if done >= total:
                del self._tasks[what, group]
                self._bar.remove_task(task)
            if not self._tasks:
                self._hide()

    def _hide(self) -> None:
        if self._shown:
            self._bar.stop()
            self._shown = False
