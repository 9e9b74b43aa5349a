"""What a scrape shows: the store's own numbers, named as Prometheus wants, bounded, and as documented."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import msgspec
import pytest
from plans import asked, computed, loaded
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from kvstore.config import MetricsConfig, Salts, TenantConfig
from kvstore.decisions import Outcome
from kvstore.log_limit import LogLimit
from kvstore.meters import TENANTS_MAX
from kvstore.policy.reload import Choice
from kvstore.rpc.metrics import LoopLag, Sources, StoreCollector
from kvstore.rpc.metrics.collector import Page
from kvstore.rpc.request_log import RequestLog
from kvstore.testing import StoreDriver, small_config, small_disk
from kvstore.types import Reuse, Tier

README = Path(__file__).parents[2] / "README.md"
OPEN_METRICS = "application/openmetrics-text;version=1.0.0"


def collector_of(driver: StoreDriver) -> StoreCollector:
    loop = asyncio.new_event_loop()
    lag = LoopLag(loop)
    lag.close()
    loop.close()
    requests = RequestLog(driver.clock, every=False)
    return StoreCollector(Sources(driver.store, requests, lag, 1_700_000_000.0, LogLimit(driver.clock)))


@pytest.fixture
def collector(driver: StoreDriver) -> StoreCollector:
    return collector_of(driver)


def text_of(collector: StoreCollector, accept: str = "") -> str:
    return b"".join(Page(collector, accept).pieces()).decode()


def samples(collector: StoreCollector) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    families = text_string_to_metric_families(text_of(collector))
    return {(s.name, frozenset(s.labels.items())): s.value for f in families for s in f.samples}


def value(collector: StoreCollector, name: str, **labels: str) -> float:
    return samples(collector)[name, frozenset(labels.items())]


def test_tokens_hit_are_the_sum_over_tiers(driver: StoreDriver, collector: StoreCollector) -> None:
    session = driver.attach()
    session.own_pool(16, 16)
    chain = session.chain(range(40))
    session.save(chain)
    for on_device in (0, 3, 3):  # all from HOST, then the first three blocks are on the device too
        found = session.lookup(chain)
        assert session.acquire(found.lease.id, 10).device == on_device
        session.commit(found.lease, chain, on_device, 3)
        session.release(found.lease)
    driver.group().meters.observe_saved(100, "default")
    assert value(collector, "kvstore_lookup_tokens_total", tenant="default") == 120
    hit = {
        tier: value(collector, "kvstore_hit_tokens_total", tier=tier, tenant="default")
        for tier in ("GPU", "HOST")
    }
    assert hit == {"GPU": 24, "HOST": 96}
    counters = driver.group().counters
    assert sum(hit.values()) == 4 * counters.hit_blocks
    assert value(collector, "kvstore_saved_prefill_tokens_total", tenant="default") == 100


def test_pools_show_what_the_store_counts(driver: StoreDriver, collector: StoreCollector) -> None:
    session = driver.attach()
    pool = session.own_pool(16, 16)
    chain = session.chain(range(40))
    session.save(chain, 0, 7)
    filling = session.reserve(chain, 7).filling
    table = session.acquire(0, 5)
    assert filling is not None
    counts = driver.group().host.counts()
    for state in ("free", "filling", "ready", "draining"):
        assert value(collector, "kvstore_host_slots", group="default", state=state) == counts[state]
    assert (counts["ready"], counts["filling"]) == (7, 3)
    for state, count in pool.counts().items():
        if state != "events_lost":
            assert value(collector, "kvstore_device_blocks", group="default", state=state) == count
    for name, expected in (
        ("kvstore_leases", 1),
        ("kvstore_fillings", 1),
        ("kvstore_sessions", 1),
        ("kvstore_engines", 1),
        ("kvstore_index_nodes", 10),
        ("kvstore_quarantined_slots", 0),
        ("kvstore_alarm", 0),
        ("kvstore_saved_blocks_total", 7),
    ):
        assert value(collector, name, group="default") == expected
    session.release(table.lease)
    session.disconnect()  # its process may still write
    assert value(collector, "kvstore_quarantined_slots", group="default") == 3
    driver.group().alarm = "look"
    assert value(collector, "kvstore_alarm", group="default") == 1


def test_what_leaves_is_counted_by_tier_and_reason(driver: StoreDriver, collector: StoreCollector) -> None:
    session = driver.attach()
    session.own_pool(4, 4)
    for seed in range(3):  # three times two slabs of 15
        session.save(session.chain(range(1000 * seed, 1000 * seed + 120)))
    chain = session.chain(range(16))
    for _ in range(2):
        session.save(chain)
        lease = session.acquire(0, 4).lease
        session.commit(lease, chain, 0, 4)
        session.release(lease)
    session.release(session.acquire(0, 4).lease)  # takes the four idle blocks
    evicted = samples(collector)

    def left(tier: str, reason: str) -> float:
        labels = {"group": "default", "tier": tier, "reason": reason}
        return evicted["kvstore_evicted_blocks_total", frozenset(labels.items())]

    assert left("HOST", "room") == driver.group().host.dropped["evicted"] == 64
    assert (left("GPU", "room"), left("GPU", "engine_gone")) == (8, 0)
    lease = session.acquire(0, 4).lease
    session.commit(lease, chain, 0, 4)
    session.release(lease)
    session.disconnect()
    labels = {"group": "default", "tier": "GPU", "reason": "engine_gone"}
    assert samples(collector)["kvstore_evicted_blocks_total", frozenset(labels.items())] == 4


def test_plans_are_counted_by_choice_and_judged(driver: StoreDriver, collector: StoreCollector) -> None:
    memory = driver.group().decisions
    plans = [memory.planned(asked(), loaded(load_s=0.5, recompute_s=1.0)) for _ in range(3)]
    memory.planned(asked(), computed())
    for plan, seconds in zip(plans, (0.5, 3.0), strict=False):  # of the third nobody tells
        memory.ended(plan, Outcome(seconds))
    plan = {c: value(collector, "kvstore_plan_total", group="default", choice=c) for c in Choice}
    assert plan == {"recompute": 1, "load": 3, "split": 0}
    for name, total, low, up_to_low in (
        ("kvstore_plan_regret_seconds", 2.0, "0.0", 1),
        ("kvstore_plan_error_ratio", 7.0, "0.9", 0),
    ):
        assert value(collector, f"{name}_count", choice="load") == 2
        assert value(collector, f"{name}_sum", choice="load") == total
        assert value(collector, f"{name}_bucket", choice="load", le=low) == up_to_low
        assert value(collector, f"{name}_count", choice="recompute") == 0


def test_event_lag_is_shown(driver: StoreDriver, collector: StoreCollector) -> None:
    events = driver.group().events
    listener = events.listen(lambda: None)
    events.heard(listener, events.sequence)
    session = driver.attach()
    session.save(session.chain(range(40)))
    driver.clock.advance(2.5)
    assert value(collector, "kvstore_event_lag", group="default") == events.sequence > 0
    assert value(collector, "kvstore_event_lag_seconds", group="default") == 2.5


@pytest.mark.parametrize("accept", ["", OPEN_METRICS, "text/html, */*", ";;q=,\xff"])
def test_the_page_is_one_that_prometheus_reads(collector: StoreCollector, accept: str) -> None:
    page = Page(collector, accept)
    text = b"".join(page.pieces()).decode()
    if accept == OPEN_METRICS:
        assert "openmetrics" in page.content_type
        assert text.endswith("\n# EOF\n") and text.count("# EOF") == 1
        families = list(openmetrics.text_string_to_metric_families(text))
    else:
        assert page.content_type.startswith("text/plain")
        families = list(text_string_to_metric_families(text))
    assert len(families) > 30


def test_names_follow_the_rules(collector: StoreCollector) -> None:
    for family in collector.collect():
        assert re.fullmatch(r"kvstore_[a-z_]+", family.name)
        assert family.documentation.endswith("."), family.name
        assert not re.search(r"_(ms|us|count|kib|mib)$", family.name), "base units only"
        text = text_of(collector)
        if family.type == "counter":
            assert f"# TYPE {family.name}_total counter" in text
        else:
            assert not family.name.endswith("_total")


def test_a_thousand_tenants_cost_no_more_than_some() -> None:
    tenants = tuple(TenantConfig(name=f"tenant{number:04}") for number in range(1000))
    with StoreDriver(small_config(tenants=tenants)) as driver:
        meters = driver.group().meters
        for tenant in tenants:
            meters.count_lookup(tenant.name, 16)
            meters.count_hit(tenant.name, {Tier.HOST: 16})
            meters.observe_ttft(0.1, True, tenant.name)
        # 4 µs each: 4 ms for all of them, made in pieces of at most 1 ms.
        assert len(samples(collector_of(driver))) < 1000
        pieces = list(Page(collector_of(driver), "").pieces())
        assert max(piece.count(b"\n") for piece in pieces) <= len(meters.of_tenant("tenant0000").hit) * (
            TENANTS_MAX + 2
        )
        assert value(collector_of(driver), "kvstore_lookup_tokens_total", tenant="(other)") == 16 * (
            1000 - TENANTS_MAX
        )


REFUSED = "kvstore_quota_refused_total"


@pytest.mark.parametrize("how", ["names", "digests", "none"])
def test_refusals_of_more_tenants_than_have_series_are_all_counted(how: str) -> None:
    """And those of one stay where they are, whoever else begins to use something."""
    tenants = tuple(TenantConfig(name=f"tenant{number:04}", leases_max=1) for number in range(300))
    config = msgspec.structs.replace(small_config(tenants=tenants), metrics=MetricsConfig(tenants=how))
    with StoreDriver(config) as driver:
        quotas, collector = driver.group().quotas, collector_of(driver)

        def refusals() -> dict[str, float]:
            found = samples(collector).items()
            return {dict(labels)["tenant"]: count for (name, labels), count in found if name == REFUSED}

        for tenant in reversed(tenants[150:]):
            assert quotas.lookup(tenant.name, 1)
        before = refusals()
        assert sum(before.values()) == 150
        for tenant in tenants[:150]:
            assert quotas.lookup(tenant.name, 1)
        after = refusals()
        assert sum(after.values()) == 300
        assert all(after[name] >= count for name, count in before.items())
        assert len(after) <= TENANTS_MAX + 1
        assert {name for name, count in after.items() if count > 1} <= {"(other)", "all"}


def test_labels_call_tenants_what_the_configuration_says() -> None:
    tenants = tuple(
        TenantConfig(name=name, group="red", reuse=Reuse.GROUP) for name in ("vermilion", "cobalt")
    )
    seen = {}
    for how in ("names", "digests", "none"):
        config = msgspec.structs.replace(small_config(tenants=tenants), metrics=MetricsConfig(tenants=how))
        salts = Salts({"vermilion": b"v" * 32, "cobalt": b"c" * 32}, {"red": b"r" * 32})
        with StoreDriver(config, salts) as driver:
            for name in ("vermilion", "cobalt"):
                session = driver.attach((name,))
                session.save(session.chain(range(8)))
                session.save(session.chain(range(8), reuse="group"))
            text = text_of(collector_of(driver))
            labels = [dict(found) for _, found in samples(collector_of(driver))]
            seen[how] = {found["tenant"] for found in labels if "tenant" in found}
            assert ("vermilion" in text) is (how == "names")
    assert seen["names"] == {"vermilion", "cobalt", "group:red"}
    assert seen["none"] == {"all"}
    assert len(seen["digests"]) == 3
    assert all(re.fullmatch("[0-9a-f]{12}", label) for label in seen["digests"])


def test_the_readme_lists_every_metric(tmp_path: Path) -> None:
    """Row for row what a scrape shows: name, type, labels and help."""
    limited = (TenantConfig(name="default", leases_max=1),)
    with StoreDriver(small_config(nvme=small_disk(tmp_path), tenants=limited)) as driver:
        collector = collector_of(driver)
        session = driver.attach()
        session.save(session.chain(range(8)))
        held = [session.lookup(session.chain(range(8))).blocks for _ in range(2)]
        assert held == [2, 0], "the second lease is refused"
        collector._sources.requests.slow["lookup"] = 1
        families = list(collector.collect())
    shown = []
    for family in families:
        labels = dict.fromkeys(key for sample in family.samples for key in sample.labels if key != "le")
        name = family.name + ("_total" if family.type == "counter" else "")
        quoted = " ".join(f"`{label}`" for label in labels) or "–"
        shown.append(f"| `{name}` | {family.type} | {quoted} | {family.documentation} |")
    listed = [line for line in README.read_text().splitlines() if line.startswith("| `kvstore_")]
    assert listed == shown, "the table should be:\n" + "\n".join(shown)
