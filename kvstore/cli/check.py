"""`kvstore check`: does every conservation law hold?"""

from __future__ import annotations

from pathlib import Path

from kvstore.cli.answers import say_json, say_text
from kvstore.cli.options import AsJson, ConfigFile, SetFlags, load
from kvstore.cli.tool import ask

__all__ = ["check_command"]


def check_command(*, config: ConfigFile = None, overrides: SetFlags = None, as_json: AsJson = False) -> int:
    """Let a running daemon check every conservation law (slots, pins, index); exit 1 when one is broken.

    Examples:
        kvstore check
        kvstore check --json | jq -e .ok
        kvstore check --config /etc/kvstore.toml || systemctl kill -s ABRT kvstore
    """
    settings = load(config, overrides)
    report = ask(Path(settings.daemon.socket), "check")
    if as_json:
        say_json(report)
    else:
        partial = f" ({report['partial']})" if "partial" in report else ""
        say_text(f"ok{partial}" if report["ok"] else f"BROKEN: {report['broken']}")
    return 0 if report["ok"] else 1
