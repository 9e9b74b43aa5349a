"""`kvstore version`: of this installation, and of the daemon that runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from kvstore import __version__
from kvstore.cli.answers import failure, say_json, say_text
from kvstore.cli.options import AsJson, ConfigFile, SetFlags, load
from kvstore.cli.tool import NoAnswer, ask
from kvstore.cli.units import duration_text

__all__ = ["version_command"]


def version_command(
    *, config: ConfigFile = None, overrides: SetFlags = None, as_json: AsJson = False
) -> None:
    """Versions of this package, its native core and its protocol; and of the daemon, if one answers.

    A daemon that does not answer is no error here: its line says why.

    Examples:
        kvstore version
        kvstore version --json | jq .daemon.version
    """
    from kvstore import _native
    from kvstore.rpc.messages import PROTOCOL_VERSION

    path = Path(load(config, overrides).daemon.socket)
    facts: dict[str, Any] = {
        "kvstored": __version__,
        "python": sys.version.split()[0],
        "protocol": PROTOCOL_VERSION,
        "copy_path": _native.crc_path(),
    }
    daemon, line = _daemon(path)
    if as_json:
        say_json({**facts, "daemon": daemon})
        return
    say_text("\n".join([*(f"{name} {value}" for name, value in facts.items()), f"daemon {line}"]))


def _daemon(path: Path) -> tuple[dict[str, Any], str]:
    """What the daemon says of itself, as values and as a line."""
    try:
        report = ask(path, "status")
    except NoAnswer as error:
        return dict(failure(error)), f"none: {error}"
    facts = {name: report[name] for name in ("version", "pid", "uptime_s", "epoch")}
    up = duration_text(facts["uptime_s"])
    line = f"{facts['version']}, pid {facts['pid']}, up {up}, epoch {facts['epoch']}"
    return {**facts, "socket": str(path)}, line
