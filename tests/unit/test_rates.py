"""Rates: what is learnt of a source's speed, what outliers and changes do to it."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.policy.rates import SOURCES_MAX, Rates, Source, Transfer
from kvstore.policy.speeds import SAMPLES_MAX
from kvstore.types import Tier

DISK = Source(Tier.NVME)
MIB = 1 << 20


def disk_s(
    total_bytes: int, latency_s: float = 1e-3, bytes_per_s: float = 2e9, deep_bytes: float = 0.0
) -> float:
    """A source with a latency, whose bandwidth grows with the bytes in flight: half of it at `deep_bytes`."""
    return latency_s + (total_bytes + deep_bytes) / bytes_per_s


def learn(rates: Rates, seconds_of: Callable[[int], float], sizes: list[int], start_s: float = 0.0) -> None:
    for number, size in enumerate(sizes):
        rates.observe(DISK, Transfer(size, 0, seconds_of(size)), start_s + number * 0.1)


def sizes_between(low: int, high: int, count: int, seed: int = 1) -> list[int]:
    rng = random.Random(seed)
    return [int(2 ** rng.uniform(low, high)) for _ in range(count)]


# ---- what is learnt ---------------------------------------------------------------------------------------


@given(st.floats(1e6, 1e10), st.floats(0.0, 6.4e7), st.integers(0, 1 << 30))
@settings(max_examples=100)
def test_any_source_is_learnt_from_twelve_transfers(bytes_per_s: float, pipe: float, seed: int) -> None:
    """Small and large ones. `pipe` bytes take as long as the latency."""
    rates, latency_s = Rates(), pipe / bytes_per_s
    sizes = sizes_between(18, 26, 6, seed) + sizes_between(26, 30, 6, seed)
    learn(rates, lambda size: disk_s(size, latency_s, bytes_per_s), sizes)
    for size in (1 << 18, 1 << 24, 1 << 30):
        assert rates.seconds(DISK, size) == pytest.approx(disk_s(size, latency_s, bytes_per_s), rel=0.1)


def test_bandwidth_depends_on_the_bytes_in_flight() -> None:
    """A shared wire whose throughput falls with what is in flight: one number would be off by 4 times."""
    rates = Rates()

    def congested(total: int) -> float:
        return total / (4e9 / (1 + total / (32 * MIB)))

    learn(rates, congested, sizes_between(20, 27, 48))
    for size in (4 * MIB, 16 * MIB, 64 * MIB, 128 * MIB):
        assert rates.seconds(DISK, size) == pytest.approx(congested(size), rel=0.35)
    assert rates.speed(DISK, 2 * MIB).bytes_per_s > 3 * rates.speed(DISK, 128 * MIB).bytes_per_s


def test_what_is_ahead_counts_as_what_is_asked() -> None:
    rates = Rates()
    for number, size in enumerate(sizes_between(18, 26, 24)):
        ahead = (number % 4) * 8 * MIB
        rates.observe(DISK, Transfer(size, ahead, disk_s(size + ahead)), number * 0.1)
    assert rates.seconds(DISK, MIB, 63 * MIB) == rates.seconds(DISK, 64 * MIB)
    assert rates.seconds(DISK, MIB, 63 * MIB) == pytest.approx(disk_s(64 * MIB), rel=0.1)


def test_a_first_byte_that_was_timed_is_the_latency() -> None:
    """Sizes that are all alike tell nothing of it."""
    rates, timed = Rates(), Rates()
    for number in range(8):
        rates.observe(DISK, Transfer(64 * MIB, 0, 0.5), number * 0.1)
        timed.observe(DISK, Transfer(64 * MIB, 0, 0.5, 0.2), number * 0.1)
        timed.observe(DISK, Transfer(64 * MIB, 1, 0.5, 0.4), number * 0.1)  # behind another: says nothing
    assert timed.speed(DISK, MIB).latency_s == pytest.approx(0.2)
    assert rates.speed(DISK, MIB).latency_s <= 0.25
    assert rates.seconds(DISK, 64 * MIB) == pytest.approx(0.5)
    assert timed.seconds(DISK, 64 * MIB) == pytest.approx(0.5)


@given(st.integers(0, 1 << 30), st.lists(st.sampled_from([0.01, 0.1, 10.0, 100.0]), min_size=2, max_size=2))
@settings(max_examples=100)
def test_two_outliers_change_nothing_much(seed: int, offs: list[float]) -> None:
    """The two latest, or any: of whatever size, off by up to a hundred times in either direction."""
    rng = random.Random(seed)
    sizes = sizes_between(20, 28, 40, seed)
    hit = [38, 39] if seed % 2 else rng.sample(range(40), 2)
    rates = Rates()
    for number, size in enumerate(sizes):
        off = offs[hit.index(number)] if number in hit else 1.0
        rates.observe(DISK, Transfer(size, 0, disk_s(size) * rng.uniform(0.95, 1.05) * off), number * 0.1)
    for size in (MIB, 4 * MIB, 64 * MIB):
        assert rates.seconds(DISK, size) == pytest.approx(disk_s(size), rel=0.3)


def test_two_outliers_where_nothing_else_was_seen() -> None:
    """Nearest in size and time, and yet they do not outvote those that are far away."""
    rates = Rates()
    learn(rates, disk_s, [64 * MIB, 16 * MIB] * 8)
    learn(rates, lambda size: 100 * disk_s(size), [MIB] * 2, start_s=10.0)
    assert rates.seconds(DISK, MIB) == pytest.approx(disk_s(MIB), rel=0.3)


def test_transfers_that_were_mostly_latency_say_little_of_bandwidth() -> None:
    rates, rng = Rates(), random.Random(1)
    for number, size in enumerate([256 * MIB] * 5 + [MIB // 16] * 20):
        seconds = disk_s(size, latency_s=0.01) * rng.uniform(0.97, 1.03)
        rates.observe(DISK, Transfer(size, 0, seconds), number * 0.1)
    assert rates.seconds(DISK, MIB // 2) == pytest.approx(disk_s(MIB // 2, latency_s=0.01), rel=0.15)


@pytest.mark.parametrize("factor", [400.0, 1 / 400.0])
def test_three_in_a_row_are_a_change(factor: float) -> None:
    """Unlimited → 5 MB/s and back: two are outliers, with the third the past is forgotten."""
    rates = Rates()
    learn(rates, disk_s, [64 * MIB] * 40)
    before = rates.seconds(DISK, 64 * MIB)
    changed = disk_s(64 * MIB) * factor
    seen = []
    for number in range(3):
        rates.observe(DISK, Transfer(64 * MIB, 0, changed), 100.0 + number)
        seen.append(rates.seconds(DISK, 64 * MIB))
    assert seen[:2] == [pytest.approx(before, rel=0.01)] * 2
    assert seen[2] == pytest.approx(changed, rel=0.01)


def test_probes_that_are_fast_clear_a_large_slow_past() -> None:
    """More in flight is no slower: three small transfers are enough to try a large one again."""
    rates = Rates()
    learn(rates, lambda size: size / 5e6, [64 * MIB] * 20)
    assert rates.seconds(DISK, 64 * MIB) > 10
    learn(rates, disk_s, [4 * MIB] * 3, start_s=10.0)
    assert rates.seconds(DISK, 64 * MIB) < 0.2


def test_small_transfers_that_are_slow_say_nothing_of_large_ones() -> None:
    """It may be latency: what is known of much in flight stays."""
    rates = Rates()
    learn(rates, disk_s, [64 * MIB] * 20)
    learn(rates, lambda _: 0.05, [MIB] * 3, start_s=10.0)
    assert rates.seconds(DISK, 64 * MIB) < 3 * disk_s(64 * MIB)
    assert rates.seconds(DISK, MIB) == pytest.approx(0.05, rel=0.5)


def test_slow_ones_whose_first_byte_came_soon_lack_bandwidth_everywhere() -> None:
    rates = Rates()
    learn(rates, disk_s, [64 * MIB] * 20)
    for number in range(3):
        rates.observe(DISK, Transfer(4 * MIB, 0, 0.8, 0.01), 10.0 + number)
    assert rates.seconds(DISK, 64 * MIB) == pytest.approx(16 * 0.79 + 0.01, rel=0.01)


def test_the_first_bytes_may_be_many() -> None:
    """A block at once: what it took to come is not latency."""
    rates = Rates()
    for number in range(3):
        first_s = 0.01 + MIB / 1e8
        rates.observe(DISK, Transfer(4 * MIB, 0, 0.01 + 4 * MIB / 1e8, first_s, MIB), float(number))
    assert rates.speed(DISK, MIB).latency_s == pytest.approx(0.01)
    assert rates.seconds(DISK, 64 * MIB) == pytest.approx(0.01 + 64 * MIB / 1e8)
    whole = Transfer.cut_short(64 * MIB, 4 * MIB, 0.01 + 4 * MIB / 1e8, 0.01 + MIB / 1e8, MIB)
    assert whole.seconds == pytest.approx(0.01 + 64 * MIB / 1e8)
    only = Transfer.cut_short(64 * MIB, MIB, 0.1, 0.05, MIB)  # one block, and nothing to take the pace from
    assert (only.seconds, only.latency_s) == (pytest.approx(6.4), 0.0)


def test_one_load_that_was_given_up_is_a_change() -> None:
    """A third of it came, and the pace is taken for the rest. That is a change, unless it was predicted."""
    rates = Rates()
    learn(rates, disk_s, [64 * MIB] * 20)
    cut = Transfer.cut_short(60 * MIB, 20 * MIB, 0.11, 0.01)
    assert cut.seconds == pytest.approx(0.01 + 3 * 0.1)
    rates.observe(DISK, cut, 10.0)
    assert rates.seconds(DISK, 60 * MIB) == pytest.approx(cut.seconds)
    rates.observe(DISK, Transfer.cut_short(60 * MIB, 20 * MIB, 0.1, 0.01), 11.0)
    assert rates.speed(DISK, MIB).samples == 2
    with pytest.raises(ValueError, match=r"^arrived_bytes:"):
        Transfer.cut_short(MIB, 0, 1.0, 0.1)
    with pytest.raises(ValueError, match=r"^first_byte_s:"):
        Transfer.cut_short(MIB, 1, 1.0, 2.0)
    assert Transfer.cut_short(1 << 60, 1, 1.0, 0.5).seconds == 1e6


def test_what_is_older_counts_less() -> None:
    """Five transfers of today outweigh ten of an hour ago, ten of a second ago they do not."""
    for passed_s, expected in ((3600.0, 0.15), (1.0, 0.1)):
        rates = Rates()
        for _ in range(10):
            rates.observe(DISK, Transfer(64 * MIB, 0, 0.1), 0.0)
        for _ in range(5):
            rates.observe(DISK, Transfer(64 * MIB, 0, 0.15), passed_s)
        assert rates.seconds(DISK, 64 * MIB) == pytest.approx(expected, rel=0.02)


# ---- cold, odd and hostile --------------------------------------------------------------------------------


def test_a_cold_source_is_a_guess_and_says_so() -> None:
    rates = Rates()
    for tier in Tier:
        speed = rates.speed(Source(tier), MIB)
        assert not speed.known
        assert speed.bytes_per_s > 0
    order = [rates.seconds(Source(tier), 64 * MIB) for tier in (Tier.HOST, Tier.NVME, Tier.PEER, Tier.REMOTE)]
    assert order == sorted(order)
    assert len(rates) == 0  # asking makes nothing
    rates.observe(DISK, Transfer(64 * MIB, 0, 10.0), 0.0)
    assert rates.speed(DISK, 64 * MIB).known
    assert rates.seconds(DISK, 64 * MIB) == pytest.approx(10.0)
    assert not rates.speed(Source(Tier.NVME, "another"), MIB).known


@given(
    st.lists(
        st.tuples(
            st.one_of(st.integers(1, 1 << 60), st.integers(1, 10)),
            st.one_of(st.just(0), st.integers(0, 1 << 60)),
            st.one_of(st.floats(0, 1e6), st.sampled_from([0.0, 5e-324, 1e6])),
            st.booleans(),
            st.floats(-1e12, 1e12),
        ),
        max_size=60,
    ),
    st.integers(0, 1 << 60),
)
@settings(max_examples=150)
def test_whatever_is_seen_predictions_are_numbers(
    seen: list[tuple[int, int, float, bool, float]], asked: int
) -> None:
    """Sizes and seconds of 18 orders of magnitude; a clock that jumps both ways."""
    rates = Rates()
    for size, ahead, seconds, timed, now_s in seen:
        rates.observe(DISK, Transfer(size, ahead, seconds, seconds / 2 if timed else None), now_s)
    speed, seconds = rates.speed(DISK, asked), rates.seconds(DISK, asked)
    assert 0.0 <= speed.latency_s <= 1e6
    assert 0.0 < speed.bytes_per_s < math.inf
    assert 0.0 <= seconds < math.inf
    assert (seconds == 0.0) == (asked == 0)
    assert speed.samples <= SAMPLES_MAX


def test_a_clock_that_jumps_forgets_nothing_and_breaks_nothing() -> None:
    rates = Rates()
    learn(rates, disk_s, [64 * MIB] * 10)
    for now_s in (1e15, -1e15, 5.0):
        rates.observe(DISK, Transfer(64 * MIB, 0, disk_s(64 * MIB)), now_s)
        assert rates.seconds(DISK, 64 * MIB) == pytest.approx(disk_s(64 * MIB), rel=0.01)
    assert rates.heard_s(DISK) == 1e15


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ((0, 0, 1.0), "size_bytes"),
        ((-1, 0, 1.0), "size_bytes"),
        ((1 << 61, 0, 1.0), "size_bytes"),
        ((math.nan, 0, 1.0), "size_bytes"),
        ((1, -1, 1.0), "ahead_bytes"),
        ((1, 0, -1.0), "seconds"),
        ((1, 0, math.nan), "seconds"),
        ((1, 0, math.inf), "seconds"),
        ((1, 0, 1.0, 2.0), "first_byte_s"),
        ((1, 0, 1.0, math.nan), "first_byte_s"),
        ((1, 0, 1.0, -1.0), "first_byte_s"),
        ((1, 0, 1.0, 0.5, -1), "first_bytes"),
    ],
)
def test_a_transfer_that_cannot_be_is_refused(values: tuple[int, int, float], named: str) -> None:
    with pytest.raises(ValueError, match=f"^{named}:"):
        Transfer(*values)


def test_questions_that_cannot_be_are_refused() -> None:
    rates = Rates()
    with pytest.raises(ValueError, match=r"^size_bytes:"):
        rates.seconds(DISK, -1)
    with pytest.raises(ValueError, match=r"^ahead_bytes:"):
        rates.seconds(DISK, 1, -1)
    with pytest.raises(ValueError, match=r"^in_flight_bytes:"):
        rates.speed(DISK, -1)
    for now_s in (math.nan, math.inf):
        with pytest.raises(ValueError, match=r"^now_s:"):
            rates.observe(DISK, Transfer(1, 0, 1.0), now_s)
    assert len(rates) == 0


def test_sources_have_a_limit() -> None:
    rates = Rates()
    for number in range(SOURCES_MAX + 10):
        rates.observe(Source(Tier.PEER, str(number)), Transfer(MIB, 0, 1.0), float(number))
    assert len(rates) == SOURCES_MAX
    assert not rates.speed(Source(Tier.PEER, "9"), MIB).known
    assert rates.speed(Source(Tier.PEER, "10"), MIB).known
    rates.forget(Source(Tier.PEER, "10"))
    assert not rates.speed(Source(Tier.PEER, "10"), MIB).known


# ---- across restarts --------------------------------------------------------------------------------------


@given(st.integers(0, 1 << 30), st.floats(-1e6, 1e6), st.floats(0, 1e6))
@settings(max_examples=40)
def test_what_was_learnt_outlives_a_restart(seed: int, then_s: float, since_s: float) -> None:
    """Through JSON, onto a clock that starts elsewhere: the same predictions."""
    rates = Rates()
    for number, size in enumerate(sizes_between(18, 28, 30, seed)):
        rates.observe(DISK, Transfer(size, number * MIB, disk_s(size)), then_s + number)
    later = Rates()
    later.restore(json.loads(json.dumps(rates.report(then_s + 30 + since_s))), 0.0)
    for size in (MIB, 64 * MIB):
        # Ages are rounded: a median may fall on the neighbour.
        assert later.seconds(DISK, size) == pytest.approx(rates.seconds(DISK, size), rel=0.05)


def test_what_is_heard_since_the_start_stays() -> None:
    old, new = Rates(), Rates()
    learn(old, lambda size: size / 5e6, [MIB] * 5)
    learn(new, disk_s, [64 * MIB])
    old.observe(Source(Tier.HOST), Transfer(MIB, 0, 1.0), 1.0)
    new.restore(old.report(1.0), 1.0)
    assert new.seconds(DISK, 64 * MIB) == pytest.approx(disk_s(64 * MIB), rel=0.01)
    assert new.seconds(Source(Tier.HOST), MIB) == pytest.approx(1.0)


BAD_ROWS: list[object] = [
    [-1.0, 1.0, 1.0, None],
    [0.0, 0.5, 1.0, None],
    [0.0, 1.0, 0.0, None],
    [0.0, 1.0, 1e9, None],
    [0.0, 1.0, 1.0, 2.0],
    [0.0, 1.0, "1", None],
    [0.0, 1.0],
    [math.nan, 1.0, 1.0, None],
]


@pytest.mark.parametrize("row", BAD_ROWS, ids=repr)
def test_a_report_with_a_bad_transfer_changes_nothing(row: object) -> None:
    good = {"tier": "HOST", "name": "", "samples": [[0.0, 1e6, 0.5, None]]}
    bad = {"tier": "NVME", "name": "", "samples": [row]}
    rates = Rates()
    with pytest.raises(ValueError):
        rates.restore({"format": "kvstore-rates", "version": 1, "sources": [good, bad]}, 0.0)
    assert len(rates) == 0


@pytest.mark.parametrize(
    ("report", "named"),
    [
        ({"format": "kvstore-rates", "version": 2, "sources": []}, "version 1"),
        ({"format": "kvstore-learnt", "version": 1, "sources": []}, "kvstore-rates"),
        ({"format": "kvstore-rates", "version": 1}, "sources"),
        ([], "kvstore-rates"),
        (None, "kvstore-rates"),
        (
            {
                "format": "kvstore-rates",
                "version": 1,
                "sources": [{"tier": "TAPE", "name": "", "samples": []}],
            },
            "TAPE",
        ),
        (
            {
                "format": "kvstore-rates",
                "version": 1,
                "sources": [{"tier": "NVME", "name": "", "samples": [[0.0, 1.0, 1.0, None]] * 99}],
            },
            "samples",
        ),
    ],
)
def test_another_report_is_refused(report: object, named: str) -> None:
    with pytest.raises(ValueError, match=re.escape(named)):
        Rates().restore(report, 0.0)
