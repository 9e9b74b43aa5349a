"""`kvstore top`: the status, live."""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from kvstore.cli.answers import console, failure, say, say_json
from kvstore.cli.options import AsJson, ConfigFile, Interval, SetFlags, check_seconds, load
from kvstore.cli.reading import with_rates
from kvstore.cli.tool import NoAnswer, Tool
from kvstore.cli.units import duration_text

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["Watch", "top_command"]

_INTERVAL_S_MIN = 0.05
# How long "restarted" stays on the screen.
_NEWS_S = 30.0


def top_command(
    *,
    config: ConfigFile = None,
    overrides: SetFlags = None,
    interval_s: Interval = 1.0,
    once: Annotated[bool, Parameter(negative=())] = False,
    as_json: AsJson = False,
) -> None:
    """Watch a running daemon: alarms, tiers, engines and rates, refreshed every --interval seconds.

    Ends with q or Ctrl-C. Where stdout is no terminal it prints one frame; with --json one JSON object an
    interval, until interrupted. It outlives the daemon: while that is gone it says since when and why, and
    when another one answers, that it was restarted.

    Args:
        once: print one frame (after one interval, for the rates) and end.

    Examples:
        kvstore top
        kvstore top --interval 0.2
        kvstore top --once
        kvstore top --json | jq -c '[.uptime_s, .groups.default.rates.now.hit_rate]'
    """
    check_seconds("--interval", interval_s, _INTERVAL_S_MIN)
    screen = console()
    live = screen.is_terminal and not screen.is_dumb_terminal and not once and not as_json
    with Watch(Path(load(config, overrides).daemon.socket)) as watch, suppress(KeyboardInterrupt):
        if live:
            _live(watch, interval_s)
        elif as_json and not once:
            _stream(watch, interval_s)
        else:
            watch.first()
            threading.Event().wait(interval_s)
            report = watch.look()
            if as_json:
                say_json(report)
            else:
                say(_frame(report, watch.path))


class Watch:
    """Asks one daemon after another at the same socket, and knows when it is another one.

    Args:
        path: the socket.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.restarts = 0
        self._tool: Tool | None = None
        self._last: dict[str, Any] | None = None
        self._lost_s = 0.0
        self._restarted_s = 0.0

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        if self._tool is not None:
            self._tool.close()

    def first(self) -> dict[str, Any]:
        """The first report; there must be a daemon to watch.

        Raises:
            NoAnswer: there is none.
        """
        return self._answered()

    def look(self) -> dict[str, Any]:
        """A report with rates since the last one; while no daemon answers: error, cause, fix, lost_s."""
        try:
            return self._answered()
        except NoAnswer as error:
            now = time.monotonic()
            self._lost_s = self._lost_s or now
            return {**failure(error), "lost_s": round(now - self._lost_s, 3)}

    def _answered(self) -> dict[str, Any]:
        try:
            self._tool = self._tool or Tool(self.path)
            report = self._tool.ask("status")
        except NoAnswer:
            if self._tool is not None:
                self._tool.close()
                self._tool = None
            raise
        self._lost_s = 0.0
        before, self._last = self._last, report
        if before is not None and before["epoch"] != report["epoch"]:
            self.restarts += 1
            self._restarted_s = time.monotonic()
        news = bool(self._restarted_s) and time.monotonic() - self._restarted_s < _NEWS_S
        return {**with_rates(before, report), "restarts": self.restarts, "restarted": news}


def _stream(watch: Watch, interval_s: float) -> None:
    """One JSON object an interval."""
    say_json(watch.first())
    due_s = time.monotonic()
    while True:
        due_s = max(due_s + interval_s, time.monotonic())
        threading.Event().wait(due_s - time.monotonic())
        say_json(watch.look())


def _live(watch: Watch, interval_s: float) -> None:
    """The screen, until q, Ctrl-C or SIGTERM; the terminal is as before afterwards."""
    from rich.live import Live

    report = watch.first()
    with _keys() as pressed, Live(screen=True, auto_refresh=False, console=console()) as screen:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        while True:
            screen.update(_frame(report, watch.path, hint="q ends"), refresh=True)
            if pressed(interval_s) in ("q", "Q", "\x04"):
                return
            report = watch.look()


def _no_key(seconds: float) -> str:
    threading.Event().wait(seconds)
    return ""


@contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """A function that waits so many seconds for a key and returns it, "" when none came."""
    if not sys.stdin.isatty():
        yield _no_key
        return
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)

    def pressed(seconds: float) -> str:
        ready, _, _ = select.select([fd], [], [], seconds)
        return os.read(fd, 1).decode(errors="replace") if ready else ""

    try:
        tty.setcbreak(fd)
        yield pressed
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


def _frame(report: dict[str, Any], path: Path, hint: str = "") -> RenderableType:
    """What is on the screen."""
    from rich.console import Group
    from rich.text import Text

    from kvstore.cli.panes import pane

    parts: list[RenderableType] = []
    if "error" in report:
        lost = duration_text(report["lost_s"])
        parts.append(Text(f"LOST for {lost}: {report['error']}", style="bold red"))
        parts.append(Text(report["fix"]))
        parts.append(Text("This goes on as soon as a daemon answers.", style="dim"))
    else:
        if report["restarted"]:
            parts.append(
                Text(
                    f"RESTARTED: another daemon answers ({report['restarts']} seen); totals began anew",
                    style="bold yellow",
                )
            )
        parts.append(pane(report, str(path)))
    return Group(*parts, *([Text(hint, style="dim")] if hint else []))
