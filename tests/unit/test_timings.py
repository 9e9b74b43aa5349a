"""Timings of clients: all of a message counts, or none of it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kvstore.config import TenantConfig
from kvstore.errors import BadRequest
from kvstore.rpc.messages import TIMINGS_MAX, Timings
from kvstore.rpc.timings import record
from kvstore.testing import StoreDriver, small_config
from kvstore.types import Reuse, Tier

TENANTS = tuple(TenantConfig(name=name, reuse=Reuse.GROUP) for name in ("alice", "bob"))


def test_what_a_client_timed_is_counted_under_its_group(driver: StoreDriver) -> None:
    caller = driver.attach().caller
    requests = [("default", 0.2, 100, 64), ("default", 3.0, 100, 0)]
    record(caller, Timings(requests, [(512, 0.5)], [("load", 2, 8192, 0.25), ("store", 1, 4096, 0.5)], 7))
    meters = caller.group.meters
    assert (meters.ttft[True].sum, meters.ttft[False].sum) == (0.2, 3.0)
    assert (meters.prefill_tokens, meters.prefill_seconds, meters.lost_timings) == (512, 0.5, 7)
    load = meters.moved["load"]
    assert (load.copies, load.bytes, load.seconds) == (2, 8192, 0.25)
    assert meters.moved["demote"].copies == 0
    assert meters.tenants["default"].claimed == 64


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"requests": [("eve", 0.1, 1, 1)]}, "'eve' is not a tenant of this session"),
        ({"requests": [("default", math.nan, 1, 1)]}, "requests: nan is not a duration"),
        ({"requests": [("default", -0.1, 1, 1)]}, "requests: -0.1 is not a duration"),
        ({"requests": [("default", 0.1, 1, 2)]}, "2 of 1 prompt tokens cannot be reused"),
        ({"requests": [("default", 0.1, 1 << 40, 2)]}, "prompt tokens cannot be reused"),
        ({"requests": [("default", 0.1, 1, 1)] * (TIMINGS_MAX + 1)}, f"requests: at most {TIMINGS_MAX}"),
        ({"prefills": [(1, 0.1)] * (TIMINGS_MAX + 1)}, f"prefills: at most {TIMINGS_MAX}"),
        ({"prefills": [(-1, 0.1)]}, "prefills: need counts"),
        ({"prefills": [(1, math.inf)]}, "prefills: inf is not a duration"),
        ({"transfers": [("verify", 1, 1, 0.1)]}, "kind 'verify' is none of"),
        ({"transfers": [("load", 1, 1, 0.1)] * 4}, "one entry for each of"),
        ({"transfers": [("load", 1, 1 << 60, 0.1)]}, "transfers: need counts"),
        ({"lost": -1}, "lost: need counts"),
    ],
)
def test_a_message_with_one_bad_number_counts_nothing(driver: StoreDriver, changed, words: str) -> None:
    caller = driver.attach().caller
    good = {
        "requests": [("default", 0.1, 9, 8)],
        "prefills": [(9, 0.1)],
        "transfers": [("load", 1, 9, 0.1)],
        "lost": 1,
    }
    with pytest.raises(BadRequest, match="timings") as caught:
        record(caller, Timings(**{**good, **changed}))
    assert words in str(caught.value)
    meters = caller.group.meters
    assert (meters.ttft[True].count, meters.prefill_tokens, meters.lost_timings) == (0, 0, 0)
    assert meters.moved["load"].copies == meters.tenants["default"].claimed == 0


def test_tokens_belong_to_the_root_and_of_a_shared_one_to_who_asks() -> None:
    with StoreDriver(small_config(tenants=TENANTS)) as driver:
        alice, both = driver.attach(("alice",)), driver.attach(("alice", "bob"))
        tokens = driver.group().meters.tenants
        for session, tenant, reuse, label in (
            (alice, "alice", "own", "alice"),
            (alice, "alice", "group", "alice"),
            (both, "bob", "own", "bob"),
            (both, "bob", "group", "default"),  # of two tenants: nobody can tell which
        ):
            before = tokens[label].lookup if label in tokens else 0
            chain = session.chain(range(40), tenant=tenant, reuse=reuse)
            session.save(chain)
            found = session.lookup(chain)
            session.release(found.lease)
            assert tokens[label].lookup == before + 40
        assert {name: of.hit[Tier.HOST] for name, of in tokens.items()} == {
            "alice": 80,
            "bob": 40,
            "default": 40,
        }
        driver.store.check()


def test_a_revoked_lease_hit_nothing(driver: StoreDriver) -> None:
    session = driver.attach()
    chain = session.chain(range(40))
    session.save(chain)
    session.lookup(chain)
    session.disconnect()
    tokens = driver.group().meters.tenants["default"]
    assert (tokens.lookup, tokens.hits) == (40, 0)


def test_the_daemon_times_its_own_verification(driver: StoreDriver) -> None:
    session = driver.attach()
    chain = session.chain(range(40))
    session.save(chain)
    lease = session.lookup(chain).lease
    driver.store.report(session.caller, lease.id, np.array([3, 4], np.uint32))
    verify = driver.group().meters.moved["verify"]
    assert (verify.copies, verify.bytes) == (2, 2 * session.caller.shape.length)
