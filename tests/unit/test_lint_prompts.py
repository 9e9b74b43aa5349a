"""`kvstore lint-prompts`: exact costs on prompts of known shapes, causes, limits, and the command itself."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from kvstore.cli import main
from kvstore.cli.prompt_reading import read_prompts
from kvstore.router.causes import Cause, Difference, cause_of
from kvstore.router.families import Findings, find_divergences

BLOCK = 16
# With a tokenizer that has one token a character.
RULES = "You are a careful assistant. Answer in short sentences and name your sources. " * 4


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tokenizer with one token a byte, and a template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({char: n for n, char in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text(
        "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    return tmp_path


def found(folder: Path | None, prompts: list[Any], block_tokens: int = BLOCK) -> Findings:
    lines = "\n".join(p if isinstance(p, str) else json.dumps(p) for p in prompts).encode()
    read = read_prompts(io.BytesIO(lines), "f", folder)
    assert not read.malformed
    return find_divergences(read.prompts, block_tokens, read.measures)


def full(tokens: int) -> int:
    return tokens // BLOCK * BLOCK


def test_a_date_at_the_front_costs_all_that_follows(folder: Path) -> None:
    prompts = [f"Today is 2026-01-{day:02}. {RULES}" for day in range(10, 16)]
    findings = found(folder, prompts)
    (place,) = findings.divergences
    # The first of six prompts would have been computed anyway.
    head, tail = len("Today is 2026-01-1"), len(f". {RULES}")
    assert place.cause is Cause.TIMESTAMP
    assert place.lost_tokens == findings.lost_tokens == 5 * (full(head + tail) - full(head))
    assert (place.block, place.token, place.variants, place.prompts, place.line) == (1, head, 6, 6, 1)
    assert findings.reusable_tokens == 5 * full(head)
    assert place.examples == ["2026-01-10", "2026-01-11", "2026-01-12"]
    assert place.before == "Today is " and place.after.startswith(". You are a careful")


def test_what_stands_at_the_end_costs_nothing(folder: Path) -> None:
    findings = found(folder, [f"{RULES} Today is 2026-01-{day:02}." for day in range(10, 20)])
    assert findings.divergences == () and findings.reusable_tokens == 9 * full(len(RULES) + 19 - 1)


def test_what_differs_for_good_is_no_family(folder: Path) -> None:
    prompts = [
        "Write a poem about the sea and its tides. " * 9,
        "Sum these numbers: 1, 2, 3, 4 and 5, please. " * 9,
    ]
    assert found(folder, prompts).divergences == ()


def test_prompts_that_share_a_date_are_counted_once_for_it(folder: Path) -> None:
    """Ten prompts a day reuse each other's blocks: only the first of another day is lost."""
    prompts = [
        f"It is 2026-02-0{day}. {RULES} Question {n}{'abcdefghij'[n] * 30}"
        for n in range(10)
        for day in (1, 2)
    ]
    findings = found(folder, prompts)
    (place,) = findings.divergences
    head, tail = len("It is 2026-02-0"), len(f". {RULES} Question 0" + "a" * 30)
    assert place.variants == 2 and place.prompts == 20
    assert place.lost_tokens == full(head + tail) - full(head)


def test_one_moment_is_one_place(folder: Path) -> None:
    """Some prompts share its day, some only its form."""
    prompts = [f"Now: 2026-03-{1 + n % 3:02} 10:{n:02}:11. {RULES}" for n in range(12)]
    (place,) = found(folder, prompts, block_tokens=4).divergences
    assert place.cause is Cause.TIMESTAMP and place.before == "Now: " and place.after.startswith(". You")
    assert place.examples[0] == "2026-03-01 10:00:11"


def test_two_pieces_are_two_places(folder: Path) -> None:
    ids = [f"{n:08x}-1111-4222-8333-{n * 7:012x}" for n in range(6)]
    prompts = [f"{RULES}Day 2026-03-1{n % 2}. {RULES} request {name}. {RULES}" for n, name in enumerate(ids)]
    findings = found(folder, prompts)
    assert {place.cause for place in findings.divergences} == {Cause.TIMESTAMP, Cause.UUID}
    by_cause = {place.cause: place for place in findings.divergences}
    assert by_cause[Cause.UUID].prompts == 6  # on both days
    assert by_cause[Cause.UUID].lost_tokens >= 4 * full(len(RULES))


def test_a_trailing_space(folder: Path) -> None:
    chats = [
        {"messages": [{"role": "system", "content": RULES + blank}, {"role": "user", "content": RULES}]}
        for blank in ("", " ")
    ]
    (place,) = found(folder, chats).divergences
    assert place.cause is Cause.WHITESPACE and place.lost_tokens >= full(len(RULES)) - BLOCK


def test_tools_in_another_order(folder: Path) -> None:
    def tool(name: str) -> dict[str, Any]:
        return {
            "type": "function",
            "function": {"name": name, "description": RULES, "parameters": {"a": 1, "b": 2}},
        }

    tools = [tool("alpha"), tool("beta"), tool("gamma")]
    swapped = json.loads(json.dumps(tools[::-1]))
    swapped[0]["function"]["parameters"] = {"b": 2, "a": 1}
    chats = [{"messages": [{"role": "user", "content": RULES}], "tools": these} for these in (tools, swapped)]
    findings = found(folder, chats)
    (place,) = findings.divergences
    assert place.cause is Cause.TOOL_ORDER
    # Of the second prompt all but the last, partial block would have been there.
    assert place.lost_tokens == full(findings.tokens // 2) - place.block * BLOCK


@pytest.mark.parametrize(
    ("one", "other", "cause"),
    [
        ("at 10:15:00 now", "at 10:15:07 now", Cause.TIMESTAMP),
        ("on Monday, January 5, 2026 at", "on Tuesday, January 6, 2026 at", Cause.TIMESTAMP),
        ("on January 5, 2026 at", "on January 6, 2026 at", Cause.TIMESTAMP),
        ("on 3 Feb 2026 at", "on 4 Feb 2026 at", Cause.TIMESTAMP),
        ("at 2026-01-05T10:15:00.123Z now", "at 2026-01-05T10:15:09.999Z now", Cause.TIMESTAMP),
        ("ts=1767607200 x", "ts=1767607201 x", Cause.TIMESTAMP),
        ("ts=1767607200123 x", "ts=1767607200999 x", Cause.TIMESTAMP),
        ("request 7 of", "request 8 of", Cause.NUMBER),
        ("request 9 of", "request 10 of", Cause.NUMBER),
        ("costs 12.50 now", "costs 3.75 now", Cause.NUMBER),
        (
            "id 8f14e45f-ceea-467f-a8b1-0e1f4b8d0e5a x",
            "id c9f0f895-fb98-4b91-99b0-2a4f4c1d9e77 x",
            Cause.UUID,
        ),
        ("id 8f14e45fceea467f x", "id c9f0f895fb984b91 x", Cause.ID),
        ("id req_8f14e45f x", "id req_c9f0f895 x", Cause.ID),
        ("a  b", "a b", Cause.WHITESPACE),
        ("a\n\nb", "a\r\n\r\nb", Cause.WHITESPACE),
        ("dear Alice, we", "dear Bob, we", Cause.TEXT),
        ("version 2026-01-05 of", "version beta of", Cause.TEXT),
    ],
)
def test_causes(one: str, other: str, cause: Cause) -> None:
    start = next(n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    same = next(n for n in range(1, 99) if one[-n:] != other[-n:]) - 1
    same = min(same, len(one) - start, len(other) - start)
    ends = [Difference(text, start, len(text) - same) for text in (one, other)]
    assert cause_of(ends[0], ends[1]) is cause
    assert cause_of(ends[1], ends[0]) is cause


# ---- the command ------------------------------------------------------------------------------------------


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = 0
    try:
        main(["lint-prompts", *words])
    except SystemExit as left:
        code = int(left.code or 0)
    said = capsys.readouterr()
    return code, said.out, said.err


def test_the_command_in_text_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"#{n}\x1b[31m {RULES * 4}"}) + "\n" for n in range(1, 5)))
    code, out, err = run(capsys, str(file))
    assert code == 0 and not err
    assert "4 prompts" in out and "of 4 bytes each" in out and "a number" in out and "[1]" in out
    assert "put it behind" in out and "\x1b" not in out
    code, out, _ = run(capsys, str(file), "--json", "--top", "1")
    told = json.loads(out)
    assert told["prompts"] == 4 and not told["exact"] and told["malformed_lines"] == 0
    assert told["divergences"][0]["cause"] == "number" and told["divergences"][0]["examples"] == [
        "1",
        "2",
        "3",
    ]
    # Pseudo-tokens of 4 bytes: 3 prompts lose all full blocks.
    assert told["lost_tokens"] == 3 * full((len(RULES) * 4 + 7) // 4) == told["divergences"][0]["lost_tokens"]
    assert run(capsys, str(file), "--fail-above", "50")[0] == 1
    assert run(capsys, str(file), "--fail-above", "99")[0] == 0


def test_malformed_lines_are_named(tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bad.jsonl"
    lines = [
        b"plain text",
        b'{"prompt": ',
        b"",
        b'{"input": 1}',
        b'{"messages": [{"content": 1}]}',
        b'"a string"',
    ]
    lines += [
        b'{"custom_id": "1", "body": {"messages": [{"role": "user", "content": "hi"}]}}',
        b'{"prompt": ["a"]}',
    ]
    file.write_bytes(b"\n".join(lines))
    code, out, err = run(capsys, str(file), "--json", "-t", str(folder))
    assert code == 1
    assert [line.split(":")[1] for line in err.splitlines()] == ["2", "4", "5"]
    assert err.startswith(f"{file}:2: no JSON")
    told = json.loads(out)
    assert told["prompts"] == 4 and told["malformed_lines"] == 3 and told["exact"]


def test_limits_are_counted_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.cli.prompt_reading.PROMPTS_MAX", 3)
    monkeypatch.setattr("kvstore.cli.prompt_reading.LINE_BYTES_MAX", 100)
    text = "\n".join(["a", "x" * 1000, "b", "c", "d", "y" * 101, "z" * 100]).encode()
    read = read_prompts(io.BytesIO(text), "f", None)
    assert [p.line for p in read.prompts] == [1, 3, 4]
    assert read.left_out_lines == 2 and read.malformed_lines == 2
    assert read.malformed[0] == "f:2: longer than 100 bytes"


def test_many_paths_are_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.router.families.PAIRS_MAX", 10)
    findings = found(folder, [f"{n} {RULES}" for n in range(100, 150)])
    assert findings.paths_left_out == 39 and findings.divergences[0].variants == 11


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("no-such-file",), "FILE"),
        ((__file__, "--block-tokens", "0"), "--block-tokens"),
        ((__file__, "--top", "-1"), "--top"),
        ((__file__, "--fail-above", "101"), "--fail-above"),
        ((__file__, "--tokenizer", "/nowhere"), "tokenizer"),
    ],
)
def test_wrong_usage_is_said_and_ends_with_2(
    words: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(capsys, *words)
    assert code == 2 and told in err
