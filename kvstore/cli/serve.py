"""`kvstore serve`: the daemon in the foreground."""

from __future__ import annotations

import asyncio
import gc
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from kvstore.cli.options import AsJson, ConfigFile, SetFlags, load

if TYPE_CHECKING:
    from kvstore.progress import ShowProgress

__all__ = ["serve_command"]

KeepArena = Annotated[
    bool, Parameter(negative=(), help="a crash or `kvstore stop --keep-arena` leaves HOST to the next daemon")
]


def serve_command(
    *,
    config: ConfigFile = None,
    overrides: SetFlags = None,
    keep_arena: KeepArena = False,
    as_json: AsJson = False,
) -> None:
    """Run the daemon until SIGTERM.

    Flags win over environment (KVSTORE_HOST__CAPACITY_BYTES=8GiB), which wins over the file. Logs go to
    stderr: one JSON object a line, or coloured text on a terminal; --json makes them JSON there too, and a
    daemon that cannot start says why in one JSON object on stdout.

    Examples:
        kvstore serve --set host.capacity_bytes=8GiB
        kvstore serve --config /etc/kvstore.toml --keep-arena
        kvstore serve --set daemon.socket=/run/user/1000/kv.sock --set daemon.log_level=debug
    """
    from kvstore.daemon import configure_logs, serve
    from kvstore.patience import LookingSelector

    settings = load(config, [*(overrides or []), *(["daemon.keep_arena=true"] if keep_arena else [])])
    configure_logs(settings.daemon.log_level, as_json=as_json)
    runner = asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(LookingSelector()))
    with _arena_bar() as progress, runner:
        runner.run(serve(settings, progress=progress))
    # Calls leave circles of references behind, and native code tells of whatever is still there at the exit.
    gc.unfreeze()
    gc.collect()


def _arena_bar() -> AbstractContextManager[ShowProgress | None]:
    """Progress bars on a terminal, nothing in a log file."""
    if not sys.stderr.isatty():
        return nullcontext()
    from kvstore.cli.arena_bar import ArenaBar

    return ArenaBar()
