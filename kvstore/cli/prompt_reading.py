"""Reading prompts for `kvstore lint-prompts`: line by line, within limits."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvstore.errors import BadRequest
from kvstore.router.bodies import CHAT, COMPLETIONS, Body, read_body
from kvstore.router.families import Measures, Prompt
from kvstore.router.tokens import PSEUDO_TOKEN_BYTES, ByteChunks, Encoded, ModelTokens

__all__ = ["Read", "read_prompts"]

LINE_BYTES_MAX = 16 << 20
# Texts are kept to be compared, and tokens take about as much again: half a gigabyte at the most.
PROMPTS_MAX = 100_000
CHARS_MAX = 128 << 20
# Messages about single lines; the others are only counted.
_TOLD_MAX = 20


@dataclass(slots=True)
class Read:
    """What came of a file.

    Attributes:
        exact: tokens are the model's own.
        measures: of the tokenizer.
        prompts: in the order of the file.
        malformed: FILE:LINE: what is wrong, of the first lines that are.
        malformed_lines: all of them.
        left_out_lines: behind the limits.
    """

    exact: bool
    measures: Measures
    prompts: list[Prompt] = field(default_factory=list)
    malformed: list[str] = field(default_factory=list)
    malformed_lines: int = 0
    left_out_lines: int = 0


class _Counting(Protocol):
    """A tokenizer, as far as it is needed here."""

    exact: bool

    def encode(self, body: Body) -> Encoded: ...

    def tokens_before(self, text: str, char: int) -> int: ...


def read_prompts(lines: IO[bytes], name: str, tokenizer: Path | None) -> Read:
    """Read a file to its end; what is beyond the limits is counted.

    Args:
        lines: of bytes.
        name: of the file, for messages.
        tokenizer: directory of a model's; None = pseudo-tokens.

    Raises:
        ConfigError: the tokenizer cannot be read.
    """
    counting: _Counting = _Chunks() if tokenizer is None else _Model(tokenizer)
    bodies: dict[int, Body] = {}

    def in_order_of(prompt: Prompt, other: Prompt) -> NDArray[np.uint32]:
        body = bodies[prompt.line]
        fields = {**body.fields, "tools": bodies[other.line].fields["tools"]}
        return counting.encode(dataclasses.replace(body, fields=fields)).tokens

    read = Read(counting.exact, Measures(counting.tokens_before, in_order_of))
    chars = 0
    for number, line in _numbered(lines):
        if line is not None and (len(read.prompts) >= PROMPTS_MAX or chars >= CHARS_MAX):
            read.left_out_lines += 1
            continue
        try:
            body = _body(line)
            encoded = counting.encode(body)
        except BadRequest as error:
            read.malformed_lines += 1
            if len(read.malformed) < _TOLD_MAX:
                read.malformed.append(f"{name}:{number}: {error}")
            continue
        tools = _tools(body)
        if tools:
            bodies[number] = body
        chars += len(encoded.text)
        read.prompts.append(Prompt(number, encoded.text, encoded.tokens, tools))
    return read


def _numbered(lines: IO[bytes]) -> Iterator[tuple[int, bytes | None]]:
    """Lines that are not empty, from 1 on; None = too long, and skipped."""
    number = 0
    while line := lines.readline(LINE_BYTES_MAX + 1):
        number += 1
        if len(line) > LINE_BYTES_MAX and not line.endswith(b"\n"):
            while (rest := lines.readline(LINE_BYTES_MAX)) and not rest.endswith(b"\n"):
                pass
            yield number, None
        elif line.strip():
            yield number, line.removesuffix(b"\n").removesuffix(b"\r")


def _body(line: bytes | None) -> Body:
    if line is None:
        raise BadRequest(f"longer than {LINE_BYTES_MAX} bytes")
    if line[:1] not in (b"{", b'"'):
        return _of_text(line.decode("utf-8", "replace"))
    try:
        value = msgspec.json.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"no JSON ({error})") from None
    if isinstance(value, str):
        return _of_text(value)
    if isinstance(value.get("body"), dict):  # a line of a batch file
        value = value["body"]
    if isinstance(value.get("messages"), list):
        # The beginning of an answer is the same everywhere, and no prompt's own.
        return read_body(CHAT, msgspec.json.encode({**value, "add_generation_prompt": False}))
    prompt = value.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str):
        prompt = prompt[0]
    if not isinstance(prompt, str):
        raise BadRequest("need messages, or a prompt that is a text")
    return _of_text(prompt)


def _of_text(text: str) -> Body:
    return Body(COMPLETIONS, {"prompt": text}, "", False, False, (), len(text))


def _tools(body: Body) -> tuple[str, ...]:
    tools = body.fields.get("tools")
    if not isinstance(tools, list):
        return ()
    return tuple(msgspec.json.encode(tool, order="sorted").decode() for tool in tools)


class _Chunks:
    """Pseudo-tokens."""

    exact = False

    def __init__(self) -> None:
        self._tokens = ByteChunks()

    def encode(self, body: Body) -> Encoded:
        return self._tokens.encode(body)

    def tokens_before(self, text: str, char: int) -> int:
        return len(text[:char].encode("utf-8", "replace")) // PSEUDO_TOKEN_BYTES


class _Model:
    """A model's own. The offsets of the latest text are kept: one prompt is compared with many."""

    exact = True

    def __init__(self, folder: Path) -> None:
        self._tokens = ModelTokens(folder)
        self._text = ""
        self._starts: NDArray[Any] = np.empty(0, np.int64)

    def encode(self, body: Body) -> Encoded:
        return self._tokens.exact(body)

    def tokens_before(self, text: str, char: int) -> int:
        if text is not self._text:
            self._text, self._starts = text, self._tokens.starts(text)
        return int(np.searchsorted(self._starts, char))
