"""Cases 1–5 and 12: never a byte that is not the right one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from fake_engine import BIG, SMALL, DeviceMemory
from scene import Scene

from kvstore import _native
from kvstore.client import Client
from kvstore.rpc import messages as m
from kvstore.testing.driver import namespace_of
from kvstore.types import Hit, Namespace, Part, SaveResult

SMALL_ARENA = {"host__capacity_bytes": '"4MiB"'}
SLOTS = 14  # of BIG blocks
# The first byte of a cell, the last of another, and a byte of the table of sums.
FORM = _native.SlotFormat(SMALL.layers, SMALL.kv_heads, SMALL.cell_bytes)
OFFSETS = [0, 3 * FORM.cell_stride + SMALL.cell_bytes - 1, FORM.table_offset + 5]


@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("rotten", [0, 4, 8])
def test_case_01_payload_bits_flipped_at_rest(scene: Scene, offset: int, rotten: int) -> None:
    engine = scene.engine()
    corrupt = scene.daemon.group()["host"]["corrupt_blocks"]
    chain = engine.saved(1, 9)
    hit = engine.hit(chain)
    engine.flip(int(hit.slots[rotten]), offset)
    result = engine.load(hit, chain)
    assert result.good == rotten
    assert result.status[rotten] == _native.CORRUPT
    engine.client.release(hit.lease)
    # Found, counted, dropped; what lies before it is served, and it can be saved again.
    assert scene.daemon.group()["host"]["corrupt_blocks"] == corrupt + 1
    assert engine.restored(chain) == rotten
    assert engine.save(chain) == SaveResult(1, 8, 0, 0)
    assert engine.restored(chain) == 9


def test_case_01_many_blocks_rot_at_once(scene: Scene) -> None:
    engine = scene.engine()
    corrupt = scene.daemon.group()["host"]["corrupt_blocks"]
    chain = engine.saved(1, 100)
    hit = engine.hit(chain)
    for slot in hit.slots[10::2]:
        engine.flip(int(slot), 77)
    assert engine.load(hit, chain).good == 10
    engine.client.release(hit.lease)
    assert scene.daemon.group()["host"]["corrupt_blocks"] == corrupt + 45
    assert engine.restored(chain) == 10
    assert engine.save(chain) == SaveResult(45, 55, 0, 0)


def test_case_01_a_report_of_good_blocks_drops_nothing(scene: Scene) -> None:
    """The daemon looks for itself: a client with bad memory cannot empty the store."""
    engine = scene.engine()
    corrupt = scene.daemon.group()["host"]["corrupt_blocks"]
    chain = engine.saved(1, 9)
    hit = engine.hit(chain)
    assert engine.client.report(hit.lease, range(9)) is True
    engine.client.release(hit.lease)
    assert scene.daemon.group()["host"]["corrupt_blocks"] == corrupt
    assert engine.restored(chain) == 9


@pytest.mark.parametrize(
    "other",
    [
        replace(SMALL, dtype="float16", head_dim=128),
        replace(SMALL, layers=4, head_dim=32),
        replace(SMALL, kv_heads=4, head_dim=32),
        replace(SMALL, cell_format="[token][K|V][dim]"),
        replace(SMALL, attention="causal; rope_theta=500000"),
        replace(SMALL, kernel_block_tokens=2),
        replace(SMALL, groups="full:0-1"),
    ],
    ids=["dtype", "layers", "heads", "cells", "attention", "kernel block", "groups"],
)
def test_case_02_same_tokens_under_another_layout(scene: Scene, other) -> None:  # type: ignore[no-untyped-def]
    """Blocks of the same size, model and tokens; only the layout differs."""
    assert other.block_bytes == SMALL.block_bytes
    engine, stranger = scene.engine(), scene.engine(layout=other)
    engine.saved(1, 9)
    assert stranger.matched(stranger.chain(1, 9)) == 0
    assert stranger.save(stranger.chain(1, 9)) == SaveResult(9, 0, 0, 0)
    assert stranger.restored(stranger.chain(1, 9)) == 9
    assert engine.restored(engine.chain(1, 9)) == 9


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_case_02_another_tensor_parallel_size_shares_the_same_blocks(scene: Scene, ranks: int) -> None:
    """One engine saved whole blocks; each rank of another loads its own heads of them, and only those."""
    layout = replace(SMALL, kv_heads=4)
    engine = scene.engine(layout=layout)
    chain = engine.saved(1, 9)
    namespace = Namespace.parse(namespace_of(layout, scene.name))
    heads = layout.kv_heads // ranks
    engine_id = b""
    for rank in range(ranks):
        memory = DeviceMemory(layout, 10, part=Part(0, layout.layers, rank * heads, heads))
        client = Client(
            scene.daemon.socket,
            namespace,
            memory,
            scratch_block=9,
            engine=engine_id,
            limits=engine.client.limits,
        )
        scene.keep(client)
        assert client.wait_attached(60), client.refusal
        engine_id = client.engine
        hit = client.lookup(chain)
        assert isinstance(hit, Hit)
        result = client.load(hit, np.arange(9, dtype=np.uint32)).wait()
        assert result is not None
        assert result.good == 9
        assert memory.wrong(range(9), chain.keys) == []
        client.release(hit.lease)


def test_case_03_a_failed_store_is_never_visible(scene: Scene) -> None:
    """Given up, cut short, or ended by a lost connection: what was not published does not exist."""
    raw = scene.session().engine(SMALL, model=scene.name)
    engine = scene.engine()
    got = raw.reserve(raw.chain(1, 6))
    assert raw.ask(m.Abort(got.token)) == m.Done()
    assert engine.matched(engine.chain(1, 6)) == 0
    got = raw.reserve(raw.chain(2, 6))
    assert raw.ask(m.Publish(got.token, 0, False)) == m.Published(0, 6, False)
    assert engine.matched(engine.chain(2, 6)) == 0
    raw.reserve(raw.chain(3, 6))
    assert isinstance(raw.ask(m.Quiesced()), m.Quieted)
    assert engine.matched(engine.chain(3, 6)) == 0
    for seed in (1, 2, 3):
        assert engine.save(engine.chain(seed, 6)) == SaveResult(6, 0, 0, 0)
        assert engine.restored(engine.chain(seed, 6)) == 6


def test_case_03_published_but_not_written(scene: Scene) -> None:
    """A writer that lies: its sums do not fit its bytes, so no reader takes them."""
    raw = scene.session().engine(SMALL, model=scene.name)
    chain = raw.chain(1, 3)
    got = raw.reserve(chain)
    arena, shape = raw.mapped()
    for slot in np.frombuffer(got.slots, "<u4").tolist():
        arena.view(slot, shape.length)[:] = 0x5A
    assert raw.ask(m.Publish(got.token, 3, True)) == m.Published(3, 0, False)
    engine = scene.engine()
    assert engine.restored(engine.chain(1, 3)) == 0
    assert scene.daemon.group()["host"]["corrupt_blocks"] > 0
    assert engine.save(engine.chain(1, 3)) == SaveResult(3, 0, 0, 0)
    assert engine.restored(engine.chain(1, 3)) == 3


def test_case_04_a_block_that_is_being_written_does_not_match(scene: Scene) -> None:
    raw = scene.session().engine(SMALL, model=scene.name)
    engine = scene.engine()
    engine.save(engine.chain(1, 8), 0, 3)
    got = raw.reserve(raw.chain(1, 8))
    assert (got.filled, len(got.slots)) == (3, 32)
    assert engine.matched(engine.chain(1, 8)) == 3
    assert engine.save(engine.chain(1, 8)) == SaveResult(0, 3, 5, 0)
    assert engine.restored(engine.chain(1, 8)) == 3
    assert raw.ask(m.Abort(got.token)) == m.Done()
    assert engine.save(engine.chain(1, 8)) == SaveResult(5, 3, 0, 0)


def test_case_05_source_blocks_belong_to_the_save_until_it_ends(scene: Scene) -> None:
    """Saves under way while the device memory of ended ones is written over, again and again."""
    engine = scene.engine(layout=BIG, blocks=16)
    pending = []
    for seed in range(12):
        chain = engine.chain(seed, 4)
        blocks = np.arange(4, dtype=np.uint32) + 4 * (seed % 4)
        if len(pending) == 4:  # this part of the memory is still the source of the oldest save
            oldest = pending.pop(0)
            result = oldest.wait()
            assert result is not None
            assert result.ready == 4
            assert oldest.done
        engine.memory.fill(blocks.tolist(), chain.keys)
        pending.append(engine.client.save(chain, 0, 4, blocks))
    for save in pending:
        assert save.wait() is not None
    for seed in range(12):
        assert engine.restored(engine.chain(seed, 4)) == 4


def test_case_12_eviction_never_touches_what_is_being_read(stage: Scene) -> None:
    daemon = stage.start_daemon(**SMALL_ARENA)
    engine, other = stage.engine(layout=BIG, blocks=SLOTS), stage.engine(layout=BIG, blocks=SLOTS)
    chain = engine.saved(1, 8)
    hit = engine.hit(chain)
    for seed in range(10, 14):
        assert other.save(other.chain(seed, SLOTS)).ready == SLOTS - 8
    assert engine.load(hit, chain).good == 8
    engine.client.release(hit.lease)
    assert other.save(other.chain(20, SLOTS)).ready == SLOTS
    assert engine.matched(chain) == 0
    daemon.assert_sound()


def test_case_12_a_reader_without_a_lease_notices(stage: Scene) -> None:
    """Slots of an ended lease now hold another chain: fingerprint and generation say so, block by block."""
    daemon = stage.start_daemon(**SMALL_ARENA)
    engine, other = stage.engine(layout=BIG, blocks=SLOTS), stage.engine(layout=BIG, blocks=SLOTS)
    chain = engine.saved(1, SLOTS)
    hit = engine.hit(chain)
    engine.client.release(hit.lease)
    assert other.save(other.chain(2, SLOTS)).ready == SLOTS
    blocks = np.arange(SLOTS, dtype=np.uint32)
    result = engine.client.load_slots(hit.slots, chain.keys, blocks).wait()
    assert result is not None
    assert result.good == 0
    assert (result.status == _native.STALE).all()
    assert other.restored(other.chain(2, SLOTS)) == SLOTS
    assert daemon.group()["host"]["corrupt_blocks"] == 0
