"""Hot prefixes get replicas while the next one gains more than it costs, and lose them again."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.errors import BadRequest
from kvstore.policy.routing.affinity import Affinity
from kvstore.policy.routing.base import Ask, Fleet, first_tie
from kvstore.policy.routing.hot import LEASE_S, HotReplicas
from kvstore.testing import SimClock

HOT = Ask(tokens=4200, head=b"hot")


class Scene:
    """Three replicas; the first has the head. Requests are 200 tokens more than that."""

    def __init__(self) -> None:
        self.clock = SimClock()
        self.policy = HotReplicas(Affinity(), self.clock)
        self.matched = np.array([4000, 0, 0])
        self.queue_s = np.zeros(3)
        self.blocks = np.zeros(3, np.int64)

    def fleet(self) -> Fleet:
        n = len(self.matched)
        zeros = np.zeros(n, np.int64)
        return Fleet(
            names=tuple("abc"[:n]),
            matched_tokens=np.repeat(self.matched[:, None], 4, axis=1),
            assigned=zeros,
            in_flight=zeros,
            queue_s=self.queue_s,
            blocks=self.blocks,
            free_blocks=np.full(n, 1000),
            capacity_blocks=np.full(n, 1000),
            prefill_tokens_per_s=np.full(n, 4000.0),
            tier_s_per_token=np.zeros((n, 4)),
        )

    def ask(self, times: int = 1, every_s: float = 0.05, ask: Ask = HOT) -> list[int]:
        """Where so many requests go; who computes the head has it from then on."""
        out = []
        for _ in range(times):
            self.clock.advance(every_s)
            place = self.policy.pick(ask, self.fleet(), first_tie).replica
            self.matched[place] = max(self.matched[place], 4000)
            out.append(place)
        return out


def test_a_head_that_few_ask_for_stays_where_it_is() -> None:
    scene = Scene()
    scene.queue_s[0] = 0.5
    assert scene.ask(3, every_s=20.0) == [0, 0, 0]
    assert scene.policy.granted == 0


def test_a_busy_head_gets_a_replica_when_that_gains_more_than_it_costs() -> None:
    scene = Scene()
    assert set(scene.ask(50)) == {0}, "no queue, nothing to gain"
    scene.queue_s[0] = 0.5  # 50 requests in 30 s, a quarter of a second each: more than the second it costs
    assert scene.ask() == [1]
    assert scene.policy.granted == 1
    scene.queue_s[:] = 0, 0.2, 0
    assert scene.ask() == [0], "within the set the shorter wait"
    scene.queue_s[:] = 0.3, 0.2, 0.3
    assert scene.ask() == [1]


def test_what_would_be_pushed_out_there_is_part_of_the_cost() -> None:
    for filled, goes_to in ((0, 1), (1000, 0)):
        scene = Scene()
        scene.ask(12)
        scene.blocks[:] = filled
        scene.queue_s[0] = 0.5
        assert scene.ask() == [goes_to], filled


def test_replicas_are_leases_and_shrink_again() -> None:
    scene = Scene()
    scene.ask(50)
    scene.queue_s[0] = 0.5
    scene.ask()
    scene.queue_s[:] = 0.1, 0.0, 0.0
    assert scene.ask() == [1]
    assert scene.policy.live == 1
    scene.clock.advance(LEASE_S)
    assert scene.policy.live == 0
    assert scene.ask(3, every_s=10.0) == [0, 0, 0], "the others' copies are not asked for, and age out"


def test_traffic_that_needs_them_renews_them() -> None:
    scene = Scene()
    scene.ask(200, every_s=0.02)
    scene.queue_s[0] = 0.5
    scene.ask()
    scene.queue_s[:] = 0
    for _ in range(100):
        scene.ask(50, every_s=0.02)
    assert scene.policy.live == 1, "50 requests a second of 50 ms each need two and more"


def test_a_new_head_has_its_home_where_the_policy_puts_it() -> None:
    scene = Scene()
    scene.matched[:] = 0
    assert scene.policy.pick(Ask(tokens=100, head=b"new"), scene.fleet(), first_tie).replica == 0
    assert scene.policy.name == "affinity"


def test_what_everybody_shares_is_no_hot_prefix() -> None:
    scene = Scene()
    scene.queue_s[0] = 5.0
    scene.ask(100, ask=Ask(tokens=4200, head=b"hot", universal_tokens=4000))
    assert scene.policy.granted == 0


def test_memory_is_bounded() -> None:
    scene = Scene()
    for number in range(3000):
        scene.ask(ask=Ask(tokens=4200, head=number.to_bytes(4, "little")))
    assert len(scene.policy._heads) <= 1024


@pytest.mark.parametrize("lease_s", [0, -1.0, float("nan"), float("inf")])
def test_a_lease_without_end_is_refused(lease_s: float) -> None:
    with pytest.raises(BadRequest, match="lease_s"):
        HotReplicas(Affinity(), SimClock(), lease_s)
