"""bench.plan_sim: what it reads, its exact answer, the policy held against it, and nonsense."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import plan_sim
from bench.plan_costs import BLOCK_TOKENS, GB, NEVER, Cell, Costs, Matches, tuned
from bench.plan_sim import BARS, Policy, missed, simulate
from bench.plan_trace import TraceError, read_trace
from kvstore.policy.reload import Choice
from kvstore.simulate.trace_file import TOKENS_MAX

BANDWIDTHS = st.floats(0.1, 200.0)
SLOWDOWNS = st.floats(0.3, 10.0)
LENGTHS = st.integers(1, 8192).map(lambda blocks: BLOCK_TOKENS * blocks)
# `decide` loads what is faster by a twentieth or more, and computes otherwise.
WORTH = 0.95
TROUBLE = 0.03  # what a split has to save of recompute, beside a load


def row(tokens: int, ids: list[int], at_ms: int = 0) -> dict[str, Any]:
    return {"timestamp": at_ms, "input_length": tokens, "output_length": 7, "hash_ids": ids}


# Somebody asks, asks on, and somebody else has the first block in common; the last repeats the second.
TALK = [
    row(1500, [0, 1, 2]),
    row(2049, [0, 1, 3, 4, 5], 5),
    row(700, [0, 9], 5),
    row(2049, [0, 1, 3, 4, 5], 9),
]


def trace_file(folder: Path, *rows: object) -> Path:
    file = folder / "trace.jsonl"
    file.write_text("".join(f"{each if isinstance(each, str) else json.dumps(each)}\n" for each in rows))
    return file


# ---- the trace --------------------------------------------------------------------------------------------


def test_a_match_is_the_leading_ids_that_an_earlier_request_had(tmp_path: Path) -> None:
    trace = read_trace(trace_file(tmp_path, *TALK))
    assert trace.prompt_tokens.tolist() == [1500, 2049, 700, 2049]
    assert trace.matched_tokens.tolist() == [0, 1024, 512, 2048]


def test_the_last_token_is_never_matched_nor_is_a_block_that_is_not_full(tmp_path: Path) -> None:
    same = [row(tokens, list(range(-(-tokens // 512)))) for tokens in (1024, 1024, 1025, 1023, 1)]
    assert read_trace(trace_file(tmp_path, *same)).matched_tokens.tolist() == [0, 512, 1024, 512, 0]


def test_an_id_stands_for_all_before_it(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="line 2: hash_ids: 1 comes behind 7, elsewhere behind 0"):
        read_trace(trace_file(tmp_path, row(1500, [0, 1, 2]), row(1500, [7, 1, 2])))


def test_empty_lines_are_no_requests(tmp_path: Path) -> None:
    assert len(read_trace(trace_file(tmp_path, TALK[0], "", TALK[1], "  "))) == 2


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"timestamp": 1,', "no JSON"),
        ("\x00", "no JSON"),
        ("[" * 100_000, "no JSON"),
        ("[1, 2]", "not an object"),
        (
            {**TALK[1], "input_length": -5},
            "input_length: need 1 to 16777216 tokens, got -5",
        ),
        ({**TALK[1], "input_length": 0}, "input_length: need 1 to 16777216 tokens, got 0"),
        ({**TALK[1], "input_length": 2049.0}, "got 2049.0"),
        ({**TALK[1], "input_length": True}, "got True"),
        ({**TALK[1], "input_length": TOKENS_MAX + 1}, "got 16777217"),
        ({**TALK[1], "output_length": -1}, "output_length: need 0 to 16777216 tokens, got -1"),
        (
            {"timestamp": 1, "input_length": 5, "hash_ids": [0]},
            "output_length: need 0 to 16777216 tokens, got None",
        ),
        ({**TALK[1], "timestamp": -1}, "timestamp: need milliseconds, 0 at least, got -1"),
        ({**TALK[1], "timestamp": math.nan}, "got nan"),
        ({**TALK[1], "timestamp": 1}, "timestamp goes back; sort the file by it"),
        ({**TALK[1], "hash_ids": [0, 1]}, "2 hash_ids for 2049 tokens; 5 are needed"),
        (
            {**TALK[1], "hash_ids": [0, 1, 2, 3, "4"]},
            "hash_ids: need whole numbers from 0 to",
        ),
        ({**TALK[1], "hash_ids": "x" * 1000}, "hash_ids: need whole numbers"),
    ],
    ids=lambda each: str(each)[:40].strip(),
)
def test_a_line_that_makes_no_sense_is_named_with_the_fix(tmp_path: Path, line: object, says: str) -> None:
    file = trace_file(tmp_path, row(600, [0, 8], 5), line)
    with pytest.raises(TraceError) as refused:
        read_trace(file)
    message = str(refused.value)
    assert message.startswith(f"{file}, line 2: ")
    assert says in message
    assert len(message) < 500


def test_a_line_longer_than_any_request_is_not_taken_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.simulate.trace_file.LINE_BYTES_MAX", 1000)
    with pytest.raises(TraceError, match="line 2: longer than 1000 bytes"):
        read_trace(trace_file(tmp_path, TALK[0], " " * 1000 + json.dumps(TALK[1])))


def test_a_file_that_cannot_be_read_or_has_no_request(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"none\.jsonl: No such file or directory"):
        read_trace(tmp_path / "none.jsonl")
    with pytest.raises(TraceError, match="Is a directory"):
        read_trace(tmp_path)
    with pytest.raises(TraceError, match="no request in it"):
        read_trace(trace_file(tmp_path, ""))
    with pytest.raises(TraceError, match="nothing to decide: take more of the trace"):
        simulate(read_trace(trace_file(tmp_path, TALK[0])))


# ---- the exact answer -------------------------------------------------------------------------------------


@given(LENGTHS, BANDWIDTHS, SLOWDOWNS)
@settings(max_examples=50)
def test_the_exact_split_is_where_both_meet(tokens: int, speed: float, slowdown: float) -> None:
    costs = Costs(speed * GB, slowdown)
    cell = Cell.of(np.array([tokens]), costs)
    split, pure = float(cell.split_s[0]), float(cell.pure_s[0])
    # C(k) = a·k + b·k² and L = setup + c·(n - k) meet at the root of b·k² + (a + c)·k - setup - c·n.
    a, c = costs.slowdown / costs.tokens_per_s, costs.token_bytes / costs.bytes_per_s
    b = a / (2 * costs.attention_tokens)
    root = (math.sqrt((a + c) ** 2 + 4 * b * (costs.setup_s + c * tokens)) - a - c) / (2 * b)
    meet_s = float(costs.compute_s(np.array(min(root, tokens))))
    # Less than the meeting point nothing can be, and one block more is always possible.
    block_s = BLOCK_TOKENS * c + float(np.diff(costs.compute_s(np.array([tokens - BLOCK_TOKENS, tokens])))[0])
    assert meet_s * (1 - 1e-9) <= split <= min(pure, meet_s + block_s + 1e-12)


def test_costs_by_hand() -> None:
    costs = Costs(bytes_per_s=2 * GB, slowdown=3.0)
    assert float(costs.compute_s(np.array(31_000.0))) == pytest.approx(3 * 31_000 * 1.5 / 25_000)
    assert costs.load_s(np.array([0.0, 512.0])).tolist() == [0.0, 0.002 + 512 * 131_072 / 2e9]
    cell = Cell.of(np.array([16, 32]), Costs(1000 * GB))
    assert cell.pure_s.tolist() == [cell.recompute_s[0], cell.recompute_s[1]]  # set-up alone takes longer
    ends = costs.reload_s(np.array([0.0, 0.0, 512.0]), np.array([0.0, 512.0, 1024.0]), np.full(3, 1024.0))
    whole, first = (float(costs.compute_s(np.array(tokens))) for tokens in (1024.0, 512.0))
    load = 0.002 + 512 * 131_072 / 2e9
    assert ends.tolist() == pytest.approx([whole, load + whole - first, max(first, load)])


def test_at_the_break_even_bandwidth_both_take_as_long(tmp_path: Path) -> None:
    matches = Matches.of(read_trace(trace_file(tmp_path, *TALK)))
    assert (matches.tokens.tolist(), matches.requests.tolist()) == ([512, 1024, 2048], [1, 1, 1])
    for slowdown in (1.0, 3.0):
        even = matches.break_even(Costs(slowdown=slowdown))
        costs = Costs(even["of_sums"], slowdown)
        tokens = matches.tokens.astype(float)
        assert matches.sum(costs.compute_s(tokens)) == pytest.approx(matches.sum(costs.load_s(tokens)))
        each = [float(costs.even_bytes_per_s(np.array(n))) for n in tokens]
        assert even["mean"] == pytest.approx(sum(each) / 3)
        assert even["median"] == pytest.approx(sorted(each)[1])
        assert even["first_token"] == pytest.approx(131_072 * 25_000 / slowdown)


def test_the_best_threshold_loads_all_of_a_fast_tier_and_nothing_of_a_slow_one() -> None:
    tokens = np.arange(512, 65_536, 512)
    matches = Matches(tokens, np.ones_like(tokens), 0.0)
    best = {speed: tuned(matches, [Cell.of(tokens, Costs(speed * GB))]) for speed in (0.1, 2.0, 100.0)}
    assert best[0.1] == NEVER
    assert best[100.0] == 512
    middle = Cell.of(tokens, Costs(2 * GB))
    assert 512 < best[2.0] < NEVER
    assert matches.sum(middle.threshold_s(best[2.0])) == pytest.approx(matches.sum(middle.pure_s))


# ---- the policy -------------------------------------------------------------------------------------------


@given(st.lists(LENGTHS, min_size=1, max_size=8), BANDWIDTHS, SLOWDOWNS)
@settings(max_examples=40, deadline=None)
def test_the_policy_agrees_with_the_exact_answer(lengths: list[int], speed: float, slowdown: float) -> None:
    tokens = np.array(lengths)
    costs = Costs(speed * GB, slowdown)
    cell, policy = Cell.of(tokens, costs), Policy(costs, max(lengths))
    may_load = np.array([comes_through(match, costs) for match in lengths])
    for can_split, exact_s in ((True, cell.split_s), (False, cell.pure_s)):
        asked = policy.ask(tokens, can_split=can_split)
        assert (asked.seconds >= exact_s * (1 - 1e-9)).all(), "nothing is better than the exact answer"
        assert (asked.seconds <= cell.recompute_s * (1 + 1e-9)).all(), "never worse than no load at all"
        # Both meet within a block; a load that the lag rule would end must not begin, though it be the best.
        block_s = costs.compute_s(tokens) - costs.compute_s(tokens - BLOCK_TOKENS)
        near = asked.seconds <= exact_s / WORTH + block_s + TROUBLE * cell.recompute_s
        assert (near | ((exact_s == cell.load_s) & ~may_load)).all()
        assert np.abs(asked.predicted_s / asked.seconds - 1).max() < 1e-3
        assert can_split or Choice.SPLIT not in asked.choices


def comes_through(match: int, costs: Costs) -> bool:
    """Whether each block of a load is there before the lag rule ends it, at 0.1·R + min(a·R, max(a·W, w))."""
    start = np.arange(0.0, match, BLOCK_TOKENS)
    recompute_s, load_s = (float(of(np.array(float(match)))) for of in (costs.compute_s, costs.load_s))
    kept_s, due_s = costs.compute_s(start), costs.load_s(start)
    allowed_s = 0.1 * recompute_s + np.minimum(kept_s, np.maximum(kept_s / recompute_s * load_s, due_s))
    return bool((costs.load_s(start + BLOCK_TOKENS) < allowed_s * (1 - 1e-9)).all())


@pytest.mark.parametrize("slowdown", plan_sim.SLOWDOWNS)
@pytest.mark.parametrize("speed", plan_sim.BANDWIDTHS)
def test_on_lengths_of_the_trace_a_split_is_exact(speed: float, slowdown: float) -> None:
    tokens = np.array([512, 1024, 2048, 6656, 20_480, 61_440, 122_880])
    costs = Costs(speed * GB, slowdown)
    asked = Policy(costs, int(tokens[-1])).ask(tokens, can_split=True)
    cell = Cell.of(tokens, costs)
    assert ((asked.seconds - cell.split_s) / cell.recompute_s).max() < TROUBLE + 0.001


@given(LENGTHS, st.integers(0, 100_000), BANDWIDTHS, st.booleans())
@settings(max_examples=40, deadline=None)
def test_what_lies_behind_a_match_changes_nothing(
    tokens: int, rest: int, speed: float, can_split: bool
) -> None:
    policy = Policy(Costs(speed * GB), tokens + rest)
    alone = policy.decide(tokens, can_split=can_split)
    behind = policy.decide(tokens, can_split=can_split, rest=rest)
    assert (alone.choice, alone.load_start, alone.load_stop) == (
        behind.choice,
        behind.load_start,
        behind.load_stop,
    )


# ---- the program ------------------------------------------------------------------------------------------


def run(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    monkeypatch.setattr(sys, "argv", ["bench.plan_sim", *map(str, words)])
    return plan_sim.main()


def test_the_result_says_that_it_is_a_simulation_and_what_is_summed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--json", "--trace", trace_file(tmp_path, *TALK)) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["simulation"] is True
    assert "of these n is there" in result["definition"]
    assert result["trace"]["requests_with_match"] == 3
    assert result["trace"]["matched_tokens"] == 512 + 1024 + 2048
    assert result["missed"] == []
    assert result["split_over_min"].keys() == BARS.keys()
    for row_ in result["cells"]:
        assert row_["split_over_min"] <= row_["split_over_min_with_rest"] <= 1.0
        assert min(row_["rules_over_min"].values()) >= 1.0
        for shares in row_["choices"].values():
            assert sum(shares.values()) == pytest.approx(1.0, abs=1e-3)
    # By hand, 1 GB/s and idle: every match is computed faster than loaded.
    first = result["cells"][0]
    whole = sum((n + n * n / 62_000) / 25_000 for n in (512, 1024, 2048))
    assert first["seconds"]["min"] == first["seconds"]["recompute"] == pytest.approx(whole, rel=1e-3)
    assert first["rules_over_min"]["never_load"] == 1.0


def test_without_json_it_is_told_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--trace", trace_file(tmp_path, *TALK)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("SIMULATION, nothing measured")
    assert json.loads(lines[-1])["simulation"] is True


def test_a_trace_that_is_none_is_told_without_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, "--trace", trace_file(tmp_path, TALK[0], "{"))
    assert ended.value.code == 2
    shown = capsys.readouterr()
    assert "line 2: no JSON" in shown.err
    assert not shown.out
    with pytest.raises(SystemExit):
        run(monkeypatch)
    assert "--trace" in capsys.readouterr().err


def test_a_bar_is_missed_only_on_the_trace_that_it_is_about() -> None:
    got = {**BARS, "12": 0.85}
    assert missed({"split_over_min": got, "trace": {"sha256": "of another one"}}) == []
    known = {"sha256": plan_sim.BARS_TRACE}
    assert missed({"split_over_min": got, "trace": known}) == ["12 GB/s: 0.85 for 0.8 ± 0.03"]
    assert missed({"split_over_min": BARS, "trace": known}) == []
