"""`kvstore check`: does every conservation law of the daemon hold; is a disk what was written to it?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from kvstore.cli.answers import say_json, say_text
from kvstore.cli.options import AsJson, ConfigFile, SetFlags, load
from kvstore.cli.tool import ask
from kvstore.errors import BadRequest

__all__ = ["check_command"]


def check_command(
    directory: Path | None = None,
    /,
    *,
    repair: Annotated[bool, Parameter(negative=())] = False,
    config: ConfigFile = None,
    overrides: SetFlags = None,
    as_json: AsJson = False,
) -> int:
    """Check a running daemon, or the NVMe directory of one that does not run.

    Without DIRECTORY the daemon checks every conservation law (slots, pins, index); exit 1 when one is
    broken. With it every record there is read and its checksums are compared; exit 1 when something is
    damaged, 2 when it cannot be read: a daemon uses it, or it is no such directory.

    Args:
        directory: nvme.directory, or one trust group's directory in it.
        repair: write footers of what is good: unsealed segments are sealed, rotten records are left out.

    Examples:
        kvstore check
        kvstore check --json | jq -e .ok
        kvstore check --config /etc/kvstore.toml || systemctl kill -s ABRT kvstore
        kvstore check /var/lib/kvstore/nvme
        kvstore check /var/lib/kvstore/nvme --repair --json | jq .directories.default.rotten
    """
    if directory is not None:
        return _check_disks(directory, repair, bool(config or overrides), as_json)
    if repair:
        raise BadRequest(
            "--repair: name the directory to repair; what a daemon has in memory is not repaired"
        )
    settings = load(config, overrides)
    report = ask(Path(settings.daemon.socket), "check")
    if as_json:
        say_json(report)
    else:
        partial = f" ({report['partial']})" if "partial" in report else ""
        say_text(f"ok{partial}" if report["ok"] else f"BROKEN: {report['broken']}")
    return 0 if report["ok"] else 1


def _check_disks(directory: Path, repair: bool, configured: bool, as_json: bool) -> int:
    from kvstore.cli.disk_check import check_disks  # the native core: not for `kvstore --help`

    if configured:
        raise BadRequest("DIRECTORY is checked as it lies there: leave out --config and --set")
    found = check_disks(directory, repair=repair)
    ok = all(verdict.ok for verdict in found.values())
    if as_json:
        say_json({"ok": ok, "directories": {name: verdict.json() for name, verdict in found.items()}})
    else:
        say_text("\n".join(line for name, verdict in found.items() for line in verdict.lines(name)))
    return 0 if ok else 1
