"""Fetch: blocks of a lease on their way from lower tiers to where they can be copied.

The daemon answers with what is there at once and tells of the rest in notices, in chain order. Any notice may
also say that less will come than was asked for; what has come stays, whatever happens next.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from kvstore.client.core import Core, Fetching, Grant, ask
from kvstore.client.effects import Hear, Op
from kvstore.client.values import FetchResult
from kvstore.errors import KVStoreError
from kvstore.policy.lag import LagRule
from kvstore.rpc.messages import Fetch, Fetched
from kvstore.types import FetchPlan

__all__ = ["Arrived", "fetch"]

U32 = NDArray[np.uint32]
# A wait for notices looks so often whether anybody still wants them. Nothing is delayed by it but an end.
_LOOK_S = 0.05
# The daemon watches what lags. This side does so only for one that says nothing any more, so much later.
_SILENT_S = 0.1


class Arrived:
    """What has come of a fetch so far; others may look at it before the fetch has ended.

    Attributes:
        reached: blocks before this one can be copied now.
        unwanted: why nobody waits for the rest any more, "" while somebody does; any thread may set it.
    """

    def __init__(self, start: int) -> None:
        self.reached = start
        self.unwanted = ""
        self._parts: list[U32] = []

    def add(self, reached: int, slots: U32) -> None:
        """Blocks up to `reached` are in `slots` now."""
        self._parts.append(slots)
        self.reached = reached

    def slots(self) -> U32:
        """(reached - start,) slots so far."""
        return np.concatenate(self._parts) if self._parts else np.empty(0, np.uint32)

    def use(self) -> Op[None]:
        """Do something with what has come: run after all news that were there, and when there are none."""
        yield from ()


def fetch(core: Core, lease: int, stop: int, arrived: Arrived) -> Op[FetchResult]:
    """Bring blocks [arrived.reached, stop) of a lease to where they can be copied.

    `arrived` hears of every piece. Ends at `limits.fetch_s`, with the lease, or when it is unwanted.
    """
    with core.lock:
        grant = core.leases.get(lease)
        if grant is None:
            return FetchResult(arrived.reached, arrived.slots(), "the lease is not held")
        if grant.daemon_id in core.fetches:
            return FetchResult(arrived.reached, arrived.slots(), "a fetch of this lease is under way")
        fetching = core.fetches[grant.daemon_id] = Fetching(stop)
    try:
        reason = yield from _follow(core, grant, fetching, lease, arrived)
    except KVStoreError as error:
        reason = str(error)
    finally:
        core.end_fetch(grant, fetching)
    return FetchResult(arrived.reached, arrived.slots(), reason)


def _follow(core: Core, grant: Grant, fetching: Fetching, lease: int, arrived: Arrived) -> Op[str]:
    """From the question to the end of the fetch; why it brought less than was asked for."""
    link, asked, now = grant.attachment.link, fetching.stop, core.setup.clock.now
    began_s = now()
    deadline = began_s + core.setup.limits.fetch_s
    message = Fetch(grant.daemon_id, arrived.reached, asked)
    first = yield from ask(core, link, message, Fetched, core.call_deadline())
    fetching.begun = True
    _take(core, grant, fetching, arrived, (first.ready, asked, first.runs))
    while True:
        while fetching.news:
            news = fetching.news.pop(0)
            _take(core, grant, fetching, arrived, (news.ready, news.stop, news.runs))
        yield from arrived.use()
        if fetching.over:
            return (
                "" if arrived.reached == asked else f"the daemon could bring no more than {arrived.reached}"
            )
        if arrived.unwanted:
            return arrived.unwanted
        if core.leases.get(lease) is not grant:
            return "the lease ended"
        if now() >= deadline:
            return "the fetch did not end in time"
        if now() >= (lags_s := _lags_s(grant.plan, grant.at_s, began_s, arrived.reached)):
            return "it lagged, and the daemon said nothing"
        look_again = min(deadline, lags_s, now() + _LOOK_S)
        yield Hear(link, lambda: bool(fetching.news or arrived.unwanted), look_again)


def _lags_s(plan: FetchPlan | None, at_s: float, began_s: float, reached: int) -> float:
    """When the lag rule fires if no more comes and nobody says so; every block has the same share of R."""
    if plan is None or not plan.load_s < plan.recompute_s or not plan.load_start <= reached < plan.load_stop:
        return math.inf
    share = (reached - plan.load_start) / (plan.load_stop - plan.load_start)
    due_s = LagRule(plan.recompute_s, plan.load_s).due_s(share, plan.load_s)  # as if all were still on time
    return max(began_s, at_s + plan.lag_from_s) + due_s + _SILENT_S


def _take(
    core: Core, grant: Grant, fetching: Fetching, arrived: Arrived, told: tuple[int, int, bytes]
) -> None:
    """The daemon has told: so far, where it will end, and the slots of what is new."""
    ready, stop, runs = told
    attachment = grant.attachment
    if not arrived.reached <= ready <= stop <= fetching.stop:
        gone = f"from {arrived.reached} of {fetching.stop} to {ready} of {stop}"
        raise core.broken(attachment.link, f"a fetch went {gone}")
    slots = core.slots_of(attachment, runs, ready - arrived.reached)
    fetching.stop, fetching.over = stop, ready == stop
    arrived.add(ready, slots)
