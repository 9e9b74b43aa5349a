"""Between the values of the store and the messages of the session protocol."""

from __future__ import annotations

import json

import numpy as np
from numpy.typing import NDArray

from kvstore import _native
from kvstore.block_tables import Demotion, Table
from kvstore.callers import Caller
from kvstore.errors import STATUS, BadRequest, KVStoreError
from kvstore.explaining import Memory, explain
from kvstore.group import Group
from kvstore.rpc import messages as m
from kvstore.store import Match, Store

__all__ = ["acquired", "as_keys", "as_numbers", "explained", "failed", "found", "held_s", "orders"]


def as_numbers(raw: bytes, field: str) -> NDArray[np.uint32]:
    """Numbers of a message's `field`. Raises BadRequest."""
    if len(raw) % 4 or len(raw) > 4 * m.NUMBERS_MAX:
        raise BadRequest(f"{field}: need a multiple of 4 bytes, at most {4 * m.NUMBERS_MAX}, got {len(raw)}")
    return np.frombuffer(raw, np.uint32)


def as_keys(raw: bytes) -> NDArray[np.uint8]:
    """(n, 32) keys of a message. Raises BadRequest."""
    if len(raw) % 32 or len(raw) > 32 * _native.KEYS_MAX:
        raise BadRequest(f"keys: need 32 bytes each, at most {_native.KEYS_MAX} keys, got {len(raw)} bytes")
    return np.frombuffer(raw, np.uint8).reshape(-1, 32)


def found(match: Match) -> m.Found:
    """The answer to a lookup."""
    plan, lease = match.plan, match.lease
    return m.Found(
        lease.id if lease is not None else 0,
        len(lease.nodes) if lease is not None else 0,
        lease.device if lease is not None else 0,
        match.known,
        match.gap_stop,
        match.digest,
        (plan.load_start, plan.load_stop),
        match.runs,
        [(span.tier.value, span.start, span.stop) for span in plan.spans],
        plan.reason,
        plan=plan.id,
        choice=plan.choice.value,
        lag=(plan.lag_from_s, plan.load_s, plan.recompute_s),
    )


def held_s(store: Store, body: m.Reply, began_s: float) -> float:
    """How long the reply to a question of `began_s` waits: until `daemon.lookup_time_s` is over.

    Whatever was found: so its time tells nothing of why it is a miss, or a short match: nobody has the
    blocks, they are another tenant's, they went just now, or the tenant asks too often.
    """
    least_s = store.config.daemon.lookup_time_s
    return began_s + least_s - store.clock.now() if least_s and isinstance(body, m.Found) else 0.0


def explained(store: Store, caller: Caller | None, request: str) -> m.Explained:
    """The story of a request that this caller may hear; None = a tool, which may hear everything.

    Raises:
        NotFound: nothing is remembered of it.
    """
    groups = store.groups if caller is None else {caller.group.name: caller.group}
    tenants = None if caller is None else frozenset(caller.tenants)
    memories = {name: Memory(group.decisions, _doubted(group)) for name, group in groups.items()}
    return m.Explained(json.dumps(explain(memories, request, store.clock.now(), tenants).facts))


def _doubted(group: Group) -> dict[str, str]:
    trusts = group.pricing.trusts.items()
    return {f"{source.tier} {source.name}".rstrip(): trust.doubt for source, trust in trusts if trust.doubt}


def acquired(table: Table, asked: int) -> m.Acquired:
    """The answer to an acquire for the lease `asked`, 0 = none."""
    lease = table.lease.id if len(table.lease.table) or asked else 0
    load = (table.load_start, table.load_stop)
    return m.Acquired(
        lease, table.added.tobytes(), table.device, load, table.runs, orders(table.demotions), table.busy
    )


def orders(demotions: tuple[Demotion, ...]) -> list[m.Demote]:
    """What the engine is to copy down."""
    return [
        m.Demote(f.token, d.blocks.tobytes(), f.slots.tobytes(), f.generations.tobytes())
        for d in demotions
        for f in (d.filling,)
    ]


def failed(error: KVStoreError) -> m.Failed:
    """Why a request was not done."""
    return m.Failed(STATUS[type(error)], str(error))
