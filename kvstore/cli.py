"""The command line: `kvstore serve | demo | status | check | version`."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated, Any

import cyclopts
from cyclopts import Parameter
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from kvstore import __version__
from kvstore.config import Config
from kvstore.daemon import configure_logs, serve
from kvstore.errors import KVStoreError, Unavailable

__all__ = ["app", "main"]

app = cyclopts.App(
    name="kvstore",
    help="Keep LLM KV-cache blocks in tiers; reload what is faster to reload than to recompute.",
    version=__version__,
)
_errors = Console(stderr=True)
_ANSWER_S = 3.0

SetFlags = Annotated[
    list[str] | None, Parameter(name="--set", negative=(), help="table.key=value, over environment and file")
]
ConfigFile = Annotated[Path | None, Parameter(name=["--config", "-c"], help="TOML file")]
AsJson = Annotated[bool, Parameter(name="--json", negative=(), help="one JSON object instead of text")]


@app.command(name="serve")
def serve_command(*, config: ConfigFile = None, overrides: SetFlags = None) -> None:
    """Run the daemon until SIGTERM.

    Flags win over environment (KVSTORE_HOST__CAPACITY_BYTES=8GiB), which wins over the file.

    Examples:
        kvstore serve --set host.capacity_bytes=8GiB
        kvstore serve --config /etc/kvstore.toml
    """
    settings = Config.load(config, flags=overrides or [])
    configure_logs(settings.daemon.log_level)
    with _arena_bar() as progress:
        asyncio.run(serve(settings, progress=progress))


def _arena_bar() -> AbstractContextManager[Callable[[str, int, int], None] | None]:
    """A progress bar on a terminal, nothing in a log file."""
    return _ArenaBar() if sys.stderr.isatty() else nullcontext()


class _ArenaBar:
    """Shows how far each arena is prefaulted; disappears when all are."""

    def __init__(self) -> None:
        self._bar = Progress(
            TextColumn("arena {task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TimeRemainingColumn(),
            console=_errors,
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


@app.command
def status(*, config: ConfigFile = None, overrides: SetFlags = None, as_json: AsJson = False) -> None:
    """Ask a running daemon for its tiers, engines, leases and counters.

    Examples:
        kvstore status
        kvstore status --json | jq .groups.default.host
    """
    report = _ask(Config.load(config, flags=overrides or []), "status")
    if as_json:
        print(json.dumps(report))
        return
    _print_status(report)


@app.command
def check(*, config: ConfigFile = None, overrides: SetFlags = None, as_json: AsJson = False) -> None:
    """Let a running daemon check every conservation law (slots, pins, index); exit 1 when one is broken."""
    report = _ask(Config.load(config, flags=overrides or []), "check")
    if as_json:
        print(json.dumps(report))
    else:
        partial = f" ({report['partial']})" if "partial" in report else ""
        print(f"ok{partial}" if report["ok"] else f"BROKEN: {report['broken']}")
    if not report["ok"]:
        raise SystemExit(1)


@app.command
def version(*, as_json: AsJson = False) -> None:
    """Version of this package and of its native core."""
    from kvstore import _native

    facts = {"kvstored": __version__, "python": sys.version.split()[0], "copy_path": _native.crc_path()}
    print(json.dumps(facts) if as_json else "\n".join(f"{name} {value}" for name, value in facts.items()))


def _ask(config: Config, what: str) -> dict[str, Any]:
    from kvstore.client import Client

    configure_logs("error")

    with Client(config.daemon.socket, None, role="tool") as client:
        if not client.wait_attached(_ANSWER_S):
            why = client.refusal or _why_not(Path(config.daemon.socket))
            raise Unavailable(f"no daemon answers at {config.daemon.socket} (daemon.socket): {why}")
        report = client.status() if what == "status" else client.check()
    if not report.pop("attached"):
        raise Unavailable(f"the daemon at {config.daemon.socket} did not answer: {report['reason']}")
    return report


def _why_not(path: Path) -> str:
    """Why a connection to a socket fails, in words."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_ANSWER_S)
        try:
            probe.connect(str(path))
        except OSError as error:
            return error.strerror or str(error)
    return "it accepts connections but does not answer"


def _print_status(report: dict[str, Any]) -> None:
    console = Console()
    for name, group in report["groups"].items():
        host, counters = group["host"], group["counters"]
        table = Table(title=f"trust group {name}", title_justify="left")
        for column in ("tier", "used", "free", "filling", "draining", "note"):
            table.add_column(column)
        table.add_row(
            "HOST",
            f"{host['ready']} blocks",
            f"{host['free']} slots + {host['free_slabs']} slabs",
            str(host["filling"]),
            str(host["draining"]),
            f"{host['used_bytes'] / 2**20:.0f} of {host['capacity_bytes'] / 2**20:.0f} MiB"
            + (", huge pages" if host["huge_pages"] else ""),
        )
        for engine, facts in group["engines"].items():
            device = facts["device"]
            table.add_row(
                f"GPU {engine[:8]}",
                f"L1 {device['mapped']} · L2 {device['idle']}",
                str(device["free"]),
                "",
                str(device["draining"]),
                f"{facts['pool']} pool, {facts['sessions']} sessions",
            )
        console.print(table)
        if group["alarm"]:
            console.print(f"ALARM {group['alarm']}", style="bold red", markup=False)
        console.print(
            f"lookups {counters['lookups']} · blocks asked {counters['lookup_blocks']} · hit "
            f"{counters['hit_blocks']} {counters['hit_blocks_by_tier']} · saved {counters['saved_blocks']} · "
            f"leases {group['leases']} · corrupt {host['corrupt_blocks']} · dropped {host['dropped']}"
        )


@app.command(name="demo")
def demo_command(
    *,
    golden: Annotated[bool, Parameter(negative=())] = False,
    model: Path | None = None,
    block_tokens: int = 16,
    cache: bool = True,
    seed: int = 0,
) -> None:
    """A real language model answers from cached KV; prints what was saved and proves that nothing changed.

    Starts its own daemon and engines, ends them, and leaves nothing behind. Needs the extra `torch`.

    Args:
        golden: run the five-turn conversation with known counts instead.
        model: directory with safetensors or a GGUF file; without it SmolLM2-135M-Instruct is downloaded once.
        block_tokens: tokens per block.
        cache: --no-cache runs the same without reuse.
        seed: of the token ids in --golden.

    Examples:
        kvstore demo
        kvstore demo --golden --block-tokens 32
    """
    try:
        from kvstore.connectors.embedded import demo
    except ModuleNotFoundError as error:
        raise Unavailable(f"{error}; the demo needs the extra: pip install 'kvstored[torch]'") from None
    options = demo.Options(model=model, block_tokens=block_tokens, cache=cache, seed=seed)
    try:
        raise SystemExit(demo.run_golden(options) if golden else demo.run(options))
    except demo.EXPECTED_FAILURES as error:
        raise Unavailable(f"demo: {error}") from None


def main() -> None:
    """Entry point: errors of ours are one line, exit 2; bugs keep their traceback."""
    try:
        app()
    except KVStoreError as error:
        _errors.print(f"kvstore: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
