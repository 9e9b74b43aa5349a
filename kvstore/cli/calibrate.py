"""`kvstore calibrate`: from how long a prefix on is reloading faster than computing?"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from kvstore.cli.answers import console, say_json, say_text
from kvstore.cli.options import AsJson, ConfigFile, SetFlags, load
from kvstore.cli.tool import NoAnswer, Tool
from kvstore.cli.units import count_text, size_text
from kvstore.errors import BadRequest

if TYPE_CHECKING:
    from kvstore.cli.break_even import Block, Computing
    from kvstore.cli.trial import Tried

__all__ = ["calibrate_command"]

# Llama 3 8B: 32 layers, 8 KV heads of 128, two bytes, K and V.
_TOKEN_BYTES, _BLOCK_TOKENS = 128 << 10, 16

PrefillSpeed = Annotated[
    float | None,
    Parameter(name="--prefill-tokens-per-s", help="of your engine; else what a running daemon has learnt"),
]
TokenBytes = Annotated[
    int | None,
    Parameter(
        name="--token-bytes", help="KV of one token; else of the engines of a running daemon, or 128 KiB"
    ),
]


def calibrate_command(
    *,
    prefill_tokens_per_s: PrefillSpeed = None,
    token_bytes: TokenBytes = None,
    config: ConfigFile = None,
    overrides: SetFlags = None,
    as_json: AsJson = False,
) -> None:
    """Measure this machine's tiers, and print from which prefix length on reloading wins. 20 seconds at most.

    A small daemon of its own does the measuring, with the settings of yours (nvme.* of --config and --set),
    so that one that serves keeps its blocks; it needs 0.4 GB of memory and, where nvme.directory is set,
    0.5 GB of that disk. How fast engines compute comes from the daemon that runs, or from
    --prefill-tokens-per-s.

    Examples:
        kvstore calibrate
        kvstore calibrate --config /etc/kvstore.toml --json | jq .tiers.NVME.reload_from_tokens
        kvstore calibrate --prefill-tokens-per-s 25000 --token-bytes 131072 --set nvme.directory=/mnt/nvme
    """
    _need("--prefill-tokens-per-s", prefill_tokens_per_s, 1e9)
    _need("--token-bytes", token_bytes, 1 << 30)
    settings = load(config, overrides)
    from kvstore.cli.break_even import Block, Computing
    from kvstore.cli.trial import measure
    from kvstore.logs import configure_logs

    configure_logs("error", as_json=as_json)  # that a client attaches is no news here
    began_s = time.monotonic()
    learnt, sizes = _of_daemon(Path(settings.daemon.socket))
    if prefill_tokens_per_s is not None:
        learnt = Computing(1 / prefill_tokens_per_s, 0.0, "--prefill-tokens-per-s")
    block = Block(_BLOCK_TOKENS, _BLOCK_TOKENS * token_bytes) if token_bytes is not None else sizes
    block = block or Block(_BLOCK_TOKENS, _BLOCK_TOKENS * _TOKEN_BYTES)
    with _bar() as show:
        tried = measure(settings, show)
    report = _report(tried, block, learnt)
    if as_json:
        say_json({**report, "seconds": round(time.monotonic() - began_s, 1)})
    else:
        say_text(_text(report))


def _need(option: str, value: float | None, most: float) -> None:
    if value is not None and not 0 < value <= most:
        raise BadRequest(f"{option}: need more than 0, at most {most:,.0f}, got {value:g}")


def _of_daemon(path: Path) -> tuple[Computing | None, Block | None]:
    """How fast its engines compute, and the blocks of the first of them; None where it cannot say."""
    from kvstore.cli.break_even import Block, computing_of

    try:
        with Tool(path) as tool:
            report = tool.ask("status")
    except NoAnswer:
        return None, None
    engines = [engine for group in report["groups"].values() for engine in group["engines"].values()]
    block = Block(engines[0]["block_tokens"], engines[0]["block_bytes"]) if engines else None
    return computing_of(report), block


def _report(tried: Tried, block: Block, computing: Computing | None) -> dict[str, Any]:
    """JSON-ready."""
    from kvstore.cli.break_even import first_win
    from kvstore.policy.rates import Source
    from kvstore.types import Tier

    tiers: dict[str, Any] = {}
    for tier in (Tier.HOST, Tier.NVME):
        speed = tried.rates.speed(Source(tier), 64 << 20)
        if not speed.samples:
            why = tried.left_out.get(tier, "none of its blocks could be read alone")
            tiers[tier] = {"measured": False, "why": why}
            continue
        tiers[tier] = {
            "measured": True,
            "latency_s": speed.latency_s,
            "bytes_per_s": speed.bytes_per_s,
            "samples": speed.samples,
        }
        if computing is not None:
            tiers[tier]["reload_from_tokens"] = first_win(tried.rates, Source(tier), block, computing)
    learnt = None
    if computing is not None:
        learnt = {
            "token_s": computing.token_s,
            "position_s": computing.position_s,
            "origin": computing.origin,
        }
    sizes = {"tokens": block.tokens, "bytes": block.size_bytes}
    return {"block": sizes, "computing": learnt, "tiers": tiers}


def _text(report: dict[str, Any]) -> str:
    block, computing = report["block"], report["computing"]
    lines = [f"{'':6}{'latency':>10}{'bandwidth':>13}   reloading wins from"]
    for name, tier in report["tiers"].items():
        if not tier["measured"]:
            lines.append(f"{name:6}not measured: {tier['why']}")
            continue
        speed = _speed(tier["bytes_per_s"])
        lines.append(f"{name:6}{_short(tier['latency_s']):>10}{speed:>13}   {_wins(tier, computing)}")
    size = size_text(block["bytes"])
    lines.append(f"for blocks of {block['tokens']} tokens in {size}, an engine that is idle otherwise, and")
    if computing is None:
        lines.append("no prefill speed: let an engine of a running daemon compute a prompt, or say")
        lines.append("--prefill-tokens-per-s")
    else:
        at = {p: 1 / (computing["token_s"] + computing["position_s"] * p) for p in (1000, 32_000)}
        speeds = " and ".join(f"{float(f'{v:.2g}'):,.0f} tokens/s at position {p:,}" for p, v in at.items())
        lines.append(f"{speeds} ({computing['origin']})")
    return "\n".join(lines)


def _wins(tier: dict[str, Any], computing: dict[str, Any] | None) -> str:
    from kvstore.cli.break_even import TOKENS_MAX

    if computing is None:
        return "?"
    tokens = tier["reload_from_tokens"]
    return f"never (of {TOKENS_MAX:,} tokens)" if tokens is None else f"{count_text(tokens)} tokens"


def _speed(bytes_per_s: float) -> str:
    two = float(f"{bytes_per_s:.2g}")
    return f"{two / 1e9:.3g} GB/s" if two >= 1e9 else f"{two / 1e6:.3g} MB/s"


def _short(seconds: float) -> str:
    from kvstore.explaining import about

    return about(seconds)


@contextmanager
def _bar() -> Iterator[Callable[[str, float], None]]:
    """How far it is, on a terminal; gone when everything is measured."""
    if not sys.stderr.isatty():
        yield lambda *_: None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description:18}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=1.0)
        yield lambda what, share: progress.update(task, description=what, completed=min(1.0, share))
