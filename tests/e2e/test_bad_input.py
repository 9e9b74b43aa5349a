"""Requests that make no sense: each is answered, nothing is changed, the daemon goes on."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import msgspec
import numpy as np
import pytest
from fake_engine import BIG, LIMITS, SMALL
from raw_session import hello
from real_daemon import eventually
from scene import Scene

from kvstore._native import KEYS_MAX
from kvstore.errors import BadRequest, LayoutRefused, Refused
from kvstore.rpc import messages as m
from kvstore.testing.driver import namespace_of
from kvstore.types import BlockLayout, Hit, Miss, Namespace, SaveResult

U32 = "<u4"


# ---- prompts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 3])
def test_a_prompt_shorter_than_a_block_has_no_key(scene: Scene, size: int) -> None:
    engine = scene.engine()
    chain = engine.client.chain(np.arange(size, dtype=np.uint32), "default", engine.reuse)
    assert chain is not None
    assert len(chain) == 0
    assert isinstance(engine.client.lookup(chain), Miss)
    assert engine.client.save(chain, 0, 0, np.empty(0, np.uint32)).wait() == SaveResult(0, 0, 0, 0)


@pytest.mark.parametrize(
    "tokens", [[1, 2, 1 << 32], [1 << 70], [-1, 2], [0.5, 1.0], [[1, 2], [3, 4]], ["a"], [[1], [2, 3]]]
)
def test_ids_that_are_not_tokens_are_refused_by_name(scene: Scene, tokens: list[Any]) -> None:
    engine = scene.engine()
    with pytest.raises(BadRequest, match=r"^tokens: "):
        engine.client.chain(tokens, "default", engine.reuse)
    assert engine.saved(1, 2)


def test_200_000_tokens_are_answered(scene: Scene) -> None:
    layout = replace(SMALL, block_tokens=16, head_dim=16)
    engine = scene.engine(layout=layout, blocks=256)
    blocks = 200_000 // 16
    chain = engine.chain(1, blocks)
    assert isinstance(engine.client.lookup(chain), Miss)
    saved = engine.client.save(chain, 0, blocks, np.arange(blocks, dtype=np.uint32) % 256).wait()
    assert saved is not None
    assert saved.ready + saved.dropped == blocks
    assert saved.ready > 1000
    assert saved.reason
    hit = engine.hit(chain)
    assert saved.ready - 1 <= hit.blocks <= saved.ready
    engine.client.release(hit.lease)


def test_more_keys_than_one_message_holds(scene: Scene) -> None:
    raw = scene.session().engine(SMALL, model=scene.name)
    chain = raw.chain(1, KEYS_MAX + 1)
    assert "keys" in raw.failure(m.Reserve(chain.root, chain.root, chain.keys.tobytes())).message
    positions = np.arange(len(chain), dtype=U32).tobytes()
    assert "keys" in raw.failure(m.Lookup(chain.root, len(chain), positions, chain.keys.tobytes())).message


# ---- saves ------------------------------------------------------------------------------------------------


def test_duplicate_keys_in_one_save(scene: Scene) -> None:
    raw = scene.session().engine(SMALL, model=scene.name)
    chain = raw.chain(1, 3)
    twice = np.concatenate([chain.keys, chain.keys[1:2]]).tobytes()
    answer = raw.failure(m.Reserve(chain.root, chain.root, twice))
    assert answer.status == "INVALID_ARGUMENT"
    assert scene.daemon.group()["fillings"] == 0
    assert raw.lookup(chain).blocks == 0


def test_a_known_key_after_another_parent(scene: Scene) -> None:
    raw = scene.session().engine(SMALL, model=scene.name)
    chain = raw.chain(1, 3)
    got = raw.reserve(chain)
    bad = m.Reserve(chain.root, chain.root, chain.keys[1:].tobytes())
    assert raw.failure(bad).status == "INVALID_ARGUMENT"
    swapped = np.array([1, 0, 2], U32).tobytes()
    look = m.Lookup(chain.root, 3, swapped, chain.keys.tobytes())
    assert raw.failure(look).status == "INVALID_ARGUMENT"
    deeper = m.Lookup(chain.root, 9, np.array([4], U32).tobytes(), chain.keys[1:2].tobytes())
    assert raw.failure(deeper).status == "INVALID_ARGUMENT"
    assert raw.ask(m.Abort(got.token)) == m.Done()


def test_publish_without_reserve_twice_and_too_much(scene: Scene) -> None:
    raw = scene.session().engine(SMALL, model=scene.name)
    assert raw.failure(m.Publish(1 << 40, 1, True)).status == "NOT_FOUND"
    got = raw.reserve(raw.chain(1, 3))
    for blocks in (4, -1, 1 << 62):
        assert raw.failure(m.Publish(got.token, blocks, True)).status == "INVALID_ARGUMENT"
    assert raw.ask(m.Publish(got.token, 2, False)) == m.Published(2, 1, False)
    assert raw.failure(m.Publish(got.token, 2, False)).status == "NOT_FOUND"
    assert raw.failure(m.Abort(got.token)).status == "NOT_FOUND"
    got = raw.reserve(raw.chain(2, 3))
    assert raw.ask(m.Abort(got.token)) == m.Done()
    assert raw.failure(m.Publish(got.token, 3, True)).status == "NOT_FOUND"


def test_release_twice(scene: Scene) -> None:
    engine = scene.engine()
    chain = engine.saved(1, 3)
    raw = scene.session().engine(SMALL, model=scene.name)
    found = raw.lookup(raw.chain(1, 3))
    assert found.blocks == 3
    assert isinstance(raw.ask(m.Release(found.lease)), m.Released)
    assert raw.failure(m.Release(found.lease)).status == "NOT_FOUND"
    hit = engine.hit(chain)
    engine.client.release(hit.lease)
    engine.client.release(hit.lease)
    assert engine.load(hit, chain).good == 0
    assert engine.restored(chain) == 3


def test_a_parent_that_is_not_there(scene: Scene) -> None:
    raw = scene.session().engine(SMALL, model=scene.name)
    chain = raw.chain(1, 3)
    got = raw.reserve(chain, start=1)
    assert (got.token, got.dropped) == (0, 2)
    assert "parent" in got.reason
    for parent in (b"", b"x" * 31, b"x" * 33):
        assert raw.failure(m.Reserve(chain.root, parent, chain.keys.tobytes())).status == "INVALID_ARGUMENT"


# ---- what belongs to others -------------------------------------------------------------------------------


def test_ids_of_another_session_are_unknown(scene: Scene) -> None:
    engine = scene.engine()
    engine.saved(1, 4)
    owner = scene.session().engine(SMALL, model=scene.name)
    thief = scene.session().engine(SMALL, model=scene.name)
    found = owner.lookup(owner.chain(1, 4))
    positions, keys = np.array([0], U32).tobytes(), owner.chain(1, 1).keys.tobytes()
    for attempt in (
        m.Release(found.lease),
        m.Fetch(found.lease, 0, 1),
        m.Report(found.lease, positions),
        m.Extend(found.lease, positions, keys),
    ):
        assert thief.failure(attempt).status == "NOT_FOUND"
    got = owner.reserve(owner.chain(2, 3))
    assert thief.failure(m.Publish(got.token, 3, True)).status == "NOT_FOUND"
    assert thief.failure(m.Abort(got.token)).status == "NOT_FOUND"
    assert scene.daemon.group()["leases"] == 1
    assert isinstance(owner.ask(m.Release(found.lease)), m.Released)
    assert owner.ask(m.Abort(got.token)) == m.Done()


def test_a_root_that_was_not_given_to_us(scene: Scene) -> None:
    ours = scene.session().engine(SMALL, model=scene.name)
    theirs = scene.session().engine(SMALL, model=scene.name + " of others")
    chain = theirs.chain(1, 3)
    positions, keys = np.arange(3, dtype=U32).tobytes(), chain.keys.tobytes()
    for attempt in (
        m.Lookup(chain.root, 3, positions, keys),
        m.Reserve(chain.root, chain.root, keys),
        m.Lookup(b"", 3, positions, keys),
        m.Lookup(b"\0" * 32, 3, positions, keys),
    ):
        assert "root" in ours.failure(attempt).message
    # Nor may a key of another root be continued under our own.
    got = theirs.reserve(chain)
    mine = ours.chain(1, 3)
    bad = m.Reserve(mine.root, chain.keys[0].tobytes(), mine.keys[1:].tobytes())
    answer = ours.ask(bad)
    assert (answer.token, answer.dropped) == (0, 2)
    assert answer.reason == "the parent block is not known here", "as if nobody had it"
    assert theirs.ask(m.Abort(got.token)) == m.Done()


# ---- identity ---------------------------------------------------------------------------------------------


def test_every_missing_identity_field_is_named(scene: Scene) -> None:
    honest = namespace_of(SMALL, "model")
    names = [field.name for field in fields(Namespace)]
    assert len(names) == 8
    for name in names:
        for broken in ({k: v for k, v in honest.items() if k != name}, {**honest, name: ""}):
            answer = scene.session().refused(hello(SMALL, namespace=broken))
            assert answer.status == "INVALID_ARGUMENT"
            assert f"namespace.{name}" in answer.message
    answer = scene.session().refused(hello(SMALL, namespace={**honest, "colour": "red"}))
    assert "colour" in answer.message


_VALID = BlockLayout(2, 2, 64, "float32", 4)
BAD_HELLOS: list[tuple[str, dict[str, Any]]] = [
    ("version", {"version": 0}),
    ("version", {"version": 1 << 40}),
    ("vector", {"vector": b"\0" * 32}),
    ("vector", {"vector": b""}),
    ("engine", {"engine": b"12345"}),
    ("tenants", {"tenants": []}),
    ("tenants", {"tenants": ["nobody"]}),
    ("tenants", {"tenants": ["default", "x" * 500]}),
    ("layout", {"layout": None}),
    ("part.layers", {"part": (0, 0, 0, 2)}),
    ("part.layers", {"part": (1, 2, 0, 2)}),
    ("part.layers", {"part": (-1, 2, 0, 2)}),
    ("part.heads", {"part": (0, 2, 1, 2)}),
    ("part.heads", {"part": (0, 2, 0, 1 << 60)}),
    ("namespace.layout", {"namespace": {**namespace_of(_VALID, "m"), "layout": "0" * 32}}),
    ("namespace.block_tokens", {"namespace": {**namespace_of(_VALID, "m"), "block_tokens": "8"}}),
]


@pytest.mark.parametrize(("field", "changes"), BAD_HELLOS)
def test_an_attach_that_contradicts_itself(scene: Scene, field: str, changes: dict[str, Any]) -> None:
    answer = scene.session().refused(msgspec.structs.replace(hello(_VALID), **changes))
    assert field in answer.message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("layers", 0),
        ("layers", 1 << 40),
        ("kv_heads", -2),
        ("head_dim", 1 << 20),
        ("block_tokens", 0),
        ("dtype", "float12"),
        ("cell_format", ""),
        ("attention", "\0"),
        ("groups", "x" * 600),
        ("kernel_block_tokens", -1),
    ],
)
def test_a_layout_that_cannot_be(scene: Scene, field: str, value: Any) -> None:
    honest = hello(_VALID)
    assert honest.layout is not None
    layout = msgspec.structs.replace(honest.layout, **{field: value})
    answer = scene.session().refused(msgspec.structs.replace(honest, layout=layout))
    assert f"layout.{field}" in answer.message


def test_a_block_larger_than_a_slab(scene: Scene) -> None:
    answer = scene.session().refused(hello(replace(BIG, head_dim=8192)))
    assert answer.status == "PERMISSION_DENIED"  # for good: trying again changes nothing
    assert "host.slab_bytes" in answer.message


def test_a_layout_that_is_not_the_memory_s(scene: Scene) -> None:
    """Strides that would have saved and served wrong cells: found at attach, the engine runs uncached."""
    engine = scene.engine(attach=False, lie=True, limits=replace(LIMITS, refused_s=3600.0))
    assert not engine.client.wait_attached(60)
    assert isinstance(engine.client.refusal, LayoutRefused)
    assert "layout proof" in str(engine.client.refusal)
    assert engine.client.chain(np.arange(8, dtype=np.uint32), "default", engine.reuse) is None
    assert engine.client.status()["attached"] is False
    # An engine whose layout is true is not affected.
    assert scene.engine().saved(1, 3)


def test_an_unknown_tenant_is_refused_for_good(scene: Scene) -> None:
    engine = scene.engine(attach=False, tenant="nobody")
    assert not engine.client.wait_attached(60)
    assert isinstance(engine.client.refusal, Refused)
    assert "nobody" in str(engine.client.refusal)


# ---- order and roles --------------------------------------------------------------------------------------

_KEY = b"k" * 32
EVERY_REQUEST = [
    m.Prove(),
    m.ProvedStore(),
    m.Proved(True),
    m.Pool("owned", 4, 4),
    m.Lookup(_KEY, 1, b"\0" * 4, _KEY),
    m.Extend(1, b"\0" * 4, _KEY),
    m.Fetch(1, 0, 1),
    m.Enough(1, 0),
    m.Report(1, b""),
    m.Release(1),
    m.Reserve(_KEY, _KEY, _KEY),
    m.Publish(1, 1, True),
    m.Abort(1),
    m.Acquire(0, 1),
    m.Commit(1, _KEY, 0, _KEY, _KEY),
    m.Adopt(b"", b"", b""),
    m.Observe(0, 0, 4, b"", b""),
    m.Heartbeat(),
    m.Timings([], [], []),
    m.Quiesced(),
    m.Status(),
    m.Check(),
    m.Explain(""),
    m.Flush(),
]
FOR_TOOLS = (m.Heartbeat, m.Status, m.Check, m.Explain, m.Flush)
BEFORE_PROOF = (*FOR_TOOLS, m.Prove, m.ProvedStore, m.Proved, m.Quiesced)


def named(requests: list[Any]) -> Any:
    return pytest.mark.parametrize("ask", requests, ids=lambda ask: type(ask).__name__)


def test_every_request_is_tried() -> None:
    # Attach has tests of its own; Stop is obeyed, by whom it may (tests/cases: 33, test_keep_holder.py).
    kinds = {type(ask) for ask in EVERY_REQUEST} | {m.Attach, m.Stop}
    assert kinds == set(m.Request.__args__)


@named(EVERY_REQUEST)
def test_nothing_is_answered_before_attach(scene: Scene, ask: Any) -> None:
    assert scene.session().refused(ask).message == "attach: must come first"


@named([ask for ask in EVERY_REQUEST if not isinstance(ask, FOR_TOOLS)])
def test_a_tool_may_only_look(scene: Scene, ask: Any) -> None:
    tool = scene.session().tool()
    assert tool.fds == []
    assert "tool" in tool.failure(ask).message
    assert tool.check() == {"ok": True}


@named([ask for ask in EVERY_REQUEST if not isinstance(ask, BEFORE_PROOF)])
def test_nothing_is_shared_before_the_proof(scene: Scene, ask: Any) -> None:
    raw = scene.session().attach(SMALL, model=scene.name)
    assert "proof" in raw.failure(ask).message
    assert raw.prove().lookup(raw.chain(1, 2)).blocks == 0


def test_the_proof_has_an_order(scene: Scene) -> None:
    raw = scene.session().attach(SMALL, model=scene.name)
    assert "proved_store" in raw.failure(m.ProvedStore()).message
    assert "proved" in raw.failure(m.Proved(True)).message
    assert isinstance(raw.ask(m.Prove()), m.ProveSlot)
    assert "prove" in raw.failure(m.Prove()).message
    assert "proved" in raw.failure(m.Proved(True)).message
    raw.ask(m.Quiesced())
    raw.prove()
    assert "prove" in raw.failure(m.Prove()).message
    assert "attach" in raw.failure(hello(SMALL)).message


@pytest.mark.parametrize("lie", ["store", "load"])
def test_a_proof_that_fails_ends_the_session_and_its_slot(scene: Scene, lie: str) -> None:
    raw = scene.session().attach(SMALL, model=scene.name)
    if lie == "store":  # nothing is where it should be
        assert isinstance(raw.ask(m.Prove()), m.ProveSlot)
        answer = raw.refused(m.ProvedStore())
    else:
        raw.prove_store()
        answer = raw.refused(m.Proved(False))
    assert answer.status == "FAILED_PRECONDITION"
    # This process lives on, and still no slot waits for its end.
    eventually(lambda: scene.daemon.group()["engines"] == {}, "the engine is forgotten")
    assert scene.daemon.group()["host"]["filling"] == 0


def test_a_hit_of_a_client_is_not_moved_by_nonsense(scene: Scene) -> None:
    engine = scene.engine()
    chain = engine.saved(1, 6)
    for blocks in (-1, 7):
        with pytest.raises(BadRequest, match="blocks"):
            engine.client.lookup(chain, blocks)
    hit = engine.hit(chain)
    assert isinstance(hit, Hit)
    for target in (np.arange(5), np.full(6, engine.blocks + 5), np.array([0.5] * 6), -np.arange(6)):
        with pytest.raises(BadRequest, match="blocks"):
            engine.client.load(hit, target)
    with pytest.raises(BadRequest, match="chain"):
        engine.client.save(chain, 4, 9, np.arange(5))
    assert engine.load(hit, chain).good == 6
    engine.client.release(hit.lease)


def test_a_wrong_layout_costs_no_slot_however_often_it_is_tried(stage: Scene) -> None:
    # A daemon of its own: where the pool is full, the slot of a proof evicts a block, as it may.
    daemon = stage.start_daemon()
    honest = stage.engine()
    honest.saved(1, 5)
    honest.close()
    eventually(lambda: daemon.group()["engines"] == {}, "the honest engine is gone")
    before = daemon.group()["host"]["used_bytes"]
    for _ in range(3):
        engine = stage.engine(attach=False, lie=True)
        assert not engine.client.wait_attached(60)
        eventually(lambda: daemon.group()["engines"] == {}, "the refused engine is forgotten")
        host = daemon.group()["host"]
        assert (host["filling"], host["used_bytes"]) == (0, before)
