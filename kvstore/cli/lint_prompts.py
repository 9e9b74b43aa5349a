"""`kvstore lint-prompts`: where families of prompts part too early to reuse each other's blocks."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from kvstore.cli.answers import console, say_json, say_text
from kvstore.cli.options import AsJson
from kvstore.errors import BadRequest
from kvstore.router.causes import fix_of

if TYPE_CHECKING:
    from kvstore.cli.prompt_reading import Read
    from kvstore.router.families import Divergence, Findings

__all__ = ["lint_prompts_command"]

Tokenizer = Annotated[
    Path | None,
    Parameter(
        name=["--tokenizer", "-t"],
        help="directory of the model's tokenizer.json and chat template; without it 4 bytes are one token",
    ),
]
BlockTokens = Annotated[int, Parameter(name=["--block-tokens", "-b"], help="tokens per block of the engine")]
Top = Annotated[int, Parameter(name=["--top", "-n"], help="show this many places, the costliest first")]
FailAbove = Annotated[
    float | None,
    Parameter(name="--fail-above", help="exit 1 if more than this percentage of all tokens is lost"),
]


def lint_prompts_command(
    file: str,
    /,
    *,
    tokenizer: Tokenizer = None,
    block_tokens: BlockTokens = 16,
    top: Top = 10,
    fail_above: FailAbove = None,
    as_json: AsJson = False,
) -> None:
    """Find what makes prompts miss: a date, an id, a blank, tools in another order, near the front.

    Prompts reuse each other's blocks only up to the first token that differs. For every place where prompts
    part although they go on alike behind it, this says what differs, how many tokens would have been reused
    had it stood at the end, and what to change. Exit 1 when a line could not be read, or with --fail-above.

    Args:
        file: a line is a body of the OpenAI API, {"prompt": …}, a line of its batch files, or a plain text;
            - reads stdin.

    Examples:
        kvstore lint-prompts requests.jsonl --tokenizer /models/Qwen3-8B
        kvstore lint-prompts - < prompts.txt
        kvstore lint-prompts requests.jsonl --fail-above 5 --json | jq .divergences
    """
    if not 1 <= block_tokens <= 4096:
        raise BadRequest(f"--block-tokens: need 1 to 4096, got {block_tokens}")
    if not 0 <= top <= 1000:
        raise BadRequest(f"--top: need 0 to 1000, got {top}")
    if fail_above is not None and not 0 <= fail_above <= 100:
        raise BadRequest(f"--fail-above: need 0 to 100 percent, got {fail_above:g}")
    try:
        from kvstore.cli.prompt_reading import read_prompts
    except ModuleNotFoundError as error:
        raise BadRequest(f"lint-prompts needs {error.name}; run pip install 'kvstored[router]'") from None
    from kvstore.router.families import find_divergences

    with _open(file) as lines:
        read = read_prompts(lines, "stdin" if file == "-" else file, tokenizer)
    for told in read.malformed:
        console(stderr=True).print(told, style="red", soft_wrap=True)
    findings = find_divergences(read.prompts, block_tokens, read.measures)
    if as_json:
        say_json(_values(read, findings, block_tokens, top))
    else:
        say_text("\n".join(_lines(read, findings, block_tokens, top)))
    too_much = fail_above is not None and _percent(findings.lost_tokens, findings) > fail_above
    if read.malformed_lines or too_much:
        raise SystemExit(1)


def _open(file: str) -> contextlib.AbstractContextManager[IO[bytes]]:
    if file == "-":
        return contextlib.nullcontext(sys.stdin.buffer)
    try:
        return Path(file).open("rb")
    except OSError as error:
        raise BadRequest(f"FILE: {file} cannot be read: {error.strerror}") from None


def _percent(tokens: int, findings: Findings) -> float:
    return 100 * tokens / findings.tokens if findings.tokens else 0.0


# ---- as values --------------------------------------------------------------------------------------------


def _values(read: Read, findings: Findings, block_tokens: int, top: int) -> dict[str, Any]:
    return {
        "prompts": len(read.prompts),
        "tokens": findings.tokens,
        "exact": read.exact,
        "block_tokens": block_tokens,
        "reusable_tokens": findings.reusable_tokens,
        "lost_tokens": findings.lost_tokens,
        "malformed_lines": read.malformed_lines,
        "left_out_lines": read.left_out_lines,
        "paths_left_out": findings.paths_left_out,
        "places": len(findings.divergences),
        "divergences": [_value(divergence) for divergence in findings.divergences[:top]],
    }


def _value(divergence: Divergence) -> dict[str, Any]:
    return {
        "cause": divergence.cause.name.lower(),
        "fix": fix_of(divergence.cause),
        "block": divergence.block,
        "token": divergence.token,
        "line": divergence.line,
        "prompts": divergence.prompts,
        "variants": divergence.variants,
        "lost_tokens": divergence.lost_tokens,
        "before": divergence.before,
        "examples": divergence.examples,
        "after": divergence.after,
    }


# ---- as text ----------------------------------------------------------------------------------------------


def _lines(read: Read, findings: Findings, block_tokens: int, top: int) -> list[str]:
    counted = "" if read.exact else " (of 4 bytes each; --tokenizer counts the model's own)"
    reusable, lost = findings.reusable_tokens, findings.lost_tokens
    lines = [
        f"{len(read.prompts):,} prompts, {findings.tokens:,} tokens{counted}, blocks of {block_tokens}",
        f"reusable as they are   {reusable:>12,} tokens  {_percent(reusable, findings):5.1f} %",
        f"lost at {len(findings.divergences):,} places".ljust(23)
        + f"{lost:>12,} tokens  {_percent(lost, findings):5.1f} %",
    ]
    for number, divergence in enumerate(findings.divergences[:top], 1):
        lines += ["", *_told(number, divergence)]
    if len(findings.divergences) > top:
        lines += ["", f"{len(findings.divergences) - top:,} more; --top shows them"]
    for count, what in (
        (read.malformed_lines, "lines could not be read"),
        (read.left_out_lines, "lines were left out: more than are looked at at once"),
        (findings.paths_left_out, "prompts were not compared: too many paths part at one place"),
    ):
        if count:
            lines += ["", f"{count:,} {what}"]
    return lines


def _told(number: int, divergence: Divergence) -> list[str]:
    before, after = _printable(divergence.before), _printable(divergence.after)
    first, *others = [_printable(example) for example in divergence.examples]
    return [
        f"{number}. {divergence.cause} in block {divergence.block}, token {divergence.token}: "
        f"{divergence.variants:,} variants in {divergence.prompts:,} prompts, the first in line "
        f"{divergence.line}, cost {divergence.lost_tokens:,} tokens",
        f"   …{before}[{first}]{after}…",
        *(f"   {' ' * len(before)} [{other}]" for other in others),
        f"   {fix_of(divergence.cause)}",
    ]


def _printable(text: str) -> str:
    """On one line, and without what a terminal would obey."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
