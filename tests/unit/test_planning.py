"""Lookups are planned: what is compared, what is remembered, what is given up, who is believed again.

A store with a disk on simulated time. Its engine computes a block of 4 tokens in 5 ms; a block has 131 kB, so
that a disk of 26 MB/s breaks even.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from disk_turns import MB, DiskTurns, paced, set_limits
from nvme_stage import saved, tokens

from kvstore.config import PlanConfig, Salts
from kvstore.decisions import Recorded
from kvstore.fetching import Fetching
from kvstore.intent import Intent
from kvstore.keys import KeyChain, probe_positions
from kvstore.leases import LeaseState
from kvstore.policy.prefill import Step
from kvstore.pricing import Source, Transfer
from kvstore.store import Match
from kvstore.testing import StoreDriver
from kvstore.types import Choice, Tier

BLOCKS, TOKENS = 40, 4
TOKEN_S = 0.00125
COMPUTE_S = BLOCKS * TOKENS * TOKEN_S  # 0.2 s
FAST, SLOW = 200 * MB, 5 * MB
NVME = Source(Tier.NVME)
STARTS = (0, 1000, 2000, 3000)  # chains on the disk, by their first token


class World:
    """A chain on the disk and nothing of it on HOST, an engine whose speed is known, and a disk's."""

    def __init__(self, driver: StoreDriver, limit: int) -> None:
        self.driver = driver
        self.turns = DiskTurns(driver)
        self.session = driver.attach()
        self.chain = self.session.chain(tokens(BLOCKS))
        set_limits(driver, limit)

    @property
    def group(self):
        return self.driver.group()

    def learn(self) -> None:
        """What the engine's steps and the disk's transfers have shown."""
        name = self.session.engine.namespace.digest.hex()
        for count in (4, 8, 16, 32, 64, 128) * 4:
            self.group.pricing.observe_step(name, Step(count, count * count / 2, 0, 0, count * TOKEN_S))

    def know_disk(self, bytes_per_s: float) -> None:
        size = self.session.caller.shape.length
        for blocks in (1, 4, 10, 20, 40) * 8:
            seconds = 0.001 + blocks * size / bytes_per_s
            self.group.pricing.observe_transfer(NVME, Transfer(blocks * size, 0, seconds, 0.001))

    def look_up(
        self, chain: KeyChain | None = None, request: str = "r", prompt: int = 0, mode: str = ""
    ) -> Match:
        chain = self.chain if chain is None else chain
        positions = probe_positions(len(chain), 10_000)
        return self.session.store.lookup(
            self.session.caller,
            chain.root,
            len(chain),
            positions,
            chain.keys[positions],
            Intent(prompt, request, mode=mode),
        )

    def load(self, match: Match, stop: int = 0) -> Fetching:
        """Do what the plan says, or fetch up to `stop`, to its end."""
        lease = match.lease
        assert lease is not None
        fetching = self.session.fetch(lease, match.plan.load_start, stop or match.plan.load_stop)
        self.turns.run(lambda: fetching.over)
        return fetching

    def last(self) -> Recorded:
        found = self.group.decisions.last()
        assert found is not None
        return found


def whole(chain: KeyChain):
    positions = probe_positions(len(chain), 10_000)
    return positions, chain.keys[positions]


Worlds = Callable[..., World]


@pytest.fixture
def worlds(tmp_path: Path) -> Iterator[Worlds]:
    made: list[World] = []
    config = msgspec.structs.replace(paced(tmp_path), plan=PlanConfig())
    salts = Salts.load(config)
    with StoreDriver(config, salts) as driver:
        for start in STARTS:
            saved(driver, BLOCKS, start)

    def make(limit: int = 0, mode: str = "decide") -> World:
        driver = StoreDriver(msgspec.structs.replace(config, plan=PlanConfig(mode=mode)), salts)
        made.append(World(driver, limit))
        return made[-1]

    yield make
    for world in made:
        world.turns.disks.close()
        world.driver.store.check()
        world.driver.close()


# ---- choices ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bytes_per_s", "choice"), [(FAST, Choice.LOAD), (SLOW, Choice.RECOMPUTE)])
def test_the_faster_is_chosen_and_remembered(worlds: Worlds, bytes_per_s: int, choice: Choice) -> None:
    world = worlds()
    world.learn()
    world.know_disk(bytes_per_s)
    match = world.look_up(request="cmpl-1", prompt=BLOCKS * TOKENS + 1)
    assert match.plan.choice is choice
    assert match.plan.load_stop == (BLOCKS if choice is Choice.LOAD else 0)
    record = world.last()
    assert (record.id, record.asked.request, record.asked.prompt_tokens) == (match.plan.id, "cmpl-1", 161)
    assert record.decision.predicted_s[Choice.RECOMPUTE] == pytest.approx(COMPUTE_S, rel=0.05)
    load_s = record.decision.predicted_s[Choice.LOAD]
    if choice is Choice.LOAD:
        size = BLOCKS * world.session.caller.shape.length
        assert load_s == pytest.approx(size / bytes_per_s, rel=0.2)
    else:
        assert load_s is not None and load_s > COMPUTE_S  # of the best load there is: a short one
    assert dict(record.asked.blocks)[Tier.NVME] == BLOCKS
    if choice is Choice.LOAD:
        assert world.load(match).ready == BLOCKS


def test_what_is_computed_all_the_same_is_no_hit(worlds: Worlds) -> None:
    world = worlds()
    world.learn()
    world.know_disk(FAST)
    loaded = world.look_up()
    assert loaded.lease is not None and world.load(loaded).ready == BLOCKS  # all of it is on HOST now
    world.session.release(loaded.lease)
    counters = world.group.counters
    before, by_tier = counters.hit_blocks, dict(counters.hit_blocks_by_tier)
    assert before == BLOCKS
    match = world.look_up(mode="recompute")
    assert match.lease is not None and match.plan.choice is Choice.RECOMPUTE and not match.runs
    assert len(match.lease.nodes) == match.lease.host == BLOCKS  # the engine knows what it need not save
    world.session.release(match.lease)
    assert (counters.hit_blocks, counters.hit_blocks_by_tier) == (before, by_tier)
    assert world.last().outcome is not None and world.last().outcome.loaded_blocks == 0
    exported = world.look_up(mode="recompute")
    assert world.load(exported, stop=10).ready == 10  # whoever fetches all the same has its hits
    world.session.release(exported.lease)
    assert counters.hit_blocks == before + 10


def test_the_first_request_ever(worlds: Worlds) -> None:
    """No step was seen: what is guessed to come soon is loaded, and the plan says that it is a guess."""
    world = worlds()
    match = world.look_up()
    assert (match.plan.choice, match.plan.load_stop) == (Choice.LOAD, BLOCKS)
    assert "no step was seen" in match.plan.reason
    assert set(world.last().decision.predicted_s.values()) == {None}
    assert world.load(match).ready == BLOCKS


def test_the_first_request_ever_is_not_held_up_by_a_slow_disk(worlds: Worlds) -> None:
    world = worlds(limit=1 * MB)
    began_s = world.driver.clock.now()
    match = world.look_up()
    fetching = world.load(match)
    assert fetching.lagged and 0 < fetching.ready < BLOCKS
    assert world.driver.clock.now() - began_s < 1.2


def test_nothing_known_and_nothing_asked(worlds: Worlds) -> None:
    world = worlds()
    world.learn()
    none = world.session.store.lookup(world.session.caller, world.chain.root, 0, *_nothing(world.chain))
    assert none.lease is None and none.plan.choice is Choice.RECOMPUTE
    unknown = world.look_up(world.session.chain(range(9000, 9100)), request="other")
    assert unknown.lease is None and unknown.plan.choice is Choice.RECOMPUTE
    assert unknown.plan.id == none.plan.id + 1
    assert world.last().decision.predicted_s[Choice.RECOMPUTE] == pytest.approx(100 * TOKEN_S, rel=0.05)


def _nothing(chain: KeyChain):
    return whole(chain)[0][:0], chain.keys[:0]


@pytest.mark.parametrize("mode", ["load", "recompute"])
def test_a_fixed_mode_does_what_it_says_with_the_same_predictions(worlds: Worlds, mode: str) -> None:
    world = worlds(mode=mode)
    world.learn()
    world.know_disk(SLOW if mode == "load" else FAST)
    match = world.look_up()
    assert match.plan.choice.value == mode
    assert match.plan.load_stop == (BLOCKS if mode == "load" else 0)
    assert mode in match.plan.reason
    assert None not in (world.last().predicted_s, world.last().best_other_s)
    if mode == "load":  # however slow: nobody watches
        set_limits(world.driver, SLOW)
        assert world.load(match).ready == BLOCKS


# ---- surprises --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [SLOW, 1])
def test_a_disk_that_gets_slow_in_mid_load_costs_a_tenth(worlds: Worlds, limit: int) -> None:
    world = worlds(limit=FAST)
    world.learn()
    world.know_disk(FAST)
    match, clock = world.look_up(), world.driver.clock
    began_s, lease = clock.now(), match.lease
    assert lease is not None and match.plan.choice is Choice.LOAD
    fetching = world.session.fetch(lease, 0, BLOCKS)
    world.turns.run(lambda: fetching.ready >= 4)
    set_limits(world.driver, limit)
    world.turns.run(lambda: fetching.over)
    kept = fetching.ready
    assert fetching.lagged and kept < BLOCKS
    total_s = clock.now() - began_s + (BLOCKS - kept) * TOKENS * TOKEN_S
    assert total_s <= 1.1 * COMPUTE_S + 0.005
    world.session.release(lease)
    outcome = world.last().outcome
    assert outcome is not None
    assert (outcome.loaded_blocks, outcome.abandoned_s) == (kept, lease.lagged_s)
    assert "lagged" in outcome.why
    assert lease.state is LeaseState.RELEASED


def test_trust_is_lost_at_once_and_regained_by_probes(worlds: Worlds) -> None:
    world = worlds(limit=FAST)
    world.learn()
    world.know_disk(FAST)
    match = world.look_up()
    assert match.lease is not None
    fetching = world.session.fetch(match.lease, 0, BLOCKS)
    set_limits(world.driver, 1)
    world.turns.run(lambda: fetching.over)
    world.session.release(match.lease)
    changes = world.group.decisions.changes
    assert [(change.source, change.trusted) for change in changes] == [("NVME", False)]
    assert "lagged" in changes[0].reason

    again = world.look_up()
    assert again.plan.choice is Choice.RECOMPUTE
    assert "NVME is doubted" in again.plan.reason
    world.session.release(again.lease)
    world.turns.run(lambda: not world.driver.nvme.promotions)  # the probe of a disk that stalls still
    set_limits(world.driver, FAST)
    for start in (*STARTS[1:], STARTS[0]):
        world.driver.clock.advance(2.0)
        again = world.look_up(world.session.chain(tokens(BLOCKS, start)))
        assert again.lease is not None
        if again.plan.choice is Choice.LOAD:
            break
        world.session.release(again.lease)
        world.turns.run(lambda: not world.driver.nvme.promotions)
    assert again.plan.choice is Choice.LOAD
    assert [change.trusted for change in changes] == [False, True]
    assert world.load(again).ready == BLOCKS
    assert world.group.leases.pins() == 1  # probes left none


def test_a_session_that_is_silent_in_mid_load_costs_nobody_else(worlds: Worlds) -> None:
    """It began to fetch, and was never heard of again: its pin goes when memory is needed."""
    world = worlds(limit=1 * MB)
    world.learn()
    world.know_disk(FAST)
    match = world.look_up(mode="load")  # whatever it takes: nothing but its silence ends this one
    lease, other = match.lease, world.driver.attach()
    assert lease is not None
    fetching = world.session.fetch(lease, 0, BLOCKS)
    world.turns.run(lambda: fetching.ready >= 2)
    world.driver.clock.advance(world.driver.store.config.daemon.stale_after_s + 1)
    assert lease.state is LeaseState.FETCHING
    assert other.save(other.chain(range(70_000, 70_000 + 4 * 119))).ready > 0
    assert lease.state is LeaseState.REVOKED and fetching.over and "lease" in fetching.reason
    assert world.group.counters.revoked_leases == 1
    set_limits(world.driver, 0)
    world.turns.run(lambda: not world.driver.nvme.promotions)


@pytest.mark.parametrize("later_s", [0.0, 3600.0])
def test_a_fetch_is_watched_from_its_own_begin(worlds: Worlds, later_s: float) -> None:
    """A clock that jumps, or an engine that was stopped, between lookup and fetch: not the disk's fault."""
    world = worlds()
    world.learn()
    world.know_disk(FAST)
    match, clock = world.look_up(), world.driver.clock
    assert match.plan.choice is Choice.LOAD and match.lease is not None
    clock.advance(later_s)
    set_limits(world.driver, SLOW)
    began_s = clock.now()
    fetching = world.session.fetch(match.lease, 0, BLOCKS)
    world.turns.run(lambda: fetching.over)
    took_s = clock.now() - began_s
    assert fetching.lagged and fetching.ready < BLOCKS
    assert took_s >= 0.1 * COMPUTE_S - 1e-6
    assert took_s + (BLOCKS - fetching.ready) * TOKENS * TOKEN_S <= 1.1 * COMPUTE_S + 0.005


def test_a_clock_that_jumps_in_mid_load_ends_it_with_what_has_come(worlds: Worlds) -> None:
    world = worlds(limit=FAST)
    world.learn()
    world.know_disk(FAST)
    match = world.look_up()
    assert match.lease is not None
    fetching = world.session.fetch(match.lease, 0, BLOCKS)
    world.turns.run(lambda: fetching.ready >= 4)
    world.driver.clock.advance(3600.0)
    world.turns.run(lambda: fetching.over)
    assert fetching.ready >= 4
    world.session.release(match.lease)


def test_host_is_tried_again_after_a_bad_moment(worlds: Worlds) -> None:
    """Copies that were slow for a while keep nobody away for ever, although nothing probes HOST."""
    world = worlds()
    world.learn()
    world.know_disk(FAST)
    loaded = world.look_up()
    assert loaded.lease is not None and world.load(loaded).ready == BLOCKS
    world.session.release(loaded.lease)
    size = BLOCKS * world.session.caller.shape.length
    for _ in range(4):
        world.group.pricing.observe_transfer(Source(Tier.HOST), Transfer(size, 0, 20.0))
    passed_by = world.look_up()
    assert passed_by.plan.choice is Choice.RECOMPUTE and passed_by.lease is not None
    world.session.release(passed_by.lease)
    world.driver.clock.advance(120.0)
    assert world.look_up().plan.choice is Choice.LOAD


def test_a_full_host_is_not_the_disks_fault(worlds: Worlds) -> None:
    """Probes that find no room say nothing of the disk."""
    world = worlds()
    world.learn()
    world.know_disk(SLOW)
    other = world.driver.attach()
    filler = other.chain(range(70_000, 70_000 + 4 * 120))
    other.save(filler)
    held = other.lookup(filler).lease
    for _ in range(4):
        world.driver.clock.advance(2.0)
        match = world.look_up()
        assert match.plan.choice is Choice.RECOMPUTE and match.lease is not None
        world.turns.run(lambda: not world.driver.nvme.promotions)
        world.session.release(match.lease)
    assert world.group.pricing.trust(NVME).trusted
    other.release(held)


def test_a_request_that_asks_again_counts_once(worlds: Worlds) -> None:
    world = worlds()
    world.learn()
    world.know_disk(FAST)
    first, again = world.look_up(request="cmpl-1"), world.look_up(request="cmpl-1")
    assert first.plan.id == again.plan.id
    assert sum(world.group.decisions.plans.values()) == 1
    assert world.group.decisions.carried_out(again.plan.id, world.session.engine.id, 0.1)
    assert not world.group.decisions.carried_out(again.plan.id, b"another engine  ", 9.0)
    assert world.look_up(request="cmpl-1").plan.id == again.plan.id + 1
    assert world.group.decisions.error[Choice.LOAD].count == 1
