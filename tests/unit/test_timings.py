"""Timings of clients: all of a message counts, or none of it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kvstore.config import TenantConfig
from kvstore.errors import BadRequest
from kvstore.policy.prefill import Load
from kvstore.rpc.messages import TIMINGS_MAX, Timings
from kvstore.rpc.timings import STEPS_SLICE, record
from kvstore.testing import StoreDriver, small_config
from kvstore.types import Reuse, Tier

TENANTS = tuple(TenantConfig(name=name, reuse=Reuse.GROUP) for name in ("alice", "bob"))


def test_what_a_client_timed_is_counted_under_its_group(driver: StoreDriver) -> None:
    caller = driver.attach().caller
    requests = [("default", 0.2, 100, 64), ("default", 3.0, 100, 0)]
    steps = [(512, 131_072.0, 2, 60, 0.5)]
    record(caller, Timings(requests, steps, [("load", 2, 8192, 0.25), ("store", 1, 4096, 0.5)], 7))
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
        ({"steps": [(1, 0.5, 0, 0, 0.1)] * (TIMINGS_MAX + 1)}, f"steps: at most {TIMINGS_MAX}"),
        ({"steps": [(9, 40.5, 0, 0, 0.1), (-1, 0.5, 0, 0, 0.1)]}, "steps: prefill_tokens"),
        ({"steps": [(1 << 40, 1e30, 0, 0, 0.1)]}, "steps: prefill_tokens"),
        ({"steps": [(9, math.nan, 0, 0, 0.1)]}, "steps: prefill_area"),
        ({"steps": [(9, 4.0, 0, 0, 0.1)]}, "steps: prefill_area"),
        ({"steps": [(0, 4.0, 1, 9, 0.1)]}, "steps: prefill_area"),
        ({"steps": [(0, 0.0, -1, 9, 0.1)]}, "steps: decodes"),
        ({"steps": [(0, 0.0, 1, -9, 0.1)]}, "steps: decode_context"),
        ({"steps": [(1, 0.5, 0, 0, math.inf)]}, "steps: seconds"),
        ({"steps": [(1, 0.5, 0, 0, -0.1)]}, "steps: seconds"),
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
        "steps": [(9, 40.5, 0, 0, 0.1)],
        "transfers": [("load", 1, 9, 0.1)],
        "lost": 1,
    }
    with pytest.raises(BadRequest, match="timings") as caught:
        record(caller, Timings(**{**good, **changed}))
    assert words in str(caught.value)
    meters = caller.group.meters
    assert (meters.ttft[True].count, meters.prefill_tokens, meters.lost_timings) == (0, 0, 0)
    assert meters.moved["load"].copies == meters.tenants["default"].claimed == 0
    assert len(caller.group.pricing.curves) == 0


def rows(tokens: int, count: int, decodes: int = 0) -> list[tuple[int, float, int, int, float]]:
    """Steps of an engine that needs 10 ms and 1 ms a token, and 2 ms for each decode."""
    seconds = 0.01 + 0.001 * tokens + 0.002 * decodes
    return [(tokens, tokens * tokens / 2, decodes, 100 * decodes, seconds)] * count


def test_steps_make_a_curve_of_the_namespace_of_their_engine(driver: StoreDriver) -> None:
    caller = driver.attach().caller
    record(caller, Timings([], rows(64, 4) + rows(256, 4) + rows(512, 4), []))
    record(caller, Timings([], rows(0, 20, 4) + rows(0, 20, 8), []))
    curves = caller.group.pricing.curves
    (name,) = curves
    assert name == caller.engine.namespace.digest.hex()
    assert curves[name].seconds(0, 256) == pytest.approx(0.01 + 0.256, rel=0.05)
    assert curves[name].seconds(0, 256, Load(decodes=8)) == pytest.approx(0.01 + 0.256 + 0.016, rel=0.05)


def test_only_steps_that_mostly_prefill_count_as_prefill(driver: StoreDriver) -> None:
    caller = driver.attach().caller
    record(caller, Timings([], [*rows(0, 2, 4), *rows(3, 1, 4), *rows(8, 1, 4)], []))
    meters = caller.group.meters
    assert meters.prefill_tokens == 8
    assert meters.prefill_seconds == pytest.approx(0.026)


def test_a_long_message_is_learnt_from_in_slices(driver: StoreDriver) -> None:
    caller, begun = driver.attach().caller, []
    caller.group.later = begun.append
    record(caller, Timings([], rows(64, TIMINGS_MAX), []))
    pricing, slices = caller.group.pricing, 0
    before = pricing.learnt
    for _ in begun.pop():
        assert pricing.learnt - before <= STEPS_SLICE
        before, slices = pricing.learnt, slices + 1
    assert slices == TIMINGS_MAX // STEPS_SLICE
    assert pricing.learnt == TIMINGS_MAX - 1, "all but the first of its size"


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
