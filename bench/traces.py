"""Traces for the simulator: other formats turned into Mooncake's, and a stand-in where there is no file.

    python -m bench.traces ragpulse FOLDER OUT   chunks of a retrieval workload as chained blocks of 16 tokens
    python -m bench.traces azure FILE.csv OUT    arrivals and lengths alone: no two requests share a block
    python -m bench.traces generate OUT          made-up conversations, as long and as alike as the real ones

The generator imitates Mooncake's conversation trace: every request begins with the same block, conversations
grow by the answer and a new question, the next turn comes some minutes later, arrivals fall on ticks of 3 s.
It was calibrated by hand against that trace; `generate` prints by how much each figure is off. What it does
not imitate: turns that edit earlier ones, and popular beginnings longer than one block.
"""

from __future__ import annotations

import argparse
import csv
import heapq
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from kvstore.errors import BadRequest

__all__ = ["REAL", "Row", "azure", "calibration", "generate", "infinite_reuse", "main", "ragpulse", "write"]

BLOCK_TOKENS = 512

# Of Mooncake's conversation trace (FAST'25 release, 12,031 requests).
REAL: Mapping[str, float] = {
    "infinite_reuse": 0.3736,
    "input_tokens_mean": 12_035.0,
    "input_tokens_p50": 6_909.0,
    "input_tokens_p99": 85_400.0,
    "output_tokens_mean": 342.6,
    "requests_per_s": 3.4,
}

# Chance of another turn; of the real requests 0.387 continue a conversation.
_CONTINUES = 0.385
# Logarithms of lognormal values: first prompts, what a turn adds, seconds between turns.
_FIRST_TOKENS, _MORE_TOKENS, _PAUSE_S = (8.60, 1.16), (7.00, 1.35), (4.88, 0.98)
_INPUT_TOKENS_MAX = 126_000
_TICK_S = 3.0
# So many seconds of conversations come before the first line: the real trace is a cut, too.
_BEFORE_S = 1800.0


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a trace.

    Attributes:
        at_ms: milliseconds.
        input_tokens, output_tokens: lengths.
        ids: of its blocks, one for each block begun.
        session: "" = none.
    """

    at_ms: int
    input_tokens: int
    output_tokens: int
    ids: Sequence[int]
    session: str = ""

    def json(self) -> dict[str, Any]:
        """As Mooncake writes it."""
        row: dict[str, Any] = {
            "timestamp": self.at_ms,
            "input_length": self.input_tokens,
            "output_length": self.output_tokens,
            "hash_ids": list(self.ids),
        }
        return {**row, "session_id": self.session} if self.session else row


def write(rows: Iterable[Row], path: Path) -> None:
    """JSON lines."""
    with path.open("w") as file:
        file.writelines(json.dumps(row.json(), separators=(",", ":")) + "\n" for row in rows)


# ---- conversions ------------------------------------------------------------------------------------------


def azure(path: Path) -> Iterator[Row]:
    """Azure's traces of 2023: TIMESTAMP, ContextTokens, GeneratedTokens. They do not say what prompts share,
    so every block here is new: good for arrivals and lengths, useless for reuse.

    Raises:
        BadRequest: names the line.
    """
    start: datetime | None = None
    next_id = 0
    with path.open(newline="") as file:
        for number, row in enumerate(csv.DictReader(file), start=2):
            try:
                # Seven digits behind the second; Python takes six.
                at = datetime.fromisoformat(row["TIMESTAMP"][:26])
                tokens, answer = int(row["ContextTokens"]), int(row["GeneratedTokens"])
            except (KeyError, TypeError, ValueError) as error:
                raise BadRequest(f"{path}, line {number}: {error!r}; need Azure's three columns") from None
            start = start or at
            blocks = -(-tokens // BLOCK_TOKENS)
            at_ms = round((at - start).total_seconds() * 1e3)
            if tokens > 0:
                yield Row(at_ms, tokens, answer, range(next_id, next_id + blocks))
                next_id += blocks


_CHUNKS = ("1_sys_prompt", "2_passages", "3_history", "4_user_input", "5_web_search")


def ragpulse(folder: Path, block_tokens: int = 16) -> list[Row]:
    """RAGPulse: prompts made of chunks, in the order of the file. Blocks are chained over the tokens of the
    chunks, so a chunk behind others is another block: as a set 72 % repeat, as a prefix 31.5 %.

    The 6 to 12 tokens of template between chunks have no ids and are left out. Timestamps are seconds, and
    not in order; rows are.

    Raises:
        BadRequest: a file is absent or names a chunk that no file has.
    """
    lengths: dict[int, int] = {}
    for name in _CHUNKS:
        for row in _json_lines(folder / f"ragpulse_{name}.jsonl"):
            key = next(each for each in row if each.endswith("_id"))
            lengths[row[key]] = row["token_length"]
    known: dict[tuple[Any, ...], int] = {}
    rows = []
    requests = sorted(_json_lines(folder / "ragpulse_0_trace.jsonl"), key=lambda row: float(row["timestamp"]))
    for row in requests:
        chunks = [each for part in row["hash_ids"].values() for each in part]
        absent = next((each for each in chunks if each not in lengths), None)
        if absent is not None:
            raise BadRequest(f"{folder}: chunk {absent} has no length in any of the five files")
        total = sum(lengths[each] for each in chunks)
        at_ms = round(1e3 * float(row["timestamp"]))
        ids = _chained(chunks, lengths, block_tokens, known)
        if total:
            rows.append(Row(at_ms, total, row["output_length"], ids, row["session_id"]))
    return rows


def _json_lines(path: Path) -> list[dict[str, Any]]:
    try:
        with path.open() as file:
            return [json.loads(line) for line in file if line.strip()]
    except (OSError, ValueError) as error:
        raise BadRequest(f"{path}: {error}") from None


def _chained(
    chunks: Sequence[int], lengths: Mapping[int, int], block_tokens: int, known: dict[tuple[Any, ...], int]
) -> list[int]:
    """Ids of blocks over the tokens of the chunks, each block with its parent's id in it."""
    ids: list[int] = []
    block: list[Any] = [-1]  # the parent, then pieces of chunks: chunk, first token, the one behind the last
    room = block_tokens
    for chunk in chunks:
        start, stop = 0, lengths[chunk]
        while start < stop:
            end = min(stop, start + room)
            block += (chunk, start, end)
            room -= end - start
            start = end
            if not room:
                ids.append(known.setdefault(tuple(block), len(known)))
                block, room = [ids[-1]], block_tokens
    if room < block_tokens:
        ids.append(known.setdefault(tuple(block), len(known)))
    return ids


# ---- the stand-in -----------------------------------------------------------------------------------------


def generate(requests: int = 12_031, seed: int = 1) -> list[Row]:
    """Conversations like those of the real trace. The same for the same seed. 12,031 take some 0.5 s.

    Args:
        requests: 1 at least.

    Raises:
        BadRequest: it is less.
    """
    if requests < 1:
        raise BadRequest(f"requests: need 1 at least, got {requests}")
    random = np.random.default_rng(seed)
    begins_per_s = REAL["requests_per_s"] * (1 - _CONTINUES)
    fresh, sessions, now_s = 1, 0, -_BEFORE_S  # block 0 is everybody's
    due: list[tuple[float, int, int, list[int]]] = []
    rows: list[Row] = []
    begins_s = now_s
    while len(rows) < requests:
        if due and due[0][0] <= begins_s:
            now_s, session, length, ids = heapq.heappop(due)
            length += max(1, int(random.lognormal(*_MORE_TOKENS)))
        else:
            now_s, session, ids = begins_s, sessions, [0]
            sessions += 1
            length = max(BLOCK_TOKENS + 1, int(random.lognormal(*_FIRST_TOKENS)))
            begins_s += float(random.exponential(1 / begins_per_s))
        length = min(length, _INPUT_TOKENS_MAX)
        more = -(-length // BLOCK_TOKENS) - len(ids)
        ids = [*ids, *range(fresh, fresh + more)]
        fresh += more
        if random.random() < _CONTINUES:
            # A block that is not full becomes another block when it grows.
            kept = ids[: length // BLOCK_TOKENS]
            pause_s = float(random.lognormal(*_PAUSE_S))
            heapq.heappush(due, (now_s + pause_s, session, length, kept))
        if now_s >= 0:
            at_ms = int(now_s / _TICK_S) * int(_TICK_S * 1e3)
            rows.append(Row(at_ms, length, _answer(random), ids, str(session)))
    return rows


def _answer(random: np.random.Generator) -> int:
    """Many answers are a few words, the others some hundred tokens."""
    if random.random() < 0.15:
        return int(random.integers(1, 60))
    return max(1, int(random.normal(395, 190)))


def infinite_reuse(rows: Iterable[Row], block_tokens: int = BLOCK_TOKENS) -> float:
    """Of all input tokens those of the longest prefix that an earlier request had, if nothing is evicted."""
    known: set[int] = set()
    reused = total = 0
    for row in rows:
        count = 0
        while count < len(row.ids) and row.ids[count] in known:
            count += 1
        known.update(row.ids)
        reused += min(count * block_tokens, row.input_tokens)
        total += row.input_tokens
    return reused / total


def calibration(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """By figure of `REAL`: real, made, and the error, made / real − 1."""
    tokens = np.array([row.input_tokens for row in rows])
    made = {
        "infinite_reuse": infinite_reuse(rows),
        "input_tokens_mean": float(tokens.mean()),
        "input_tokens_p50": float(np.percentile(tokens, 50)),
        "input_tokens_p99": float(np.percentile(tokens, 99)),
        "output_tokens_mean": float(np.mean([row.output_tokens for row in rows])),
        "requests_per_s": len(rows) / max(1e-3, (rows[-1].at_ms - rows[0].at_ms) / 1e3),
    }
    return {
        name: {"real": real, "made": made[name], "error": made[name] / real - 1}
        for name, real in REAL.items()
    }


def main(words: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    command = argparse.ArgumentParser("python -m bench.traces", description=__doc__.splitlines()[0])
    kinds = command.add_subparsers(dest="kind", required=True)
    for kind, source in (("ragpulse", "folder of its files"), ("azure", "one of its csv files")):
        one = kinds.add_parser(kind)
        one.add_argument("source", type=Path, help=source)
        one.add_argument("out", type=Path)
    kinds.choices["ragpulse"].add_argument("--block-tokens", type=int, default=16)
    made = kinds.add_parser("generate")
    made.add_argument("out", type=Path)
    made.add_argument("--requests", type=int, default=12_031)
    made.add_argument("--seed", type=int, default=1)
    options = command.parse_args(words)
    try:
        if options.kind == "generate":
            rows = generate(options.requests, options.seed)
        elif options.kind == "azure":
            rows = list(azure(options.source))
        else:
            rows = ragpulse(options.source, options.block_tokens)
        write(rows, options.out)
    except (BadRequest, OSError) as error:
        command.error(str(error))
    block_tokens = options.block_tokens if options.kind == "ragpulse" else BLOCK_TOKENS
    told: dict[str, Any] = {
        "requests": len(rows),
        "block_tokens": block_tokens,
        "infinite_reuse": infinite_reuse(rows, block_tokens),
    }
    if options.kind == "generate":
        told["calibration"] = calibration(rows)
    print(json.dumps(told, indent=2))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
