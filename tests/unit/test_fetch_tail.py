"""Fetches from the last block down: order, what ends them, what they share, and how they are counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from disk_turns import MB, DiskTurns, paced
from nvme_stage import saved, tokens

from kvstore.config import Salts
from kvstore.errors import BadRequest, NotFound
from kvstore.fetches import PIECE_BYTES, PIECES_MIN, Fetching, TailFetching
from kvstore.keys import KeyChain
from kvstore.leases import Lease, LeaseState
from kvstore.testing import SessionDriver, StoreDriver, slot_fault
from kvstore.tiers.promotions import PACE_S
from kvstore.types import Tier

BLOCKS = 40
# Pieces [38, 40), [36, 38), …: 264 KiB.
SLOT = 33 * 4096
PIECE = BLOCKS // PIECES_MIN
LIMIT = 20 * MB


@dataclass
class Scene:
    """A chain on the disk, nothing of it on HOST, and the loop."""

    driver: StoreDriver
    turns: DiskTurns
    heard: list[tuple[int, int]] = field(default_factory=list)

    def session(self) -> tuple[SessionDriver, KeyChain, Lease]:
        session = self.driver.attach()
        chain = session.chain(tokens(BLOCKS))
        return session, chain, session.lookup(chain).lease

    def begin(self, session: SessionDriver, lease: Lease, start: int = 0, stop: int = BLOCKS) -> TailFetching:
        fetching = session.fetch_tail(lease, start, stop, lambda f: self.heard.append((f.ready, f.end)))
        assert isinstance(fetching, TailFetching)
        return fetching

    def faults(self, fetching: Fetching, chain: KeyChain) -> list[str]:
        """What is wrong with what is named."""
        group, shape = self.driver.group(), self.driver.attach().caller.shape
        slots = group.host.slots(fetching.lease.nodes[fetching.ready : fetching.stop]).tolist()
        keys = chain.keys[fetching.ready : fetching.stop]
        found = [slot_fault(group.arena, shape, s, k.tobytes()) for s, k in zip(slots, keys, strict=True)]
        return [fault for fault in found if fault]

    def hits(self) -> dict[Tier, int]:
        return {tier: n for tier, n in self.driver.group().counters.hit_blocks_by_tier.items() if n}


Scenes = Callable[..., Scene]


@pytest.fixture
def scenes(tmp_path: Path) -> Iterator[Scenes]:
    made: list[Scene] = []
    config = paced(tmp_path)
    salts = Salts.load(config)
    with StoreDriver(config, salts) as driver:
        saved(driver, BLOCKS)

    def make(limit: int = 0, faults: str = "") -> Scene:
        driver = StoreDriver(paced(tmp_path, limit=limit), salts, faults)
        made.append(Scene(driver, DiskTurns(driver)))
        return made[-1]

    yield make
    for scene in made:
        scene.turns.disks.close()
        scene.driver.pump(lambda s=scene: s.driver.nvme.promotions == 0)  # type: ignore[misc]
        scene.driver.store.check()
        assert scene.driver.group().host.counts()["filling"] == 0
        scene.driver.close()


# ---- order -------------------------------------------------------------------------------------------------


def test_the_last_blocks_come_first_a_piece_at_a_time(scenes: Scenes) -> None:
    scene = scenes(limit=LIMIT)
    session, chain, lease = scene.session()
    assert session.caller.shape.slot_bytes == SLOT and PIECE_BYTES // SLOT > PIECE
    fetching = scene.begin(session, lease)
    assert (fetching.ready, fetching.over) == (BLOCKS, False)
    began_s = scene.driver.clock.now()
    scene.turns.run(lambda: bool(scene.heard))
    first_s = scene.driver.clock.now() - began_s
    assert fetching.ready == 38 and scene.faults(fetching, chain) == []
    size = session.caller.shape.length
    assert PIECE * size / LIMIT <= first_s < PIECE * size / LIMIT + 2 * PACE_S, (
        "the pieces do not share the disk"
    )
    scene.turns.run(lambda: fetching.over)
    whole_s = scene.driver.clock.now() - began_s
    assert scene.heard == [(ready, 0) for ready in range(38, -1, -PIECE)]
    assert whole_s < 1.1 * BLOCKS * size / LIMIT, "and the disk is never idle"
    assert (fetching.reason, lease.state) == ("", LeaseState.DONE)
    assert scene.faults(fetching, chain) == []
    session.release(lease)
    assert scene.hits() == {Tier.NVME: BLOCKS}


def test_what_is_on_host_is_named_at_once(scenes: Scenes) -> None:
    scene = scenes()
    session, chain, other = scene.session()
    head = session.fetch(other, 0, 20)
    scene.turns.run(lambda: head.over)
    tail = scene.begin(session, other, 30)
    scene.turns.run(lambda: tail.over)
    session.release(other)
    lease = session.lookup(chain).lease
    fetching = scene.begin(session, lease, 5)
    assert fetching.ready == 30
    scene.turns.run(lambda: fetching.over)
    assert (fetching.ready, scene.driver.nvme.counters.read) == (5, BLOCKS)
    assert scene.faults(fetching, chain) == []
    before = scene.hits()
    session.release(lease)
    gained = {tier: n - before.get(tier, 0) for tier, n in scene.hits().items()}
    # As for its plan and for every other fetch: HOST is what leads there without a gap. What leads before the
    # tail needs no fetch.
    assert gained == {Tier.HOST: 20, Tier.NVME: 20}
    assert scene.begin(session, session.lookup(chain).lease).over, "all of it is there"


# ---- ends --------------------------------------------------------------------------------------------------


def test_it_ends_where_computing_meets_it(scenes: Scenes) -> None:
    scene = scenes(limit=LIMIT)
    session, chain, lease = scene.session()
    fetching = scene.begin(session, lease)
    fetches = scene.driver.group().fetches
    scene.turns.run(lambda: fetching.ready <= 26)
    fetches.enough(lease, 21)
    assert not fetching.over
    scene.turns.run(lambda: fetching.over)
    assert scene.heard[-4:] == [(26, 0), (24, 21), (22, 21), (21, 21)], "block 20 is of no use"
    assert scene.faults(fetching, chain) == []
    scene.driver.pump(lambda: scene.driver.nvme.promotions == 0)
    assert scene.driver.group().host.counts()["filling"] == 0, "the rest was not brought"
    fetches.enough(lease, 23)
    session.release(lease)
    assert scene.hits() == {Tier.NVME: BLOCKS - 23}


def test_a_meeting_above_what_has_come_ends_it_at_once(scenes: Scenes) -> None:
    scene = scenes(limit=LIMIT)
    session, _, lease = scene.session()
    fetching = scene.begin(session, lease)
    scene.turns.run(lambda: fetching.ready <= 26)
    scene.driver.group().fetches.enough(lease, 33)
    assert scene.heard[-2:] == [(26, 0), (26, 26)]
    assert (lease.state, len(scene.driver.group().fetches)) == (LeaseState.DONE, 0)
    session.release(lease)
    assert scene.hits() == {Tier.NVME: BLOCKS - 33}
    with pytest.raises(BadRequest, match="descending"):
        scene.driver.group().fetches.enough(scene.session()[2], 3)


def test_a_bad_block_costs_its_piece_and_what_lies_below(scenes: Scenes, tmp_path: Path) -> None:
    scene = scenes()
    size = SLOT + 4096
    for file in sorted(tmp_path.glob("disk/**/segment-*.kvs"))[2:3]:
        data = file.read_bytes()
        at = 4096 + 2 * size + 12_288  # in the payload of its third record
        file.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    session, chain, lease = scene.session()
    fetching = scene.begin(session, lease)
    scene.turns.run(lambda: fetching.over)
    probe = session.lookup(chain)
    bad = probe.blocks
    assert 0 < bad and scene.driver.nvme.counters.corrupt == 1
    # The piece behind it, too, when that begins right behind it and was not published yet.
    above = bad // PIECE * PIECE + PIECE
    assert above <= fetching.ready <= above + (PIECE if bad + 1 == above else 0)
    assert "rotten" in fetching.reason and lease.state is LeaseState.DONE
    assert scene.faults(fetching, chain) == []
    assert scene.heard[-1] == (fetching.ready, fetching.ready)
    session.release(lease)
    assert scene.hits() == {Tier.NVME: BLOCKS - fetching.ready}


def test_a_disk_that_stalls_leaves_what_came(scenes: Scenes) -> None:
    scene = scenes(limit=LIMIT)
    session, chain, lease = scene.session()
    fetching = scene.begin(session, lease)
    scene.turns.run(lambda: fetching.ready <= 26)
    nvme = scene.driver.nvme
    nvme._promotions.set_limits(1.0, 0.0)
    scene.turns.run(lambda: fetching.over)
    assert (fetching.ready, lease.state) == (26, LeaseState.ABANDONED)
    assert "stall" in fetching.reason
    assert scene.faults(fetching, chain) == []
    with pytest.raises(BadRequest, match="abandoned"):
        scene.begin(session, lease)
    session.release(lease)
    assert scene.hits() == {Tier.NVME: BLOCKS - 26}


def test_a_lease_that_ends_ends_it(scenes: Scenes) -> None:
    scene = scenes(limit=LIMIT)
    session, _, lease = scene.session()
    fetching = scene.begin(session, lease)
    scene.turns.run(lambda: fetching.ready <= 26)
    session.release(lease)
    assert scene.heard[-1] == (26, 26) and "lease" in fetching.reason
    assert len(scene.driver.group().fetches) == 0
    with pytest.raises(NotFound):
        session.fetch_tail(lease)


def test_no_room_ends_it_with_what_fits(scenes: Scenes) -> None:
    """HOST holds a little over a hundred slots: the newer chain pins most of them."""
    scene = scenes()
    session, chain, lease = scene.session()
    pins = []
    for number in range(1, 5):
        other = session.chain(tokens(24, 100_000 * number))
        session.save(other)
        pins.append(session.lookup(other).lease)
    fetching = scene.begin(session, lease)
    scene.turns.run(lambda: fetching.over)
    assert 0 < fetching.ready < BLOCKS and "room" in fetching.reason
    assert scene.faults(fetching, chain) == []


# ---- sharing -----------------------------------------------------------------------------------------------


def test_two_of_the_same_blocks_read_them_once(scenes: Scenes) -> None:
    scene = scenes(limit=LIMIT)
    sessions = [scene.session() for _ in range(2)]
    one = scene.begin(sessions[0][0], sessions[0][2])
    two = scene.begin(sessions[1][0], sessions[1][2], 10)
    scene.turns.run(lambda: one.over and two.over)
    assert (one.ready, two.ready) == (0, 10)
    assert scene.driver.nvme.counters.read == BLOCKS
    for session, _, lease in sessions:
        session.release(lease)
    assert scene.hits() == {Tier.NVME: BLOCKS + BLOCKS - 10}


def test_one_that_is_met_does_not_take_the_other_with_it(scenes: Scenes) -> None:
    scene = scenes(limit=LIMIT)
    sessions = [scene.session() for _ in range(2)]
    one = scene.begin(sessions[0][0], sessions[0][2])
    two = scene.begin(sessions[1][0], sessions[1][2])
    scene.driver.group().fetches.enough(sessions[0][2], 40)
    assert one.over
    scene.turns.run(lambda: two.over)
    assert (two.ready, two.reason) == (0, "")
    assert scene.faults(two, sessions[1][1]) == []


def test_an_ascending_and_a_descending_fetch_meet(scenes: Scenes) -> None:
    scene = scenes(limit=LIMIT)
    (session, chain, lease), (other, _, ascending) = scene.session(), scene.session()
    up = other.fetch(ascending)
    down = scene.begin(session, lease)
    scene.turns.run(lambda: up.over and down.over)
    assert (up.ready, down.ready, scene.driver.nvme.counters.read) == (BLOCKS, 0, BLOCKS)
    assert scene.faults(down, chain) == []


@pytest.mark.parametrize("seed", range(12))
def test_any_mixture_ends_in_order(scenes: Scenes, seed: int) -> None:
    """Fetches in both directions, some given up, some met: nothing is left half way (the fixture checks)."""
    random = np.random.default_rng(seed)
    scene = scenes(limit=int(random.choice([0, LIMIT])), faults=str(random.choice(["", "slow_ms=2:0.5"])))
    begun: list[tuple[SessionDriver, Lease, Fetching]] = []
    for _ in range(5):
        session, _, lease = scene.session()
        start = int(random.integers(0, 20))
        stop = int(random.integers(start + 1, BLOCKS + 1))
        fetch = session.fetch_tail if random.random() < 0.7 else session.fetch
        begun.append((session, lease, fetch(lease, start if fetch == session.fetch_tail else 0, stop)))
        session, lease, fetching = begun[int(random.integers(len(begun)))]
        if lease.state not in (LeaseState.RELEASED, LeaseState.REVOKED) and random.random() < 0.4:
            if lease.tail is not None and random.random() < 0.7:
                scene.driver.group().fetches.enough(lease, int(random.integers(0, BLOCKS)))
            else:
                session.release(lease)
        turns = scene.turns.wakes + int(random.integers(0, 8))
        scene.turns.run(lambda t=turns: scene.turns.wakes >= t)  # type: ignore[misc]
    scene.turns.run(lambda: all(fetching.over for _, _, fetching in begun))
    for session, lease, fetching in begun:
        if lease.state in (LeaseState.RELEASED, LeaseState.REVOKED):
            continue
        chain = session.chain(tokens(BLOCKS))
        if isinstance(fetching, TailFetching):
            assert scene.faults(fetching, chain) == []
        else:
            assert fetching.ready == fetching.stop
