"""The router's core: what it knows of prefixes, queues and failures, and that its books are balanced."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import BadRequest, Unavailable
from kvstore.policy.routing.make import PolicySettings, make_policy
from kvstore.router.chain_names import KeyNames, TokenNames
from kvstore.router.core import Member, Router
from kvstore.router.kv_schema import Removed, Stored, extra_of
from kvstore.router.loads import Loads
from kvstore.router.placing import RouteRequest
from kvstore.router.prefixes import HINT_S, Prefixes
from kvstore.testing import SimClock
from kvstore.types import Tier

BLOCK = 16
NOBODY: frozenset[str] = frozenset()


def prompt(name: int, tokens: int = 160, **more: str) -> RouteRequest:
    """Token ids that no other name has."""
    ids = np.arange(name * 100_000, name * 100_000 + tokens, dtype=np.uint32)
    return RouteRequest(more.get("model", ""), ids, True, more.get("session", ""), salt=more.get("salt", ""))


def stored(
    tokens: np.ndarray, first_hash: int, parent: int | None = None, tier: Tier = Tier.GPU, extra: bytes = b""
) -> Stored:
    """As an engine tells it, under hashes of its own."""
    count = len(tokens) // BLOCK
    hashes = np.arange(first_hash, first_hash + count, dtype=np.uint64).tobytes()
    above = None if parent is None else np.uint64(parent).tobytes()
    return Stored(hashes, 8, above, tokens, BLOCK, extra, tier)


def hashes(*names: int) -> bytes:
    return np.array(names, np.uint64).tobytes()


class Scene:
    """A router with some replicas; `told` of them have a feed."""

    def __init__(
        self, policy: str = "affinity", told: bool = True, count: int = 3, capacity: int = 1000
    ) -> None:
        self.clock = SimClock()
        self.names = TokenNames(BLOCK, ("lora",), Random(1))
        self.prefixes = Prefixes(self.names, 100_000, count, self.clock)
        self.loads = Loads(count, 1000.0, self.clock)
        members = [Member(chr(97 + i), f"http://{i}", capacity, told) for i in range(count)]
        made = make_policy(policy, PolicySettings(max_skew=100))
        self.router = Router(members, self.prefixes, made, self.loads, self.clock, Random(2))
        for holdings in self.router.holdings if told else ():
            holdings.ready()

    def ask(
        self, request: RouteRequest, avoid: frozenset[str] = NOBODY, done: bool = True
    ) -> tuple[str, int, int]:
        """(replica, expected tokens, ticket); over at once unless told otherwise."""
        found = self.router.pick(request, avoid)
        if done:
            self.router.finished(found.ticket, None, None, None, True)
        return found.replica, found.expected_tokens, found.ticket

    def matched(self, request: RouteRequest) -> list[int]:
        """Tokens of it that each is known to hold on any tier."""
        fleet = self.router.fleet(self.names.of_prompt(request), request, np.arange(len(self.router.members)))
        return fleet.longest_tokens.tolist()


# ---- prefixes ----------------------------------------------------------------------------------------------


def test_a_prompt_goes_where_events_say_its_blocks_are() -> None:
    scene = Scene()
    request = prompt(1)
    scene.router.holdings[2].stored(stored(request.tokens, 500))
    assert scene.ask(request)[:2] == ("c", 160)
    longer = RouteRequest("", np.concatenate([request.tokens, prompt(2).tokens]), True, "")
    assert scene.ask(longer)[:2] == ("c", 160), "the shared head counts"


def test_events_continue_chains_by_the_engines_own_hashes() -> None:
    scene = Scene()
    request = prompt(1, 320)
    holdings = scene.router.holdings[1]
    holdings.stored(stored(request.tokens[:160], 500))
    holdings.stored(stored(request.tokens[160:], 510, parent=509))
    assert scene.matched(request) == [0, 320, 0]
    holdings.stored(stored(prompt(3).tokens, 900, parent=777))  # nobody has told of its parent
    assert holdings.orphaned_blocks == 10
    holdings.removed(Removed(hashes(*range(515, 520)), 8, Tier.GPU))
    assert scene.matched(request) == [0, 240, 0]


def test_tiers_are_told_apart_and_a_block_leaves_each_by_itself() -> None:
    scene = Scene()
    request = prompt(1)
    holdings = scene.router.holdings[0]
    holdings.stored(stored(request.tokens, 500))
    holdings.stored(stored(request.tokens, 500, tier=Tier.HOST))
    holdings.removed(Removed(hashes(*range(504, 510)), 8, Tier.GPU))
    fleet = scene.router.fleet(scene.names.of_prompt(request), request, np.array([0]))
    assert fleet.matched_tokens.tolist() == [[64, 160, 160, 160]]


def test_salts_and_adapters_are_other_blocks() -> None:
    scene = Scene()
    request = prompt(1)
    scene.router.holdings[0].stored(stored(request.tokens, 500, extra=extra_of(None, ("alice",))))
    scene.router.holdings[1].stored(stored(request.tokens, 600, extra=extra_of("lora", ())))
    assert scene.matched(request) == [0, 0, 0]
    assert scene.matched(prompt(1, salt="alice")) == [160, 0, 0]
    assert scene.matched(prompt(1, salt="bob")) == [0, 0, 0]
    assert scene.matched(prompt(1, model="lora")) == [0, 160, 0]
    assert scene.matched(prompt(1, model="lora", salt="alice")) == [0, 0, 0]


def test_block_size_follows_the_first_event_and_no_later_one() -> None:
    names = TokenNames(0, (), Random(1))
    prefixes = Prefixes(names, 10_000, 1, SimClock())
    holdings = prefixes.join(100, told=True)
    tokens = np.arange(256, dtype=np.uint32)
    assert names.block_tokens == 16
    holdings.stored(Stored(hashes(1, 2), 8, None, tokens, 128, b"", Tier.GPU))
    assert names.block_tokens == 128
    request = RouteRequest("", tokens, True, "")
    assert prefixes.matched_blocks(names.of_prompt(request), [holdings])[0].tolist() == [2, 2, 2, 2]
    holdings.stored(Stored(hashes(3, 4), 8, None, tokens[:32], 16, b"", Tier.GPU))
    assert names.other_sizes == 1


def test_a_burst_of_a_new_prompt_does_not_scatter() -> None:
    """Speculative insert at routing time: the second request comes before the first block is stored."""
    scene = Scene("scored")
    where, expected, _ = scene.ask(prompt(1), done=False)
    assert expected == 0
    for _ in range(20):
        assert scene.ask(prompt(1), done=False)[:2] == (where, 160)
    scene.clock.advance(HINT_S)
    assert scene.ask(prompt(2), done=False)[1] == 0  # time passes for hints when something is asked
    scene.clock.advance(HINT_S)
    scene.ask(prompt(2), done=False)
    scene.clock.advance(HINT_S)
    assert max(scene.matched(prompt(1))) == 0, "no event came: it was never stored"


def test_a_new_truth_takes_over_when_it_is_complete() -> None:
    scene = Scene()
    old, new = prompt(1), prompt(2)
    holdings = scene.router.holdings[0]
    holdings.stored(stored(old.tokens, 500))
    for _ in range(3):
        holdings.reset()
        holdings.stored(stored(new.tokens, 600))
        assert scene.matched(old) == [160, 0, 0], "what was known goes on being asked"
        assert scene.matched(new) == [0, 0, 0]
    holdings.ready()
    assert scene.matched(old) == [0, 0, 0]
    assert scene.matched(new) == [160, 0, 0]
    scene.prefixes.index.check()


def test_all_blocks_cleared_really_clears() -> None:
    scene = Scene()
    request = prompt(1)
    for tier in (Tier.GPU, Tier.HOST, Tier.NVME, Tier.REMOTE):
        scene.router.holdings[0].stored(stored(request.tokens, 500, tier=tier))
    scene.router.holdings[1].stored(stored(request.tokens, 500))
    scene.router.holdings[0].cleared(Tier.GPU)
    assert scene.router.holdings[0].blocks().tolist() == [0, 10, 10, 10]
    scene.router.holdings[0].cleared(None)
    assert scene.router.holdings[0].blocks().tolist() == [0, 0, 0, 0]
    assert scene.matched(request) == [0, 160, 0]
    scene.router.holdings[0].stored(stored(request.tokens[:32], 700, parent=509))
    assert scene.router.holdings[0].orphaned_blocks == 2, "the names are forgotten, too"


def test_without_events_what_was_sent_is_assumed_up_to_the_capacity() -> None:
    scene = Scene(told=False, count=1, capacity=25)
    for name in range(4):
        scene.ask(prompt(name))
    scene.clock.advance(10 * HINT_S)
    scene.ask(prompt(9, 16))
    scene.clock.advance(10 * HINT_S)
    scene.ask(prompt(9, 16))
    assert [scene.matched(prompt(name))[0] for name in range(4)] == [0, 64, 160, 160], "tails leave first"
    assert scene.router.holdings[0].blocks()[0] == 25


def test_kvstores_keys_name_blocks_by_tenant() -> None:
    names = KeyNames(BLOCK, {"alice": bytes(32), "bob": bytes(31) + bytes([1])})
    ids = prompt(1).tokens
    chains = {
        tenant: names.of_prompt(RouteRequest("", ids, True, "", tenant=tenant)).tolist()
        for tenant in ("alice", "bob", "eve")
    }
    assert len(chains["alice"]) == len(chains["bob"]) == 10
    assert not set(chains["alice"]) & set(chains["bob"])
    assert chains["eve"] == []


# ---- queues and failures -----------------------------------------------------------------------------------


def test_queues_are_what_was_sent_and_has_no_first_byte_yet() -> None:
    scene = Scene("least", count=1)
    _, _, one = scene.ask(prompt(1), done=False)
    _, _, two = scene.ask(prompt(2, 480), done=False)
    assert scene.loads.queue_s().tolist() == [0.64]
    scene.router.sent(one)
    scene.router.first_byte(one, 0.1)
    scene.router.first_byte(one, 0.1)  # again is harmless
    assert scene.loads.ahead_tokens.tolist() == [480]
    scene.router.finished(two, None, None, None, True)  # its caller left: nothing waits for it any more
    assert scene.loads.ahead_tokens.tolist() == [0]
    assert scene.loads.in_flight.tolist() == [1]
    scene.router.finished(one, 0, 160, 1, True)
    assert scene.loads.in_flight.tolist() == [0]


def test_speed_is_learnt_from_first_bytes() -> None:
    loads = Loads(1, 5000.0, SimClock())
    loads.sample(0, 1000, 0.5)
    assert loads.tokens_per_s[0] == 2000
    for _ in range(50):
        loads.sample(0, 1000, 0.25)
    assert 3800 < loads.tokens_per_s[0] <= 4000
    loads.sample(0, 1000, 1e6)  # a stall
    assert loads.tokens_per_s[0] > 1900
    before = float(loads.tokens_per_s[0])
    loads.sample(0, 5, 1.0)
    loads.sample(0, 1000, 0.0)
    loads.sample(0, 1000, float("nan"))
    assert loads.tokens_per_s[0] == before


def test_a_replica_that_was_never_measured_is_as_fast_as_the_others() -> None:
    loads = Loads(3, 5000.0, SimClock())
    loads.sample(1, 1000, 4.0)
    assert loads.tokens_per_s.tolist() == pytest.approx([250, 250, 250])
    loads.sample(0, 1000, 1.0)
    assert loads.tokens_per_s.tolist() == pytest.approx([1000, 250, 500])


def test_a_replica_that_failed_is_left_alone_for_a_while_and_tried_by_one() -> None:
    scene = Scene("round_robin", count=2)
    failed = {"a": 0, "b": 0}
    for _ in range(2):
        found = scene.router.pick(prompt(1), NOBODY)
        scene.router.sent(found.ticket)
        failed[found.replica] += 1
        scene.router.finished(found.ticket, None, None, None, found.replica == "b")
    assert failed == {"a": 1, "b": 1}
    assert [scene.ask(prompt(2))[0] for _ in range(4)] == ["b"] * 4
    scene.clock.advance(0.6)
    trials = [scene.ask(prompt(2), done=False)[0] for _ in range(6)]
    assert trials.count("a") == 1, "one finds out"
    scene.clock.advance(6)
    assert [scene.ask(prompt(2), done=False)[0] for _ in range(6)].count("a") == 1
    found = scene.router.pick(prompt(2), frozenset({"b"}))
    scene.router.sent(found.ticket)
    scene.router.first_byte(found.ticket, 0.1)
    assert scene.loads.up().tolist() == [True, True]


def test_when_none_is_up_the_untried_are_better_than_an_error() -> None:
    scene = Scene(count=2)
    scene.loads.fail(0)
    scene.loads.fail(1)
    assert scene.ask(prompt(1))[0] in "ab"
    assert scene.ask(prompt(1), frozenset({"a"}))[0] == "b"
    with pytest.raises(Unavailable, match="none of 2"):
        scene.ask(prompt(1), frozenset({"a", "b"}))


def test_what_was_assumed_of_a_replica_that_failed_is_forgotten() -> None:
    scene = Scene(told=False, count=1)
    found = scene.router.pick(prompt(1), NOBODY)
    scene.router.sent(found.ticket)
    scene.router.finished(found.ticket, None, None, None, False)
    assert scene.router.holdings[0].blocks()[0] == 0


# ---- what is told ------------------------------------------------------------------------------------------


def serve(scene: Scene, request: RouteRequest, cached: int, times: int = 1) -> None:
    for _ in range(times):
        found = scene.router.pick(request, NOBODY)
        scene.router.sent(found.ticket)
        scene.router.first_byte(found.ticket, 0.1)
        scene.router.finished(found.ticket, cached, request.tokens.size, 1, True)


def test_what_was_expected_is_compared_with_what_the_engine_says() -> None:
    scene = Scene()
    request = prompt(1)
    scene.router.holdings[0].stored(stored(request.tokens, 500))
    serve(scene, request, 128)
    serve(scene, prompt(2), 0)
    figures = scene.router.figures
    assert figures.expected_tokens.sum() == 160
    assert figures.cached_tokens.sum() == 128
    assert figures.over_tokens.sum() == 32
    assert figures.under_tokens.sum() == 0


def test_stores_without_hits_raise_an_alarm_and_hits_end_it() -> None:
    scene = Scene(count=1)
    request = prompt(1)
    scene.router.holdings[0].stored(stored(request.tokens, 500))
    serve(scene, request, 0, times=19)
    assert not scene.router.figures.alarm(0)
    serve(scene, request, 0)
    assert "nothing of them was reused" in scene.router.figures.alarm(0)
    serve(scene, request, 16)
    assert not scene.router.figures.alarm(0)


def test_hits_that_the_index_did_not_find_raise_an_alarm() -> None:
    scene = Scene(count=1)
    for name in range(30):
        serve(scene, prompt(name), 96)
    assert "the index did not find" in scene.router.figures.alarm(0)


def test_entropy_and_skew_tell_balance() -> None:
    scene = Scene("round_robin", count=4)
    assert np.isnan(scene.router.figures.entropy())
    for name in range(40):
        scene.ask(prompt(name))
    assert scene.router.figures.entropy() == pytest.approx(1.0)
    assert scene.router.figures.skew_max == 1


# ---- always ------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_books_are_balanced_whatever_happens(data: st.DataObject) -> None:
    """Every ticket ends once, in any order, after any of its steps; then nothing is in flight or waits."""
    scene = Scene(
        data.draw(st.sampled_from(["scored", "hybrid", "power_of_two"])), told=data.draw(st.booleans())
    )
    out: list[tuple[int, bool]] = []
    for _ in range(data.draw(st.integers(1, 40))):
        scene.clock.advance(data.draw(st.floats(0, 3)))
        if out and data.draw(st.booleans()):
            ticket, was_sent = out.pop(data.draw(st.integers(0, len(out) - 1)))
            if was_sent and data.draw(st.booleans()):
                scene.router.first_byte(ticket, data.draw(st.floats(0, 10)))
            scene.router.finished(ticket, None, None, None, data.draw(st.booleans()))
        else:
            ticket = scene.ask(
                prompt(data.draw(st.integers(0, 5)), 16 * data.draw(st.integers(0, 20))), done=False
            )[2]
            was_sent = data.draw(st.booleans())
            if was_sent:
                scene.router.sent(ticket)
            out.append((ticket, was_sent))
    for ticket, _ in out:
        scene.router.finished(ticket, None, None, None, True)
    assert not scene.loads.in_flight.any()
    assert not scene.loads.ahead_tokens.any()
    assert not scene.router.figures.running_tokens.any()
    scene.prefixes.index.check()


def test_members_need_names_of_their_own() -> None:
    scene = Scene()
    with pytest.raises(BadRequest, match="no name twice"):
        Router([], scene.prefixes, make_policy("least"), scene.loads, scene.clock, Random(1))
