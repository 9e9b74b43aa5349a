"""`kvstore demo`: a real model answers from cached KV, and the answers are the uncached ones.

    (a) one question behind a long system prompt: cold, from L2, and from HOST after the engine was restarted
    (b) a chat of five turns, each of which reuses the turns before
    (c) the question again, from NVME: daemon and engine are new, and HOST has no room for all that was saved
    --golden: a conversation with known lengths, whose reuse is known to the token

Everything runs in processes of its own under temporary folders, and nothing is left behind.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from .demo_disk import small_arena_bytes
from .demo_stage import Options, Stage
from .demo_stage import stage as open_stage
from .handbook import CHAT_SYSTEM, CHAT_TURNS, HANDBOOK, QUESTION
from .processes import EngineProcess, ProcessFailed
from .smollm2 import ModelUnavailable
from .spec import UnsupportedModel, read_spec
from .tokenizer import Tokenizer

__all__ = ["EXPECTED_FAILURES", "Options", "expected_reuse", "run", "run_golden"]

EXPECTED_FAILURES = (ModelUnavailable, ProcessFailed, UnsupportedModel, FileNotFoundError)
"""What may go wrong without a bug: no network for the model, no memory for a child, a wrong --model."""


@dataclass(slots=True)
class _Row:
    """One line of the table."""

    name: str
    report: dict[str, Any]
    against: dict[str, Any] | None = None


# ---- kvstore demo ------------------------------------------------------------------------------------------


def run(options: Options) -> int:
    """The demo; prints a table and, as its last line, one JSON object.

    Returns:
        Exit status: 0 when the answers were identical and the negative control was noticed.
    """
    console = Console(stderr=options.as_json)
    with open_stage(options, console) as stage:
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
        nvme = _from_disk(stage, prompt)
    rows = [_Row("cold", cold), _Row("L2", l2, cold), _Row("HOST", host, cold), _Row("NVME", nvme, cold)]
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


def _from_disk(stage: Stage, prompt: Sequence[int]) -> dict[str, Any]:
    """The question once more, when only the disk has it: daemon and engine are new, HOST is too small."""
    arena_bytes = small_arena_bytes(read_spec(stage.model), len(prompt))
    stage.restart_daemon(arena_bytes)
    third = stage.start_engine()
    _warm_up(stage, third, prompt)
    what = f"answering from NVME (daemon and engine are new, HOST has {arena_bytes >> 20} MiB)"
    return stage.ask(third, what, prompt)


def _warm_up(stage: Stage, engine: EngineProcess, prompt: Sequence[int]) -> None:
    """A full chunk and a short one, uncached: no measured request pays for a first time."""
    for size in (1024, 12):
        stage.ask(engine, "warming up", prompt[-size:], reuse=False, new_tokens=2)


def _more_samples(
    stage: Stage,
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
    stage: Stage, engine: EngineProcess, prompt: Sequence[int], good: dict[str, Any]
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
    stage: Stage, engine: EngineProcess, tokenizer: Tokenizer
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
        "prompt tokens by where their KV came from, and time to first token "
        "(HOST: the engine is new; NVME: the daemon too)"
    )
    table = Table(title=title, title_justify="left")
    for column in ("", "prompt", "L2", "HOST", "NVME", "fresh", "TTFT ms", "speed-up", "same"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for row in rows:
        report, against = row.report, row.against
        reused = report["reused"]
        table.add_row(
            row.name,
            str(report["prompt_tokens"]),
            str(reused.get("GPU", 0)),
            str(reused.get("HOST", 0)),
            str(reused.get("NVME", 0)),
            str(report["fresh"]),
            f"{1000 * report['ttft_s']:.0f}",
            f"{against['ttft_s'] / report['ttft_s']:.1f} ×" if against else "",
            ("yes" if report["tokens"] == against["tokens"] else "NO") if against else "",
        )
    return table


def _verdict(
    rows: Sequence[_Row], speed: dict[str, Any], control: dict[str, Any], settled: dict[str, Any]
) -> dict[str, Any]:
    cold, l2, host, nvme = (row.report for row in rows[:4])
    compared = [row for row in rows if row.against is not None]
    return {
        "answers_identical": all(
            row.report["tokens"] == row.against["tokens"] for row in compared if row.against
        ),
        "negative_control_detected": bool(control.get("detected")),
        "ttft_cold_over_host": round(cold["ttft_s"] / host["ttft_s"], 2),
        "ttft_cold_over_l2": round(cold["ttft_s"] / l2["ttft_s"], 2),
        "ttft_cold_over_nvme": round(cold["ttft_s"] / nvme["ttft_s"], 2),
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
    with open_stage(options, console) as stage:
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


def _converse(stage: Stage, engine: EngineProcess) -> list[dict[str, Any]]:
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
