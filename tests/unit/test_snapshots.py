"""Snapshots in parts: parts and the events since are the truth, whatever happened in between."""

from __future__ import annotations

import numpy as np

from kvstore.events import EventKind
from kvstore.snapshots import SnapshotPart, snapshot_parts
from kvstore.testing import StoreDriver, small_config, small_layout
from kvstore.types import Tier


def rows(part: SnapshotPart) -> set[bytes]:
    return {key.tobytes() for key in part.keys}


def test_parts_and_the_events_since_are_the_truth() -> None:
    layout = small_layout(head_dim=64)
    with StoreDriver(small_config(capacity_bytes=128 << 20, slab_bytes=2 << 20, nodes_max=40_000)) as driver:
        group = driver.group()
        session = driver.attach(layout=layout)
        pool = session.own_pool(100, 100)
        for start in range(0, 9000, 3000):
            session.save(session.chain(np.arange(start * 4, (start + 3000) * 4, dtype=np.uint32)))
        chain = session.chain(range(40))
        session.commit(session.acquire(0, 10).lease, chain, 0, 10)
        group.record_changes(session.engine)
        sequence = group.events.sequence
        seen: set[bytes] = set()
        devices: dict[bytes, set[bytes]] = {}
        for number, part in enumerate(snapshot_parts(group)):
            assert len(part.keys) <= 8192
            if part.tier is Tier.HOST:
                seen |= rows(part)
            else:
                devices[part.engine] = rows(part)
            group.host.pool.evict(session.caller.shape, 100)
            session.save(session.chain(range(100_000 + number, 100_080 + number)))
        group.record_changes(session.engine)
        for event in group.events.since(driver.store.epoch, sequence).events:
            if event.tier is Tier.HOST:
                keys = {key.tobytes() for key in event.keys}
                seen = seen | keys if event.kind is EventKind.STORED else seen - keys
        now = group.host.keys()
        assert seen == {key.tobytes() for key in now}
        assert number > 10
        assert 1000 < len(seen) < 9000
        held = pool.keys()
        assert devices == {session.engine.id: {key.tobytes() for key in held}}
