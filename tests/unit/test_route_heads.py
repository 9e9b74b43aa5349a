"""The prefixes that most requests begin with, as a warm-up needs them."""

from __future__ import annotations

import numpy as np

from kvstore.router.heads import HEADS_MAX, TOKENS_MAX, Heads
from kvstore.testing import SimClock


def ids(*parts: range) -> np.ndarray:
    return np.concatenate([np.array(part, np.uint32) for part in parts])


def test_a_head_is_what_all_its_requests_begin_with() -> None:
    heads = Heads(SimClock())
    heads.observe(b"a", ids(range(100), range(1000, 1100)), "", "m")
    assert heads.top(10) == [], "one request is nobody's shared prompt"
    heads.observe(b"a", ids(range(100), range(2000, 2100)), "", "m")
    heads.observe(b"a", ids(range(80)), "", "m")
    heads.observe(b"a", ids(range(100), range(1000, 1100)), "", "m")
    (found,) = heads.top(10)
    assert found.tokens.tolist() == list(range(80))
    assert found.count == 4


def test_the_first_is_the_one_that_saves_most() -> None:
    heads = Heads(SimClock())
    for _ in range(10):
        heads.observe(b"often", ids(range(100)), "", "")
    for _ in range(3):
        heads.observe(b"long", ids(range(5000, 6000)), "", "")
    assert [head.tokens.size for head in heads.top(5)] == [1000, 100]
    assert len(heads.top(1)) == 1


def test_what_was_hot_an_hour_ago_fades() -> None:
    clock = SimClock()
    heads = Heads(clock)
    for _ in range(10):
        heads.observe(b"old", ids(range(100)), "", "")
    clock.advance(3 * 3600)
    for _ in range(3):
        heads.observe(b"new", ids(range(500, 600)), "", "")
    assert heads.top(1)[0].tokens[0] == 500


def test_memory_is_bounded_and_the_least_worth_leaves() -> None:
    heads = Heads(SimClock())
    for _ in range(2):
        heads.observe(b"kept", ids(range(3 * TOKENS_MAX)), "", "")
    for name in range(2 * HEADS_MAX):
        heads.observe(name.to_bytes(4, "little"), ids(range(20)), "", "")
    assert len(heads) == HEADS_MAX
    assert [head.tokens.size for head in heads.top(5)] == [TOKENS_MAX]


def test_a_salt_is_in_no_repr() -> None:
    heads = Heads(SimClock())
    for _ in range(2):
        heads.observe(b"a", ids(range(100)), "secret", "m")
    assert "secret" not in repr(heads.top(1))
    assert heads.top(1)[0].salt == "secret"
