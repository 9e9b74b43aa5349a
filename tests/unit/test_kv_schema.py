"""KV events on the wire: what vLLM sends becomes the values that were meant, and nothing else becomes any."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.events import EventKind, KVEvent
from kvstore.router.kv_schema import (
    BLOCKS_MAX,
    PAYLOAD_BYTES_MAX,
    BadEvent,
    Batch,
    Cleared,
    Removed,
    Stored,
    decode_batch,
    extra_of,
)
from kvstore.rpc.zmq_wire import Schema
from kvstore.snapshots import SnapshotPart
from kvstore.types import Tier

NAMES = {
    "BlockStored": (
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
        "group_idx",
        "kv_cache_spec_kind",
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}
FORMS = pytest.mark.parametrize("form", ["array", "map"])


def wire(form: str, tag: str, *values: Any) -> Any:
    """An event as one generation of vLLM sends it."""
    if form == "array":
        return [tag, *values]
    return {"type": tag, **dict(zip(NAMES[tag], values, strict=False))}


def decoded(*events: Any, ts: float = 1.5, rank: int | None = None) -> Batch:
    """One payload with these events."""
    return decode_batch(msgspec.msgpack.encode([ts, list(events), *([rank] if rank is not None else [])]))


def u64(*numbers: int) -> bytes:
    return np.array(numbers, np.uint64).tobytes()


def tokens_of(event: Stored) -> list[int]:
    assert event.tokens is not None
    assert event.tokens.dtype == np.uint32
    return event.tokens.tolist()


# ---- both forms -------------------------------------------------------------------------------------------


@FORMS
def test_integers_and_their_tokens(form: str) -> None:
    batch = decoded(
        wire(form, "BlockStored", [1, 2**64 - 1], 7, [5, 6, 2**32 - 1, 8], 2, None, "GPU"), rank=3
    )
    (event,) = batch.events
    assert isinstance(event, Stored)
    assert (event.hashes, event.width, event.parent, len(event)) == (u64(1, 2**64 - 1), 8, u64(7), 2)
    assert (tokens_of(event), event.block_tokens) == ([5, 6, 2**32 - 1, 8], 2)
    assert (event.extra, event.tier, event.group, event.kind) == (b"", Tier.GPU, 0, "")
    assert (batch.ts_s, batch.rank, batch.skipped) == (1.5, 3, 0)


@FORMS
def test_bytes_and_no_tokens(form: str) -> None:
    keys = [bytes([n]) * 32 for n in range(3)]
    stored, removed, cleared = decoded(
        wire(form, "BlockStored", keys, None, [], 16, None, "CPU"),
        wire(form, "BlockRemoved", keys[:1], "DISK"),
        wire(form, "AllBlocksCleared"),
    ).events
    assert stored == Stored(b"".join(keys), 32, None, None, 16, b"", Tier.HOST)
    assert removed == Removed(keys[0], 32, Tier.NVME)
    assert cleared == Cleared(None)


@FORMS
def test_signed_hashes_are_the_same_64_bits(form: str) -> None:
    (event,) = decoded(wire(form, "BlockRemoved", [-1, 5])).events
    assert event == Removed(u64(2**64 - 1, 5), 8, Tier.GPU)


def test_older_versions_send_fewer_fields() -> None:
    (event,) = decoded(["BlockStored", [1], None, [3, 4], 2]).events
    assert isinstance(event, Stored)
    assert (tokens_of(event), event.tier, event.extra) == ([3, 4], Tier.GPU, b"")
    assert decoded(["BlockRemoved", [1]]).events == (Removed(u64(1), 8, Tier.GPU),)


def test_fields_of_later_versions_are_ignored() -> None:
    later = [
        "BlockStored",
        [1],
        None,
        [3],
        1,
        None,
        "GPU",
        None,
        None,
        2,
        "sliding_window",
        128,
        {"x": [1]},
        9,
    ]
    (event,) = decoded(later).events
    assert isinstance(event, Stored)
    assert (event.group, event.kind) == (2, "sliding_window")
    (event,) = decoded({"type": "BlockRemoved", "block_hashes": [1], "locality": "LOCAL", "new": {}}).events
    assert isinstance(event, Removed)


def test_unknown_types_are_counted_and_skipped() -> None:
    batch = decoded(["Moved", 1, 2], {"type": "Warmed", "x": 1}, ["BlockRemoved", [4]])
    assert batch.skipped == 2
    assert batch.events == (Removed(u64(4), 8, Tier.GPU),)


@pytest.mark.parametrize(
    ("medium", "tier"),
    [
        (None, Tier.GPU),
        ("GPU", Tier.GPU),
        ("CPU", Tier.HOST),
        ("cpu_pinned", Tier.HOST),
        ("DISK", Tier.NVME),
        ("STORAGE", Tier.NVME),
        ("REMOTE", Tier.REMOTE),
        ("HOLOGRAM", Tier.REMOTE),
    ],
)
def test_media_are_tiers(medium: str | None, tier: Tier) -> None:
    (event,) = decoded(["BlockRemoved", [1], medium]).events
    assert isinstance(event, Removed)
    assert event.tier is tier


def test_tokens_that_do_not_fill_their_blocks_tell_nothing() -> None:
    batch = decoded(["BlockStored", [1, 2], None, [1, 2, 3], 2])
    assert (batch.events, batch.skipped) == ((), 1)


# ---- what makes blocks differ -----------------------------------------------------------------------------


@FORMS
def test_blocks_with_other_extras_come_apart_and_keep_their_chain(form: str) -> None:
    keys = [["salt"], None, [["image", 3]], [["image", 3]], None]
    events = decoded(
        wire(form, "BlockStored", [1, 2, 3, 4, 5], 9, list(range(10)), 2, None, None, None, keys)
    ).events
    found = [(e.hashes, e.parent, tokens_of(e), e.extra) for e in events if isinstance(e, Stored)]
    image = extra_of(None, [("image", 3)])
    assert found == [
        (u64(1), u64(9), [0, 1], extra_of(None, ("salt",))),
        (u64(2), u64(1), [2, 3], b""),
        (u64(3, 4), u64(2), [4, 5, 6, 7], image),
        (u64(5), u64(4), [8, 9], b""),
    ]


def test_an_adapter_counts_for_every_block_however_it_is_told() -> None:
    told = ["BlockStored", [1, 2], None, [1, 2], 1, 4, None, "sql", None]
    repeated = ["BlockStored", [1, 2], None, [1, 2], 1, 4, None, "sql", [["sql"], ["sql"]]]
    by_number = ["BlockStored", [1, 2], None, [1, 2], 1, 4]
    extras = []
    for event in (told, repeated, by_number):
        (stored,) = decoded(event).events
        assert isinstance(stored, Stored)
        extras.append(stored.extra)
    assert extras == [extra_of("sql", ()), extra_of("sql", ()), extra_of(4, ())]
    assert len(set(extras)) == 2


def test_causes_that_differ_have_extras_that_differ() -> None:
    causes = [
        (None, ()),
        (None, ("a",)),
        ("a", ()),
        ("a", ("a", "a")),
        ("a", ("b",)),
        (None, ("a", "b")),
        (None, ("ab",)),
        (None, (b"a",)),
        (None, (("a", 1),)),
        (None, ("a", 1)),
        (None, (("a", "1"),)),
        (1, ()),
        ("1", ()),
        (None, (1,)),
    ]
    assert len({extra_of(*cause) for cause in causes}) == len(causes)


# ---- our own publisher ------------------------------------------------------------------------------------

keys_strategy = st.integers(0, 40).map(lambda n: np.random.default_rng(n).integers(0, 256, (n, 32), np.uint8))


@given(
    st.booleans(),
    st.sampled_from(list(EventKind)),
    st.sampled_from(list(Tier)),
    st.sampled_from([b"", bytes(range(16))]),
    st.sampled_from([b"", bytes(range(32))]),
    keys_strategy,
)
def test_what_the_daemon_publishes_is_read_back(
    as_map: bool, kind: EventKind, tier: Tier, engine: bytes, parent: bytes, keys: np.ndarray
) -> None:
    batch = decode_batch(Schema(as_map).event(KVEvent(1, kind, tier, engine, parent, keys), 2.5, 16))
    place = Tier.REMOTE if tier is Tier.PEER else tier
    expected: tuple[Any, ...]
    if kind is EventKind.CLEARED:
        expected = (Cleared(place),)
    elif not len(keys):
        expected = ()
    elif kind is EventKind.REMOVED:
        expected = (Removed(keys.tobytes(), 32, place),)
    else:
        expected = (Stored(keys.tobytes(), 32, parent or None, None, 16, b"", place),)
    assert batch == Batch(2.5, None, expected, 0)


def test_a_snapshot_tells_no_parents() -> None:
    keys = np.arange(64, dtype=np.uint8).reshape(2, 32)
    batch = decode_batch(Schema(False).snapshot(SnapshotPart(Tier.NVME, b"", keys), 0.0, 0))
    assert batch.events == (Stored(keys.tobytes(), 32, None, None, 0, b"", Tier.NVME),)


# ---- round trips ------------------------------------------------------------------------------------------

u32s = st.integers(0, 2**32 - 1)


@given(
    form=st.sampled_from(["array", "map"]),
    hashes=st.one_of(
        st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=20),
        st.lists(st.binary(min_size=32, max_size=32), min_size=1, max_size=20),
    ),
    size=st.integers(1, 8),
    data=st.data(),
)
def test_any_chain_is_read_back(form: str, hashes: list[Any], size: int, data: st.DataObject) -> None:
    count = len(hashes)
    tokens = data.draw(st.lists(u32s, min_size=count * size, max_size=count * size))
    salts = data.draw(
        st.lists(st.sampled_from([None, ["s"], ["t", ["m", 1]]]), min_size=count, max_size=count)
    )
    event = wire(form, "BlockStored", hashes, None, tokens, size, None, "CPU", None, salts)
    stored = [each for each in decoded(event).events if isinstance(each, Stored)]
    packed = b"".join(hashes) if isinstance(hashes[0], bytes) else u64(*hashes)
    assert b"".join(each.hashes for each in stored) == packed
    assert [token for each in stored for token in tokens_of(each)] == tokens
    extras = [each.extra for each in stored for _ in range(len(each))]
    assert extras == [extra_of(None, salt or ()) for salt in salts]
    width = stored[0].width
    assert [each.parent for each in stored] == [None, *(each.hashes[-width:] for each in stored[:-1])]


# ---- what is none -----------------------------------------------------------------------------------------

HONEST = msgspec.msgpack.encode(
    [
        1.0,
        [
            ["BlockStored", [1, 2], None, [1, 2, 3, 4], 2, None, "GPU", "lora", [["s"], None]],
            {"type": "BlockRemoved", "block_hashes": [b"x" * 32], "medium": "CPU"},
            ["AllBlocksCleared"],
        ],
        0,
    ]
)


@given(st.binary(max_size=300))
def test_any_bytes_are_a_batch_or_bad(payload: bytes) -> None:
    with contextlib.suppress(BadEvent):
        assert isinstance(decode_batch(payload), Batch)


@given(st.integers(0, len(HONEST) - 1))
def test_a_payload_that_was_cut_off_is_bad(at: int) -> None:
    with pytest.raises(BadEvent):
        decode_batch(HONEST[:at])


@given(st.integers(0, len(HONEST) - 1), st.integers(0, 255))
def test_a_payload_with_a_wrong_byte_is_a_batch_or_bad(at: int, byte: int) -> None:
    spoilt = HONEST[:at] + bytes([byte]) + HONEST[at + 1 :]
    with contextlib.suppress(BadEvent):
        assert isinstance(decode_batch(spoilt), Batch)


@pytest.mark.parametrize(
    ("event", "field"),
    [
        (["BlockStored"], "at least length"),
        (["BlockStored", [1, b"x" * 32], None, [], 0], "block_hashes"),
        (["BlockStored", [b"x", b"xy"], None, [], 0], "block_hashes"),
        (["BlockStored", [b""], None, [], 0], "block_hashes"),
        (["BlockStored", [-1, 2**64 - 1], None, [], 0], "block_hashes"),
        (["BlockStored", [b"x" * 65], None, [], 0], "block_hashes"),
        (["BlockStored", [1], b"x" * 32, [1], 1], "parent_block_hash"),
        (["BlockStored", [1], None, [-1], 1], "token_ids"),
        (["BlockStored", [1], None, [2**32], 1], "token_ids"),
        (["BlockStored", [1], None, [[1, 2]], 1], "event"),
        (["BlockStored", [1], None, [1], -1], "block_size"),
        (["BlockStored", [1], None, [1], 1, None, "GPU", None, [["s"], ["t"]]], "extra_keys"),
        (["BlockStored", [1], None, [1], 1, None, "GPU", None, [{"s": 1}]], "extra_keys"),
        (["BlockStored", [1], None, [1], 1, None, "GPU", None, [[{"s": 1}]]], "extra_keys"),
        (["BlockStored", [1], None, [1], 1, None, "GPU", None, [["s" * 5000]]], "extra_keys"),
        (["BlockStored", [1], None, [1], 1, None, 7], "event"),
        (["BlockStored", [1], None, [1], 1, None, "GPU", ["lora"]], "event"),
        (["BlockRemoved", list(range(BLOCKS_MAX + 1))], "event"),
        (["BlockRemoved", 5], "event"),
        ({"type": "BlockRemoved"}, "event"),
        ({"block_hashes": [1]}, "type"),
        ([], "type"),
        ([1], "type"),
        (5, "type"),
    ],
)
def test_a_wrong_event_is_named(event: Any, field: str) -> None:
    with pytest.raises(BadEvent, match=field):
        decoded(event)


def test_sizes_are_limited_before_anything_is_made_of_them() -> None:
    with pytest.raises(BadEvent, match="payload"):
        decode_batch(bytes(PAYLOAD_BYTES_MAX + 1))
    with pytest.raises(BadEvent, match="payload"):
        decode_batch(b"")
    with pytest.raises(BadEvent):  # four billion events in five bytes
        decode_batch(b"\x92\x00\xdd\xff\xff\xff\xff")
    with pytest.raises(BadEvent):
        decode_batch(b"\x92\x00\x91" + b"\x91" * 1_000_000 + b"\xc0")


def test_a_long_prompt_takes_milliseconds() -> None:
    tokens = np.random.default_rng(0).integers(0, 150_000, 100_000).tolist()
    payload = msgspec.msgpack.encode(
        [0.0, [["BlockStored", list(range(1, 6251)), None, tokens, 16, None, "GPU"]]]
    )
    best_s = min(timed(payload) for _ in range(3))
    assert best_s < 0.05  # 6 ms here; a loop over tokens in Python takes 100


def timed(payload: bytes) -> float:
    start_s = time.perf_counter()
    decode_batch(payload)
    return time.perf_counter() - start_s
