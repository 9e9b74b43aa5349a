"""A decision in plain words: golden texts, and what may be told to whom."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plans import AT_S, asked, computed, loaded
from reload_oracle import questions

from kvstore.decisions import Asked, Decisions, Outcome, TrustChange
from kvstore.errors import NotFound
from kvstore.explaining import Memory, about, explain
from kvstore.policy.reload import Choice, Decision, ReloadQuestion, decide
from kvstore.types import Span, Tier

NOW_S = AT_S + 14.2


def story(memory: Decisions, request: str = "", doubted: dict[str, str] | None = None) -> str:
    return "\n".join(explain({"team": Memory(memory, doubted or {})}, request, NOW_S).words)


def test_a_load_that_stalled() -> None:
    memory = Decisions()
    plan = memory.planned(asked(request="cmpl-7"), loaded())
    memory.ended(plan, Outcome(None, 30, 0.4837, "NVME sent nothing for 212.3 ms"))
    memory.ended(plan, Outcome(2.0349))
    memory.trust_changed(TrustChange(AT_S + 0.5, "NVME", False, "a load took 5.123 s instead of 0.31 s"))
    memory.trust_changed(TrustChange(AT_S + 13.5, "NVME", True))
    for _ in range(18):
        memory.planned(asked(0, AT_S + 1), computed())
    memory.planned(asked(0, AT_S + 14), loaded())
    assert story(memory, "cmpl-7") == (
        "Request cmpl-7 (lease 12) of tenant default with SmolLM2-135M, 14 s ago: a prompt of 1,536 tokens.\n"
        "Known of its KV: 20 blocks on HOST and 76 blocks on NVME.\n"
        "Choice: load. Reason: loads blocks 0 to 96 from HOST and NVME: 310 ms against 1.7 s for computing "
        "all.\n"
        "Predicted until its KV is complete: load 310 ms (chosen), recompute 1.7 s, split not possible or "
        "not known.\n"
        "The load was given up by the lag rule after 480 ms: NVME sent nothing for 210 ms; 30 of 96 blocks "
        "had arrived and were kept, the rest was computed. It took 2 s, 6.5 times as long as predicted; "
        "recompute was predicted to take 300 ms less than that.\n"
        "Since then: NVME lost trust 14 s ago (a load took 5.1 s instead of 310 ms); NVME regained trust "
        "just now; 19 more plans: 18 recompute and 1 load."
    )


def test_a_load_that_came_as_predicted() -> None:
    memory = Decisions()
    plan = memory.planned(asked(), loaded())
    memory.ended(plan, Outcome(0.3391, 96))
    assert story(memory, "12").splitlines()[-2:] == [
        "All 96 blocks arrived. It took 340 ms, about as predicted; no other choice was predicted to be "
        "faster than that.",
        "Since then: no more plans.",
    ]


def test_everything_was_computed_because_nobody_trusts_the_disk() -> None:
    memory = Decisions()
    one = Asked(NOW_S - 0.4, 0, "acme", "m", 1, ((Tier.GPU, 1), (Tier.NVME, 0)))
    memory.planned(one, computed("; NVME is doubted: a load took 5.123 s instead of 0.31 s"))
    assert story(memory, doubted={"NVME": "a load took 5.123 s instead of 0.31 s"}) == (
        "A request of tenant acme with m, just now: a prompt of 1 token.\n"
        "Known of its KV: 1 block on the device.\n"
        "Choice: recompute. Reason: computes everything: 1.7 s against 1.7 s for loading from NVME, which "
        "saves too little to risk it; NVME is doubted: a load took 5.1 s instead of 310 ms.\n"
        "Predicted until its KV is complete: recompute 1.7 s (chosen), load 1.7 s, split not possible or not "
        "known.\n"
        "What came of it was not told: it is under way, or its engine does not tell.\n"
        "Since then: NVME is doubted now (a load took 5.1 s instead of 310 ms); no more plans."
    )


def test_the_first_request_ever() -> None:
    memory = Decisions()
    blind = decide(ReloadQuestion(40, 16, 1 << 20, 0, (), lambda start, stop: None))
    one = Asked(AT_S, 3, "default", "m", 40, ())
    plan = memory.planned(one, blind)
    memory.ended(plan, Outcome(12.7))
    assert story(memory).splitlines()[1:5] == [
        "Nothing was known of its KV.",
        "Choice: recompute. Reason: nothing can be loaded.",
        "Predicted until its KV is complete: recompute not possible or not known (chosen), load not possible "
        "or not known, split not possible or not known.",
        "It took 13 s.",
    ]


def happened(decision: Decision, outcome: Outcome) -> str:
    memory = Decisions()
    memory.ended(memory.planned(asked(), decision), outcome)
    return story(memory).splitlines()[4]


@pytest.mark.parametrize(
    ("outcome", "text"),
    [
        (
            Outcome(),
            "How many of 96 blocks arrived was not told. How long it took in all its engine did not tell.",
        ),
        (
            Outcome(loaded_blocks=40, why="block 40 was rotten"),
            "Only 40 of 96 blocks arrived: block 40 was rotten; the rest was computed. "
            "How long it took in all its engine did not tell.",
        ),
        (
            Outcome(loaded_blocks=0),
            "Not one of 96 blocks arrived; the rest was computed. "
            "How long it took in all its engine did not tell.",
        ),
        (
            Outcome(abandoned_s=0.2),
            "The load was given up by the lag rule after 200 ms; an unknown number of 96 blocks had arrived "
            "and were kept, the rest was computed. How long it took in all its engine did not tell.",
        ),
        (
            Outcome(0.1, 96),
            "All 96 blocks arrived. It took 100 ms, less than the 310 ms that were predicted; no other "
            "choice was predicted to be faster than that.",
        ),
        (
            Outcome(31.2, 96),
            "All 96 blocks arrived. It took 31 s, 100 times as long as predicted; recompute was predicted to "
            "take 29 s less than that.",
        ),
    ],
)
def test_what_came_of_it(outcome: Outcome, text: str) -> None:
    assert happened(loaded(), outcome) == text


def test_a_load_of_one_block() -> None:
    assert happened(loaded(blocks=1), Outcome(0.3, 1)).startswith("Its block arrived. It took 300 ms")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "no time"),
        (4.23e-4, "420 µs"),
        (9.96e-4, "1 ms"),
        (0.00423, "4.2 ms"),
        (0.3123, "310 ms"),
        (0.9951, "1 s"),
        (1.7345, "1.7 s"),
        (12.49, "12 s"),
        (99.6, "2 min"),
        (7300.0, "2 h"),
    ],
)
def test_times_show_two_digits(seconds: float, text: str) -> None:
    assert about(seconds) == text


@given(st.floats(0.0, 1e9))
def test_a_time_is_never_off_by_more_than_its_last_digit(seconds: float) -> None:
    if seconds < 1e-6:
        return
    number, unit = about(seconds).split()
    value = float(number) * {"µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}[unit]
    assert abs(value - seconds) <= 0.3 * seconds if unit == "min" else abs(value - seconds) <= 0.26 * seconds
    if unit in ("µs", "ms", "s"):
        assert abs(value - seconds) <= 0.051 * seconds
        assert len(number.replace(".", "").strip("0")) <= 2


@given(questions(), st.floats(0.0, 100.0), st.integers(0, 300))
def test_every_decision_can_be_told(question: ReloadQuestion, seconds: float, blocks: int) -> None:
    memory = Decisions()
    decision = decide(question)
    plan = memory.planned(asked(), decision)
    memory.ended(plan, Outcome(seconds, blocks))
    told = explain({"team": Memory(memory)}, "", NOW_S)
    text = " ".join(told.words)
    assert all(sentence[0].isupper() and sentence.endswith(".") for sentence in told.words)
    assert all(f"{choice} " in told.words[3] for choice in Choice)
    assert "  " not in text and ".." not in text and not re.search(r"\b(None|nan|inf)\b", text)
    for number in re.findall(r"(\d[\d.]*) (?:µs|ms|s)\b", text):
        assert len(number.replace(".", "").strip("0")) <= 2, text
    facts = json.loads(json.dumps(told.facts, allow_nan=False))
    assert facts["choice"] == decision.choice
    assert facts["load"] == [decision.load_start, decision.load_stop]


def test_the_facts_are_exact() -> None:
    memory = Decisions()
    plan = memory.planned(asked(request="cmpl-7"), loaded())
    memory.ended(plan, Outcome(2.0349, 30, 0.4837, "NVME stalled"))
    memory.trust_changed(TrustChange(AT_S + 4.2, "NVME", False, "it lagged"))
    told = explain({"team": Memory(memory, {"NVME": "it lagged"})}, "cmpl-7", NOW_S)
    assert told.facts == {
        "group": "team",
        "request": "cmpl-7",
        "lease": 12,
        "tenant": "default",
        "namespace": "SmolLM2-135M",
        "ago_s": pytest.approx(14.2),
        "prompt_tokens": 1536,
        "blocks": {"GPU": 0, "HOST": 20, "NVME": 76},
        "choice": "load",
        "load": [0, 96],
        "spans": [["HOST", 0, 20], ["NVME", 20, 96]],
        "predicted_s": {"recompute": 1.7345, "load": 0.3123, "split": None},
        "lag_rule": {"from_s": 0.0, "load_s": 0.3123, "recompute_s": 1.7345},
        "reason": "loads blocks 0 to 96 from HOST and NVME: 312 ms against 1.73 s for computing all",
        "outcome": {"seconds": 2.0349, "loaded_blocks": 30, "abandoned_s": 0.4837, "why": "NVME stalled"},
        "regret_s": pytest.approx(0.3004),
        "actual_over_predicted": pytest.approx(2.0349 / 0.3123),
        "since": {
            "plans": {"recompute": 0, "load": 0, "split": 0},
            "trust": [
                {"source": "NVME", "trusted": False, "reason": "it lagged", "ago_s": pytest.approx(10.0)}
            ],
            "doubted": {"NVME": "it lagged"},
        },
        "words": list(told.words),
    }


def test_trust_that_changed_before_is_no_news() -> None:
    memory = Decisions()
    memory.trust_changed(TrustChange(AT_S - 0.1, "NVME", False, "it lagged"))
    memory.planned(asked(), loaded())
    assert story(memory).endswith("Since then: no more plans.")


def test_the_latest_of_all_groups_is_the_last() -> None:
    one, two = Decisions(), Decisions()
    one.planned(asked(5, AT_S + 2), loaded())
    two.planned(asked(5, AT_S + 1), computed())
    both = {"one": Memory(one), "two": Memory(two), "empty": Memory(Decisions())}
    assert explain(both, "", NOW_S).facts["group"] == "one"
    assert explain(both, "5", NOW_S).facts["group"] == "one"
    two.planned(asked(6, AT_S + 3), computed())
    assert explain(both, "", NOW_S).facts["group"] == "two"
    assert explain(both, "6", NOW_S).facts["choice"] == "recompute"


def test_a_tenant_hears_of_its_own_requests_only() -> None:
    memory = Decisions()
    memory.planned(asked(1, tenant="a", request="same"), loaded())
    memory.planned(asked(2, tenant="b", request="same"), computed())
    memory.planned(asked(3, tenant="b"), computed())
    memories, a = {"team": Memory(memory)}, frozenset({"a"})
    for request in ("", "same", "1"):
        told = explain(memories, request, NOW_S, a)
        assert (told.facts["tenant"], told.facts["lease"]) == ("a", 1)
        assert sum(told.facts["since"]["plans"].values()) == 0, "how much others ask is not its business"
    for request in ("2", "3", "4"):  # another's, or nobody's: it cannot tell which
        with pytest.raises(NotFound, match=f"no plan of a request or lease '{request}' is remembered"):
            explain(memories, request, NOW_S, a)
    with pytest.raises(NotFound, match="no plan was recorded yet"):
        explain(memories, "same", NOW_S, frozenset({"c"}))


def test_what_is_not_remembered_is_said() -> None:
    memory = Decisions()
    with pytest.raises(NotFound, match="no plan was recorded yet"):
        explain({"team": Memory(memory)}, "", NOW_S)
    memory.planned(asked(), loaded())
    with pytest.raises(NotFound, match="'cmpl-8' is remembered; the latest 1024 plans"):
        explain({"team": Memory(memory)}, "cmpl-8", NOW_S)


def test_a_clock_that_jumped_back_gives_no_negative_time() -> None:
    memory = Decisions()
    memory.planned(asked(at_s=NOW_S + 100), loaded())
    told = explain({"team": Memory(memory)}, "", NOW_S)
    assert told.facts["ago_s"] == 0.0
    assert ", just now: " in told.words[0]


def test_a_split_says_what_it_does() -> None:
    memory = Decisions()
    split = Decision(
        Choice.SPLIT,
        40,
        96,
        (Span(Tier.NVME, 40, 96),),
        {Choice.RECOMPUTE: 1.7, Choice.LOAD: 0.9, Choice.SPLIT: 0.55},
        0.5,
        0.05,
        1.2,
        "loads blocks 40 to 96 from NVME and computes 0 to 40 meanwhile: 550 ms against 1.7 s for computing "
        "all and 900 ms for loading",
    )
    plan = memory.planned(asked(), split)
    memory.ended(plan, Outcome(0.95, 56))
    lines = story(memory).splitlines()
    assert lines[3] == (
        "Predicted until its KV is complete: split 550 ms (chosen), recompute 1.7 s, load 900 ms."
    )
    assert lines[4] == (
        "All 56 blocks arrived. It took 950 ms, 1.7 times as long as predicted; load was predicted to take "
        "50 ms less than that."
    )
