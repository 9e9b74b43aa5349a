"""The token bucket: never more than it may let through, never less than it could, however it is asked."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.policy.throttle import RATE_MIN, TokenBucket

RATES = st.floats(RATE_MIN, 1e11)
SIZES = st.floats(1.0, 1e9)
GAPS = st.lists(st.tuples(SIZES, st.floats(0.0, 100.0)), min_size=1, max_size=40)


def passed(bucket: TokenBucket, pieces: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """(when it had passed, size) of pieces that come so many seconds after one another."""
    came, out = 1000.0, []
    for size, gap in pieces:
        came += gap
        out.append((bucket.ready_s(size, came), size))
        bucket.take(size, came)
    return out


@given(RATES, st.floats(0.0, 1e9), GAPS)
def test_no_interval_sees_more_than_rate_and_burst_and_one_piece(rate, burst, pieces) -> None:
    out = passed(TokenBucket(rate, burst), pieces)
    assert [at for at, _ in out] == sorted(at for at, _ in out)
    largest = max(size for size, _ in out)
    for i, (begin, _) in enumerate(out):
        total = 0.0
        for end, size in out[i + 1 :]:
            total += size
            most = rate * (end - begin) + burst + largest
            assert total <= most * (1 + 1e-9) + rate * 1e-9


@given(RATES, st.floats(0.0, 1e9), GAPS)
def test_from_a_full_bucket_on_no_more_than_rate_and_burst(rate, burst, pieces) -> None:
    out, began, total = passed(TokenBucket(rate, burst), pieces), 1000.0 + pieces[0][1], 0.0
    for at, size in out:
        total += size
        # From when the first came: before it the bucket was full and could not get fuller.
        assert total <= (rate * (at - began) + burst) * (1 + 1e-9) + rate * 1e-9


@given(RATES, st.lists(SIZES, min_size=1, max_size=50))
def test_what_waits_passes_at_exactly_the_rate(rate, sizes) -> None:
    out = passed(TokenBucket(rate), [(size, 0.0) for size in sizes])
    assert out[-1][0] - 1000.0 == pytest.approx(sum(sizes) / rate, rel=1e-9, abs=1e-6)


def test_a_million_pieces_do_not_drift() -> None:
    bucket = TokenBucket(5e6)
    for _ in range(1_000_000):
        bucket.take(4096.0, 1000.0)
    assert bucket.ready_s(0.0, 1000.0) - 1000.0 == pytest.approx(1e6 * 4096 / 5e6, rel=1e-9)


@given(RATES, SIZES, st.floats(0.0, 1e4))
def test_pieces_agrees_with_ready_s(rate, size, wait) -> None:
    bucket, since = TokenBucket(rate), 1000.0
    now = since + wait
    count = bucket.pieces(size, since, now)
    if count:
        assert bucket.ready_s(count * size, since) <= now + (wait + 1.0) * 1e-8
    assert bucket.ready_s((count + 1) * size, since) > now - (wait + 1.0) * 1e-8
    assert bucket.pieces(size, since, bucket.ready_s(size, since)) >= 1, "no waiting in vain"


@given(st.lists(st.floats(0.0, 0.01), min_size=1, max_size=60))
def test_late_looks_cost_nothing_in_the_long_run(delays) -> None:
    """Somebody who looks late each time has taken as much as one who is on time, one piece at most less."""
    bucket, size, rate, now, taken = TokenBucket(1e6), 4096, 1e6, 1000.0, 0
    for delay in delays:
        now = max(now, bucket.ready_s(size, 1000.0)) + delay
        count = bucket.pieces(size, 1000.0, now)
        assert count >= 1
        bucket.take(count * size, 1000.0)
        taken += int(count) * size
        assert (now - 1000.0) * rate - size - 1 <= taken <= (now - 1000.0) * rate + 1


def test_a_pause_earns_the_burst_and_no_more() -> None:
    bucket = TokenBucket(1000.0, burst_bytes=500.0)
    assert bucket.ready_s(500, 10.0) == 10.0
    bucket.take(500, 10.0)
    assert bucket.ready_s(500, 10.0) == pytest.approx(10.5)
    assert bucket.ready_s(1500, 1000.0) == pytest.approx(1001.0), "990 s of pause are worth 500 bytes"
    assert TokenBucket(1000.0).ready_s(500, 1000.0) == pytest.approx(1000.5), "without a burst: nothing"


def test_the_rate_may_change_in_the_middle() -> None:
    bucket = TokenBucket()
    bucket.take(1e12, 10.0)
    assert bucket.ready_s(1e12, 10.0) == 10.0
    assert bucket.pieces(1, 10.0, 10.0) == math.inf
    bucket.set_rate(100.0, 20.0)
    assert bucket.ready_s(100, 15.0) == pytest.approx(21.0), "the time before the limit earns nothing"
    bucket.set_rate(RATE_MIN, 20.5)
    assert bucket.ready_s(100, 15.0) == pytest.approx(120.5)
    bucket.set_rate(math.inf, 30.0)
    assert bucket.ready_s(100, 15.0) == 30.0
    bucket.set_rate(math.inf, 99.0)
    assert bucket.ready_s(100, 15.0) == 30.0, "the same rate is no change"


@pytest.mark.parametrize("rate", [0.0, 0.5, -1.0, math.nan])
def test_no_rate(rate: float) -> None:
    with pytest.raises(ValueError, match="bytes_per_s: "):
        TokenBucket(rate)
    with pytest.raises(ValueError, match="bytes_per_s: "):
        TokenBucket().set_rate(rate, 0.0)


def test_no_size_no_moment() -> None:
    for burst in (-1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="burst_bytes: "):
            TokenBucket(1.0, burst)
    for size in (-1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="size_bytes: "):
            TokenBucket().ready_s(size, 0.0)
    for at in (math.inf, math.nan):
        with pytest.raises(ValueError, match="monotonic"):
            TokenBucket().pieces(1, at, at)
