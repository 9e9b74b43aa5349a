"""Identity and layout: what must be equal for bytes to be interchangeable."""

from __future__ import annotations

import dataclasses
import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import BadRequest
from kvstore.types import BlockLayout, Namespace, Part, Reuse, Tier, align

FIELDS = ("adapter", "attention", "block_tokens", "kv_dtype", "layout", "model", "tokenizer", "weights")
VALUES = {name: f"the {name}" for name in FIELDS}
NAMESPACE = Namespace.parse(VALUES)
LAYOUT = BlockLayout(layers=30, kv_heads=3, head_dim=64, dtype="bfloat16", block_tokens=16)
NAME = st.text(st.characters(exclude_categories=["C"]), min_size=1, max_size=512)


def take_text(raw: bytes) -> tuple[str, bytes]:
    length = int.from_bytes(raw[:4], "little")
    return raw[4 : 4 + length].decode(), raw[4 + length :]


@given(st.fixed_dictionaries(dict.fromkeys(FIELDS, NAME)))
def test_canonical_form_reads_back(values: dict[str, str]) -> None:
    raw, pairs = Namespace.parse(values).canonical(), []
    while raw:
        name, raw = take_text(raw)
        value, raw = take_text(raw)
        pairs.append((name, value))
    assert pairs == [(name, values[name]) for name in FIELDS]


def test_digest_is_blake2b_of_the_canonical_form() -> None:
    expected = hashlib.blake2b(NAMESPACE.canonical(), digest_size=32, person=b"kvstore-ns-v1").digest()
    assert NAMESPACE.digest == expected


@pytest.mark.parametrize("field", FIELDS)
def test_every_field_is_part_of_the_identity(field: str) -> None:
    other = dataclasses.replace(NAMESPACE, **{field: "another"})
    assert other.digest != NAMESPACE.digest
    assert other.root(b"s" * 16) != NAMESPACE.root(b"s" * 16)


def test_text_cannot_move_between_fields() -> None:
    one = dataclasses.replace(NAMESPACE, model="ab", adapter="c")
    two = dataclasses.replace(NAMESPACE, model="a", adapter="bc")
    assert one.digest != two.digest


@pytest.mark.parametrize("field", FIELDS)
def test_a_missing_field_is_named(field: str) -> None:
    with pytest.raises(BadRequest, match=rf"^namespace\.{field}: missing"):
        Namespace.parse({k: v for k, v in VALUES.items() if k != field})


def test_an_unknown_field_is_named() -> None:
    with pytest.raises(BadRequest, match=r"^namespace\.modle: unknown field"):
        Namespace.parse({**VALUES, "modle": "x"})


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("bad", ["", "x" * 513, "a\nb", "a\0", "\x7f", "\ud800"])
def test_bad_values_name_their_field(field: str, bad: str) -> None:
    with pytest.raises(BadRequest, match=rf"^namespace\.{field}: need 1 to 512 printable"):
        Namespace.parse({**VALUES, field: bad})


def test_values_of_another_type_are_refused() -> None:
    with pytest.raises(BadRequest, match=r"^namespace\.block_tokens: "):
        Namespace.parse({**VALUES, "block_tokens": 16})  # type: ignore[dict-item]


def test_roots_differ_by_salt() -> None:
    salts = [b"", b"a" * 16, b"b" * 16, b"a" * 17, b"a" * 64]
    assert len({NAMESPACE.root(salt) for salt in salts}) == len(salts)
    assert all(len(NAMESPACE.root(salt)) == 32 for salt in salts)


# ---- layout -----------------------------------------------------------------------------------------------

OTHER_LAYOUT = {
    "layers": 31,
    "kv_heads": 4,
    "head_dim": 128,
    "dtype": "float16",
    "block_tokens": 32,
    "cell_format": "[K|V][dim][token]",
    "kernel_block_tokens": 16,
    "attention": "window=4096",
    "groups": "full:0-15;window:16-29",
}


def test_every_layout_field_has_another_value_here() -> None:
    assert OTHER_LAYOUT.keys() == {field.name for field in dataclasses.fields(BlockLayout)}


@pytest.mark.parametrize("field", OTHER_LAYOUT)
def test_every_field_is_part_of_the_fingerprint(field: str) -> None:
    other = dataclasses.replace(LAYOUT, **{field: OTHER_LAYOUT[field]})
    assert other.fingerprint != LAYOUT.fingerprint
    assert len(other.fingerprint) == 32


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("layers", 0),
        ("layers", 1025),
        ("layers", 2.0),
        ("layers", "3"),
        ("kv_heads", -1),
        ("kv_heads", 1025),
        ("head_dim", 0),
        ("head_dim", 8193),
        ("block_tokens", 0),
        ("block_tokens", 4097),
        ("kernel_block_tokens", -1),
        ("kernel_block_tokens", 4097),
        ("kernel_block_tokens", "16"),
        ("dtype", "float64"),
        ("dtype", ""),
        ("cell_format", ""),
        ("attention", "a\nlayers=31"),
        ("groups", "x" * 513),
    ],
)
def test_layout_limits_are_named(field: str, bad: object) -> None:
    with pytest.raises(BadRequest, match=rf"^layout\.{field}: need"):
        dataclasses.replace(LAYOUT, **{field: bad})


@given(
    st.integers(1, 1024),
    st.integers(1, 64),
    st.integers(1, 8192),
    st.sampled_from(["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2", "int8"]),
    st.integers(1, 4096),
)
def test_sizes(layers: int, heads: int, dim: int, dtype: str, tokens: int) -> None:
    layout = BlockLayout(layers, heads, dim, dtype, tokens)
    width = {"float32": 4, "float16": 2, "bfloat16": 2}.get(dtype, 1)
    assert layout.cell_bytes == 2 * tokens * dim * width
    assert layout.block_bytes == layers * heads * layout.cell_bytes
    assert layout.cell_stride % 64 == 0 and 0 <= layout.cell_stride - layout.cell_bytes < 64
    needed = layers * heads * (layout.cell_stride + 4)
    assert layout.slot_bytes % 4096 == 0 and 0 <= layout.slot_bytes - needed < 4096


@given(st.integers(0, 1 << 40), st.integers(1, 1 << 20))
def test_align(size: int, unit: int) -> None:
    aligned = align(size, unit)
    assert aligned % unit == 0
    assert 0 <= aligned - size < unit


# ---- parts ------------------------------------------------------------------------------------------------


def test_parts_of_all_ranks_cover_every_cell_once() -> None:
    parts = [Part(0, 30, rank, 1) for rank in range(3)]
    for part in parts:
        part.check(LAYOUT)
    for layer in range(30):
        for head in range(3):
            assert sum(part.holds(layer, head) for part in parts) == 1
            assert Part.whole(LAYOUT).holds(layer, head)
    assert not Part.whole(LAYOUT).holds(30, 0)
    assert not Part.whole(LAYOUT).holds(0, 3)


@pytest.mark.parametrize(
    ("part", "field"),
    [
        (Part(0, 31, 0, 3), "layers"),
        (Part(29, 2, 0, 3), "layers"),
        (Part(-1, 2, 0, 3), "layers"),
        (Part(0, 0, 0, 3), "layers"),
        (Part(0, 30, 0, 4), "heads"),
        (Part(0, 30, 3, 1), "heads"),
        (Part(0, 30, -1, 1), "heads"),
        (Part(0, 30, 0, 0), "heads"),
    ],
)
def test_a_part_outside_the_layout_is_refused(part: Part, field: str) -> None:
    with pytest.raises(BadRequest, match=rf"^part\.{field}: "):
        part.check(LAYOUT)


# ---- enums ------------------------------------------------------------------------------------------------


def test_reuse_widens() -> None:
    assert Reuse.NONE.width < Reuse.OWN.width < Reuse.GROUP.width


def test_tier_names_are_their_values() -> None:
    assert [tier.value for tier in Tier] == ["GPU", "HOST", "NVME", "PEER", "REMOTE"]


def test_a_layout_has_no_more_cells_than_a_slot_can_sum() -> None:
    with pytest.raises(BadRequest, match="cells"):
        BlockLayout(1024, 65, 1, "int8", 1)
    assert BlockLayout(1024, 64, 1, "int8", 1).cells == 65_536
