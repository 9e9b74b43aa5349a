"""Figures of the conversation trace: what a policy reuses, how long it waits, what a view may miss."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvstore.policy.routing.base import Ask, Choice, Fleet, Ties, lowest
from kvstore.policy.routing.make import PolicySettings, make_policy
from kvstore.policy.routing.scored import Scored
from kvstore.simulate.fitting import fit_weight
from kvstore.simulate.queueing import QueueSettings, Served, serve
from kvstore.simulate.trace_file import read_trace
from kvstore.simulate.views import ApproximateView, ExactView, NoView
from kvstore.simulate.workload import Workload

TRACE = Path(__file__).parents[3] / "shared/traces/mooncake_conversation_trace.jsonl"
# Requests, where the first ones show what all of them do.
PART = 5000


@pytest.fixture(scope="module")
def conversations() -> Workload:
    if not TRACE.is_file():
        pytest.skip(
            f"{TRACE.name} lies outside the repository and is absent; test_simulate_traces has a stand-in"
        )
    return read_trace(TRACE)


@pytest.fixture(scope="module")
def in_turn(conversations: Workload) -> Served:
    """Round-robin, against which others are held."""
    return serve(conversations, make_policy("round_robin"), NoView(8), QueueSettings())


def seconds(run: Served, share: float, part: slice = slice(None)) -> float:
    return float(np.percentile(run.ttft_s[part], share))


def reuse(run: Served, work: Workload, part: slice = slice(None)) -> float:
    return int(run.reused_tokens[part].sum()) / int(work.input_tokens[part].sum())


@pytest.mark.parametrize(
    ("name", "given_settings", "want", "p50_s", "p99_s"),
    [
        ("power_of_two", {}, 0.110, 5.0, 31),
        ("session_hash", {}, 0.360, 2.7, 30),
        ("hybrid", {"max_skew": 1}, 0.341, 2.2, 24),
        ("scored", {"weight": 1.0, "weight_max": 1.0}, 0.311, 1.1, 13.6),  # "predicted TTFT"
    ],
)
def test_the_table_of_the_conversation_trace(
    conversations: Workload,
    name: str,
    given_settings: dict[str, float],
    want: float,
    p50_s: float,
    p99_s: float,
) -> None:
    policy = make_policy(name, PolicySettings(**given_settings))
    blind = name in ("power_of_two", "session_hash")
    run = serve(conversations, policy, NoView(8) if blind else ExactView(8), QueueSettings())
    assert reuse(run, conversations) == pytest.approx(want, abs=0.006)
    # Which conversations meet on one replica is luck, of ties and of hashes: a fifth in the tail.
    assert seconds(run, 50) == pytest.approx(p50_s, rel=0.1)
    assert seconds(run, 99) == pytest.approx(p99_s, rel=0.2)


def test_round_robin_of_the_conversation_trace(conversations: Workload, in_turn: Served) -> None:
    """No luck in it: exact to the last digit that was published."""
    assert round(reuse(in_turn, conversations), 3) == 0.116
    assert (round(seconds(in_turn, 50), 1), round(seconds(in_turn, 99))) == (5.6, 44)


def test_affinity_alone_collapses_because_everybody_shares_a_block(conversations: Workload) -> None:
    part = conversations.first(PART)
    run = serve(part, make_policy("affinity"), ExactView(8), QueueSettings())
    assert sorted(run.assigned.tolist()) == [0] * 7 + [PART]
    assert reuse(run, part) < 0.15


class LongestPrefix:
    """Any object that answers is a policy. The longest match beyond what everybody shares; without one the
    smallest footprint, of equal ones the shortest queue."""

    name = "longest_prefix"

    def pick(self, ask: Ask, fleet: Fleet, ties: Ties) -> Choice:
        own = np.maximum(fleet.longest_tokens - ask.universal_tokens, 0)
        if own.max():
            return Choice(ties(lowest(fleet.queue_s, np.flatnonzero(own == own.max()))))
        return Choice(ties(lowest(fleet.queue_s, lowest(fleet.blocks))))


def test_the_longest_prefix_reuses_all_there_is_and_waits_longer_than_scored(conversations: Workload) -> None:
    run = serve(conversations, LongestPrefix(), ExactView(8), QueueSettings())
    assert reuse(run, conversations) == pytest.approx(0.360, abs=0.003)
    assert seconds(run, 50) <= 1.7
    assert 14 <= seconds(run, 99) <= 20


def test_scored_meets_its_bars_on_the_half_that_its_weight_has_not_seen(
    conversations: Workload, in_turn: Served
) -> None:
    fleet, half = QueueSettings(), len(conversations) // 2
    weight = fit_weight(conversations, half, fleet, (1.0, 4.0))
    part = slice(half, None)
    scored = serve(conversations, Scored(weight, weight), ExactView(8), fleet)
    assert reuse(scored, conversations, part) >= 0.34
    assert seconds(scored, 99, part) / seconds(in_turn, 99, part) <= 0.32
    assert seconds(scored, 50, part) / seconds(in_turn, 50, part) <= 0.20


def test_what_a_view_may_miss(conversations: Workload) -> None:
    """5 s of lag cost nothing, 120 s a sixth; forgetting by age costs a third, by capacity nothing at all
    (that is in test_simulate)."""

    def share(view: ExactView | ApproximateView, lag_s: float = 0.0) -> float:
        return reuse(serve(part, Scored(), view, QueueSettings(lag_s=lag_s)), part)

    part = conversations.first(PART)
    exact = share(ExactView(8))
    assert share(ExactView(8), 5.0) / exact == pytest.approx(1.0, abs=0.015)
    assert share(ExactView(8), 120.0) / exact == pytest.approx(0.83, abs=0.04)
    assert share(ApproximateView(8, ttl_s=120.0)) / exact == pytest.approx(0.62, abs=0.05)


def test_an_overloaded_fleet_gains_by_a_weight_that_follows(conversations: Workload) -> None:
    part, fleet = conversations.first(3500), QueueSettings(load=1.5)
    fixed, following = (serve(part, policy, ExactView(8), fleet) for policy in (Scored(3.5, 3.5), Scored()))
    assert reuse(following, part) > reuse(fixed, part)
    assert following.ttft_s.mean() < 0.9 * fixed.ttft_s.mean()
