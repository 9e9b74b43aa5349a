"""Quotas: what a tenant may use of each tier, and how fast; nobody pays for another's."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from kvstore.config import SharedConfig, TenantConfig
from kvstore.quotas import Quotas
from kvstore.testing import SessionDriver, StoreDriver, small_config, small_disk, small_layout
from kvstore.types import Reuse

SLOT = small_layout().slot_bytes
MIB = 1 << 20
Stage = Callable[..., StoreDriver]


@pytest.fixture
def stage() -> Iterator[Stage]:
    drivers: list[StoreDriver] = []

    def make(
        *tenants: TenantConfig,
        shared: tuple[SharedConfig, ...] = (),
        disk: Path | None = None,
        disk_bytes: int = 8 * MIB,
    ) -> StoreDriver:
        nvme = small_disk(disk, capacity_bytes=disk_bytes) if disk is not None else None
        config = small_config(tenants=tenants, nvme=nvme)
        drivers.append(StoreDriver(msgspec.structs.replace(config, shared=shared)))
        return drivers[-1]

    yield make
    for driver in drivers:
        driver.store.check()
        driver.close()


def tokens(name: int, blocks: int = 1) -> range:
    return range(10_000 * name, 10_000 * name + 4 * blocks)


def save(session: SessionDriver, name: int, blocks: int = 1, **root: str) -> int:
    return session.save(session.chain(tokens(name, blocks), **root)).ready


def holds(session: SessionDriver, name: int, blocks: int = 1, **root: str) -> int:
    found = session.lookup(session.chain(tokens(name, blocks), **root))
    if found.match.lease is not None:
        session.release(found.lease)
    return found.blocks


def refused(quotas: Quotas, owner: str) -> dict[str, int]:
    found = quotas.report()[owner]["refused"]
    assert isinstance(found, dict)
    return found


# ---- bytes -------------------------------------------------------------------------------------------------


def test_a_tenant_at_its_limit_lives_off_its_own_blocks(stage: Stage) -> None:
    driver = stage(TenantConfig(name="alice", host_bytes=4 * SLOT), TenantConfig(name="bob"))
    alice, bob = driver.attach(("alice",)), driver.attach(("bob",))
    for name in range(5):
        assert save(bob, name)
    for name in range(20):
        assert save(alice, name), "there is always room among its own"
    assert [name for name in range(20) if holds(alice, name)] == [16, 17, 18, 19]
    assert all(holds(bob, name) for name in range(5))
    report = driver.group().quotas.report()
    assert report["alice"] == {
        "host_bytes": 4 * SLOT,
        "nvme_bytes": 0,
        "limits": {"host_bytes": 4 * SLOT},
        "refused": {},
    }
    assert report["bob"]["host_bytes"] == 5 * SLOT


def test_what_does_not_fit_is_refused_with_the_key_and_others_save_on(stage: Stage) -> None:
    driver = stage(TenantConfig(name="alice", host_bytes=2 * SLOT), TenantConfig(name="bob"))
    alice, bob = driver.attach(("alice",)), driver.attach(("bob",))
    held = alice.chain(tokens(1, 2))
    alice.save(held)
    lease = alice.lookup(held).lease
    assert lease is not None
    got = alice.reserve(alice.chain(tokens(2, 3)))
    assert (got.filling, got.dropped) == (None, 3)
    assert got.reason == f"tenants.host_bytes = {2 * SLOT} of alice: its other blocks are in use"
    assert got.busy == got.reason
    assert refused(driver.group().quotas, "alice") == {"host_bytes": 1}
    assert driver.group().counters.refused_saves == 3
    assert save(bob, 3, 3) == 3
    alice.release(lease)
    assert save(alice, 4, 2) == 2
    assert not holds(alice, 1, 2)


def test_silent_engines_of_the_same_tenant_lose_their_pins_and_others_do_not(stage: Stage) -> None:
    driver = stage(TenantConfig(name="alice", host_bytes=2 * SLOT), TenantConfig(name="bob"))
    alice, bob, other = driver.attach(("alice",)), driver.attach(("bob",)), driver.attach(("alice",))
    for session in (alice, bob):
        session.save(session.chain(tokens(1, 2)))
        assert session.lookup(session.chain(tokens(1, 2))).lease is not None
    driver.clock.advance(60.0)
    assert save(other, 5, 2) == 2
    group = driver.group()
    assert (len(group.leases.of(alice.caller.session)), len(group.leases.of(bob.caller.session))) == (0, 1)


def test_silent_engines_lose_their_pins_on_shared_blocks_whoever_pays_for_them(stage: Stage) -> None:
    """The group's limit is reached by what y pins: only that makes room, and not what it pins of its own."""
    members = [TenantConfig(name=name, group="red", reuse=Reuse.GROUP) for name in ("x", "y")]
    driver = stage(*members, shared=(SharedConfig(group="red", host_bytes=2 * SLOT),))
    x, y = driver.attach(("x",)), driver.attach(("y",))
    for root in ("group", "own"):
        chain = y.chain(tokens(1, 2), reuse=root)
        y.save(chain)
        assert y.lookup(chain).lease is not None
    got = x.reserve(x.chain(tokens(2, 2), reuse="group"))
    assert (got.filling, got.dropped) == (None, 2), "y has just been heard of"
    driver.clock.advance(60.0)
    x.heartbeat()
    assert save(x, 2, 2, reuse="group") == 2
    group = driver.group("red")
    assert [lease.root for lease in group.leases.of(y.caller.session)] == [y.chain(tokens(1)).root]
    assert group.counters.revoked_leases == 1


def test_shared_blocks_count_for_the_group(stage: Stage) -> None:
    members = [
        TenantConfig(name=name, group="red", reuse=Reuse.GROUP, host_bytes=SLOT) for name in ("a", "b")
    ]
    driver = stage(*members, shared=(SharedConfig(group="red", host_bytes=3 * SLOT),))
    a, b = driver.attach(("a",)), driver.attach(("b",))
    for name in range(6):
        assert save((a, b)[name % 2], name, reuse="group")
    assert [name for name in range(6) if holds(a, name, reuse="group")] == [3, 4, 5]
    assert save(a, 20)
    assert save(a, 21)
    assert [name for name in (20, 21) if holds(a, name)] == [21]
    report = driver.group("red").quotas.report()
    assert {name: used["host_bytes"] for name, used in report.items()} == {
        "a": SLOT,
        "b": 0,
        "group:red": 3 * SLOT,
    }


def test_a_reload_sets_lifts_and_lowers_limits(stage: Stage) -> None:
    driver = stage(TenantConfig(name="alice"), TenantConfig(name="bob"))
    alice, bob = driver.attach(("alice",)), driver.attach(("bob",))
    for name in range(6):
        save(alice, name)

    def reload(**limits: int) -> None:
        tenants = (TenantConfig(name="alice", **limits), TenantConfig(name="bob"))
        driver.group().reconfigure(msgspec.structs.replace(driver.config, tenants=tenants))

    reload(host_bytes=3 * SLOT)
    assert save(alice, 10)
    assert [name for name in (*range(6), 10) if holds(alice, name)] == [4, 5, 10]
    reload()
    for name in range(20, 26):
        assert save(alice, name)
    assert driver.group().quotas.report()["alice"]["host_bytes"] == 9 * SLOT
    assert save(bob, 1)


# ---- the disk ----------------------------------------------------------------------------------------------


def on_disk(driver: StoreDriver, owner: str) -> int:
    report = driver.group().quotas.report()  # who has nothing is not listed
    return int(report[owner]["nvme_bytes"]) // SLOT if owner in report else 0  # type: ignore[call-overload]


def test_on_the_disk_a_tenant_gives_up_its_oldest_for_its_newest(stage: Stage, tmp_path: Path) -> None:
    driver = stage(TenantConfig(name="alice", nvme_bytes=4 * SLOT), TenantConfig(name="bob"), disk=tmp_path)
    alice, bob = driver.attach(("alice",)), driver.attach(("bob",))
    for name in range(3):
        save(bob, name)
    for name in range(8):
        save(alice, name)
        driver.settle()
    assert (on_disk(driver, "alice"), on_disk(driver, "bob")) == (4, 3)
    nodes = driver.group().index
    there = [
        name
        for name in range(8)
        if driver.nvme.readable(
            np.array([nodes.find(alice.chain(tokens(name)).keys[0].tobytes())], np.uint32)
        )[0]
    ]
    assert there == [4, 5, 6, 7]
    assert save(alice, 50, 6) == 6  # more than it may have at all: HOST keeps it
    driver.settle()
    assert on_disk(driver, "alice") <= 4
    assert driver.nvme.admission.refused_by_reason()["quota"]
    assert refused(driver.group().quotas, "alice")["nvme_bytes"]
    assert driver.nvme.counters.dropped["over_limit"] >= 4


@pytest.mark.parametrize("quota", [True, False])
def test_on_the_disk_a_flood_within_its_quota_turns_the_log_for_nobody_else(
    stage: Stage, tmp_path: Path, quota: bool
) -> None:
    """What bob never uses stays. Without the quota the same flood takes all: or it would prove nothing."""
    flooding = TenantConfig(name="alice", nvme_bytes=60 * SLOT if quota else 0)
    driver = stage(flooding, TenantConfig(name="bob"), disk=tmp_path, disk_bytes=32 * MIB)
    alice, bob = driver.attach(("alice",)), driver.attach(("bob",))
    for name in range(15):
        assert save(bob, name, 4) == 4
        save(alice, 100 + name, 4)
        driver.settle()
    assert on_disk(driver, "bob") == 60
    flood = 2 * 32 * MIB // (4 * SLOT)
    for name in range(1000, 1000 + flood):
        save(alice, name, 4)
        driver.settle()
    assert on_disk(driver, "bob") == (60 if quota else 0)
    dropped = driver.nvme.counters.dropped
    assert (dropped["compacted"] > 0) is quota
    assert dropped["reinserted"] <= 3 * 4 * flood
    if quota:
        assert all(holds(bob, name, 4) == 4 for name in range(15)), "HOST has lost them, the disk has not"
        assert 40 < on_disk(driver, "alice") <= 60


def test_a_days_writes_of_one_tenant_are_its_own(stage: Stage, tmp_path: Path) -> None:
    daily = 24 * 4 * SLOT  # four an hour
    driver = stage(
        TenantConfig(name="alice", nvme_write_bytes_per_day=daily), TenantConfig(name="bob"), disk=tmp_path
    )
    alice, bob = driver.attach(("alice",)), driver.attach(("bob",))
    for name in range(8):
        save(alice, name)
        save(bob, name)
        driver.settle()
    assert (on_disk(driver, "alice"), on_disk(driver, "bob")) == (4, 8)
    assert refused(driver.group().quotas, "alice") == {"nvme_write_bytes_per_day": 4}
    driver.clock.advance(3600 / 4 + 1)
    save(alice, 100)
    driver.settle()
    assert on_disk(driver, "alice") == 5


def flooded(driver: StoreDriver, session: SessionDriver, names: Iterator[int], hours: int) -> int:
    """How many blocks come to the disk of a tenant that saves eight a quarter of an hour."""
    before = on_disk(driver, "alice")
    for _ in range(4 * hours):
        for _ in range(8):
            save(session, next(names))
        driver.settle()
        driver.clock.advance(900.0)
    return on_disk(driver, "alice") - before


def test_a_day_passes_a_days_worth_and_a_reload_grants_no_second_one(stage: Stage, tmp_path: Path) -> None:
    daily = 48 * SLOT
    mine = TenantConfig(name="alice", nvme_write_bytes_per_day=daily)
    driver = stage(mine, TenantConfig(name="bob"), disk=tmp_path, disk_bytes=32 * MIB)
    alice, names = driver.attach(("alice",)), itertools.count()
    assert flooded(driver, alice, names, 24) in (49, 50), "and the first hour's, that was there"
    for turn in range(1, 11):
        tenants = (
            TenantConfig(name="alice", nvme_write_bytes_per_day=daily + turn * SLOT),
            TenantConfig(name="bob"),
        )
        driver.group().reconfigure(msgspec.structs.replace(driver.config, tenants=tenants))
    assert flooded(driver, alice, names, 3) in (6, 7, 8)


def test_after_a_restart_the_disk_is_still_counted(tmp_path: Path) -> None:
    config = small_config(
        tenants=(TenantConfig(name="alice", nvme_bytes=4 * SLOT),), nvme=small_disk(tmp_path)
    )
    for start in (0, 10):
        with StoreDriver(config) as driver:
            alice = driver.attach(("alice",))
            if start:
                assert on_disk(driver, "alice") == 3, "a root is known again when its tenant attaches"
            for name in range(start, start + 3):
                save(alice, name)
                driver.settle()
            assert on_disk(driver, "alice") == (4 if start else 3)


# ---- rates and leases --------------------------------------------------------------------------------------


def test_lookups_beyond_the_rate_are_misses_with_a_reason(stage: Stage) -> None:
    driver = stage(TenantConfig(name="alice", lookups_per_s=3.0), TenantConfig(name="bob"))
    alice, bob = driver.attach(("alice",)), driver.attach(("bob",))
    for session in (alice, bob):
        save(session, 1)
    assert [holds(alice, 1) for _ in range(5)] == [1, 1, 1, 0, 0]
    match = alice.lookup(alice.chain(tokens(1))).match
    assert match.plan.reason == "tenants.lookups_per_s = 3.0 of alice: it asks more often"
    assert (match.lease, match.known, match.gap_stop) == (None, 0, 0)
    assert [holds(bob, 1) for _ in range(20)] == [1] * 20
    driver.clock.advance(1.0)
    assert [holds(alice, 1) for _ in range(4)] == [1, 1, 1, 0]
    assert refused(driver.group().quotas, "alice") == {"lookups_per_s": 4}


def test_saves_beyond_the_rate_are_refused(stage: Stage) -> None:
    driver = stage(TenantConfig(name="alice", save_bytes_per_s=2 * SLOT))
    alice = driver.attach(("alice",))
    assert save(alice, 1, 4) == 4, "what is asked for at once is given, and paid for later"
    got = alice.reserve(alice.chain(tokens(2)))
    assert got.filling is None
    assert got.reason == f"tenants.save_bytes_per_s = {2 * SLOT} of alice: it saves more"
    driver.clock.advance(0.9)
    assert alice.reserve(alice.chain(tokens(2))).filling is None
    driver.clock.advance(0.2)
    assert save(alice, 2) == 1


def test_leases_are_counted_over_all_engines_of_a_tenant(stage: Stage) -> None:
    driver = stage(TenantConfig(name="alice", leases_max=2), TenantConfig(name="bob"))
    one, two, bob = driver.attach(("alice",)), driver.attach(("alice",)), driver.attach(("bob",))
    for session in (one, bob):
        save(session, 1)
    leases = [session.lookup(session.chain(tokens(1))).lease for session in (one, two)]
    assert all(leases)
    match = one.lookup(one.chain(tokens(1))).match
    assert match.plan.reason == "tenants.leases_max = 2 of alice: it holds as many"
    for _ in range(5):
        assert bob.lookup(bob.chain(tokens(1))).blocks == 1
    assert leases[1] is not None
    two.release(leases[1])
    assert holds(one, 1)
    one.disconnect()
    assert driver.group().leases.count_of("alice") == 0


def test_an_engine_of_several_tenants_cannot_hide_behind_their_shared_root(stage: Stage) -> None:
    driver = stage(
        TenantConfig(name="alice", reuse=Reuse.GROUP, lookups_per_s=1.0),
        TenantConfig(name="bob", reuse=Reuse.GROUP),
    )
    both = driver.attach(("alice", "bob"))
    save(both, 1, reuse="group")
    assert [holds(both, 1, reuse="group") for _ in range(3)] == [1, 0, 0]


# ---- all together ------------------------------------------------------------------------------------------


def hit_rate(driver: StoreDriver, flood: bool) -> float:
    """Of bob, who comes back to the same prompts, while alice saves what nobody asks for again."""
    alice, bob = driver.attach(("alice",)), driver.attach(("bob",))
    choose, fresh = random.Random(7), itertools.count(1000)
    hits = asked = 0
    for turn in range(600):
        name = min(int(choose.paretovariate(1.0)), 18)
        found = holds(bob, name)
        if turn >= 100:
            hits, asked = hits + found, asked + 1
        if not found:
            save(bob, name)
        if flood:
            save(alice, next(fresh), 2)
    return hits / asked


def test_mixed_load_the_one_who_floods_costs_the_others_nothing(stage: Stage) -> None:
    """An arena of 30 slots: bob uses 18 prompts."""
    limited = (TenantConfig(name="alice", host_bytes=8 * SLOT), TenantConfig(name="bob"))
    alone = hit_rate(stage(*limited), flood=False)
    beside = hit_rate(stage(*limited), flood=True)
    without = hit_rate(stage(TenantConfig(name="alice"), TenantConfig(name="bob")), flood=True)
    assert alone > 0.9
    assert beside == alone, "not one hit less"
    assert without < alone - 0.05, "or the flood was none"


def test_accounts_that_have_no_limit_cost_nothing(stage: Stage) -> None:
    driver = stage(*(TenantConfig(name=f"t{number}") for number in range(50)))
    assert driver.group().quotas.report() == {}
