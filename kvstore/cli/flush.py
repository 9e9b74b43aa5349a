"""`kvstore flush`: what is on NVMe survives from now on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from kvstore.cli.answers import say_json, say_text
from kvstore.cli.options import AsJson, ConfigFile, SetFlags, check_seconds, load
from kvstore.cli.tool import Tool
from kvstore.cli.units import count_text, size_text

__all__ = ["flush_command"]

# A write queue of 256 MiB takes a second on any NVMe and some ten on the slowest disk that is one.
FLUSH_S = 60.0

Timeout = Annotated[float, Parameter(name=["--timeout", "-t"], help="seconds to wait for the disks")]


def flush_command(
    *,
    config: ConfigFile = None,
    overrides: SetFlags = None,
    timeout_s: Timeout = FLUSH_S,
    as_json: AsJson = False,
) -> int:
    """Let the running daemon bring to the medium what its disks have accepted, and wait for that.

    What was acknowledged before and let in by the write budget then survives kill -9 and a power cut. Exit 1
    when the disks refuse, or there is none (nvme.directory).

    Examples:
        kvstore flush
        kvstore flush --timeout 5 --json | jq .blocks
        kvstore flush && systemctl reboot
    """
    check_seconds("--timeout", timeout_s, least_s=0.1)
    with Tool(Path(load(config, overrides).daemon.socket)) as tool:
        flushed = tool.flush(timeout_s)
    if as_json:
        facts = {name: getattr(flushed, name) for name in flushed.__struct_fields__}
        say_json({"ok": not flushed.error, **facts})
    elif flushed.error:
        say_text(f"NOT FLUSHED: {flushed.error}")
    else:
        kept = f"{count_text(flushed.blocks)} blocks, {size_text(flushed.bytes)}, are on NVMe"
        refused = (
            f"; {count_text(flushed.refused)} were not let in since the start" if flushed.refused else ""
        )
        say_text(f"flushed in {flushed.seconds:.3g} s: {kept}{refused}")
    return 1 if flushed.error else 0
