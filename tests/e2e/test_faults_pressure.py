"""More than fits: pinned arenas, bursts, other block sizes. The newest complete prefixes stay."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fake_engine import BIG, LIMITS, SMALL, FakeEngine
from real_daemon import eventually
from scene import Scene

from kvstore.rpc import messages as m
from kvstore.types import Hit, Miss, SaveResult

SMALL_ARENA = {"host__capacity_bytes": '"4MiB"'}
SLOTS = 14  # of BIG blocks


def pinned(stage: Scene) -> tuple[FakeEngine, Hit]:
    """An arena that is full, and every block of it under a lease."""
    stage.start_daemon(**SMALL_ARENA)
    engine = stage.engine(layout=BIG, blocks=32)
    chain = engine.saved(1, SLOTS)
    return engine, engine.hit(chain)


def test_a_pinned_arena_is_busy_with_a_reason(stage: Scene) -> None:
    engine, hit = pinned(stage)
    saved = engine.save(engine.chain(2, 5))
    assert (saved.ready, saved.dropped) == (0, 5)
    assert "pinned" in saved.reason
    assert stage.daemon.group()["counters"]["refused_saves"] == 5
    # What is there can be read, and goes on being there.
    assert engine.load(hit, engine.chain(1, SLOTS)).good == SLOTS
    engine.client.release(hit.lease)
    assert engine.save(engine.chain(2, 5)) == SaveResult(5, 0, 0, 0)
    assert engine.restored(engine.chain(2, 5)) == 5
    assert engine.restored(engine.chain(1, SLOTS)) == SLOTS - 5  # leaves left first
    engine.close()
    stage.daemon.assert_quiet()


def test_a_raw_reserve_in_a_pinned_arena_says_busy(stage: Scene) -> None:
    stage.start_daemon(**SMALL_ARENA)
    raw = stage.session().engine(BIG, model=stage.name)
    engine = stage.engine(layout=BIG, blocks=32)
    hit = engine.hit(engine.saved(1, SLOTS))
    got = raw.reserve(raw.chain(2, 3))
    assert (got.token, got.slots, got.dropped) == (0, b"", 3)
    assert got.busy
    engine.client.release(hit.lease)
    got = raw.reserve(raw.chain(2, 3))
    assert (got.busy, got.dropped, len(got.slots)) == ("", 0, 12)
    assert raw.ask(m.Abort(got.token)) == m.Done()
    raw.close()
    engine.close()
    stage.daemon.assert_quiet()


def test_a_newcomer_waits_uncached_while_everything_is_pinned(stage: Scene) -> None:
    engine, hit = pinned(stage)
    newcomer = stage.engine(attach=False, layout=BIG, limits=replace(LIMITS, retry_max_s=0.02))
    # It is let in, fails to get a slot for its proof, hangs up and tries again.
    log = stage.daemon.log
    eventually(lambda: log.read_text().count("session attached") >= 4, "it has tried three times")
    assert not newcomer.client.attached
    assert newcomer.client.refusal is None, "full is not for ever"
    engine.client.release(hit.lease)
    assert newcomer.attached().saved(3, 2)


def test_slots_that_are_being_filled_are_not_evicted(stage: Scene) -> None:
    stage.start_daemon(**SMALL_ARENA)
    raw = stage.session().engine(BIG, model=stage.name)
    engine = stage.engine(layout=BIG, blocks=32)
    got = raw.reserve(raw.chain(1, 5))
    saved = engine.save(engine.chain(2, SLOTS))
    assert (saved.ready, saved.dropped) == (SLOTS - 5, 5)
    assert stage.daemon.group()["host"]["filling"] == 5
    assert raw.ask(m.Abort(got.token)) == m.Done()
    assert engine.save(engine.chain(2, SLOTS)) == SaveResult(5, SLOTS - 5, 0, 0)


@pytest.mark.parametrize("count", [5, 12])
def test_a_burst_larger_than_the_arena_keeps_its_newest(stage: Scene, count: int) -> None:
    """Chains of four blocks, one after the other: the newest are whole, an older one may lose its tail."""
    daemon = stage.start_daemon(**SMALL_ARENA)
    engine = stage.engine(layout=BIG)
    chains = [engine.saved(seed, 4) for seed in range(count)]
    kept = [engine.matched(chain) for chain in chains]
    assert sum(kept) == SLOTS, "the arena is full, and every block in it can be reached"
    assert kept == [0] * (count - 4) + [2, 4, 4, 4]
    assert [engine.restored(chain) for chain in chains] == kept
    host = daemon.group()["host"]
    assert host["ready"] == SLOTS
    assert host["dropped"]["evicted"] == 4 * count - SLOTS
    daemon.assert_sound()


def test_one_chain_longer_than_the_arena_keeps_its_head(stage: Scene) -> None:
    daemon = stage.start_daemon(**SMALL_ARENA)
    engine = stage.engine(layout=BIG, blocks=40)
    chain = engine.chain(1, 40)
    saved = engine.save(chain)
    assert (saved.ready, saved.dropped) == (SLOTS, 40 - SLOTS)
    assert saved.reason
    assert engine.restored(chain) == SLOTS
    assert daemon.group()["host"]["ready"] == SLOTS
    daemon.assert_sound()


def test_a_conversation_that_grows_evicts_others_not_itself(stage: Scene) -> None:
    stage.start_daemon(**SMALL_ARENA)
    engine = stage.engine(layout=BIG, blocks=SLOTS)
    engine.saved(7, 6)
    chain = engine.chain(1, SLOTS)
    for stop in range(2, SLOTS + 1, 3):
        saved = engine.save(chain, 0, stop)
        assert saved.dropped == 0
        assert saved.ready + saved.filled == stop
        assert engine.restored(engine.chain(1, stop)) == stop
    stage.daemon.assert_sound()


def test_memory_moves_between_block_sizes(stage: Scene) -> None:
    """An arena full of one size serves another: whole slabs change hands, nobody is starved."""
    daemon = stage.start_daemon(**SMALL_ARENA)
    big, small = stage.engine(layout=BIG, model="big"), stage.engine(layout=SMALL, model="small")
    big.saved(1, 12)
    for seed in range(3):
        few = small.saved(seed, 60)
        assert small.restored(few) == 60
        many = big.saved(100 + seed, 7)
        assert big.restored(many) == 7
    daemon.assert_sound()


def test_every_answer_is_given_when_nothing_fits(stage: Scene) -> None:
    """A block as large as a slab in an arena of one slab: one block at a time, and no wait for ever."""
    stage.start_daemon(host__capacity_bytes='"2MiB"')
    layout = replace(BIG, head_dim=3840)
    engine = stage.engine(layout=layout, blocks=4)
    first = engine.chain(1, 3)
    saved = engine.save(first)
    assert (saved.ready, saved.dropped) == (1, 2)
    hit = engine.hit(first)
    assert isinstance(engine.client.lookup(engine.chain(2, 3)), Miss)
    assert engine.save(engine.chain(2, 1)).dropped == 1
    engine.client.release(hit.lease)
    assert engine.save(engine.chain(2, 1)).ready == 1
    assert engine.matched(first) == 0
    stage.daemon.assert_sound()
