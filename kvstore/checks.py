"""Checks of the running store: every conservation law, a slice at a time, so that nobody waits for all of it.

A slice looks at SLICE slots, nodes or blocks (about a millisecond); between two of them the event loop serves
whoever is ready. What a check in slices proves is written in native/src/check.h: laws about one node, slot or
block always, counts if nothing changed from its first slice to its last (`complete`).

Two kinds of run share this file, one at a time: what a client asked for (`Checks.ask`) goes on at once and is
repeated while the store keeps changing; the daemon's own (`daemon.self_check_s`) leaves long pauses and gives
way to the other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass

import structlog

from kvstore import _native
from kvstore.callers import Checked
from kvstore.errors import LimitExceeded
from kvstore.group import Group
from kvstore.store import Store
from kvstore.tiers.gpu import OwnedPool

__all__ = ["CHECKS_MAX", "CheckReport", "Checks", "in_slices"]

log = structlog.get_logger()

SLICE = 4096
# Questions that wait for an answer; one run answers all that came before it began.
CHECKS_MAX = 1024
# A busy store changes all the time: after that many runs its counts are left out of the answer.
_RUNS_MAX = 3
# Between slices of the daemon's own run, so that it takes 1/20 of the loop; one that was asked for shares it.
_OWN_PAUSE_S = 0.02


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What a check found.

    Attributes:
        broken: the first broken law, "" when all hold.
        complete: counts were compared too: nothing changed while it ran.
    """

    broken: str
    complete: bool

    def answer(self) -> dict[str, object]:
        """As `kvstore check` shows it."""
        if self.broken:
            return {"ok": False, "broken": self.broken}
        if self.complete:
            return {"ok": True}
        return {"ok": True, "partial": "counts were not compared: the store changed during each run"}


Slices = Generator[None, None, bool]


def in_slices(groups: Iterable[Group]) -> Slices:
    """Check these groups, pausing at every `yield`; returns whether all counts were compared.

    Raises:
        RuntimeError: names the group and the first law that is broken (kept in `Group.checked`, too).
    """
    complete = True
    for group in groups:
        try:
            settled = yield from _group(group)
        except Exception as error:  # a check that trips over what it finds has found something, too
            if not isinstance(error, RuntimeError):
                log.exception("bug in a check", group=group.name)
            broken = str(error) if isinstance(error, RuntimeError) else f"the check failed: {error!r}"
            group.checked = Checked(group.clock.now(), False, broken)
            raise RuntimeError(f"group {group.name}: {broken}") from error
        group.checked = Checked(group.clock.now(), settled, "")
        complete = complete and settled
    return complete


def _group(group: Group) -> Slices:
    checker = _native.Checker(group.index, group.host.pool)
    while not checker.step(SLICE):
        yield
    settled = checker.settled
    yield
    group.nvme.check()
    for engine in list(group.engines.values()):
        yield
        if isinstance(engine.device, OwnedPool):
            settled = (yield from _device(engine.device)) and settled
        else:
            engine.device.check()
    for session in list(group.callers):
        yield
        group.leases.check(session)
    group.check_counters()
    return settled


def _device(device: OwnedPool) -> Slices:
    checker = device.checker()
    while not checker.step(SLICE):
        yield
    return checker.settled


class Checks:
    """Runs checks of one store on its event loop, one at a time."""

    def __init__(self, store: Store, loop: asyncio.AbstractEventLoop) -> None:
        self._store = store
        self._loop = loop
        self._waiting: list[Callable[[CheckReport], None]] = []
        self._answering: list[Callable[[CheckReport], None]] = []
        self._runs = 0
        self._slices: Slices | None = None
        self._next: asyncio.Handle | None = None
        self._tick: asyncio.TimerHandle | None = None
        self._told = ""

    def open(self) -> None:
        """Begin to check without being asked, if `daemon.self_check_s` says so."""
        period_s = self._store.config.daemon.self_check_s
        if period_s:
            self._tick = self._loop.call_later(period_s, self._self_check)

    def close(self) -> None:
        """Stop; who waits for an answer is not told."""
        for handle in (self._next, self._tick):
            if handle is not None:
                handle.cancel()
        self._slices = self._next = self._tick = None
        self._waiting, self._answering = [], []

    def ask(self, answer: Callable[[CheckReport], None]) -> None:
        """Check everything from now on, and call `answer` when it is done.

        Raises:
            LimitExceeded: CHECKS_MAX others wait.
        """
        if len(self._waiting) + len(self._answering) >= CHECKS_MAX:
            raise LimitExceeded(f"check: {CHECKS_MAX} checks wait already; ask again when they are answered")
        self._waiting.append(answer)
        if not self._answering:
            self._begin_asked()

    def _begin_asked(self) -> None:
        self._answering, self._waiting = self._waiting, []
        self._runs = 0
        self._begin()

    def _self_check(self) -> None:
        self._tick = self._loop.call_later(self._store.config.daemon.self_check_s, self._self_check)
        if self._slices is None:
            self._begin()

    def _begin(self) -> None:
        """Start a run; one that nobody asked for is dropped for it."""
        if self._next is not None:
            self._next.cancel()
        self._runs += 1
        self._slices = in_slices(list(self._store.groups.values()))
        self._go_on()

    def _go_on(self) -> None:
        if self._answering:
            self._next = self._loop.call_soon(self._step)
        else:
            self._next = self._loop.call_later(_OWN_PAUSE_S, self._step)

    def _step(self) -> None:
        assert self._slices is not None
        try:
            next(self._slices)
        except StopIteration as done:
            self._end(CheckReport("", bool(done.value)))
        except RuntimeError as error:
            self._end(CheckReport(str(error), complete=False))
        else:
            self._go_on()

    def _end(self, report: CheckReport) -> None:
        self._slices = self._next = None
        if report.broken and report.broken != self._told:
            log.error(
                "check failed", broken=report.broken, fix="restart the daemon, and report this line as a bug"
            )
        self._told = report.broken
        if self._answering and not report.broken and not report.complete and self._runs < _RUNS_MAX:
            self._begin()
            return
        answering, self._answering = self._answering, []
        for answer in answering:
            answer(report)
        if self._waiting:
            self._begin_asked()
