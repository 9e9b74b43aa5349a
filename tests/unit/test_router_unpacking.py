"""Long arrays of events, read in native code."""

from __future__ import annotations

import msgspec
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvstore._native import unpack_hashes, unpack_tokens


@given(st.lists(st.integers(0, (1 << 32) - 1), max_size=40))
def test_tokens_are_read_as_msgspec_writes_them(tokens: list[int]) -> None:
    assert np.frombuffer(unpack_tokens(msgspec.msgpack.encode(tokens)), np.uint32).tolist() == tokens


@given(st.lists(st.integers(-(1 << 63), (1 << 64) - 1), max_size=40))
def test_hashes_are_read_as_msgspec_writes_them(hashes: list[int]) -> None:
    assert np.frombuffer(unpack_hashes(msgspec.msgpack.encode(hashes)), np.uint64).tolist() == [
        h % (1 << 64) for h in hashes
    ]
