"""bench.traces: conversions, and a stand-in that is as alike as the real trace."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from bench import traces
from kvstore.errors import BadRequest
from kvstore.policy.routing.make import make_policy
from kvstore.policy.routing.scored import Scored
from kvstore.simulate.queueing import QueueSettings, serve
from kvstore.simulate.trace_file import read_trace
from kvstore.simulate.views import ExactView

FILES = Path(__file__).parents[3] / "shared/traces"


def need(name: str) -> Path:
    path = FILES / name
    if not path.is_file():
        pytest.skip(f"{name} lies outside the repository and is absent")
    return path


@pytest.fixture(scope="module")
def made() -> list[traces.Row]:
    return traces.generate()


@pytest.mark.parametrize("figure", traces.REAL)
def test_the_stand_in_is_calibrated(made: list[traces.Row], figure: str) -> None:
    """Within 3 % with this seed; other seeds differ by a few more."""
    assert abs(traces.calibration(made)[figure]["error"]) <= 0.03


def test_other_seeds_are_other_conversations_as_alike() -> None:
    other = traces.generate(seed=9)
    assert other != traces.generate(seed=10)
    assert all(abs(each["error"]) <= 0.10 for each in traces.calibration(other).values())


def test_the_bars_hold_on_the_stand_in(made: list[traces.Row], tmp_path: Path) -> None:
    """So that they are watched where the real trace is absent."""
    path = tmp_path / "made.jsonl"
    traces.write(made[:4500], path)
    work, fleet, half = read_trace(path), QueueSettings(), slice(2250, None)
    runs = [serve(work, policy, ExactView(8), fleet) for policy in (make_policy("round_robin"), Scored())]
    base, scored = (np.percentile(run.ttft_s[half], [50, 99]) for run in runs)
    assert runs[1].reused_tokens[half].sum() / work.input_tokens[half].sum() >= 0.30
    assert scored[1] / base[1] <= 0.45
    assert scored[0] / base[0] <= 0.20


def test_everybody_begins_alike_and_conversations_grow(made: list[traces.Row]) -> None:
    assert {row.ids[0] for row in made} == {0}
    last: dict[str, traces.Row] = {}
    for row in made:
        before = last.get(row.session)
        if before is not None:
            kept = before.input_tokens // traces.BLOCK_TOKENS
            assert list(row.ids[:kept]) == list(before.ids[:kept])
            assert row.input_tokens >= before.input_tokens
        last[row.session] = row
    assert len(last) < 0.75 * len(made)
    with pytest.raises(BadRequest, match="need 1 at least"):
        traces.generate(0)


def test_the_real_trace_has_the_figures_it_is_calibrated_to() -> None:
    work = read_trace(need("mooncake_conversation_trace.jsonl"))
    rows = [
        traces.Row(round(1e3 * at_s), tokens, answer, ids)
        for at_s, tokens, answer, ids in zip(
            work.arrivals_s.tolist(),
            work.input_tokens.tolist(),
            work.output_tokens.tolist(),
            work.chains,
            strict=True,
        )
    ]
    assert all(abs(each["error"]) < 0.001 for each in traces.calibration(rows).values())


def test_ragpulse_as_prefixes() -> None:
    need("ragpulse_0_trace.jsonl")
    rows = traces.ragpulse(FILES)
    assert len(rows) == 7106
    assert traces.infinite_reuse(rows, 16) == pytest.approx(0.315, abs=0.001)


def test_ragpulse_chunks_become_chained_blocks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lengths = {"1_sys_prompt": (1, 4), "2_passages": (2, 6), "3_history": (3, 1), "4_user_input": (4, 3)}
    for name, (chunk, tokens) in {**lengths, "5_web_search": (5, 2)}.items():
        row = {f"{name[2:]}_id": chunk, "token_length": tokens}
        (tmp_path / f"ragpulse_{name}.jsonl").write_text(json.dumps(row) + "\n\n")

    def request(at: str, *chunks: int) -> str:
        parts = {"sys_prompt": [chunks[0]], "passages_ids": list(chunks[1:])}
        row = {"timestamp": at, "input_length": 99, "output_length": 7, "hash_ids": parts, "session_id": at}
        return json.dumps(row) + "\n"

    trace = tmp_path / "ragpulse_0_trace.jsonl"
    trace.write_text(request("9", 1, 3, 2) + request("2", 1, 2) + request("3", 1, 2, 4))
    rows = traces.ragpulse(tmp_path, 4)
    assert [row.at_ms for row in rows] == [2000, 3000, 9000]  # sorted
    assert [row.input_tokens for row in rows] == [10, 13, 11]
    first, longer, moved = (list(row.ids) for row in rows)
    assert longer[:2] == first[:2]
    assert longer[2] != first[2]  # its last block is full of other tokens
    assert moved[0] == first[0]
    assert moved[1] not in first  # the same passage behind something else is another block
    out = tmp_path / "out.jsonl"
    assert traces.main(["ragpulse", str(tmp_path), str(out), "--block-tokens", "4"]) == 0
    assert json.loads(capsys.readouterr().out)["infinite_reuse"] == 12 / 34
    assert read_trace(out, 4).sessions == ("2", "3", "9")
    trace.write_text(request("1", 77))
    with pytest.raises(BadRequest, match="chunk 77 has no length"):
        traces.ragpulse(tmp_path)
    trace.unlink()
    with pytest.raises(BadRequest, match="No such file"):
        traces.ragpulse(tmp_path)


def test_azure_has_arrivals_and_lengths(tmp_path: Path) -> None:
    path, out = tmp_path / "azure.csv", tmp_path / "azure.jsonl"
    head = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    path.write_text(f"{head}2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,1100,109\n")
    rows = list(traces.azure(path))
    assert [(row.at_ms, row.input_tokens, row.output_tokens) for row in rows] == [
        (0, 374, 44),
        (4315, 1100, 109),
    ]
    assert [list(row.ids) for row in rows] == [[0], [1, 2, 3]]
    traces.write(rows, out)
    assert read_trace(out).input_tokens.tolist() == [374, 1100]
    path.write_text(f"{head}yesterday,1,2\n")
    with pytest.raises(BadRequest, match="line 2"):
        list(traces.azure(path))


def test_the_generator_as_a_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "made.jsonl"
    assert traces.main(["generate", str(out), "--requests", "200", "--seed", "4"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["requests"] == len(read_trace(out)) == 200
    assert told["calibration"].keys() == traces.REAL.keys()
    with pytest.raises(SystemExit):
        traces.main(["azure", str(tmp_path / "absent.csv"), str(out)])
    assert "No such file" in capsys.readouterr().err
