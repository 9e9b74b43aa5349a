"""A request trace, reduced to what a plan asks: how long is a prompt, and how much of it is known already?

Reads JSON lines as Mooncake publishes them, one request a line, oldest first:

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353, …]}

`hash_ids` names the prompt's blocks of 512 tokens in order; an id stands for its block *and all before it*: a
match is as many leading ids as some earlier line had. Cost: one pass and a set of all ids; 12,000 requests
take 0.3 s.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["TRACE_BLOCK_TOKENS", "Trace", "TraceError", "read_trace"]

TRACE_BLOCK_TOKENS = 512
LINE_BYTES_MAX = 16 << 20
"""A prompt of ten million tokens has some 200 KiB of ids."""
PROMPT_TOKENS_MAX = 1 << 24
"""Beyond every model; lengths and their squares stay exact in 64 bits."""
_FORMAT = '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}'


class TraceError(ValueError):
    """The file is no trace; the message names file, line and what to do."""


@dataclass(frozen=True, slots=True)
class Trace:
    """What an infinite cache would know of every request, in the order of arrival.

    Attributes:
        prompt_tokens: (requests,) length of the prompt.
        matched_tokens: (requests,) tokens of its longest prefix that an earlier request had, in whole blocks
            of 512. At least one token of the prompt is never part of it: its answer starts from that one.
        sha256: of the file, so that a result can say which trace it is about.
    """

    prompt_tokens: NDArray[np.int64]
    matched_tokens: NDArray[np.int64]
    sha256: str

    def __len__(self) -> int:
        return len(self.prompt_tokens)


def read_trace(file: Path) -> Trace:
    """Read a trace and match every prompt against all earlier ones.

    Nothing is ever evicted, and a prompt is known from the next line on. What a model generated counts as new
    when it first comes back in a prompt, because the trace has no ids of answers.

    Raises:
        TraceError: no such file, no request in it, or a line that makes no sense.
    """
    known: set[int] = set()
    prompts: list[int] = []
    matches: list[int] = []
    digest = hashlib.sha256()
    last_ms = -1.0
    for number, line in _lines(file):
        digest.update(line)
        if not line.strip():
            continue
        where = f"{file}, line {number}"
        row = _row(line, where)
        tokens, ids = row["input_length"], row["hash_ids"]
        if row["timestamp"] < last_ms:
            raise TraceError(
                f"{where}: timestamp {row['timestamp']} is earlier than the line before ({last_ms:g}); sort "
                "the file by timestamp, because who came first decides what is known"
            )
        last_ms = row["timestamp"]
        blocks = 0
        # Only whole blocks have keys, and the last token is computed in any case.
        whole = (tokens - 1) // TRACE_BLOCK_TOKENS
        while blocks < whole and ids[blocks] in known:
            blocks += 1
        known.update(ids)
        prompts.append(tokens)
        matches.append(blocks * TRACE_BLOCK_TOKENS)
    if not prompts:
        raise TraceError(f"{file}: no request in it; a line looks like {_FORMAT}")
    return Trace(np.array(prompts, np.int64), np.array(matches, np.int64), digest.hexdigest())


def _lines(file: Path) -> Iterator[tuple[int, bytes]]:
    try:
        with file.open("rb") as lines:
            number = 0
            while line := lines.readline(LINE_BYTES_MAX + 1):
                number += 1
                if len(line) > LINE_BYTES_MAX:
                    raise TraceError(
                        f"{file}, line {number}: longer than {LINE_BYTES_MAX} bytes; one request a line, "
                        f"like {_FORMAT}"
                    )
                yield number, line
    except OSError as error:
        raise TraceError(
            f"{file}: {error.strerror or error}; give --trace a file of JSON lines that can be read, such as "
            "Mooncake's conversation trace"
        ) from error


def _row(line: bytes, where: str) -> dict[str, Any]:
    """One request, every field checked."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise TraceError(
            f"{where}: no JSON ({error}); repair or remove the line, it should look like {_FORMAT}"
        ) from error
    if not isinstance(row, dict):
        raise TraceError(f"{where}: not an object; repair or remove the line, it should look like {_FORMAT}")
    _whole(row, "input_length", 1, where)
    _whole(row, "output_length", 0, where)
    stamp = row.get("timestamp")
    if isinstance(stamp, bool) or not isinstance(stamp, int | float) or not 0 <= stamp < float("inf"):
        raise TraceError(f"{where}: timestamp is {_short(stamp)}; it must be milliseconds, 0 or more")
    ids = row.get("hash_ids")
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise TraceError(f"{where}: hash_ids is {_short(ids)}; it must be a list of whole numbers")
    blocks = -(-row["input_length"] // TRACE_BLOCK_TOKENS)
    if len(ids) != blocks:
        raise TraceError(
            f"{where}: {len(ids)} hash_ids for input_length {row['input_length']}; {blocks} are needed, one "
            f"for each {TRACE_BLOCK_TOKENS} tokens begun"
        )
    return row


def _whole(row: dict[str, Any], name: str, least: int, where: str) -> None:
    value = row.get(name)
    if type(value) is not int or not least <= value <= PROMPT_TOKENS_MAX:
        raise TraceError(
            f"{where}: {name} is {_short(value)}; it must be a whole number of tokens from {least} to "
            f"{PROMPT_TOKENS_MAX}: repair or remove the line"
        )


def _short(value: object) -> str:
    """As text of a length that fits a message."""
    text = "absent" if value is None else repr(value)
    return text if len(text) <= 40 else text[:37] + "…"
