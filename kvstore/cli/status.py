"""`kvstore status`: what the daemon holds, who holds it, and what is wrong."""

from __future__ import annotations

import threading
from pathlib import Path

from kvstore.cli.answers import say, say_json
from kvstore.cli.options import AsJson, ConfigFile, Interval, SetFlags, check_seconds, load
from kvstore.cli.reading import with_rates
from kvstore.cli.tool import Tool

__all__ = ["status_command"]


def status_command(
    *,
    config: ConfigFile = None,
    overrides: SetFlags = None,
    interval_s: Interval = 0.5,
    as_json: AsJson = False,
) -> None:
    """Show a running daemon's alarms, tiers, engines (L1 / L2 / free), leases and rates.

    Rates are taken over --interval seconds and since the start; --interval 0 answers at once, without the
    former. Exit 2 when no daemon answers, with the reason: no socket, a stale one, no permission, another
    version, or a daemon that hangs.

    Examples:
        kvstore status
        kvstore status --set daemon.socket=/run/user/1000/kv.sock
        kvstore status --interval 0 --json | jq .groups.default.host
        kvstore status --json | jq -e '.alarms == []'
    """
    from kvstore.cli.panes import pane

    check_seconds("--interval", interval_s, least_s=0.0)
    path = Path(load(config, overrides).daemon.socket)
    with Tool(path) as tool:
        before, after = None, tool.ask("status")
        if interval_s:
            threading.Event().wait(interval_s)
            before, after = after, tool.ask("status")
    report = with_rates(before, after)
    if as_json:
        say_json(report)
    else:
        say(pane(report, str(path)))
