"""Block keys against hashlib, for any tokens, extras and block sizes."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvstore import _native, keys
from kvstore.errors import BadRequest
from kvstore.keys import KEY_BYTES, WHOLE_MAX, KeyChain, as_tokens, probe_positions

ROOT = bytes(range(200, 232))
TOKEN = st.integers(0, 2**32 - 1)


def oracle(root: bytes, tokens: list[int], block_tokens: int, extra: dict[int, bytes]) -> list[bytes]:
    """The format as written down, with nothing of ours."""
    out, parent = [], root
    for block in range(len(tokens) // block_tokens):
        piece = extra.get(block, b"")
        mine = tokens[block * block_tokens : (block + 1) * block_tokens]
        data = parent + len(piece).to_bytes(4, "little") + piece
        data += b"".join(token.to_bytes(4, "little") for token in mine)
        parent = hashlib.blake2b(data, digest_size=32, person=b"kvstore-bk-v1").digest()
        out.append(parent)
    return out


def rows(chain: KeyChain) -> list[bytes]:
    return [key.tobytes() for key in chain.keys]


@given(
    st.binary(min_size=32, max_size=32),
    st.lists(TOKEN, max_size=200),
    st.integers(1, 70),
    st.dictionaries(st.integers(0, 12), st.binary(max_size=300), max_size=5),
)
@example(ROOT, list(range(28)), 28, {0: b""})
def test_any_chain(root: bytes, tokens: list[int], block_tokens: int, extra: dict[int, bytes]) -> None:
    expected = oracle(root, tokens, block_tokens, extra)
    chain = KeyChain.of(root, tokens, block_tokens, extra)
    assert rows(chain) == expected
    assert len(chain) == len(expected)
    assert chain.parent(0) == root
    assert [chain.parent(i + 1) for i in range(len(chain))] == expected
    total = sum(int.from_bytes(key[:8], "little") * (2 * i + 1) for i, key in enumerate(expected))
    assert chain.digest(len(chain)) == total % 2**64


@pytest.mark.parametrize("length", range(49))
def test_every_length_modulo_the_block(length: int) -> None:
    tokens = list(range(500, 500 + length))
    assert rows(KeyChain.of(ROOT, tokens, 16)) == oracle(ROOT, tokens, 16, {})


@pytest.mark.parametrize("size", [0, 1, 27, 28, 29, 60, 92, 4095, 4096])
def test_extras_around_compression_borders(size: int) -> None:
    extra = {1: bytes(i % 251 for i in range(size))}
    tokens = list(range(48))
    assert rows(KeyChain.of(ROOT, tokens, 16, extra)) == oracle(ROOT, tokens, 16, extra)


def test_an_empty_extra_is_no_extra() -> None:
    plain = rows(KeyChain.of(ROOT, range(32), 16))
    assert rows(KeyChain.of(ROOT, range(32), 16, {0: b""})) == plain
    assert rows(KeyChain.of(ROOT, range(32), 16, {0: b"\0"})) != plain


def test_an_extra_of_the_tail_binds_nothing() -> None:
    plain = KeyChain.of(ROOT, range(40), 16)
    assert rows(KeyChain.of(ROOT, range(40), 16, {2: b"x", 9: b"y"})) == rows(plain)


@pytest.mark.parametrize("extra", [{0: b"x" * 4097}, {-1: b"x"}, {0: "text"}, {0: 5}])
def test_bad_extras_are_refused(extra: dict[int, bytes]) -> None:
    with pytest.raises(BadRequest, match=r"^extra\[-?\d\]: need"):
        KeyChain.of(ROOT, range(32), 16, extra)


@pytest.mark.parametrize("root", [b"", b"x" * 31, b"x" * 33])
def test_a_bad_root_is_refused(root: bytes) -> None:
    with pytest.raises(BadRequest, match=r"^root: need 32 bytes"):
        KeyChain.of(root, range(32), 16)


@pytest.mark.parametrize("block_tokens", [0, -1])
def test_a_bad_block_size_is_refused(block_tokens: int) -> None:
    with pytest.raises(BadRequest, match=r"^block_tokens: need"):
        KeyChain.of(ROOT, range(32), block_tokens)


def test_no_tokens_no_keys() -> None:
    chain = KeyChain.of(ROOT, [], 16)
    assert chain.keys.shape == (0, KEY_BYTES)
    assert chain.parent(0) == ROOT
    assert chain.digest(0) == 0


def test_two_hundred_thousand_tokens() -> None:
    tokens = np.random.default_rng(7).integers(0, 2**32, 200_000, np.uint64)
    chain = KeyChain.of(ROOT, tokens, 16)
    assert rows(chain) == oracle(ROOT, tokens.tolist(), 16, {})


def test_the_test_vector_is_an_ordinary_key() -> None:
    tokens = list(range(70_000, 70_040))
    assert keys.test_vector() == oracle(bytes(range(32)), tokens, 16, {1: b"kvstore test vector"})[-1]


# ---- tokens -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int32, np.uint32, np.int64, np.uint64])
def test_integer_arrays_of_any_width(dtype: type[np.integer]) -> None:
    assert as_tokens(np.arange(100, dtype=dtype)).tolist() == list(range(100))


def test_views_need_not_be_contiguous() -> None:
    tokens = np.arange(100, dtype=np.uint32)[::3]
    assert as_tokens(tokens).flags.c_contiguous
    assert rows(KeyChain.of(ROOT, tokens, 16)) == oracle(ROOT, tokens.tolist(), 16, {})


@pytest.mark.parametrize(
    "tokens",
    [
        [0, -1],
        [2**32],
        [2**63],
        [2**64],
        [-1, 2**63],
        [0.0, 1.0],
        [1.5],
        ["1"],
        [None],
        [True, False],
        [[1, 2], [3, 4]],
        [[1, 2], [3]],
        5,
        np.zeros((2, 2), np.uint32),
        np.zeros((0, 2), np.uint32),
        np.array([-5], np.int64),
        np.array([2**32], np.uint64),
        np.array([np.nan]),
        np.array([1 + 2j]),
    ],
    ids=repr,
)
def test_what_is_not_a_list_of_ids_is_refused(tokens: object) -> None:
    with pytest.raises(BadRequest, match=r"^tokens: "):
        as_tokens(tokens)  # type: ignore[arg-type]


def test_more_tokens_than_any_context_are_refused() -> None:
    many = np.broadcast_to(np.uint32(0), (1 << 24) + 1)  # no memory behind it
    with pytest.raises(BadRequest, match="tokens_max"):
        as_tokens(many)


# ---- probes -----------------------------------------------------------------------------------------------


@given(st.integers(1, 1 << 24), st.sampled_from([0, 16, WHOLE_MAX]))
@example(1, 0)
@example(8, 0)
@example(9, 0)
@example(8000, WHOLE_MAX)
def test_probes(blocks: int, whole_max: int) -> None:
    positions = probe_positions(blocks, whole_max).tolist()
    if blocks <= whole_max:
        assert positions == list(range(blocks))
        return
    assert positions == sorted(set(positions))
    assert positions[0] == 0
    assert positions[-min(8, blocks) :] == list(range(max(0, blocks - 8), blocks))
    assert len(positions) <= 2 * math.sqrt(blocks) + 9
    gaps = np.diff([*positions, blocks])
    assert gaps.max() <= math.isqrt(blocks) + 1, "a gap would need a long second trip"


@pytest.mark.parametrize("blocks", [0, -1])
def test_nothing_to_probe(blocks: int) -> None:
    assert probe_positions(blocks).size == probe_positions(blocks, 0).size == 0


def test_a_long_chain_fits_one_native_call() -> None:
    assert len(probe_positions(1 << 22)) <= _native.KEYS_MAX
