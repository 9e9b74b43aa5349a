"""Public test kit: a clock that tests turn, a small real store, and its naive twin.

    from kvstore.testing import StoreDriver

    with StoreDriver() as driver:
        session = driver.attach()
        chain = session.chain(range(64))
        session.save(chain)
        assert session.lookup(chain).blocks == len(chain)

Everything but the socket is the real thing: memory, index, pools, leases, fillings and block tables.
"""

from __future__ import annotations

from kvstore.testing.clock import SimClock
from kvstore.testing.driver import StoreDriver, small_config, small_disk, small_layout
from kvstore.testing.model import ModelStore
from kvstore.testing.session import Found, SessionDriver
from kvstore.testing.slots import cell_pattern, slot_fault, write_slot

__all__ = [
    "Found",
    "ModelStore",
    "SessionDriver",
    "SimClock",
    "StoreDriver",
    "cell_pattern",
    "slot_fault",
    "small_config",
    "small_disk",
    "small_layout",
    "write_slot",
]
