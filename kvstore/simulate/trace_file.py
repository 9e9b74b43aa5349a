"""Traces in the format of Mooncake: JSON lines, one request a line, oldest first.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353, …]}

`timestamp` is in milliseconds. `hash_ids` names the prompt's blocks in order, one for each 512 tokens begun;
an id stands for its block *and all before it*. A line may have a `session_id`; where it has none, the second
block stands for the conversation, because the first is often the same for everybody.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from kvstore.errors import BadRequest
from kvstore.simulate.workload import Workload

__all__ = ["read_trace"]

REQUESTS_MAX = 10_000_000
LINE_BYTES_MAX = 16 << 20
TOKENS_MAX = 1 << 24
ID_MAX = (1 << 63) - 1
_LOOKS_LIKE = (
    'a line looks like {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}'
)


def read_trace(path: Path, block_tokens: int = 512) -> Workload:
    """Read and check a whole trace. 12,000 requests take some 0.2 s.

    Args:
        block_tokens: tokens that an id of the file stands for.

    Raises:
        BadRequest: no such file, no request in it, or a line that makes no sense; names the line and the fix.
    """
    if block_tokens < 1:
        raise BadRequest(f"--block-tokens: need 1 at least, got {block_tokens}")
    rows: list[dict[str, Any]] = []
    parents: dict[int, int] = {}
    digest = hashlib.sha256()
    for number, line in _lines(path):
        digest.update(line)
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        row = _row(line, where, block_tokens)
        if rows and row["timestamp"] < rows[-1]["timestamp"]:
            raise BadRequest(f"{where}: timestamp goes back; sort the file by it")
        _check_chain(row["hash_ids"], parents, where)
        rows.append(row)
        if len(rows) > REQUESTS_MAX:
            raise BadRequest(f"{path}: more than requests_max = {REQUESTS_MAX} requests; take a part of it")
    if not rows:
        raise BadRequest(f"{path}: no request in it; {_LOOKS_LIKE}")
    stamps = np.array([row["timestamp"] for row in rows], float)
    return Workload(
        arrivals_s=(stamps - stamps[0]) / 1e3,
        input_tokens=np.array([row["input_length"] for row in rows], np.int64),
        output_tokens=np.array([row["output_length"] for row in rows], np.int64),
        chains=tuple(tuple(row["hash_ids"]) for row in rows),
        sessions=tuple(_session(row) for row in rows),
        block_tokens=block_tokens,
        sha256=digest.hexdigest(),
    )


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    try:
        with path.open("rb") as lines:
            number = 0
            while line := lines.readline(LINE_BYTES_MAX + 1):
                number += 1
                if len(line) > LINE_BYTES_MAX:
                    raise BadRequest(f"{path}, line {number}: longer than {LINE_BYTES_MAX} bytes")
                yield number, line
    except OSError as error:
        raise BadRequest(f"--trace: {path}: {error.strerror or error}") from None


def _row(line: bytes, where: str, block_tokens: int) -> dict[str, Any]:
    """One request, every field that is read checked."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"{where}: no JSON ({error}); {_LOOKS_LIKE}") from None
    if not isinstance(row, dict):
        raise BadRequest(f"{where}: not an object; {_LOOKS_LIKE}")
    stamp = row.get("timestamp")
    if isinstance(stamp, bool) or not isinstance(stamp, int | float) or not 0 <= stamp < float("inf"):
        raise BadRequest(f"{where}: timestamp: need milliseconds, 0 at least, got {stamp!r:.40}")
    for field, least in (("input_length", 1), ("output_length", 0)):
        value = row.get(field)
        if type(value) is not int or not least <= value <= TOKENS_MAX:
            raise BadRequest(f"{where}: {field}: need {least} to {TOKENS_MAX} tokens, got {value!r:.40}")
    ids = row.get("hash_ids")
    if not isinstance(ids, list) or not all(type(each) is int and 0 <= each <= ID_MAX for each in ids):
        raise BadRequest(f"{where}: hash_ids: need whole numbers from 0 to 2**63 − 1, got {ids!r:.40}")
    blocks = -(-row["input_length"] // block_tokens)
    if len(ids) != blocks:
        raise BadRequest(
            f"{where}: {len(ids)} hash_ids for {row['input_length']} tokens; {blocks} are needed, one for "
            f"each {block_tokens} begun (--block-tokens)"
        )
    if not isinstance(row.get("session_id", ""), str | int):
        raise BadRequest(f"{where}: session_id: need a text or a number")
    return row


def _check_chain(ids: list[int], parents: dict[int, int], where: str) -> None:
    before = -1
    for each in ids:
        if parents.setdefault(each, before) != before:
            raise BadRequest(
                f"{where}: hash_ids: {each} comes behind {before}, elsewhere behind {parents[each]}; an id "
                "must stand for its block and all before it"
            )
        before = each


def _session(row: dict[str, Any]) -> str:
    if "session_id" in row:
        return str(row["session_id"])
    return str(row["hash_ids"][:2][-1])
