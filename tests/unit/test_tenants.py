"""Who may read and write what: tenants, trust groups, namespaces."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvstore.config import TenantConfig
from kvstore.errors import BadRequest, KVStoreError, Refused
from kvstore.testing import SessionDriver, StoreDriver, small_config, small_layout
from kvstore.types import Reuse

TENANTS = (
    TenantConfig(name="alice", group="red", reuse=Reuse.GROUP),
    TenantConfig(name="bob", group="red", reuse=Reuse.OWN),
    TenantConfig(name="carol", group="red", reuse=Reuse.NONE),
    TenantConfig(name="dave", group="blue", reuse=Reuse.OWN),
)


@pytest.fixture
def tenants() -> Iterator[StoreDriver]:
    with StoreDriver(small_config(tenants=TENANTS)) as driver:
        yield driver
        driver.store.check()


def tokens(blocks: int, start: int = 0) -> range:
    return range(start, start + 4 * blocks)


def test_tenants_of_a_group_share_what_they_declare(tenants: StoreDriver) -> None:
    alice, bob = tenants.attach(("alice",)), tenants.attach(("bob",))
    assert {name: set(by) for name, by in alice.roots.items()} == {"alice": {"own", "group"}}
    assert {name: set(by) for name, by in bob.roots.items()} == {"bob": {"own"}}
    own = alice.chain(tokens(3))
    alice.save(own)
    assert bob.lookup(bob.chain(tokens(3))).blocks == 0
    with pytest.raises(BadRequest, match="not one of the roots"):
        bob.lookup(own)
    with pytest.raises(BadRequest, match="not one of the roots"):
        bob.reserve(own)
    shared = alice.chain(tokens(3), reuse="group")
    assert alice.lookup(shared).blocks == 0
    alice.save(shared)
    again = tenants.attach(("alice",))
    assert again.lookup(again.chain(tokens(3), reuse="group")).blocks == 3


def test_a_tenant_without_reuse_gets_no_root(tenants: StoreDriver) -> None:
    assert tenants.attach(("carol",)).roots == {"carol": {}}


def test_a_chain_continues_only_under_its_own_root(tenants: StoreDriver) -> None:
    both = tenants.attach(("alice", "bob"))
    mine, theirs = both.chain(tokens(2), tenant="alice"), both.chain(tokens(2), tenant="bob")
    both.save(mine)
    got = both.store.reserve(both.caller, theirs.root, mine.keys[-1].tobytes(), theirs.keys)
    assert (got.filling, got.reason) == (None, "the parent block is not known here"), "as if nobody had it"
    with pytest.raises(BadRequest):
        both.store.reserve(both.caller, theirs.root, theirs.root, mine.keys)


@pytest.mark.parametrize(
    ("names", "error"),
    [
        ((), BadRequest),
        (("alice", "dave"), BadRequest),
        (("mallory",), Refused),
        (("alice", "mallory"), Refused),
    ],
)
def test_who_may_attach_as_whom(
    tenants: StoreDriver, names: tuple[str, ...], error: type[KVStoreError]
) -> None:
    with pytest.raises(error, match=r"^tenants: "):
        tenants.attach(names)


@pytest.fixture
def session(driver: StoreDriver) -> SessionDriver:
    return driver.attach()


def test_another_model_or_layout_is_another_namespace(driver: StoreDriver, session: SessionDriver) -> None:
    session.save(session.chain(tokens(3)))
    for other in (driver.attach(model="other"), driver.attach(layout=small_layout(head_dim=512))):
        assert other.lookup(other.chain(tokens(3))).blocks == 0


def test_a_block_must_fit_a_slab(driver: StoreDriver) -> None:
    with pytest.raises(Refused, match=r"host\.slab_bytes"):
        driver.attach(layout=small_layout(head_dim=8192, layers=8))


def test_a_tenant_is_named_once(driver: StoreDriver) -> None:
    with pytest.raises(BadRequest, match="at most once"):
        driver.attach(("default", "default"))
    with pytest.raises(BadRequest, match="at most once"):
        driver.attach(("default",) * 100_000)


def test_an_engine_is_joined_by_processes_of_its_own_tenants_only(tenants: StoreDriver) -> None:
    """Also while it has no session: whoever joins it may publish and abort what was reserved."""
    engine = b"e" * 16
    first = tenants.attach(("alice",), engine=engine)
    chain = first.chain(tokens(2))
    assert first.reserve(chain).filling is not None
    for connected in (True, False):
        if not connected:
            first.disconnect()
        for others in (("bob",), ("alice", "bob")):
            with pytest.raises(Refused, match="engine: its processes name the same tenants"):
                tenants.attach(others, engine=engine)
    tenants.attach(("alice",), engine=engine)
