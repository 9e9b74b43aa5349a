"""`kvstore simulate`: tables, sweeps, golden numbers, pictures, and what it says of nonsense."""

from __future__ import annotations

import builtins
import json
from pathlib import Path
from typing import Any

import pytest

from kvstore.cli import main
from kvstore.simulate import golden
from kvstore.simulate.trace_file import read_trace

FAMILIES = ("--requests", "AABACABDAACBADABCABA", "--lengths", "A=1000,B=800,C=600,D=400")


class Ran:
    """A command that came to its end in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str], *words: object) -> None:
        with pytest.raises(SystemExit) as ended:
            main(["simulate", *map(str, words)])
        self.status = ended.value.code
        self.out, self.err = capsys.readouterr()

    @property
    def json(self) -> dict[str, Any]:
        answer = json.loads(self.out)
        assert isinstance(answer, dict)
        return answer


def line(at_ms: float, tokens: int, *ids: int, **more: object) -> str:
    row = {"timestamp": at_ms, "input_length": tokens, "output_length": 9, "hash_ids": ids, **more}
    return json.dumps(row) + "\n"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Two conversations of three turns under one first block; 10 tokens a block."""
    path = tmp_path / "trace.jsonl"
    turns = [(0, 1), (0, 2), (0, 1, 3), (0, 2, 4), (0, 1, 3, 5), (0, 2, 4, 6)]
    path.write_text("".join(line(1000 * at, 10 * len(ids), *ids) for at, ids in enumerate(turns)))
    return path


# ---- answers ----------------------------------------------------------------------------------------------


def test_families_are_swept_over_capacity_and_skew(capsys: pytest.CaptureFixture[str]) -> None:
    ran = Ran(
        capsys, *FAMILIES, "--capacity", "1,2", "--max-skew", "0,2", "--seconds-per-request", 0.5, "--json"
    )
    assert ran.status == 0
    runs = {(run["label"], run["capacity"]): run for run in ran.json["runs"]}
    labels = ("round_robin", "affinity", "hybrid max_skew=0", "hybrid max_skew=2")
    assert list(runs) == [(label, capacity) for capacity in (1, 2) for label in labels]
    best = runs["hybrid max_skew=2", 2]
    assert (best["reused_tokens"], best["skew"], best["evictions"]) == (12_800, 3, 0)
    assert best["assigned"] == [8, 7, 5]
    assert best["queue_penalty_s"] == 7.0
    assert best["max_skew"] == 2
    assert {"replicas": 3, "requests": 20, "mode": "families"}.items() <= ran.json.items()


def test_families_as_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    spaced = (
        "--requests",
        "A A B",
        "--lengths",
        "A=10 B=3",
        "--policy",
        "round-robin,scored",
        "--replicas",
        1,
    )
    lines = Ran(capsys, *spaced).out.splitlines()
    assert lines[0] == "3 requests, 1 replicas, capacity in families"
    assert lines[2].split()[:4] == ["policy", "capacity", "reused", "reuse"]
    assert [row.split()[:3] for row in lines[3:]] == [["round_robin", "2", "10"], ["scored", "2", "10"]]


def test_ties_by_lot_only_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    words = (*FAMILIES, "--policy", "least", "--json")
    first, again = Ran(capsys, *words).json, Ran(capsys, *words).json
    drawn = [Ran(capsys, *words, "--seed", seed).json for seed in range(5)]
    assert first == again
    assert any(each["runs"] != first["runs"] for each in drawn)


def test_a_trace_in_time(capsys: pytest.CaptureFixture[str], trace: Path) -> None:
    ran = Ran(capsys, "--trace", trace, "--block-tokens", 10, "--replicas", 2, "--capacity", "3,9", "--json")
    assert ran.status == 0
    answer = ran.json
    assert answer["trace"]["requests"] == 6
    assert answer["trace"]["input_tokens"] == 180
    policies = [run["label"] for run in answer["runs"] if run["capacity"] == 9]
    assert policies == [
        *("round_robin", "least", "power_of_two", "session_hash", "consistent_hash", "affinity"),
        *("hybrid max_skew=0", "hybrid max_skew=1", "hybrid max_skew=2", "scored"),
    ]
    # Round-robin on two replicas keeps two conversations apart by chance: each finds its last turn.
    first = answer["runs"][0]
    assert first["capacity"] == 3
    assert first["warm_up"]["requests"] + first["steady"]["requests"] == 6
    assert answer["runs"][10]["all"]["reused_tokens"] == 2 * (20 + 30)
    assert first["over_round_robin"] == {"ttft_p50": 1.0, "ttft_p99": 1.0}


def test_weights_are_swept_and_fixed_on_the_first_half(
    capsys: pytest.CaptureFixture[str], trace: Path
) -> None:
    words = ("--trace", trace, "--block-tokens", 10, "--policy", "scored", "--replicas", 2)
    swept = Ran(capsys, *words, "--weight", "1,2.5", "--json").json
    assert [(run["label"], run["weight"]) for run in swept["runs"]] == [
        ("scored weight=1", 1.0),
        ("scored weight=2.5", 2.5),
    ]
    fitted = Ran(capsys, *words, "--fit-weight", "--json").json
    assert fitted["weight_of_first_half"] == fitted["runs"][0]["weight"]
    assert fitted["runs"][0]["over_round_robin"] is None  # it is not among the policies
    assert "fixed on the first half" in Ran(capsys, *words, "--fit-weight").out


@pytest.mark.parametrize("view", ["exact", "capacity", "ttl"])
def test_views_and_lag(capsys: pytest.CaptureFixture[str], trace: Path, view: str) -> None:
    words = ("--trace", trace, "--block-tokens", 10, "--policy", "affinity", "--view", view, "--json")
    prompt = Ran(capsys, *words, "--view-ttl-s", 0.5).json["runs"][0]["all"]
    late = Ran(capsys, *words, "--lag-s", 100).json["runs"][0]["all"]
    assert (prompt["predicted_tokens"] > 0) == (view != "ttl")
    assert (late["predicted_tokens"] > 0) == (view != "exact")  # the others do not wait for events


def test_the_trace_table_says_where_nothing_is_steady(
    capsys: pytest.CaptureFixture[str], trace: Path
) -> None:
    out = Ran(capsys, "--trace", trace, "--block-tokens", 10, "--policy", "round_robin,scored").out
    assert "steady state: no request; the trace never fills this fleet" in out
    assert "warm-up, 6 requests" in out
    assert "second half, over round-robin" in out


def test_golden_passes(capsys: pytest.CaptureFixture[str]) -> None:
    ran = Ran(capsys, "--golden")
    assert ran.status == 0
    assert ran.out.count("PASS") == len(golden.check_golden())
    assert "FAIL" not in ran.out
    assert ran.out.splitlines()[-1].endswith("all as expected")


def test_golden_fails_on_any_difference(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(golden.LENGTHS, "C", 601)
    ran = Ran(capsys, "--golden")
    assert ran.status == 1
    assert ran.out.count("FAIL") == 10  # at capacity 1 nobody finds C again
    told = Ran(capsys, "--golden", "--json")
    assert (told.status, told.json["ok"]) == (1, False)
    wrong = next(check for check in told.json["checks"] if not check["ok"])
    assert wrong["found"] != wrong["expected"]


# ---- pictures ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["families", "trace"])
def test_it_draws(capsys: pytest.CaptureFixture[str], trace: Path, tmp_path: Path, mode: str) -> None:
    picture = tmp_path / "picture.png"
    words = FAMILIES if mode == "families" else ("--trace", trace, "--block-tokens", 10)
    assert Ran(capsys, *words, "--capacity", "1,2", "--plot", picture).status == 0
    assert picture.read_bytes().startswith(b"\x89PNG\r\n")


def test_without_matplotlib_it_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = builtins.__import__

    def absent(name: str, *rest: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", absent)
    ran = Ran(capsys, *FAMILIES, "--plot", tmp_path / "picture.png", "--json")
    assert ran.status == 2
    assert "pip install 'kvstored[bench]'" in ran.json["error"]


# ---- nonsense ---------------------------------------------------------------------------------------------

NONSENSE = [
    ((), "say one of --requests"),
    ((*FAMILIES, "--golden"), "say one of"),
    (("--golden", "--plot", "x.png"), "nothing to draw"),
    (("--requests", "A"), "--lengths: --requests needs it"),
    (("--requests", "A Z", "--lengths", "A=1"), "--lengths: 'Z' is requested"),
    (("--requests", ",", "--lengths", "A=1"), "--requests: need one"),
    (("--requests", "A", "--lengths", "A"), "--lengths: need FAMILY=TOKENS"),
    (("--requests", "A", "--lengths", "A=1,A=2"), "each once"),
    (("--requests", "A", "--lengths", "A=x"), "--lengths: need numbers"),
    (("--requests", "A", "--lengths", "A="), "--lengths: need a number"),
    ((*FAMILIES, "--capacity", "0"), "--capacity: need 1"),
    ((*FAMILIES, "--capacity", "1,two"), "--capacity: need numbers"),
    ((*FAMILIES, "--replicas", "0"), "--replicas: need 1"),
    ((*FAMILIES, "--max-skew", "-1"), "max_skew: need 0"),
    ((*FAMILIES, "--policy", "best"), "'best' is none"),
    ((*FAMILIES, "--skew-of", "tokens"), "--skew-of: 'tokens' is none; say assigned or in_flight"),
    ((*FAMILIES, "--capacity", ",".join(["1"] * 400)), "runs_max = 1000"),
    ((*FAMILIES, "--plot", "/nowhere/x.png"), "--plot: /nowhere/x.png: No such file"),
    (("--trace", "/nowhere"), "--trace: /nowhere: No such file"),
]
OF_TRACES = [
    (("--view", "blind"), "--view: 'blind' is none"),
    (("--view", "ttl", "--view-ttl-s", "0"), "--view-ttl-s: need more"),
    (("--fit-weight", "--weight", "2"), "--fit-weight: chooses"),
    (("--weight", "nan"), "weight: need 1"),
    (("--load", "0"), "load: need more"),
    (("--block-tokens", "0"), "--block-tokens: need 1"),
    (("--block-tokens", "512"), "2 hash_ids for 20 tokens; 1 are needed"),
]


@pytest.mark.parametrize(("words", "said"), NONSENSE)
def test_nonsense_is_one_line(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str) -> None:
    ran = Ran(capsys, *words)
    assert (ran.status, ran.out) == (2, "")
    assert said in ran.err
    assert len(ran.err.splitlines()) == 1


@pytest.mark.parametrize(("words", "said"), OF_TRACES)
def test_nonsense_about_a_trace(
    capsys: pytest.CaptureFixture[str], trace: Path, words: tuple[str, ...], said: str
) -> None:
    size = () if "--block-tokens" in words else ("--block-tokens", 10)
    told = Ran(capsys, "--trace", trace, *size, *words, "--json")
    assert told.status == 2
    assert said in told.json["error"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no request in it"),
        ("{", "line 1: no JSON"),
        ("[]", "line 1: not an object"),
        (line(0, 5, 1) + line(-1, 5, 1), "line 2: timestamp: need milliseconds"),
        (line(5, 5, 1) + line(4, 5, 1), "line 2: timestamp goes back"),
        (line(0, 0), "input_length: need 1"),
        (line(0, 5, 1, output_length=-1), "output_length: need 0"),
        (line(0, 5, -1), "hash_ids: need whole numbers"),
        (line(0, 5, 1, 2), "2 hash_ids for 5 tokens; 1 are needed"),
        (line(0, 5, 1, session_id=[]), "session_id: need a text"),
        (line(0, 15, 1, 2) + line(0, 15, 3, 2), "2 comes behind 3, elsewhere behind 1"),
        (line(0, 25, 1, 2, 2), "2 comes behind 2, elsewhere behind 1"),
    ],
)
def test_a_trace_that_is_none_names_the_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, said: str
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    ran = Ran(capsys, "--trace", path, "--block-tokens", 10)
    assert ran.status == 2
    assert said in ran.err


def test_a_conversation_is_told_by_its_id_or_its_second_block(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(line(7, 15, 0, 4) + "\n" + line(9, 5, 0) + line(9, 5, 0, session_id="s"))
    found = read_trace(path, 10)
    assert found.sessions == ("4", "0", "s")
    assert found.arrivals_s.tolist() == [0, 0.002, 0.002]
