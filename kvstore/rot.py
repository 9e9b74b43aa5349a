"""Blocks that a client says are not what they should be: looked at here, and dropped if that is true."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvstore.callers import Caller
from kvstore.errors import BadRequest
from kvstore.leases import Lease

__all__ = ["drop_rotten"]

# A report makes the daemon read the blocks it names: 32 MiB at 8 GB/s hold the loop for 4 ms.
REPORT_BYTES_MAX = 32 << 20


def drop_rotten(caller: Caller, lease: Lease, bad: NDArray[np.uint32]) -> int:
    """Verify the blocks of a lease that failed its client's check; how many were rotten, and are gone.

    Args:
        bad: positions in the match; none of them, nor what follows the first, counts as a hit.

    Raises:
        BadRequest: a position is outside the match.
    """
    group = caller.group
    if len(bad) and int(bad.max()) >= len(lease.nodes):
        raise BadRequest(f"report.bad: position {int(bad.max())} is beyond the match of {len(lease.nodes)}")
    if not len(bad):
        return 0
    # What was not loaded does not count as a hit, whatever the reason.
    lease.host = min(lease.host, int(bad.min()))
    lease.disk = min(lease.disk, int(bad.min()))
    if lease.tail is not None:
        lease.tail.used_from(int(bad.max()) + 1)
    most = max(1, REPORT_BYTES_MAX // caller.shape.slot_bytes)
    began_s = group.clock.now()
    some = bad[:most]
    dropped = group.host.drop_if_corrupt(lease.nodes[some], caller.shape)
    size_bytes, seconds = len(some) * caller.shape.length, group.clock.now() - began_s
    group.meters.observe_transfer("verify", len(some), size_bytes, seconds)
    group.record_changes()
    return dropped
