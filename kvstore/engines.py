"""Engines and their processes: who joined, who left, who may still write.

attach    a session joins its engine
detach    its connection closed: pins end at once, slots it may write stay quarantined (LAWS A1)
writer_gone   its process ended, or said `quiesced`: its part of every filling is given up
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvstore.callers import Caller, Engine
from kvstore.errors import BadRequest
from kvstore.events import EventKind
from kvstore.group import Group
from kvstore.keys import KEY_BYTES
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
    engine.sessions.discard(caller.session)
    if engine.pool_session == caller.session:
        _close_pool(group, engine)
    group.later(group.end_leases(caller))
    del group.callers[caller.session]
    # Fillings that wait for nobody: orders to a session that cannot copy.
    group.later(_leave(group, engine, 0))


def _close_pool(group: Group, engine: Engine) -> None:
    """The pool dies, and with it every block number that other sessions of the engine still hold."""
    pool = engine.device
    group.events.append(EventKind.CLEARED, Tier.GPU, np.empty((0, KEY_BYTES), np.uint8), engine=engine.id)
    group.counters.device_closed_blocks += pool.counts()["idle"]
    engine.device, engine.pool_session = NoTier(Tier.GPU), 0
    group.later(pool.closing())
    nothing = np.empty(0, np.uint32)
    for session in engine.sessions:
        for lease in group.leases.of(session):
            lease.table, lease.device = nothing, 0
    for filling in group.fillings.of_engine(engine.id):
        filling.drain = filling.copied = nothing


def writer_gone(group: Group, engine: Engine, session: int) -> int:
    """A process cannot write any more; how many fillings were freed at once because they waited for it alone.

    A process with very many of them gives up the rest in slices.
    """
    engine.writers.discard(session)
    before = len(group.fillings)
    group.later(_leave(group, engine, session))
    return before - len(group.fillings)


def _leave(group: Group, engine: Engine, session: int) -> Iterator[None]:
    yield from group.leave_fillings(engine, session)
    group.record_changes(engine)
    if not group.fillings.count(engine.id):
        engine.writers.clear()  # no slot depends on anyone
    _forget(group, engine)


def _forget(group: Group, engine: Engine) -> None:
    # Work in slices may end when the engine has left already and another has come under its id.
    if not engine.sessions and not engine.writers and group.engines.get(engine.id) is engine:
        del group.engines[engine.id]
