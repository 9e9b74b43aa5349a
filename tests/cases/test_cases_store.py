"""Cases 9–11, 13–15, 23 and 26: pins, leases, room, and waits that end."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from fake_engine import BIG, LIMITS, SMALL
from raw_session import RawSession
from real_daemon import eventually
from scene import Scene

from kvstore.client import PoolSpec
from kvstore.rpc import messages as m
from kvstore.types import Busy, Miss, SaveResult

SMALL_ARENA = {"host__capacity_bytes": '"4MiB"'}
SLOTS = 14  # of BIG blocks


def test_case_09_clients_that_vanish_after_a_lookup_leave_no_pin(stage: Scene) -> None:
    """After many of them everything can still be evicted, so the hit rate does not sink to 0."""
    daemon = stage.start_daemon(**SMALL_ARENA)
    engine = stage.engine(layout=BIG, blocks=SLOTS)
    # A scheduler copies nothing, so its attach takes no slot for a proof.
    for number in range(40):
        chain = engine.chain(number, 2)
        assert engine.save(chain) == SaveResult(2, 0, 0, 0)
        with RawSession(daemon.socket) as raw:
            raw.attach(BIG, model=stage.name, role="scheduler")
            assert raw.lookup(raw.chain(number, 2)).lease
    eventually(lambda: daemon.group()["leases"] == 0, "every lease ended with its connection")
    assert engine.save(engine.chain(999, SLOTS)) == SaveResult(SLOTS, 0, 0, 0)
    assert engine.restored(engine.chain(999, SLOTS)) == SLOTS
    daemon.assert_sound()


def test_case_10_a_lease_has_no_timer(stage: Scene) -> None:
    """Held far beyond every limit of its daemon: the data is resident, so it is read."""
    daemon = stage.start_daemon(
        **SMALL_ARENA, daemon__heartbeat_s="0.1", daemon__stale_after_s="0.2", daemon__stall_s="0.1"
    )
    engine, other = stage.engine(layout=BIG, blocks=SLOTS), stage.engine(layout=BIG, blocks=SLOTS)
    chain = engine.saved(1, 8)
    hit = engine.hit(chain)
    until = time.monotonic() + 1.0
    eventually(lambda: time.monotonic() > until, "five times stale_after_s")
    # Under pressure too: its engine is alive and says so in the background.
    assert other.save(other.chain(2, SLOTS)).ready == SLOTS - 8
    assert engine.load(hit, chain).good == 8
    engine.client.release(hit.lease)
    assert daemon.group()["counters"]["revoked_leases"] == 0


def test_case_11_a_lease_is_released_by_its_id(stage: Scene) -> None:
    """Two leases on one chain: one release frees one pin, whoever computes which keys."""
    daemon = stage.start_daemon(**SMALL_ARENA)
    engine, other = stage.engine(layout=BIG, blocks=SLOTS), stage.engine(layout=BIG, blocks=SLOTS)
    chain = engine.saved(1, SLOTS)
    first, second = engine.hit(chain), engine.hit(chain)
    assert first.lease != second.lease
    engine.client.release(first.lease)
    engine.client.release(first.lease)
    assert daemon.group()["leases"] == 1
    assert other.save(other.chain(2, 3)).dropped == 3
    assert engine.load(second, chain).good == SLOTS
    engine.client.release(second.lease)
    assert daemon.group()["leases"] == 0
    assert other.save(other.chain(2, 3)).ready == 3


def test_case_13_a_full_pool_makes_room_inline(stage: Scene) -> None:
    """Full to the last slot: each save that is acknowledged is there, at once and whole."""
    daemon = stage.start_daemon(**SMALL_ARENA)
    engine = stage.engine(layout=BIG, blocks=SLOTS)
    engine.saved(0, SLOTS)
    assert daemon.group()["host"]["free"] == daemon.group()["host"]["free_slabs"] == 0
    for seed in range(1, 30):
        size = 1 + seed % SLOTS
        assert engine.save(engine.chain(seed, size)) == SaveResult(size, 0, 0, 0)
        assert engine.restored(engine.chain(seed, size)) == size
    assert daemon.group()["host"]["ready"] == SLOTS
    daemon.assert_sound()


def test_case_14_a_burst_keeps_its_newest_complete_prefixes(stage: Scene) -> None:
    """Three times as much as fits, from two engines by turns: nothing that is kept is useless."""
    daemon = stage.start_daemon(**SMALL_ARENA)
    engines = [stage.engine(layout=BIG), stage.engine(layout=BIG)]
    chains = [engines[number % 2].saved(number, 3) for number in range(14)]
    matched = [engines[0].matched(chain) for chain in chains]
    assert matched[-4:] == [3, 3, 3, 3]
    assert sum(matched) == daemon.group()["host"]["ready"] == SLOTS
    assert daemon.group()["host"]["dropped"]["evicted"] == 14 * 3 - SLOTS
    for chain, length in zip(chains, matched, strict=True):
        assert engines[1].restored(chain) == length
    daemon.assert_sound()


def test_case_15_a_lookup_right_after_a_save_hits(scene: Scene) -> None:
    """By the saver, by another engine, and for each part of a chain that grows."""
    saver, reader = scene.engine(), scene.engine()
    for seed in range(60):
        chain = saver.chain(seed, 3)
        assert saver.save(chain, 0, 2).ready == 2
        assert reader.matched(chain) == 2
        assert saver.save(chain, 2, 3).ready == 1
        assert saver.matched(chain) == reader.matched(chain) == 3


def test_case_23_every_wait_ends(stage: Scene) -> None:
    """The daemon is stopped in the middle of everything a client can ask: each answer comes all the same."""
    daemon = stage.start_daemon()
    limits = replace(LIMITS, call_s=0.2, attach_s=0.5, copy_s=5.0, retry_s=0.01, retry_max_s=0.02)
    engine = stage.engine(limits=limits, pool=PoolSpec("owned", 32, 32), blocks=32)
    chain = engine.saved(1, 9)
    questions = {
        "lookup": lambda: isinstance(engine.client.lookup(chain), Miss),
        "save": lambda: engine.save(chain).ready == 0,
        "reserve": lambda: engine.client.reserve(chain, 0, 9).token == 0,
        "acquire": lambda: isinstance(engine.client.acquire(0, 3), Busy),
        "status": lambda: engine.client.status()["attached"] is False,
        "check": lambda: engine.client.check()["attached"] is False,
        "heartbeat": lambda: engine.client.heartbeat() is False,
        "quiesced": lambda: engine.client.quiesced() is False,
        "observe": lambda: engine.client.observe(0, 0, 32, np.empty((0, 32), np.uint8), chain.keys) is False,
    }
    for generation, (name, question) in enumerate(questions.items(), start=1):
        eventually(lambda g=generation: engine.client.generation >= g and engine.client.attached, "attached")
        engine.client.poll()
        daemon.stopped()
        began = time.monotonic()
        assert question(), name
        assert time.monotonic() - began < 20, name
        daemon.process.send_signal(18)
    eventually(lambda: engine.client.attached, "attached at the end")
    daemon.stopped()
    began = time.monotonic()
    engine.close()
    assert time.monotonic() - began < 20
    daemon.process.send_signal(18)
    daemon.assert_quiet()


@pytest.mark.parametrize("victim", ["head", "middle"])
def test_case_26_no_tail_without_its_head(stage: Scene, victim: str) -> None:
    """Whatever leaves, every block that stays can be reached; and nothing is stored after a gap."""
    daemon = stage.start_daemon(**SMALL_ARENA)
    engine = stage.engine(layout=BIG, blocks=SLOTS)
    raw = stage.session().engine(BIG, model=stage.name)
    chain = engine.chain(1, 8)
    # A tail whose head is not there is not taken.
    orphan = engine.save(chain, 4, 8)
    assert (orphan.ready, orphan.dropped) == (0, 4)
    assert "parent" in orphan.reason
    # Nor one whose head is lost while it is written.
    got = raw.reserve(raw.chain(2, 6), 0, 3)
    tail = raw.reserve(raw.chain(2, 6), 3, 6)
    assert raw.ask(m.Abort(got.token)) == m.Done()
    assert raw.ask(m.Publish(tail.token, 3, False)) == m.Published(0, 3, False)
    assert daemon.group()["host"]["ready"] == 0
    # Rot in the middle: what is behind it stays, but is served only when the hole is filled.
    engine.save(chain)
    hit = engine.hit(chain)
    hole = 0 if victim == "head" else 3
    engine.flip(int(hit.slots[hole]))
    engine.load(hit, chain)
    engine.client.release(hit.lease)
    assert engine.matched(chain) == hole
    assert engine.save(chain) == SaveResult(1, 7, 0, 0)
    assert engine.restored(chain) == 8
    # Eviction takes the leaf of every chain first.
    for seed in range(10, 20):
        engine.saved(seed, 3)
        kept = [engine.matched(engine.chain(other, 3)) for other in range(10, seed + 1)]
        assert sum(kept) + engine.matched(chain) == daemon.group()["host"]["ready"]
    daemon.assert_sound()
    assert SMALL.block_tokens == BIG.block_tokens
