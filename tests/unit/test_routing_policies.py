"""Routing policies: each picks what it says it picks, and every term of `scored` can change its mind."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from fleets import fleet
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import BadRequest
from kvstore.policy.routing.base import TIERS, Ask, first_tie, lowest, random_ties
from kvstore.policy.routing.consistent_hash import ConsistentHash
from kvstore.policy.routing.hybrid import Hybrid
from kvstore.policy.routing.least import Least
from kvstore.policy.routing.make import POLICIES, PolicySettings, make_policy
from kvstore.policy.routing.power_of_two import PowerOfTwo
from kvstore.policy.routing.rendezvous import owners
from kvstore.policy.routing.round_robin import RoundRobin
from kvstore.policy.routing.scored import OVERLOAD_S, WEIGHT, WEIGHT_MAX, Scored
from kvstore.policy.routing.session_hash import SessionHash
from kvstore.policy.routing.universal import UniversalPrefix

ASK = Ask(1600)


def scored(ask: Ask, replicas: object, policy: Scored | None = None) -> int:
    return (policy or Scored()).pick(ask, replicas, first_tie).replica


# ---- all of them ------------------------------------------------------------------------------------------


@given(st.data())
def test_every_policy_answers_for_every_fleet_and_changes_none(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 5))
    numbers = st.lists(st.integers(0, 3000), min_size=count, max_size=count)
    matched = [
        sorted(data.draw(st.lists(st.integers(0, 2000), min_size=4, max_size=4))) for _ in range(count)
    ]
    replicas = fleet(
        matched,
        assigned=data.draw(numbers),
        in_flight=data.draw(numbers),
        queue_s=data.draw(numbers),
        blocks=data.draw(numbers),
        free_blocks=data.draw(numbers),
        tier_s_per_token=[0.0, 1e-6, 1e-5, 1e-3],
    )
    before = replace(
        replicas,
        **{f: getattr(replicas, f).copy() for f in ("matched_tokens", "assigned", "in_flight", "queue_s")},
    )
    ask = data.draw(
        st.builds(
            Ask,
            st.integers(1, 3000),
            st.sampled_from(["", "s"]),
            st.sampled_from([b"", b"h"]),
            st.sampled_from([None, 0.5]),
            st.integers(0, 4000),
        )
    )
    for name in POLICIES:
        choice = make_policy(name).pick(ask, replicas, random_ties(Random(1)))
        assert type(choice.replica) is int
        assert 0 <= choice.replica < count
        assert choice.reason
        assert choice.score_s is None or np.isfinite(choice.score_s).all()
    for field in ("matched_tokens", "assigned", "in_flight", "queue_s"):
        assert (getattr(replicas, field) == getattr(before, field)).all()


def test_a_policy_is_named_as_it_is_asked_for() -> None:
    assert [make_policy(name).name for name in POLICIES] == list(POLICIES)
    with pytest.raises(BadRequest, match="'best' is none; the policies are round_robin, least"):
        make_policy("best")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"max_skew": -1}, "max_skew: need 0"),
        ({"weight": 0.5}, "weight: need 1"),
        ({"weight": float("nan")}, "weight: need 1"),
        ({"weight": 4.0, "weight_max": 3.0}, "weight_max: need 4.0"),
    ],
)
def test_settings_out_of_range_are_told(settings: dict[str, float], said: str) -> None:
    name = "hybrid" if "max_skew" in settings else "scored"
    with pytest.raises(BadRequest, match=said):
        make_policy(name, PolicySettings(**settings))


def test_a_fleet_that_makes_no_sense_names_its_field() -> None:
    good = fleet([10, 20])
    assert len(TIERS) == good.matched_tokens.shape[1]
    for field, value in (
        ("names", ("a", "a")),
        ("matched_tokens", np.array([[4, 3, 3, 3]] * 2)),
        ("queue_s", np.array([0.0, np.nan])),
        ("assigned", np.array([1])),
        ("prefill_tokens_per_s", np.array([1.0, 0.0])),
        ("tier_s_per_token", np.full((2, 4), np.nan)),
    ):
        with pytest.raises(BadRequest, match=rf"fleet\.{field}"):
            replace(good, **{field: value}).check()


def test_sums_of_seconds_in_another_order_are_equal() -> None:
    assert lowest(np.array([0.1 + 0.2, 0.3, 0.31])).tolist() == [0, 1]
    assert lowest(np.array([5.0, 2.0, 2.0]), np.array([0, 2])).tolist() == [2]


# ---- blind ones -------------------------------------------------------------------------------------------


def test_round_robin_goes_round_whoever_comes_and_leaves() -> None:
    policy = RoundRobin()

    def turn(*names: str) -> str:
        replicas = fleet([0] * len(names), names=names)
        return names[policy.pick(ASK, replicas, first_tie).replica]

    assert [turn("a", "b", "c") for _ in range(4)] == ["a", "b", "c", "a"]
    assert turn("c", "a", "b") == "b"  # in another order of the arrays
    assert turn("a", "b") == "a"
    assert turn("b", "c") == "b"  # the one before has left


def test_least_takes_the_fewest_in_flight() -> None:
    assert Least().pick(ASK, fleet([9, 0, 0], in_flight=[3, 1, 2]), first_tie).replica == 1


def test_power_of_two_never_takes_the_most_loaded_and_often_not_the_least() -> None:
    replicas, ties = fleet([0] * 4, in_flight=[0, 1, 2, 9]), random_ties(Random(7))
    seen = Counter(PowerOfTwo().pick(ASK, replicas, ties).replica for _ in range(600))
    # Of six pairs three hold 0, two more hold 1, one is (2, 9).
    assert seen[3] == 0
    assert [seen[at] / 600 for at in range(3)] == pytest.approx([1 / 2, 1 / 3, 1 / 6], abs=0.06)
    assert PowerOfTwo().pick(ASK, fleet([0]), first_tie).replica == 0


# ---- hashes -----------------------------------------------------------------------------------------------

NAMES = tuple(f"10.0.0.{number}:8000" for number in range(8))


def test_keys_spread_evenly() -> None:
    seen = Counter(int(owners(NAMES, f"s{number}".encode(), 1)[0]) for number in range(8000))
    assert all(850 < seen[at] < 1150 for at in range(8))  # 1,000 ± 30 expected, five times that allowed


@given(st.binary(max_size=40), st.integers(1, 8))
def test_more_owners_keep_the_owners_there_were(key: bytes, count: int) -> None:
    every = owners(NAMES, key, 8).tolist()
    assert owners(NAMES, key, count).tolist() == every[:count]
    assert sorted(every) == list(range(8))


def test_a_conversation_without_an_id_goes_by_its_head_and_without_both_to_the_least_loaded() -> None:
    replicas, policy = fleet([0] * 8, names=NAMES, in_flight=[1, 1, 1, 0, 1, 1, 1, 1]), SessionHash()
    by_id = {policy.pick(Ask(9, "s", bytes([n])), replicas, first_tie).replica for n in range(50)}
    by_head = {policy.pick(Ask(9, "", b"h"), replicas, first_tie).replica for n in range(50)}
    assert len(by_id) == len(by_head) == 1
    assert policy.pick(Ask(9), replicas, first_tie).replica == 3


def test_a_head_gets_owners_as_it_grows_popular_and_loses_them_again() -> None:
    replicas, policy = fleet([0] * 8, names=NAMES), ConsistentHash()

    def owners_of(head: bytes) -> int:
        return int(policy.pick(Ask(9, head=head), replicas, first_tie).reason.split()[2])

    def others(count: int) -> None:
        for number in range(count):
            policy.pick(Ask(9, head=b"other %d" % number), replicas, first_tie)

    assert owners_of(b"hot") == 1
    for _ in range(300):
        most = owners_of(b"hot")
    assert most == 7  # 8 / 1.25: every request has it
    others(300)
    assert owners_of(b"hot") == 4  # half of them
    others(6000)
    assert owners_of(b"hot") == 1


def test_requests_of_one_head_go_to_the_less_loaded_of_its_owners() -> None:
    policy, idle = ConsistentHash(), fleet([0] * 8, names=NAMES)
    ask = Ask(9, head=b"hot")
    for _ in range(300):
        policy.pick(ask, idle, first_tie)
    mine = owners(NAMES, b"head hot", 7)
    loads = np.ones(8, int)
    loads[mine[4]] = 0
    stranger = next(at for at in range(8) if at not in mine)
    loads[stranger] = 0
    assert policy.pick(ask, fleet([0] * 8, names=NAMES, in_flight=loads), first_tie).replica == mine[4]


def test_the_memory_of_heads_is_bounded() -> None:
    policy, replicas = ConsistentHash(), fleet([0] * 2)
    for number in range(9000):
        policy.pick(Ask(9, head=number.to_bytes(4, "little")), replicas, first_tie)
    assert len(policy._seen) <= 4096


# ---- hybrid -----------------------------------------------------------------------------------------------


def test_hybrid_looks_at_the_load_before_the_increment() -> None:
    at_limit = fleet([0, 900], assigned=[4, 5])
    assert Hybrid(1).pick(ASK, at_limit, first_tie).replica == 1
    assert Hybrid(0).pick(ASK, at_limit, first_tie).replica == 0
    assert Hybrid(1).pick(ASK, fleet([0, 900], assigned=[4, 6]), first_tie).replica == 0


def test_equal_matches_go_to_the_least_assigned() -> None:
    assert Hybrid(5).pick(ASK, fleet([7, 7, 0], assigned=[3, 2, 0]), first_tie).replica == 1


# ---- scored: one test flips the choice for each term ------------------------------------------------------


def test_the_queue_can_change_its_mind() -> None:
    assert scored(ASK, fleet([1600, 0], queue_s=[0.5, 0.0])) == 0  # 0.16 s saved, 3.5-fold
    assert scored(ASK, fleet([1600, 0], queue_s=[0.6, 0.0])) == 1


def test_the_uncached_part_can_change_its_mind() -> None:
    assert scored(ASK, fleet([1600, 0], queue_s=[0.5, 0.0])) == 0
    assert scored(ASK, fleet([1400, 0], queue_s=[0.5, 0.0])) == 1  # 3.5 × 0.14 s is less than the queue


def test_the_weight_can_change_its_mind() -> None:
    replicas = fleet([1600, 0], queue_s=[0.3, 0.0])
    assert scored(ASK, replicas, Scored(1, 1)) == 1
    assert scored(ASK, replicas, Scored(3, 3)) == 0


def test_the_prefill_rate_can_change_its_mind() -> None:
    queues = [0.05, 0.0]
    assert scored(ASK, fleet([0, 0], queue_s=queues)) == 1
    assert scored(ASK, fleet([0, 0], queue_s=queues, prefill_tokens_per_s=[20_000.0, 10_000.0])) == 0


def test_the_tier_can_change_its_mind() -> None:
    prices = [0.0, 1e-5, 5e-5, 9e-5]
    on_disk, on_host = [0, 0, 1600, 1600], [0, 1600, 1600, 1600]
    less_on_device = [1200] * 4
    assert scored(ASK, fleet([on_host, less_on_device], tier_s_per_token=prices)) == 0  # 16 ms against 40
    assert scored(ASK, fleet([on_disk, less_on_device], tier_s_per_token=prices)) == 1  # 80 ms against 40
    # Of a prefix that lies half on the device only the other half has to be moved up.
    assert scored(ASK, fleet([[1400, 1400, 1600, 1600], less_on_device], tier_s_per_token=prices)) == 0


def test_a_tier_that_is_slower_than_computing_costs_what_computing_costs() -> None:
    remote = [0, 0, 0, 1600]
    choice = Scored().pick(ASK, fleet([remote, 0], tier_s_per_token=[0, 0, 0, 1.0]), first_tie)
    assert choice.score_s is not None
    assert choice.score_s[0] == pytest.approx(choice.score_s[1])


def test_what_everybody_shares_can_change_its_mind() -> None:
    replicas = fleet([512, 0], queue_s=[0.1, 0.0])
    assert scored(Ask(1600), replicas) == 0
    assert scored(Ask(1600, universal_tokens=512), replicas) == 1


def test_a_shortage_of_blocks_can_change_its_mind() -> None:
    queues = [0.0, 0.05]
    assert scored(ASK, fleet([0, 0], queue_s=queues)) == 0
    # 100 blocks are needed, 40 are free: 60 × 16 tokens of running requests are computed again, 0.096 s.
    assert scored(ASK, fleet([0, 0], queue_s=queues, free_blocks=[40, 100])) == 1
    # Blocks that it shares with a running request are not taken from anybody.
    shared = fleet([1600, 1600], queue_s=queues, free_blocks=[0, 100])
    assert scored(ASK, shared) == 0


def test_the_wanted_time_can_change_its_mind() -> None:
    replicas = fleet([1600, 0], queue_s=[0.5, 0.0])
    assert scored(Ask(1600), replicas) == 0
    assert scored(Ask(1600, slo_s=0.5), replicas) == 0  # just in time
    assert scored(Ask(1600, slo_s=0.3), replicas) == 1
    # What it would really take counts, also the part that everybody shares.
    late = fleet([0, 1000], queue_s=[0.0, 0.02])
    assert scored(Ask(1600, universal_tokens=1000), late) == 0
    assert scored(Ask(1600, universal_tokens=1000, slo_s=0.1), late) == 1


def test_overload_can_change_its_mind() -> None:
    calm, overloaded = fleet([1600, 0], queue_s=[1.0, 0.0]), fleet([1600, 0], queue_s=[11.0, 10.0])
    assert scored(ASK, calm) == 1
    assert scored(ASK, overloaded) == 0
    assert scored(ASK, overloaded, Scored(WEIGHT, WEIGHT)) == 1  # a fixed weight does not follow


def test_the_weight_follows_the_shortest_queue() -> None:
    def weight(*queues: float) -> float:
        return Scored().weight_of(fleet([0] * len(queues), queue_s=queues))

    assert weight(0, 1000) == WEIGHT
    assert weight(OVERLOAD_S / 2, OVERLOAD_S) == (WEIGHT + WEIGHT_MAX) / 2
    assert weight(OVERLOAD_S) == weight(1000, 1000) == WEIGHT_MAX
    assert Scored(20).weight_max == 20


# ---- what everybody shares --------------------------------------------------------------------------------


def test_the_universal_prefix_is_what_nine_in_ten_share() -> None:
    found = UniversalPrefix()
    for number in range(2000):
        found.observe([0, 1, number % 2 + 10, number + 100] if number % 20 else [number + 9000])
    assert found.blocks == 2
    assert found.leading([0, 1, 10, 3]) == 2
    assert found.leading([0, 7]) == 1
    assert found.leading([5, 1]) == found.leading([]) == 0


def test_a_long_system_prompt_is_learnt_at_once_not_block_by_block() -> None:
    found, prompt = UniversalPrefix(), list(range(600))
    for number in range(40):
        found.observe([*prompt, number + 1000])
    assert found.blocks == 600


def test_a_new_template_takes_over_and_a_burst_does_not() -> None:
    found = UniversalPrefix()
    for number in range(400):
        found.observe([0, number + 100])
    for _ in range(20):
        found.observe([0, 7, 8])
    assert found.leading([0, 7, 8]) == 1
    for _ in range(6):
        found.observe([7, 8])
    assert found.leading([0]) == 1
    # It takes 45 to forget the old one by half, and 32 to believe the new one.
    for number in range(90):
        found.observe([7, number + 100])
    assert found.leading([7]) == 1
    assert found.leading([0]) == 0


def test_what_three_in_four_share_is_not_universal() -> None:
    found, random = UniversalPrefix(), Random(4)
    for number in range(2000):
        found.observe([0, 5, number + 100] if random.random() < 0.75 else [0, number + 100])
    assert found.blocks == 1


def test_the_universal_prefix_is_bounded() -> None:
    found = UniversalPrefix(3)
    for _ in range(200):
        found.observe(range(50))
    assert found.blocks == 3
    with pytest.raises(BadRequest, match="depth_max"):
        UniversalPrefix(0)
