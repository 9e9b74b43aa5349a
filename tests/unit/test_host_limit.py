"""`host.limit_bytes_per_s` and `host.added_latency_s`: HOST as slow as somebody wants to see it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from disk_turns import MB, DiskTurns, paced, set_limits
from nvme_stage import saved, tokens

from kvstore.config import Config, HostConfig, PlanConfig, Salts
from kvstore.errors import BadRequest
from kvstore.fetching import Fetching, Watch
from kvstore.intent import Intent
from kvstore.keys import probe_positions
from kvstore.leases import LeaseState
from kvstore.policy.lag import LagRule
from kvstore.policy.prefill import Step
from kvstore.pricing import Source
from kvstore.store import Match
from kvstore.testing import SessionDriver, StoreDriver, small_config
from kvstore.types import Choice, Tier

BLOCKS, TOKENS = 40, 4
HOST = Source(Tier.HOST)


def limited(config: Config, limit: int, latency_s: float = 0.0) -> Config:
    host: HostConfig = msgspec.structs.replace(
        config.host, limit_bytes_per_s=limit, added_latency_s=latency_s
    )
    return msgspec.structs.replace(config, host=host)


def _nobody(_: Fetching) -> None:
    """Is told."""


class Scene:
    """A chain on HOST, no disk, simulated time."""

    def __init__(self, limit: int = 0, latency_s: float = 0.0, mode: str = "load") -> None:
        config = small_config(capacity_bytes=16 << 20)
        self.config = msgspec.structs.replace(config, plan=PlanConfig(mode=mode))
        self.driver = StoreDriver(self.config)
        self.session: SessionDriver = self.driver.attach()
        self.chain = self.session.chain(tokens(BLOCKS))
        self.session.save(self.chain)
        self.size = self.session.caller.shape.length
        self.limit(limit, latency_s)

    def limit(self, limit: int, latency_s: float = 0.0) -> None:
        self.driver.group().reconfigure(limited(self.config, limit, latency_s))

    def look_up(self) -> Match:
        positions = probe_positions(BLOCKS, 10_000)
        return self.session.store.lookup(
            self.session.caller,
            self.chain.root,
            BLOCKS,
            positions,
            self.chain.keys[positions],
            Intent(BLOCKS * TOKENS + 1),
        )

    def fetch(self, match: Match, watch: Watch | None = None, *, tail: bool = False) -> Fetching:
        assert match.lease is not None
        fetches, shape = self.driver.group().fetches, self.session.caller.shape
        if tail:
            return fetches.begin_tail(match.lease, 0, BLOCKS, shape, _nobody)
        return fetches.begin(match.lease, 0, BLOCKS, shape, _nobody, watch)

    def run(self, done: Callable[[], bool]) -> float:
        """Until then; how long that was."""
        clock, alarms = self.driver.clock, self.driver.group().fetches.alarms
        began_s = clock.now()
        while not done():
            assert alarms.next_s is not None, "nothing will happen any more"
            clock.advance(max(0.0, alarms.next_s - clock.now()))
            alarms.ring()
        return clock.now() - began_s


@pytest.fixture
def scenes() -> Iterator[Callable[..., Scene]]:
    made: list[Scene] = []

    def make(*args: object, **options: object) -> Scene:
        made.append(Scene(*args, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for scene in made:
        scene.driver.store.check()
        scene.driver.close()


def test_without_a_limit_all_is_ready_at_once(scenes: Callable[..., Scene]) -> None:
    scene = scenes()
    match = scene.look_up()
    assert match.runs and scene.fetch(match).over
    assert not scene.driver.group().fetches.pace.limited and not len(scene.driver.group().fetches)


@pytest.mark.parametrize("tail", [False, True])
def test_blocks_are_let_out_at_the_pace_of_the_limit(scenes: Callable[..., Scene], tail: bool) -> None:
    scene = scenes(10 * MB, 0.05)
    match = scene.look_up()
    assert match.plan.load_stop == BLOCKS and not match.runs, "none of them is ready"
    fetching = scene.fetch(match, tail=tail)
    half_s = scene.run(lambda: fetching.arrived >= BLOCKS // 2)
    assert fetching.arrived < BLOCKS
    whole_s = half_s + scene.run(lambda: fetching.over)
    assert half_s == pytest.approx(0.05 + BLOCKS // 2 * scene.size / (10 * MB), rel=0.1)
    assert whole_s == pytest.approx(0.05 + BLOCKS * scene.size / (10 * MB), rel=0.1)
    assert match.lease is not None and match.lease.state is LeaseState.DONE
    again = scene.fetch(match, tail=tail)
    assert not again.over, "and once more"
    assert scene.run(lambda: again.over) == pytest.approx(whole_s, rel=0.1)


def test_a_limit_that_goes_lets_everything_out(scenes: Callable[..., Scene]) -> None:
    scene = scenes(1)  # a stall
    fetching = scene.fetch(scene.look_up())
    scene.driver.clock.advance(5.0)
    scene.driver.group().fetches.alarms.ring()
    assert not fetching.arrived
    scene.limit(0)
    assert scene.run(lambda: fetching.over) < 0.01
    assert scene.look_up().runs, "and what is asked for next is ready at once"


def test_the_lag_rule_gives_it_up_and_the_next_plan_knows(scenes: Callable[..., Scene]) -> None:
    """It was as fast as memory until a moment ago; W is small, so nobody waits long."""
    scene = scenes(mode="decide")
    group = scene.driver.group()
    name = scene.session.engine.namespace.digest.hex()
    for count in (4, 8, 16, 32, 64, 128) * 4:
        group.pricing.observe_step(name, Step(count, count * count / 2, 0, 0, count * 0.00125))
    assert scene.look_up().plan.choice is Choice.LOAD
    for limit in (2 * MB, 1):
        scene.limit(limit)
        match = scene.look_up()
        planned = match.lease.planned if match.lease is not None else None
        assert match.lease is not None and planned is not None
        fetching = scene.fetch(match, planned.watch(0) or Watch(LagRule(0.2, 0.01, 0.0), lambda _: 0.2))
        took_s = scene.run(lambda fetching=fetching: fetching.over)  # type: ignore[misc]
        assert took_s <= 0.1 * 0.2 * 1.2, "a tenth of what computing takes"
        assert fetching.lagged and "it lagged" in fetching.reason
        assert match.lease.host == fetching.ready < BLOCKS, "the rest is no hit"
        again = scene.look_up()
        assert again.plan.choice is Choice.RECOMPUTE, again.plan.reason


def test_a_lease_that_ends_waits_for_nothing(scenes: Callable[..., Scene]) -> None:
    scene = scenes(1 * MB)
    match = scene.look_up()
    fetching = scene.fetch(match)
    scene.run(lambda: fetching.arrived > 2)
    assert match.lease is not None
    scene.session.release(match.lease)
    assert fetching.over and not len(scene.driver.group().fetches)
    assert "ended" in fetching.reason
    hits = scene.driver.group().counters.hit_blocks_by_tier
    assert hits[Tier.HOST] == fetching.ready < BLOCKS, "the rest was never let out"


def test_computing_that_has_met_the_tail_ends_it(scenes: Callable[..., Scene]) -> None:
    scene = scenes(1 * MB)
    match = scene.look_up()
    fetching = scene.fetch(match, tail=True)
    scene.run(lambda: fetching.arrived > 2)
    assert match.lease is not None
    group = scene.driver.group()
    assert group.pricing.rates.speed(HOST, scene.size).samples == 0
    group.fetches.enough(match.lease, BLOCKS - 2)
    assert fetching.over and match.lease.state is LeaseState.DONE and not len(group.fetches)
    speed = group.pricing.rates.speed(HOST, 4 * scene.size)
    assert speed.samples == 1 and speed.bytes_per_s < 100 * MB, "and shows how slow HOST is"


def test_what_the_disk_brings_passes_the_limit_too(disks: Callable[..., Disk]) -> None:
    disk = disks(0)
    disk.limit(10 * MB)
    began_s = disk.driver.clock.now()
    fetching = disk.session.fetch(disk.lease, 0, BLOCKS)
    disk.turns.run(lambda: fetching.over)
    assert fetching.ready == BLOCKS and disk.lease.brought == (0, BLOCKS)
    size = disk.session.caller.shape.length
    assert disk.driver.clock.now() - began_s == pytest.approx(BLOCKS * size / (10 * MB), rel=0.1)


def test_a_dropped_block_ends_the_fetch_that_waits_for_it_and_no_other(scenes: Callable[..., Scene]) -> None:
    scene = scenes(2 * MB)
    group = scene.driver.group()
    other = scene.session.chain(tokens(BLOCKS, 5000))
    scene.session.save(other)
    first = scene.fetch(scene.look_up())
    lease = scene.session.lookup(other).lease
    second = group.fetches.begin(lease, 0, BLOCKS, scene.session.caller.shape, _nobody)
    scene.run(lambda: first.arrived > 2)
    node = int(first.lease.nodes[first.ready + 3])
    arena, slot = group.arena, int(group.host.slots(first.lease.nodes)[first.ready + 3])
    arena.view(slot, 64)[10] ^= 0xFF
    assert group.host.drop_if_corrupt(np.array([node], np.uint32), scene.session.caller.shape) == 1
    scene.run(lambda: first.over and second.over)
    assert "dropped" in first.reason and first.ready < BLOCKS
    assert second.ready == BLOCKS


def test_somebody_who_fails_to_hear_costs_nobody_else(scenes: Callable[..., Scene]) -> None:
    scene = scenes(2 * MB)
    group = scene.driver.group()

    def broken(_: Fetching) -> None:
        raise ValueError("a bug")

    deaf = scene.session.lookup(scene.chain).lease
    group.fetches.begin(deaf, 0, BLOCKS, scene.session.caller.shape, broken)
    fetching = scene.fetch(scene.look_up())
    scene.run(lambda: fetching.over)
    assert fetching.ready == BLOCKS


def test_fetches_that_begin_one_after_another_starve_nobody(scenes: Callable[..., Scene]) -> None:
    scene = scenes(100 * MB)
    group, clock = scene.driver.group(), scene.driver.clock
    first = scene.fetch(scene.look_up())
    for _ in range(60):
        clock.advance(0.0005)
        group.fetches.alarms.ring()
        scene.fetch(scene.look_up())
    assert first.arrived > 0


class Disk:
    """A chain on a disk, and the loop in simulated time."""

    def __init__(self, folder: Path, disk: int, faults: str = "") -> None:
        config = paced(folder)
        salts = Salts.load(config)
        with StoreDriver(config, salts) as driver:
            saved(driver, BLOCKS)
        self.config = paced(folder, limit=disk)
        self.driver = StoreDriver(self.config, salts, faults)
        self.turns = DiskTurns(self.driver)
        self.session = self.driver.attach()
        self.lease = self.session.lookup(self.session.chain(tokens(BLOCKS))).lease

    def limit(self, limit: int) -> None:
        self.driver.group().reconfigure(limited(self.config, limit))

    def close(self) -> None:
        self.turns.disks.close()
        self.driver.store.check()
        self.driver.close()


@pytest.fixture
def disks(tmp_path: Path) -> Iterator[Callable[..., Disk]]:
    made: list[Disk] = []

    def make(*args: object, **options: object) -> Disk:
        made.append(Disk(tmp_path, *args, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for disk in made:
        disk.close()


def test_a_limit_that_comes_and_goes_in_mid_fetch(disks: Callable[..., Disk]) -> None:
    disk = disks(5 * MB)
    fetching = disk.session.fetch(disk.lease, 0, BLOCKS)
    for step, limit in enumerate((2 * MB, 0, 1 * MB, 0), 1):
        disk.turns.run(lambda step=step: fetching.arrived >= 8 * step)  # type: ignore[misc]
        assert fetching.arrived <= fetching.came
        assert disk.driver.group().host.readable(disk.lease.nodes[: fetching.ready]).all()
        disk.limit(limit)
    disk.turns.run(lambda: fetching.over)
    assert fetching.ready == BLOCKS and disk.lease.brought == (0, BLOCKS)
    assert not len(disk.driver.group().fetches)


def test_what_was_abandoned_is_not_fetched_again_under_a_limit(disks: Callable[..., Disk]) -> None:
    disk = disks(5 * MB)
    fetching = disk.session.fetch(disk.lease, 0, BLOCKS)
    disk.turns.run(lambda: fetching.arrived >= 10)
    set_limits(disk.driver, 1)
    disk.turns.run(lambda: fetching.over)
    assert disk.lease.state is LeaseState.ABANDONED
    disk.limit(1 * MB)
    with pytest.raises(BadRequest, match="abandoned"):
        disk.session.fetch(disk.lease, 0, 5)
    disk.limit(0)
    assert not disk.driver.group().fetches.pace.limited, "nothing of it waits"
    assert disk.session.fetch(disk.lease, 0, 5).over


def test_a_slow_host_is_not_the_disks_fault(disks: Callable[..., Disk]) -> None:
    disk = disks(0)
    disk.limit(1 * MB)
    rule = Watch(LagRule(0.2, 0.01), lambda arrived: 0.2 * (BLOCKS - arrived) / BLOCKS)
    shape = disk.session.caller.shape
    fetching = disk.driver.group().fetches.begin(disk.lease, 0, BLOCKS, shape, _nobody, rule)
    disk.turns.run(lambda: fetching.over)
    assert fetching.lagged and fetching.ready < BLOCKS and disk.lease.state is LeaseState.DONE
    pricing = disk.driver.group().pricing
    assert pricing.trust(Source(Tier.NVME)).trusted
    assert pricing.rates.speed(HOST, 40 * shape.length).bytes_per_s < 10 * MB
