"""Counters that the exporter reads: what they add up to, and their bounds."""

from __future__ import annotations

import pytest

from kvstore.meters import OTHER_TENANTS, PREFILL_STEPS_MAX, TENANTS_MAX, Histogram, Meters
from kvstore.types import Tier


def test_a_histogram_counts_a_value_under_every_bound_that_holds_it() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 3.0):
        histogram.observe(value)
    assert list(histogram.cumulative()) == [(1.0, 2), (2.0, 3), (float("inf"), 4)]
    assert (histogram.count, histogram.sum) == (4, 6.0)


def test_a_connector_cannot_claim_more_than_its_leases_held() -> None:
    meters = Meters(["alice"])
    meters.count_lookup("alice", 100)
    meters.observe_saved(64, "alice")
    assert meters.tenants["alice"].saved == 0  # told before its lease ended
    meters.count_hit("alice", {Tier.GPU: 16, Tier.HOST: 32})
    assert (meters.tenants["alice"].hits, meters.tenants["alice"].saved) == (48, 48)
    meters.check()


def test_check_names_the_tenant_whose_tokens_do_not_add_up() -> None:
    meters = Meters(["alice", "bob"])
    meters.count_hit("bob", {Tier.GPU: 16})  # never asked
    with pytest.raises(RuntimeError, match="tenant bob: tokens asked 0 >= hit 16"):
        meters.check()


def test_tenants_have_a_series_before_anything_happens() -> None:
    assert list(Meters(["alice", "bob"]).tenants) == ["alice", "bob"]


def test_of_too_many_tenants_the_first_to_ask_get_a_series_and_no_token_is_lost() -> None:
    names = [f"t{number}" for number in range(1000)]
    meters = Meters(names)
    assert meters.tenants == {}
    for name in reversed(names):
        meters.count_lookup(name, 16)
        meters.count_hit(name, {Tier.HOST: 16})
        meters.observe_saved(16, name)
        meters.observe_ttft(0.1, True, name)
    assert len(meters.tenants) == TENANTS_MAX + 1
    assert meters.tenants["t999"].lookup == 16
    assert meters.tenants[OTHER_TENANTS].lookup == 16 * (1000 - TENANTS_MAX)
    assert sum(tokens.hit[Tier.HOST] for tokens in meters.tenants.values()) == 16_000
    assert sum(tokens.saved for tokens in meters.tenants.values()) == 16_000
    assert meters.ttft[True].count == 1000
    meters.check()


def test_the_speed_of_prefill_is_that_of_the_latest_steps() -> None:
    meters = Meters()
    assert meters.prefill_tokens_per_s == 0.0
    meters.observe_prefill(1, 1000.0)
    for _ in range(PREFILL_STEPS_MAX):
        meters.observe_prefill(100, 0.5)
    assert meters.prefill_tokens_per_s == pytest.approx(200.0)
    assert (meters.prefill_tokens, meters.prefill_seconds) == (51_201, 1256.0)
