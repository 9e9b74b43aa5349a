"""The plan: for now it loads everything that is known, and says that it did not decide."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvstore.policy import reload
from kvstore.types import Span, Tier

BLOCKS = st.integers(0, 10_000)


@given(BLOCKS, BLOCKS)
def test_spans_cover_the_match_once_and_the_load_is_what_the_device_lacks(device: int, host: int) -> None:
    plan = reload.plan(device, host)
    covered = [block for span in plan.spans for block in (span.start, span.stop)]
    assert covered == sorted(covered)
    assert all(span.start < span.stop for span in plan.spans)
    assert sum(span.stop - span.start for span in plan.spans) == max(device, host)
    assert (plan.load_start, plan.load_stop) == (device, max(device, host))
    assert "not" in plan.reason


def test_device_first() -> None:
    assert reload.plan(2, 5).spans == (Span(Tier.GPU, 0, 2), Span(Tier.HOST, 2, 5))
    assert reload.plan(5, 2).spans == (Span(Tier.GPU, 0, 5),)
    assert reload.plan(0, 3).spans == (Span(Tier.HOST, 0, 3),)
    assert reload.plan(0, 0).spans == ()
