"""`kvstore demo`: a real model answers from cached KV, and the answers are the uncached ones.

    (a) one question behind a long system prompt: cold, from L2, and from HOST after the engine was restarted
    (b) a chat of five turns, each of which reuses the turns before
    --golden: a conversation with known lengths, whose reuse is known to the token

Everything runs in processes of its own under one temporary folder, and nothing is left behind.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn
from rich.table import Table

from .handbook import CHAT_SYSTEM, CHAT_TURNS, HANDBOOK, QUESTION
from .processes import DaemonProcess, EngineProcess, ProcessFailed
from .smollm2 import ModelUnavailable, find_smollm2
from .spec import UnsupportedModel, read_spec
from .tokenizer import Tokenizer

__all__ = ["EXPECTED_FAILURES", "Options", "expected_reuse", "run", "run_golden"]

EXPECTED_FAILURES = (ModelUnavailable, ProcessFailed, UnsupportedModel, FileNotFoundError)
"""What may go wrong without a bug: no network for the model, no memory for a child, a wrong --model."""

NEW_TOKENS = 64
GOLDEN_INPUTS = (400, 700, 1000, 1400, 1700)
GOLDEN_OUTPUTS = (100, 100, 150, 100, 1)
# SmolLM2-135M in float32: 45 KiB a token, so 512 MiB hold about 11,900 tokens, five times what is needed.
ARENA = "512MiB"
DEVICE_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class Options:
    """Flags of the command.

    Attributes:
        model: GGUF file or directory; None = SmolLM2-135M-Instruct, downloaded once.
        block_tokens: tokens per block.
        cache: False runs everything without reuse.
        seed: of the random ids of --golden.
        as_json: only the result goes to stdout, what is shown to people goes to stderr.
        inputs, outputs: tokens of each turn of --golden.
    """

    model: Path | None = None
    block_tokens: int = 16
    cache: bool = True
    seed: int = 0
    as_json: bool = False
    inputs: Sequence[int] = GOLDEN_INPUTS
    outputs: Sequence[int] = GOLDEN_OUTPUTS


@dataclass(slots=True)
class _Row:
    """One line of the table."""

    name: str
    report: dict[str, Any]
    against: dict[str, Any] | None = None


@dataclass(slots=True)
class _Stage:
    """The running processes."""

    folder: Path
    model: Path
    options: Options
    console: Console
    daemon: DaemonProcess
    engines: list[EngineProcess] = field(default_factory=list)

    def start_engine(self) -> EngineProcess:
        """A fresh engine process, attached to the daemon."""
        config = {
            "model": str(self.model),
            "socket": str(self.daemon.socket),
            "blocks": DEVICE_TOKENS // self.options.block_tokens,
            "block_tokens": self.options.block_tokens,
        }
        with self.console.status("starting the engine (reads and dequantizes the weights)"):
            engine = EngineProcess(self.folder, config)
        self.engines.append(engine)
        if not engine.ready["ready"]:
            raise engine.failed("the daemon did not accept the engine")
        return engine

    def ask(
        self,
        engine: EngineProcess,
        what: str,
        prompt: Sequence[int],
        *,
        reuse: bool = True,
        new_tokens: int = NEW_TOKENS,
    ) -> dict[str, Any]:
        """One request; --no-cache turns reuse off."""
        kind = "own" if reuse and self.options.cache else "none"
        request = {"prompt": list(prompt), "reuse": kind, "max_new_tokens": new_tokens}
        with self.console.status(what):
            return engine.ask("generate", request)


@contextmanager
def _stage(options: Options, console: Console) -> Iterator[_Stage]:
    model = options.model or _find_model(console)
    with tempfile.TemporaryDirectory(prefix="kvstore-demo-") as name:
        folder = Path(name)
        daemon = DaemonProcess(folder, {"host.capacity_bytes": ARENA})
        stage = _Stage(folder, model, options, console, daemon)
        try:
            with console.status("starting the daemon (prefaults its arena)"):
                daemon.wait_ready()
            yield stage
        finally:
            for engine in stage.engines:
                engine.end()
            daemon.end()


def _find_model(console: Console) -> Path:
    columns = (TextColumn("downloading SmolLM2-135M-Instruct"), BarColumn(), DownloadColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = None

        def report(done: int, total: int | None) -> None:
            nonlocal task
            if task is None:
                task = bar.add_task("", total=total)
            bar.update(task, completed=done, total=total)

        return find_smollm2(progress=report)


# ---- kvstore demo ------------------------------------------------------------------------------------------


def run(options: Options) -> int:
    """The demo; prints a table and, as its last line, one JSON object.

    Returns:
        Exit status: 0 when the answers were identical and the negative control was noticed.
    """
    console = Console(stderr=options.as_json)
    with _stage(options, console) as stage:
        tokenizer = Tokenizer(stage.model)
        system = {"role": "system", "content": HANDBOOK}
        prompt = tokenizer.chat([system, {"role": "user", "content": QUESTION}])
        console.print(
            f"[bold]One question behind a system prompt of {len(prompt)} tokens[/bold]\n{QUESTION}\n"
        )
        first = stage.start_engine()
        _warm_up(stage, first, prompt)
        cold = stage.ask(first, "answering cold", prompt)
        l2 = stage.ask(first, "answering from L2 (idle device blocks)", prompt)
        _more_samples(stage, first, prompt, cold, reuse=False)
        _more_samples(stage, first, prompt, l2)
        settled = first.ask("settle")
        first.end()
        second = stage.start_engine()
        _warm_up(stage, second, prompt)
        host = stage.ask(second, "answering from HOST (the engine process is new)", prompt)
        _more_samples(stage, second, prompt, host, before="forget")
        console.print(f"{_text(tokenizer, cold['tokens'])}\n")
        control = _negative_control(stage, second, prompt, host) if options.cache else {}
        chat, chat_reference = _chat(stage, second, tokenizer)
        with console.status("comparing prefill with HF transformers"):
            speed = second.ask("compare", {"prompt": prompt, "rounds": 3})
    rows = [_Row("cold", cold), _Row("L2", l2, cold), _Row("HOST", host, cold)]
    rows += [
        _Row(f"chat {turn + 1}", cached, plain)
        for turn, (cached, plain) in enumerate(zip(chat, chat_reference, strict=True))
    ]
    console.print(_table(rows))
    result = _verdict(rows, speed, control, settled)
    print(json.dumps(result))
    return (
        0 if result["answers_identical"] and (result["negative_control_detected"] or not options.cache) else 1
    )


def _warm_up(stage: _Stage, engine: EngineProcess, prompt: Sequence[int]) -> None:
    """A full chunk and a short one, uncached: no measured request pays for a first time."""
    for size in (1024, 12):
        stage.ask(engine, "warming up", prompt[-size:], reuse=False, new_tokens=2)


def _more_samples(
    stage: _Stage,
    engine: EngineProcess,
    prompt: Sequence[int],
    report: dict[str, Any],
    *,
    reuse: bool = True,
    before: str = "",
) -> None:
    """Ask the first token twice more; the report then shows the median of three.

    A sample counts only if it reused what the first one did.
    """
    samples = [report["ttft_s"]]
    for _ in range(2):
        if before and stage.options.cache:
            engine.ask(before)
        again = stage.ask(engine, "measuring again", prompt, reuse=reuse, new_tokens=1)
        if again["fresh"] == report["fresh"]:
            samples.append(again["ttft_s"])
    report["ttft_s"] = statistics.median(samples)
    report["ttft_samples_s"] = samples


def _negative_control(
    stage: _Stage, engine: EngineProcess, prompt: Sequence[int], good: dict[str, Any]
) -> dict[str, Any]:
    """One inverted cell of one restored block must change the answer, and its repair must bring it back."""
    engine.ask("flip")
    wrong = stage.ask(engine, "negative control: one restored cell inverted", prompt)
    engine.ask("flip")
    repaired = stage.ask(engine, "negative control: cell repaired", prompt)
    return {
        "detected": wrong["tokens"] != good["tokens"] and repaired["tokens"] == good["tokens"],
        "reused": sum(wrong["reused"].values()),
    }


def _chat(
    stage: _Stage, engine: EngineProcess, tokenizer: Tokenizer
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Five turns with reuse, and the same prompts without."""
    stage.console.print("[bold]A chat of five turns[/bold]")
    prompt = tokenizer.chat(
        [{"role": "system", "content": CHAT_SYSTEM}, {"role": "user", "content": CHAT_TURNS[0]}]
    )
    cached: list[dict[str, Any]] = []
    plain: list[dict[str, Any]] = []
    for turn, question in enumerate(CHAT_TURNS):
        if turn:
            prompt = [*prompt, *_spoken(tokenizer, cached[-1]["tokens"]), *tokenizer.next_turn(question)]
        cached.append(stage.ask(engine, f"chat, turn {turn + 1}", prompt))
        plain.append(stage.ask(engine, f"chat, turn {turn + 1}, uncached", prompt, reuse=False))
        stage.console.print(
            f"[dim]>[/dim] {question}\n{_text(tokenizer, cached[-1]['tokens'])}\n", highlight=False
        )
    return cached, plain


def _spoken(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[int]:
    """What the assistant said: its tokens up to the end mark (the engine was told to go on behind it)."""
    tokens = list(tokens)
    return tokens[: tokens.index(tokenizer.eos_id)] if tokenizer.eos_id in tokens else tokens


def _text(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    return tokenizer.decode(_spoken(tokenizer, tokens)).strip()


def _table(rows: Sequence[_Row]) -> Table:
    title = (
        "prompt tokens by where their KV came from, and time to first token (HOST: the engine process is new)"
    )
    table = Table(title=title, title_justify="left")
    for column in ("", "prompt", "L2", "HOST", "fresh", "TTFT ms", "uncached", "speed-up", "same"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for row in rows:
        report, against = row.report, row.against
        reused = report["reused"]
        table.add_row(
            row.name,
            str(report["prompt_tokens"]),
            str(reused.get("GPU", 0)),
            str(reused.get("HOST", 0)),
            str(report["fresh"]),
            f"{1000 * report['ttft_s']:.0f}",
            f"{1000 * against['ttft_s']:.0f}" if against else "",
            f"{against['ttft_s'] / report['ttft_s']:.1f} ×" if against else "",
            ("yes" if report["tokens"] == against["tokens"] else "NO") if against else "",
        )
    return table


def _verdict(
    rows: Sequence[_Row], speed: dict[str, Any], control: dict[str, Any], settled: dict[str, Any]
) -> dict[str, Any]:
    cold, l2, host = (row.report for row in rows[:3])
    compared = [row for row in rows if row.against is not None]
    return {
        "answers_identical": all(
            row.report["tokens"] == row.against["tokens"] for row in compared if row.against
        ),
        "negative_control_detected": bool(control.get("detected")),
        "ttft_cold_over_host": round(cold["ttft_s"] / host["ttft_s"], 2),
        "ttft_cold_over_l2": round(cold["ttft_s"] / l2["ttft_s"], 2),
        "prefill_over_transformers": round(statistics.median(speed["ratios"]), 3),
        "prompt_tokens": cold["prompt_tokens"],
        "new_tokens": min(len(row.report["tokens"]) for row in rows),
        "reused": {row.name: row.report["reused"] for row in rows},
        "ttft_s": {row.name: round(row.report["ttft_s"], 4) for row in rows},
        "ttft_samples_s": {row.name: row.report["ttft_samples_s"] for row in rows[:3]},
        "prefill_ratios": [round(ratio, 3) for ratio in speed["ratios"]],
        "ties": sum(row.report["ties"] for row in rows),
        "dropped_saves": settled["dropped"],
    }


# ---- kvstore demo --golden ---------------------------------------------------------------------------------


def run_golden(options: Options) -> int:
    """A conversation of known lengths on the engine; prints reuse per turn and ends with one JSON object.

    Returns:
        Exit status: 0 when every turn reused exactly what `expected_reuse` says.
    """
    console = Console(stderr=options.as_json)
    with _stage(options, console) as stage:
        engine = stage.start_engine()
        reports = _converse(stage, engine)
    expected = expected_reuse(options.inputs, options.outputs, options.block_tokens, cache=options.cache)
    reused = [sum(report["reused"].values()) for report in reports]
    table = Table(title="a conversation whose reuse is known to the token", title_justify="left")
    for column in ("turn", "prompt", "reused", "expected", "fresh", "TTFT"):
        table.add_column(column, justify="right")
    for turn, report in enumerate(reports):
        table.add_row(
            str(turn + 1),
            str(report["prompt_tokens"]),
            str(reused[turn]),
            str(expected[turn]),
            str(report["fresh"]),
            f"{1000 * report['ttft_s']:.0f} ms",
        )
    console.print(table)
    result = {
        "reused": reused,
        "total": sum(reused),
        "fresh": sum(report["fresh"] for report in reports),
        "expected": expected,
        "as_expected": reused == expected,
        "block_tokens": options.block_tokens,
        "cache": options.cache,
    }
    print(json.dumps(result))
    return 0 if result["as_expected"] else 1


def _converse(stage: _Stage, engine: EngineProcess) -> list[dict[str, Any]]:
    options = stage.options
    vocab = read_spec(stage.model).vocab
    random = np.random.default_rng(options.seed)
    prompt: list[int] = []
    reports = []
    for turn, (size, new) in enumerate(zip(options.inputs, options.outputs, strict=True)):
        prompt += random.integers(0, vocab, size - len(prompt)).tolist()
        report = stage.ask(engine, f"turn {turn + 1}: {size} tokens in, {new} out", prompt, new_tokens=new)
        reports.append(report)
        prompt = [*prompt, *report["tokens"]]
    return reports


def expected_reuse(
    inputs: Sequence[int], outputs: Sequence[int], block_tokens: int, *, cache: bool
) -> list[int]:
    """Tokens each turn can reuse: full blocks of the turn before, whose last sampled token has no KV yet."""
    out = [0]
    for size, new in list(zip(inputs, outputs, strict=True))[:-1]:
        out.append((size + new - 1) // block_tokens * block_tokens if cache else 0)
    return out
