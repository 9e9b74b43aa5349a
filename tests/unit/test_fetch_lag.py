"""Fetches under the lag rule: what is late is given up in time, what arrived stays, nobody else is hurt."""

from __future__ import annotations

import select
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
from disk_turns import MB, DiskTurns, paced, set_limits
from nvme_stage import saved, tokens

from kvstore.config import Salts
from kvstore.errors import BadRequest
from kvstore.fetching import Fetching, Watch
from kvstore.leases import LeaseState
from kvstore.policy.lag import LagRule
from kvstore.policy.rates import Transfer
from kvstore.testing import SessionDriver, StoreDriver
from kvstore.tiers.promotions import PACE_S

BLOCKS = 40
# R, and W: what loading BLOCKS takes at 80 MB/s is 66 ms.
RECOMPUTE_S, LOAD_S = 0.5, 0.08
# DiskLoop looks at promotions that say nothing so often.
TICK_S = 0.1


def rest_s(arrived: int) -> float:
    """As if every block took as long to compute."""
    return RECOMPUTE_S * (BLOCKS - arrived) / BLOCKS


def watch(rest: Callable[[int], float] = rest_s, late_s: float = 0.0) -> Watch:
    return Watch(LagRule(RECOMPUTE_S, LOAD_S, late_s), rest)


@dataclass
class Scene:
    """A chain on the disk, nothing of it on HOST, and the loop."""

    driver: StoreDriver
    turns: DiskTurns

    def begin(
        self, session: SessionDriver, rule: Watch | None, stop: int = BLOCKS
    ) -> tuple[Fetching, list[int]]:
        """A fetch of its first blocks, and what is heard of it."""
        heard: list[int] = []
        lease = session.lookup(session.chain(tokens(BLOCKS))).lease
        fetching = self.driver.group().fetches.begin(
            lease, 0, stop, session.caller.shape, lambda f: heard.append(f.ready), rule
        )
        return fetching, heard

    def total_s(self, fetching: Fetching, began_s: float) -> float:
        """What the request takes in all: until the fetch ended, and computing the rest."""
        return self.driver.clock.now() - began_s + rest_s(fetching.ready)


Scenes = Callable[..., Scene]


@pytest.fixture
def scenes(tmp_path: Path) -> Iterator[Scenes]:
    made: list[Scene] = []
    config = paced(tmp_path)
    salts = Salts.load(config)
    with StoreDriver(config, salts) as driver:
        saved(driver, BLOCKS)

    def make(limit: int = 0, latency_s: float = 0.0, faults: str = "", late_s: float = 0.0) -> Scene:
        driver = StoreDriver(paced(tmp_path, limit=limit, latency_s=latency_s), salts, faults)
        made.append(Scene(driver, DiskTurns(driver, late_s)))
        return made[-1]

    yield make
    for scene in made:
        scene.turns.disks.close()
        scene.driver.pump(lambda s=scene: s.driver.nvme.promotions == 0)  # type: ignore[misc]
        scene.driver.store.check()
        assert scene.driver.group().host.counts()["filling"] == 0
        scene.driver.close()


def test_a_load_as_predicted_is_left_alone(scenes: Scenes) -> None:
    scene = scenes(limit=80 * MB)
    session = scene.driver.attach()
    fetching, _ = scene.begin(session, watch())
    scene.turns.run(lambda: fetching.over)
    assert (fetching.ready, fetching.lagged, fetching.reason) == (BLOCKS, False, "")
    assert fetching.lease.state is LeaseState.DONE
    wakes = scene.turns.wakes
    scene.turns.run(lambda: scene.turns.wakes >= wakes + 5)
    assert scene.driver.nvme.alarms.next_s is None, "nobody looks at what has ended"


@pytest.mark.parametrize("late_s", [0.0, 0.002])
@pytest.mark.parametrize(
    ("limit", "latency_s"), [(5 * MB, 0.0), (1 * MB, 0.0), (1, 0.0), (0, 0.4), (20 * MB, 0.1)]
)
def test_a_disk_that_lags_costs_no_more_than_the_bound(
    scenes: Scenes, limit: int, latency_s: float, late_s: float
) -> None:
    scene = scenes(limit=limit, latency_s=latency_s, late_s=late_s)
    session, clock = scene.driver.attach(), scene.driver.clock
    began_s = clock.now()
    fetching, heard = scene.begin(session, watch())
    scene.turns.run(lambda: fetching.over)
    assert fetching.lagged and fetching.reason.startswith("it lagged: ")
    assert f"{fetching.ready} of {BLOCKS} blocks" in fetching.reason
    assert heard[-1] == fetching.ready, "whoever waits is told"
    bound_s = watch().rule.bound_s
    assert scene.total_s(fetching, began_s) <= bound_s + late_s + PACE_S
    due_s = watch().due_s(fetching.ready)
    assert due_s - 1e-9 <= clock.now() - began_s <= due_s + late_s + PACE_S, "neither too early"


def test_a_caller_that_knows_how_late_looks_are_keeps_the_bound_itself(scenes: Scenes) -> None:
    scene = scenes(limit=5 * MB, late_s=0.004)
    session = scene.driver.attach()
    began_s = scene.driver.clock.now()
    fetching, _ = scene.begin(session, watch(late_s=0.005))
    scene.turns.run(lambda: fetching.over)
    assert fetching.lagged
    assert scene.total_s(fetching, began_s) <= watch().rule.bound_s


def test_without_timers_a_tick_is_what_it_may_cost(scenes: Scenes) -> None:
    scene = scenes(limit=5 * MB)
    session, driver = scene.driver.attach(), scene.driver
    driver.nvme.alarms.wake_at = lambda _: None
    began_s = driver.clock.now()
    fetching, _ = scene.begin(session, watch())
    scene.turns.run(lambda: fetching.over)
    assert fetching.lagged
    assert scene.total_s(fetching, began_s) <= watch().rule.bound_s + TICK_S + PACE_S


def test_what_arrived_stays_and_its_lease_is_abandoned(scenes: Scenes) -> None:
    scene = scenes(limit=5 * MB)
    session = scene.driver.attach()
    fetching, _ = scene.begin(session, watch())
    scene.turns.run(lambda: fetching.over)
    kept, lease = fetching.ready, fetching.lease
    assert 0 < kept < BLOCKS
    assert (lease.state, lease.host, lease.brought) == (LeaseState.ABANDONED, kept, (0, kept))
    assert session.faults(lease, session.chain(tokens(BLOCKS))) == []
    with pytest.raises(BadRequest, match="lagged; look up again"):
        session.fetch(lease)
    session.release(lease)
    set_limits(scene.driver, 0)
    again, _ = scene.begin(session, watch())
    assert again.ready >= kept
    scene.turns.run(lambda: again.over)
    assert (again.ready, again.lagged) == (BLOCKS, False)


def test_a_stall_in_the_middle_keeps_what_came_before_it(scenes: Scenes) -> None:
    scene = scenes(limit=80 * MB)
    session, clock = scene.driver.attach(), scene.driver.clock
    began_s = clock.now()
    fetching, _ = scene.begin(session, watch())
    scene.turns.run(lambda: fetching.ready >= BLOCKS // 2)
    set_limits(scene.driver, 1)
    scene.turns.run(lambda: fetching.over)
    assert fetching.lagged and BLOCKS // 2 <= fetching.ready < BLOCKS
    assert scene.total_s(fetching, began_s) <= watch().rule.bound_s + PACE_S


def test_a_second_request_for_the_same_blocks_gets_them_all(scenes: Scenes) -> None:
    """The first gives up; what it had under way for the other goes on, and is read once."""
    scene = scenes(limit=5 * MB)
    one, two = scene.driver.attach(), scene.driver.attach()
    began_s = scene.driver.clock.now()
    first, _ = scene.begin(one, watch())
    second, _ = scene.begin(two, None)
    scene.turns.run(lambda: first.over)
    assert first.lagged and not second.over and second.ready == first.ready
    one.release(first.lease)
    scene.turns.run(lambda: second.over)
    assert (second.ready, second.reason) == (BLOCKS, "")
    assert two.faults(second.lease, two.chain(tokens(BLOCKS))) == []
    assert scene.driver.nvme.counters.read == BLOCKS
    ideal_s = BLOCKS * two.caller.shape.length / (5 * MB)
    assert scene.driver.clock.now() - began_s <= ideal_s * 1.05 + PACE_S


def test_whoever_comes_after_it_was_given_up_gets_them_too(scenes: Scenes) -> None:
    scene = scenes(faults="stall_ms=300:1.0")
    one, two = scene.driver.attach(), scene.driver.attach()
    first, _ = scene.begin(one, watch())
    scene.driver.clock.advance(watch().due_s(0) + 1e-6)
    scene.driver.nvme.tick()
    assert (first.lagged, first.ready) == (True, 0)
    second, _ = scene.begin(two, None)  # finds slots that are being filled for nobody any more
    scene.driver.pump(lambda: second.over)
    assert (second.ready, second.reason) == (BLOCKS, "")
    assert two.faults(second.lease, two.chain(tokens(BLOCKS))) == []


def test_when_nobody_waits_any_more_nothing_is_held_back_for_nobody(scenes: Scenes) -> None:
    scene = scenes(limit=5 * MB)
    one, two = scene.driver.attach(), scene.driver.attach()
    first, _ = scene.begin(one, watch())
    second, _ = scene.begin(two, None)
    scene.turns.run(lambda: first.over)
    two.release(second.lease)
    assert scene.driver.nvme.promotions == 0
    assert scene.driver.group().host.counts()["filling"] == 0


def test_what_came_and_was_not_told_yet_counts(scenes: Scenes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk has answered while the loop was busy: at the alarm that is looked at first."""
    scene = scenes()
    nvme = scene.driver.nvme
    fetching, _ = scene.begin(scene.driver.attach(), watch())
    take = nvme.pump

    def all_was_there() -> None:
        while nvme._promotions._by_job:
            assert select.select([nvme.eventfd], [], [], 30.0)[0]
            take()

    monkeypatch.setattr(nvme, "pump", all_was_there)
    scene.driver.clock.advance(10.0)
    nvme.alarms.ring()
    assert (fetching.ready, fetching.lagged) == (BLOCKS, False)


def test_a_lease_that_ends_is_not_looked_at(scenes: Scenes) -> None:
    scene = scenes(limit=5 * MB)
    session = scene.driver.attach()
    fetching, heard = scene.begin(session, watch())
    session.release(fetching.lease)
    told = len(heard)
    scene.driver.clock.advance(10.0)
    scene.driver.nvme.tick()
    assert len(heard) == told and not fetching.lagged


def test_what_lagged_teaches_what_all_of_it_would_have_taken(scenes: Scenes) -> None:
    scene = scenes(limit=5 * MB)
    session = scene.driver.attach()
    transfers: list[Transfer] = []
    scene.driver.nvme.observe(transfers.append, lambda _: None)
    slow = LagRule(10 * RECOMPUTE_S, LOAD_S)
    fetching, _ = scene.begin(session, Watch(slow, lambda arrived: 10 * rest_s(arrived)))
    scene.turns.run(lambda: fetching.over)
    (transfer,) = transfers
    size = BLOCKS * session.caller.shape.length
    assert transfer.given_up and transfer.size_bytes == size
    assert fetching.lagged and fetching.ready > 10
    assert size / transfer.seconds == pytest.approx(5 * MB, rel=0.1)


@pytest.mark.parametrize("power", [1.0, 3.0])
def test_it_is_the_rest_that_decides_not_the_blocks(scenes: Scenes, power: float) -> None:
    def rest(arrived: int) -> float:
        return RECOMPUTE_S * (1.0 - (arrived / BLOCKS) ** power)

    scene = scenes(limit=5 * MB)
    began_s = scene.driver.clock.now()
    fetching, _ = scene.begin(scene.driver.attach(), watch(rest))
    scene.turns.run(lambda: fetching.over)
    took_s = scene.driver.clock.now() - began_s
    assert fetching.lagged and took_s == pytest.approx(watch(rest).due_s(fetching.ready), abs=PACE_S)
    on_time_s = watch(rest_s).due_s(fetching.ready)
    assert (took_s < on_time_s - PACE_S) == (power == 3.0), "late blocks that cost more end it sooner"


def test_what_is_as_early_as_predicted_is_granted_its_time(scenes: Scenes) -> None:
    scene = scenes(limit=20 * MB)  # 0.26 s: predicted so, and worth it
    rule = LagRule(RECOMPUTE_S, 0.27)
    block_s = scene.driver.attach().caller.shape.length / (20 * MB)

    def steep(arrived: int) -> float:
        return RECOMPUTE_S * (1.0 - (arrived / BLOCKS) ** 2)

    told = Watch(rule, steep, lambda arrived: (arrived + 2) * block_s)
    fetching, _ = scene.begin(scene.driver.attach(), told)
    scene.turns.run(lambda: fetching.over)
    assert (fetching.ready, fetching.lagged) == (BLOCKS, False)


def test_a_prediction_that_is_none_begins_nothing(scenes: Scenes) -> None:
    scene = scenes()
    session = scene.driver.attach()
    with pytest.raises(ValueError, match="rest_s: "):
        scene.begin(session, watch(lambda _: float("nan")))
    assert (scene.driver.nvme.promotions, len(scene.driver.group().fetches)) == (0, 0)
    fetching, _ = scene.begin(session, watch())
    scene.turns.run(lambda: fetching.over)
    assert fetching.ready == BLOCKS


def test_what_was_cancelled_is_read_by_whoever_came_meanwhile(tmp_path: Path) -> None:
    """Its slots are still being filled when the second asks; then the disk says that it never began."""
    plain = paced(tmp_path)
    config = msgspec.structs.replace(plain, nvme=msgspec.structs.replace(plain.nvme, depth=8))
    salts = Salts.load(config)
    with StoreDriver(config, salts) as driver:
        saved(driver, BLOCKS)
    with StoreDriver(config, salts, "slow_ms=5:1.0") as driver:
        one, two = driver.attach(), driver.attach()
        lease = one.lookup(one.chain(tokens(BLOCKS))).lease
        one.fetch(lease)
        one.release(lease)
        fetching = two.fetch(two.lookup(two.chain(tokens(BLOCKS))).lease)
        assert driver.nvme.promotions == 2
        driver.pump(lambda: fetching.over)
        assert (fetching.ready, fetching.reason) == (BLOCKS, "")
        assert two.faults(fetching.lease, two.chain(tokens(BLOCKS))) == []
        assert driver.nvme.counters.read_failed > 0, "some had not begun"
        driver.pump(lambda: driver.nvme.promotions == 0)
        driver.store.check()
