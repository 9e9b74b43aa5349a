"""The simulator: golden numbers, a naive twin on random traces, the figures of the conversation trace."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from workloads import BLOCK_TOKENS, naive, workload

from kvstore.errors import BadRequest
from kvstore.policy.routing.base import first_tie
from kvstore.policy.routing.make import POLICIES, make_policy
from kvstore.policy.routing.scored import Scored
from kvstore.simulate.conversation import converse
from kvstore.simulate.families import FamilySettings, run_families
from kvstore.simulate.figures import over, run_figures
from kvstore.simulate.fitting import fit_weight
from kvstore.simulate.golden import BASE_TRACE, LENGTHS, Check, check_golden
from kvstore.simulate.lru import BlockLru
from kvstore.simulate.queueing import QueueSettings, prefill_rate, serve
from kvstore.simulate.views import ApproximateView, ExactView, NoView
from kvstore.simulate.workload import Workload

TRACE = Path(__file__).parents[3] / "shared/traces/mooncake_conversation_trace.jsonl"


# ---- golden -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("check", check_golden(), ids=lambda check: check.what)
def test_golden(check: Check) -> None:
    assert check.found == check.expected


def test_golden_has_every_number() -> None:
    """Conversation, universal prefix, 2 tables × 5 policies × 2 capacities × 3 and 7 more, isolation."""
    assert len(check_golden()) == 8 + 5 + 60 + 7 + 5
    assert len({check.what for check in check_golden()}) == len(check_golden())


# ---- families ---------------------------------------------------------------------------------------------


def test_the_queue_penalty_counts_before_the_increment() -> None:
    fleet = FamilySettings({"A": 10}, replicas=2, capacity=1, seconds_per_request=0.5)
    run = run_families("AAAA", make_policy("affinity"), fleet, first_tie)
    assert run.assigned == (4, 0)
    assert run.queue_penalty_s == 0.5 * (0 + 1 + 2 + 3)


def test_the_family_used_last_stays() -> None:
    fleet = FamilySettings({"A": 10, "B": 3, "C": 1}, replicas=1, capacity=2)
    run = run_families("ABACA", make_policy("least"), fleet, first_tie)
    assert (run.hits, run.evictions) == (2, 1)


def test_warm_up_and_what_is_lost_to_evictions_are_apart() -> None:
    fleet = FamilySettings({"A": 10, "B": 3}, replicas=1, capacity=1)
    run = run_families("AABA", make_policy("least"), fleet, first_tie)
    assert (run.reused_tokens, run.warm_up_tokens, run.lost_tokens, run.evictions) == (10, 13, 10, 2)
    assert run.json()["reuse"] == 10 / 33
    assert run.json()["reuse_without_warm_up"] == 10 / 20


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_runs_on_families(name: str) -> None:
    run = run_families(BASE_TRACE, make_policy(name), FamilySettings(LENGTHS), first_tie)
    assert sum(run.assigned) == len(BASE_TRACE)
    assert run.reused_tokens + run.warm_up_tokens + run.lost_tokens == run.input_tokens == 16_600


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("replicas", 0, "--replicas"),
        ("capacity", 0, "--capacity"),
        ("seconds_per_request", float("nan"), "--seconds-per-request"),
        ("prefill_tokens_per_s", 0.0, "--prefill-tokens-per-s"),
        ("lengths", {"A": 0}, "--lengths: A"),
    ],
)
def test_families_that_make_no_sense_name_the_option(field: str, value: object, said: str) -> None:
    with pytest.raises(BadRequest, match=said):
        replace(FamilySettings({"A": 1}), **{field: value})


def test_a_conversation_that_forgets_is_none() -> None:
    with pytest.raises(BadRequest, match="fewer than the 110 said before"):
        converse([100, 90], [0, 10])


# ---- in time ----------------------------------------------------------------------------------------------

REQUESTS = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.5, 1.0, 2.5]),
        st.lists(st.integers(0, 2), min_size=1, max_size=6),
        st.integers(0, BLOCK_TOKENS - 1),
        st.sampled_from([0, 7, 50]),  # 50 tokens of an answer take 1.5 s: ends meet arrivals
    ),
    min_size=2,
    max_size=25,
)


@settings(max_examples=150)
@given(
    REQUESTS,
    st.sampled_from(sorted(POLICIES)),
    st.integers(1, 4),
    st.integers(1, 9),
    st.sampled_from([0.0, 0.7, 5.0]),
)
def test_it_agrees_with_a_naive_twin(
    requests: list[tuple[float, list[int], int, int]], name: str, replicas: int, capacity: int, lag_s: float
) -> None:
    work = workload(requests)
    fleet = QueueSettings(replicas, capacity, lag_s=lag_s, seed=len(requests))
    run = serve(work, make_policy(name), ExactView(replicas), fleet, 8.0)
    twin = naive(work, make_policy(name), fleet, 8.0)
    assert run.replica.tolist() == twin["replica"]
    assert run.reused_tokens.tolist() == twin["reused"]
    assert run.predicted_tokens.tolist() == twin["predicted"]
    assert run.ttft_s.tolist() == pytest.approx(twin["ttft"])
    assert run.evictions.sum() == sum(twin["evicted"])
    assert run.assigned.tolist() == [twin["replica"].count(at) for at in range(replicas)]
    if not lag_s:
        assert (run.predicted_tokens == run.reused_tokens).all()


@given(REQUESTS, st.integers(1, 9))
def test_without_events_a_view_bounded_by_capacity_knows_as_much(
    requests: list[tuple[float, list[int], int, int]], capacity: int
) -> None:
    work, fleet = workload(requests), QueueSettings(3, capacity)
    runs = [serve(work, Scored(), view, fleet, 6.0) for view in (ExactView(3), ApproximateView(3, capacity))]
    assert runs[0].replica.tolist() == runs[1].replica.tolist()
    assert runs[0].predicted_tokens.tolist() == runs[1].predicted_tokens.tolist()


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=30), st.integers(1, 9)
)
def test_heads_are_never_evicted_before_their_tails(paths: list[list[int]], capacity: int) -> None:
    held = BlockLru(capacity)
    chains = workload([(0.0, path, 0, 0) for path in paths]).chains
    for chain in chains:
        touched = held.touch(chain)
        assert len(held) <= capacity
        assert not set(touched.stored) & (set(chain[: held.match(chain)]) - set(touched.stored))
        for other in chains:
            assert sum(block in held for block in other) == held.match(other)


def test_a_view_by_age_forgets() -> None:
    view = ApproximateView(2, ttl_s=10)
    view.routed(1, [5, 6], 0.0)
    view.routed(1, [5], 8.0)
    assert view.matched_blocks([5, 6], 9.0).tolist() == [0, 2]
    assert view.matched_blocks([5, 6], 11.0).tolist() == [0, 1]
    assert view.matched_blocks([5, 6], 19.0).tolist() == [0, 0]
    with pytest.raises(BadRequest, match="a capacity or a time"):
        ApproximateView(2)


@pytest.mark.parametrize("name", ["round_robin", "least", "power_of_two", "session_hash", "consistent_hash"])
def test_blind_policies_do_not_look_at_matches(name: str) -> None:
    work, fleet = talks(1), QueueSettings(3, 20)
    blind, seeing = (serve(work, make_policy(name), view, fleet) for view in (NoView(3), ExactView(3)))
    assert blind.replica.tolist() == seeing.replica.tolist()
    assert blind.reused_tokens.tolist() == seeing.reused_tokens.tolist()
    assert not blind.predicted_tokens.any()


def test_first_tokens_wait_their_turn() -> None:
    work = workload([(0.0, [0] * 5, 0, 0), (1.0, [1] * 5, 0, 0), (0.0, [0] * 5, 0, 0)])
    run = serve(work, make_policy("least"), ExactView(1), QueueSettings(1, 100), 4.0)
    # 20 tokens take 5 s. The second waits 4 s; the third finds all of its prompt and waits for both.
    assert run.ttft_s.tolist() == [5.0, 9.0, 9.0]
    assert run.reused_tokens.tolist() == [0, 0, 20]


def test_the_load_is_what_was_asked_for() -> None:
    work = workload([(0.0, [0] * 5, 0, 0), (10.0, [1] * 5, 0, 0)])
    assert prefill_rate(work, QueueSettings(2, 10, load=0.5)) == 40 / (2 * 0.5 * 10)
    with pytest.raises(BadRequest, match="same moment"):
        prefill_rate(work.first(1), QueueSettings())


def test_warm_up_ends_when_more_came_than_the_fleet_holds() -> None:
    work = workload([(1.0, [0, 1], 0, 0), (1.0, [0, 1], 0, 0), (1.0, [0, 2], 0, 0), (1.0, [3], 0, 0)])
    assert [work.filled_at(blocks) for blocks in (1, 2, 3, 4)] == [0, 2, 3, 4]
    run = serve(work, make_policy("round_robin"), ExactView(1), QueueSettings(1, 2), 4.0)
    found = run_figures(run, work, work.filled_at(2))
    assert (found["warm_up"]["requests"], found["steady"]["requests"]) == (2, 2)
    assert (found["warm_up"]["reuse"], found["steady"]["reuse"]) == (0.5, 4 / 12)
    assert run_figures(run, work, 4)["steady"] is None
    assert over(found, run_figures(run, work, 4), "steady") is None
    assert over(found, found, "steady") == {"ttft_p50": 1.0, "ttft_p99": 1.0}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("replicas", 0),
        ("capacity_blocks", 0),
        ("load", 0.0),
        ("load", float("inf")),
        ("lag_s", -1.0),
        ("decode_s_per_token", float("nan")),
    ],
)
def test_a_fleet_that_makes_no_sense_is_told(field: str, value: float) -> None:
    with pytest.raises(BadRequest, match=field.removesuffix("_blocks")):
        replace(QueueSettings(), **{field: value})


def test_ties_by_lot_are_the_seeds() -> None:
    random = Random(2)
    work = workload([(1.0, [random.randrange(3) for _ in range(4)], 0, 0) for _ in range(40)])
    runs = [
        serve(work, make_policy("power_of_two"), ExactView(4), QueueSettings(4, 9, seed=s), 9.0)
        for s in (1, 1, 2)
    ]
    assert runs[0].replica.tolist() == runs[1].replica.tolist() != runs[2].replica.tolist()


def talks(seed: int, requests: int = 300) -> Workload:
    """Conversations that grow, under one first block: enough of them for queues and evictions."""
    random, talks, rows = Random(seed), [[0, number] for number in range(12)], []
    for _ in range(requests):
        talk = talks[random.randrange(12)]
        talk.append(random.randrange(3))
        rows.append((random.expovariate(1.0), list(talk), 0, 0))
        if len(talk) > 12:
            talk[1:] = [random.randrange(1000)]
    return workload(rows)


def test_the_weight_is_the_one_that_reuses_most_among_the_fast_ones() -> None:
    work, fleet, weights = talks(2), QueueSettings(4, 25, load=0.5), (1.0, 1.1, 1.25, 1.5, 2.0, 3.0)
    rate, found = prefill_rate(work, fleet), {}
    for weight in weights:
        run = serve(work.first(200), Scored(weight, weight), ExactView(4), fleet, rate)
        found[weight] = float(np.mean(run.ttft_s)), int(np.sum(run.reused_tokens))
    best_s = min(mean_s for mean_s, _ in found.values())
    fast = {weight: found[weight][1] for weight in weights if found[weight][0] <= 1.02 * best_s}
    # The fastest of all is not the one, nor the one that reuses most of all.
    assert max(fast.values()) > next(reused for mean_s, reused in found.values() if mean_s == best_s)
    assert max(fast.values()) < max(reused for _, reused in found.values())
    assert fit_weight(work, 200, fleet, weights) == max(fast, key=fast.__getitem__)


def test_the_weight_sees_nothing_of_the_other_half() -> None:
    work, fleet = talks(3), QueueSettings(4, 25)
    shuffled = replace(work, chains=(*work.chains[:150], *work.chains[149::-1]))
    assert fit_weight(work, 150, fleet) == fit_weight(shuffled, 150, fleet)
    with pytest.raises(BadRequest, match="fit: need 1 to 300"):
        fit_weight(work, 0, fleet)
