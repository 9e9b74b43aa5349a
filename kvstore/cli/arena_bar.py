"""How far the arenas are, while `kvstore serve` touches every page of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from kvstore.cli.answers import console

__all__ = ["ArenaBar"]


class ArenaBar:
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
