"""A tenant that floods a real daemon, beside one that comes back to what it has."""

from __future__ import annotations

import itertools

import pytest
from fake_engine import SMALL
from nvme_kit import nvme_settings, on_disk
from scene import Scene

from kvstore.types import Tier

BLOCKS, PROMPTS, TURNS = 6, 30, 120
# Of an arena of 4 MiB, some 340 slots: the one who comes back uses 180.
QUOTA_BYTES = 100 * SMALL.slot_bytes


@pytest.mark.parametrize(("quota", "flood"), [(True, False), (True, True), (False, True)])
def test_who_floods_costs_the_others_nothing(stage: Scene, quota: bool, flood: bool) -> None:
    """Without the quota the same flood costs them all: or it would prove nothing."""
    limit = f"host_bytes = {QUOTA_BYTES}\n" if quota else ""
    daemon = stage.start_daemon(
        f'[[tenants]]\nname = "alice"\n{limit}[[tenants]]\nname = "bob"', host__capacity_bytes='"4MiB"'
    )
    alice, bob = stage.engine(tenant="alice"), stage.engine(tenant="bob")
    fresh = itertools.count(1000)
    for prompt in range(PROMPTS):
        bob.saved(prompt, BLOCKS)
    hits = 0
    for turn in range(TURNS):
        hits += bob.matched(bob.chain(turn % PROMPTS, BLOCKS))
        for _ in range(2 if flood else 0):
            alice.save(alice.chain(next(fresh), BLOCKS))
    if quota:
        assert hits == TURNS * BLOCKS, "not one hit less"
        assert bob.restored(bob.chain(0, BLOCKS)) == BLOCKS, "and the right bytes"
        used = daemon.group()["quotas"].get("alice", {"host_bytes": 0})
        assert used["host_bytes"] <= QUOTA_BYTES
        got = alice.save(alice.chain(5000, 120))  # more than it may have at all
        assert 0 < got.ready <= 100
        assert got.reason == f"tenants.host_bytes = {QUOTA_BYTES} of alice: its other blocks are in use"
    else:
        assert hits < TURNS * BLOCKS / 2
    assert daemon.group()["counters"]["hit_blocks_by_tier"][Tier.HOST] >= hits
    daemon.assert_sound()


@pytest.mark.parametrize("quota", [True, False])
def test_who_floods_the_disk_costs_the_others_nothing(stage: Scene, quota: bool) -> None:
    """bob is away while alice fills the log three times; then he comes back to what HOST has long lost."""
    limit = f"nvme_bytes = {QUOTA_BYTES}\n" if quota else ""
    disk = nvme_settings(stage.folder / "nvme", capacity_bytes='"12MiB"', segment_bytes='"1MiB"')
    daemon = stage.start_daemon(
        f'[[tenants]]\nname = "alice"\n{limit}[[tenants]]\nname = "bob"',
        host__capacity_bytes='"4MiB"',
        **{key.replace(".", "__"): value for key, value in disk.items()},
    )
    alice, bob = stage.engine(tenant="alice"), stage.engine(tenant="bob")
    for prompt in range(PROMPTS):
        bob.saved(prompt, BLOCKS)
    on_disk(daemon, PROMPTS * BLOCKS)
    fresh = itertools.count(1000)
    for _ in range(3 * 12 * (1 << 20) // (BLOCKS * SMALL.slot_bytes)):
        alice.save(alice.chain(next(fresh), BLOCKS))
    on_disk(daemon, 1)
    hits = sum(bob.matched(bob.chain(prompt, BLOCKS)) for prompt in range(PROMPTS))
    if quota:
        assert hits == PROMPTS * BLOCKS, "not one hit less"
        assert bob.restored(bob.chain(0, BLOCKS)) == BLOCKS, "and the right bytes"
        assert daemon.group()["quotas"]["alice"]["nvme_bytes"] <= QUOTA_BYTES
    else:
        assert hits < PROMPTS * BLOCKS / 2
    daemon.assert_sound()
