"""What a trust group knows of the cost of its bytes, and how it shows."""

from __future__ import annotations

import json

import pytest

from kvstore.policy.rates import SOURCES_MAX
from kvstore.pricing import Pricing, Source, Step, Transfer
from kvstore.status import status
from kvstore.testing import SimClock, StoreDriver
from kvstore.types import Tier

DISK, PEER = Source(Tier.NVME), Source(Tier.PEER, "red:7000")


def learn(pricing: Pricing, namespace: str) -> None:
    """Steps of an engine that needs 10 ms and 1 ms a token."""
    for start, tokens in ((0, 256), (0, 512), (4096, 512)) * 4:
        area = tokens * (start + tokens / 2)
        pricing.observe_step(namespace, Step(tokens, area, 0, 0, 0.01 + tokens / 1000))


def test_trust_is_made_once_and_of_a_source() -> None:
    pricing = Pricing(SimClock())
    trust = pricing.trust(DISK)
    trust.abandoned("it lagged", 1000.0)
    assert pricing.trust(DISK) is trust and pricing.trust(PEER).trusted
    assert pricing.trust(Source(Tier.NVME, "other")).trusted


def test_of_too_many_sources_the_trusted_that_nobody_asks_about_are_forgotten() -> None:
    clock = SimClock()
    pricing = Pricing(clock)
    doubted, asked = Source(Tier.PEER, "doubted"), Source(Tier.PEER, "asked about")
    pricing.trust(doubted).abandoned("it lagged", clock.now())
    first = pricing.trust(Source(Tier.PEER, "0"))
    kept = pricing.trust(asked)
    for number in range(1, SOURCES_MAX + 10):
        pricing.trust(Source(Tier.PEER, str(number)))
        assert pricing.trust(asked) is kept
    assert len(pricing.trusts) == SOURCES_MAX
    assert not pricing.trust(doubted).trusted
    assert pricing.trust(Source(Tier.PEER, "0")) is not first


def test_when_all_are_doubted_there_is_a_bound_even_so() -> None:
    clock = SimClock()
    pricing = Pricing(clock)
    for number in range(SOURCES_MAX + 10):
        pricing.trust(Source(Tier.PEER, str(number))).abandoned("it lagged", clock.now())
    assert len(pricing.trusts) == SOURCES_MAX
    assert pricing.trust(Source(Tier.PEER, "0")).trusted, "forgotten, so it starts again"


def test_what_teaches_nothing_is_not_counted_as_learnt() -> None:
    pricing = Pricing(SimClock())
    assert not pricing.observe_step("a", Step(512, 131_072.0, 0, 0, 0.5)), "the first of its size"
    assert pricing.observe_step("a", Step(512, 131_072.0, 0, 0, 0.5))
    pricing.observe_transfer(DISK, Transfer(4096, 0, 0.5))
    assert pricing.learnt == 2


def test_a_report_is_json_and_brings_everything_back_but_trust() -> None:
    pricing = Pricing(SimClock(5000.0))
    learn(pricing, "a" * 64)
    learn(pricing, "b" * 64)
    pricing.observe_transfer(PEER, Transfer(1 << 20, 0, 0.5))
    pricing.trust(PEER).abandoned("it lagged", 5000.0)
    after = Pricing(SimClock(3.0))
    assert after.restore(json.loads(json.dumps(pricing.report()))) == []
    assert after.namespaces() == pricing.namespaces() == ["b" * 64, "a" * 64]
    known = pricing.curves["a" * 64].seconds(0, 900)
    assert after.curves["a" * 64].seconds(0, 900) == pytest.approx(known)
    assert after.rates.seconds(PEER, 1 << 20) == pricing.rates.seconds(PEER, 1 << 20)
    assert after.trust(PEER).trusted


def test_status_says_what_is_known(driver: StoreDriver) -> None:
    engine = driver.attach().caller.engine
    pricing = driver.group().pricing
    learn(pricing, engine.namespace.digest.hex())
    learn(pricing, "f" * 64)
    pricing.observe_transfer(PEER, Transfer(1 << 20, 0, 0.5))
    pricing.trust(DISK).abandoned("blocks came too late", driver.clock.now())
    report = json.loads(json.dumps(status(driver.store)))["groups"]["default"]["pricing"]
    known = report["curves"][engine.namespace.digest.hex()]
    assert known["model"] == engine.namespace.model
    assert report["curves"]["f" * 64]["model"] is None
    assert known["seconds"] == {"1000": pytest.approx(1.02), "8000": pytest.approx(8.16)}
    assert known["steps"] == 10, "the first of each size is left out"
    peer, disk = report["sources"]["PEER:red:7000"], report["sources"]["NVME"]
    assert peer["samples"] == 1 and peer["trust"] is None
    assert 1.9e6 < peer["bytes_per_s"] < 2.4e6
    assert disk["samples"] == 0 and disk["trust"]["reason"] == "blocks came too late"
