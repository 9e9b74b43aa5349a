"""Rules learnt from routers' bug reports, as far as a policy decides about them. One test a rule."""

from __future__ import annotations

from collections import Counter
from random import Random

import numpy as np
import pytest
from fleets import fleet
from hypothesis import given
from hypothesis import strategies as st

from kvstore.policy.routing.base import Ask, Policy, first_tie, random_ties
from kvstore.policy.routing.consistent_hash import ConsistentHash
from kvstore.policy.routing.hybrid import Hybrid, Skew
from kvstore.policy.routing.make import POLICIES, make_policy
from kvstore.policy.routing.scored import Scored
from kvstore.policy.routing.session_hash import SessionHash

# A request in the queue of a replica takes 20 ms of its time here.
REQUEST_S = 0.02


@pytest.mark.parametrize(("head_tokens", "winner"), [(4000, "A"), (200, "B")])
def test_a_long_head_beats_a_queue_and_a_short_one_does_not(head_tokens: int, winner: str) -> None:
    """A holds the head and has 30 in flight, B holds nothing and has 5; the tail has 200 tokens."""
    in_flight = np.array([30, 5])
    replicas = fleet([head_tokens, 0], names=("A", "B"), in_flight=in_flight, queue_s=in_flight * REQUEST_S)
    choice = Scored().pick(Ask(head_tokens + 200), replicas, first_tie)
    assert replicas.names[choice.replica] == winner
    turned = fleet(
        [0, head_tokens], names=("B", "A"), in_flight=in_flight[::-1], queue_s=in_flight[::-1] * REQUEST_S
    )
    assert turned.names[Scored().pick(Ask(head_tokens + 200), turned, first_tie).replica] == winner


@pytest.mark.parametrize("name", [name for name in POLICIES if name not in ("round_robin",)])
def test_random_tie_breaks_spread_what_is_equal(name: str) -> None:
    """A fixed order would send every miss to one replica."""
    policy, ties = make_policy(name), random_ties(Random(3))
    seen = Counter(policy.pick(Ask(1000), fleet([0] * 4), ties).replica for _ in range(400))
    assert sorted(seen) == [0, 1, 2, 3]
    assert min(seen.values()) > 60  # 100 expected


@pytest.mark.parametrize("name", ["least", "power_of_two", "hybrid", "affinity", "scored"])
def test_a_miss_does_not_go_to_the_smallest_index_regardless_of_load(name: str) -> None:
    """The death spiral: the first replica gets all misses because it got all misses."""
    loaded = fleet(
        [0, 0, 0], assigned=[50, 3, 3], in_flight=[50, 3, 3], queue_s=[9.0, 0.1, 0.1], blocks=[9000, 5, 5]
    )
    for ties in (first_tie, random_ties(Random(1))):
        for _ in range(20):
            assert make_policy(name).pick(Ask(1000), loaded, ties).replica != 0


def test_a_cold_placement_goes_to_a_small_queue_and_a_small_footprint() -> None:
    ask = Ask(10_000)  # a second of computing; the window is 50 ms
    policy = Scored()

    def choice(queues: list[float], blocks: list[int]) -> int:
        return policy.pick(ask, fleet([0, 0, 0], queue_s=queues, blocks=blocks), first_tie).replica

    assert choice([0.0, 0.03, 0.03], [900, 500, 400]) == 2  # near enough, and the emptiest
    assert choice([0.0, 0.20, 0.03], [900, 100, 400]) == 2  # the emptiest is not near
    assert choice([0.02, 0.01, 0.03], [500, 500, 500]) == 1  # all as full: the queue decides


def test_cold_placements_count_what_is_full_not_what_is_large() -> None:
    replicas = fleet([0, 0], blocks=[300, 200], capacity_blocks=[1000, 210])
    assert Scored().pick(Ask(1000), replicas, first_tie).replica == 0


def test_a_warm_request_does_not_go_after_the_emptiest() -> None:
    replicas = fleet([1600, 1590], blocks=[9000, 10])
    assert Scored().pick(Ask(1600), replicas, first_tie).replica == 0


def test_affinity_is_a_window_near_the_least_load_not_a_hard_switch() -> None:
    """Beyond the window affinity still counts: the next best match inside it wins."""
    matched = [900, 600, 0]
    assert (
        Hybrid(2, Skew.IN_FLIGHT).pick(Ask(1000), fleet(matched, in_flight=[7, 6, 5]), first_tie).replica == 0
    )
    beyond = fleet(matched, in_flight=[9, 6, 5])  # the best match is out of the window: the next best is not
    assert Hybrid(2, Skew.IN_FLIGHT).pick(Ask(1000), beyond, first_tie).replica == 1


@given(st.floats(0, 5), st.floats(0, 5), st.floats(0, 1e-3))
def test_a_little_more_queue_changes_a_score_a_little(one_s: float, other_s: float, more_s: float) -> None:
    def score(queue_s: float) -> float:
        scores = Scored(3, 3).pick(Ask(1600), fleet([800, 0], queue_s=[queue_s, other_s]), first_tie).score_s
        assert scores is not None
        return float(scores[0])

    assert score(one_s + more_s) - score(one_s) == pytest.approx(more_s, abs=1e-9)


def test_seconds_are_not_normalised_over_the_fleet() -> None:
    """A third replica that is far worse changes nothing between the first two."""
    two = Scored().pick(Ask(1600), fleet([1600, 0], queue_s=[0.5, 0.0]), first_tie)
    three = Scored().pick(Ask(1600), fleet([1600, 0, 0], queue_s=[0.5, 0.0, 500.0]), first_tie)
    assert two.score_s is not None and three.score_s is not None
    assert two.score_s.tolist() == three.score_s[:2].tolist()
    assert two.replica == three.replica


def test_in_flight_skew_forgives_what_was_answered_long_ago() -> None:
    """Cumulative skew sends everything to a replica that has just joined."""
    joined = fleet([900, 0], assigned=[5000, 0], in_flight=[1, 1])
    assert Hybrid(1, Skew.ASSIGNED).pick(Ask(1000), joined, first_tie).replica == 1
    assert Hybrid(1, Skew.IN_FLIGHT).pick(Ask(1000), joined, first_tie).replica == 0


def test_a_miss_does_not_chase_the_one_replica_that_has_what_everybody_shares() -> None:
    """Each request ends before the next comes, so no queue ever sends one away."""
    policy, ties, held = Scored(), random_ties(Random(5)), np.zeros(4, int)
    held[2] = 512
    seen = Counter()
    for _ in range(200):
        replica = policy.pick(Ask(2000, universal_tokens=512), fleet(held.tolist()), ties).replica
        seen[replica] += 1
    assert min(seen[at] for at in range(4)) > 25  # 50 expected
    assert policy.pick(Ask(2000), fleet(held.tolist()), ties).replica == 2  # not known to be shared: a match


@pytest.mark.parametrize("policy", [SessionHash(), ConsistentHash()], ids=lambda policy: policy.name)
def test_a_replica_that_leaves_moves_only_its_own_sessions(policy: Policy) -> None:
    names = [f"node-{number}" for number in range(6)]
    asks = [Ask(9, session=f"s{number}", head=b"h%d" % number) for number in range(300)]

    def places(up: list[str]) -> list[str]:
        replicas = fleet([0] * len(up), names=up)
        return [up[policy.pick(ask, replicas, first_tie).replica] for ask in asks]

    before = places(names)
    assert places(names[::-1]) == before  # whatever the order of the arrays
    after = places([name for name in names if name != "node-2"])
    moved = [was for was, now in zip(before, after, strict=True) if was != now]
    assert set(moved) == {"node-2"}
    assert len(moved) == before.count("node-2")
    assert places(names) == before  # it comes back, and they do


def test_at_weight_one_the_score_is_the_predicted_time_to_the_first_token() -> None:
    replicas = fleet([800, 0], queue_s=[0.3, 0.1])
    choice = Scored(1, 1).pick(Ask(1600), replicas, first_tie)
    assert choice.score_s is not None
    assert choice.score_s.tolist() == pytest.approx([0.3 + 0.08, 0.1 + 0.16])
