"""Engines and their processes: who joined, who left, who may still write.

attach    a session joins its engine
detach    its connection closed: pins end at once, slots it may write stay quarantined (LAWS A1)
writer_gone   its process ended, or said `quiesced`: its part of every filling is given up
"""

from __future__ import annotations

import numpy as np

from kvstore.errors import BadRequest
from kvstore.group import Caller, Engine, Group
from kvstore.leases import LeaseState
from kvstore.tiers.gpu import BorrowedPool, OwnedPool
from kvstore.tiers.noop import NoTier
from kvstore.types import Tier

__all__ = ["attach", "detach", "set_pool", "writer_gone"]


def attach(caller: Caller) -> None:
    """A session joined its engine."""
    group, engine = caller.group, caller.engine
    group.engines[engine.id] = engine
    group.callers[caller.session] = caller
    engine.sessions.add(caller.session)


def set_pool(caller: Caller, pool: OwnedPool | BorrowedPool) -> None:
    """Declare the engine's device pool.

    Raises:
        BadRequest: it has one.
    """
    engine = caller.engine
    if not isinstance(engine.device, NoTier):
        raise BadRequest("pool: this engine has declared its pool already")
    engine.device, engine.pool_session = pool, caller.session


def detach(caller: Caller) -> None:
    """A connection closed."""
    group, engine = caller.group, caller.engine
    for lease in group.leases.of(caller.session):
        group.end_lease(lease, LeaseState.REVOKED)
    engine.sessions.discard(caller.session)
    if engine.pool_session == caller.session:
        _close_pool(group, engine)
    del group.callers[caller.session]
    group.leave_fillings(engine, 0)  # those that wait for nobody: orders to a session that cannot copy
    if not group.fillings.count(engine.id):
        engine.writers.clear()  # no slot depends on anyone
    _forget(group, engine)


def _close_pool(group: Group, engine: Engine) -> None:
    """The pool dies, and with it every block number that other sessions of the engine still hold."""
    engine.device.close()
    group.record_changes(engine)
    engine.device, engine.pool_session = NoTier(Tier.GPU), 0
    nothing = np.empty(0, np.uint32)
    for session in engine.sessions:
        for lease in group.leases.of(session):
            lease.table, lease.device = nothing, 0
    for filling in group.fillings.of_engine(engine.id):
        filling.drain = filling.copied = nothing


def writer_gone(group: Group, engine: Engine, session: int) -> int:
    """A process cannot write any more; how many fillings were freed because they waited for it alone."""
    engine.writers.discard(session)
    freed = group.leave_fillings(engine, session)
    if freed:
        group.record_changes(engine)
    _forget(group, engine)
    return freed


def _forget(group: Group, engine: Engine) -> None:
    if not engine.sessions and not engine.writers:
        group.engines.pop(engine.id, None)
