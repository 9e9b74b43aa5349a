"""`kvstore stop`: end the daemon, with or without its arenas."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from kvstore.cli.answers import say_json, say_text
from kvstore.cli.options import AsJson, ConfigFile, SetFlags, load
from kvstore.cli.tool import NoAnswer, Tool
from kvstore.errors import DeadlineExceeded
from kvstore.keep.holding import end_leftover, holder_path
from kvstore.processes import has_ended

__all__ = ["stop_command"]

# Closing sessions takes no time, unmapping an arena about 50 ms per GiB.
STOP_S = 60.0

KeepArena = Annotated[bool, Parameter(negative=(), help="leave HOST to the next daemon")]


def stop_command(
    *,
    config: ConfigFile = None,
    overrides: SetFlags = None,
    keep_arena: KeepArena = False,
    as_json: AsJson = False,
) -> int:
    """Ask the running daemon to stop, and wait until its process is gone.

    A plain stop leaves nothing: no process, no socket, no memory; also nothing of a daemon that crashed and
    whose arena waits for the next one. Only the daemon's own user and root may ask.

    Examples:
        kvstore stop
        kvstore stop --keep-arena && kvstore serve --keep-arena
        kvstore stop --json | jq .pid
    """
    settings = load(config, overrides)
    socket = settings.daemon.socket
    try:
        pid = _stopped(Path(socket), keep_arena)
    except NoAnswer as silence:
        if keep_arena or silence.cause not in ("absent", "stale") or not end_leftover(holder_path(socket)):
            raise
        pid = 0
    if as_json:
        say_json({"stopped": pid > 0, "pid": pid, "kept": keep_arena})
    elif not pid:
        say_text("no daemon ran; the arena that one had left is dropped")
    else:
        say_text(f"stopped (pid {pid})" + ("; its arena waits for the next daemon" if keep_arena else ""))
    return 0


def _stopped(path: Path, keep: bool) -> int:
    """Pid of the daemon that is gone now."""
    with Tool(path) as tool:
        pid, pidfd = tool.process()
        tool.stop(keep)
    if pidfd < 0:
        return pid
    try:
        if not has_ended(pidfd, STOP_S):
            raise DeadlineExceeded(
                f"the daemon (pid {pid}) was told to stop and still runs after {STOP_S:g} s"
            )
    finally:
        os.close(pidfd)
    return pid
