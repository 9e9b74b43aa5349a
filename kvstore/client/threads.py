"""How operations run in threads: the driver, and handles for operations with copies."""

from __future__ import annotations

import contextlib
import os
import select
import threading
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvstore.client.core import Core
from kvstore.client.effects import Call, Connect, Effect, Hear, Job, Op, Outcome, Watch, Work
from kvstore.client.fetching import Arrived, fetch
from kvstore.client.link import ThreadLink
from kvstore.client.loading import Loading, load
from kvstore.client.tails import TailLoading, load_tail
from kvstore.client.values import FetchResult, LoadResult
from kvstore.errors import DeadlineExceeded, KVStoreError
from kvstore.types import SaveResult

__all__ = ["Fetch", "Load", "Pending", "Save", "TailLoad", "Threads"]

T = TypeVar("T")
U32 = NDArray[np.uint32]


class Threads:
    """Performs effects by blocking the thread that asks."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.active: set[Pending[Any]] = set()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def run(self, op: Op[T]) -> T:
        """An operation to its end."""
        outcome: Outcome = None
        error: KVStoreError | None = None
        while True:
            try:
                effect = op.send(outcome) if error is None else op.throw(error)
            except StopIteration as stop:
                return stop.value  # type: ignore[no-any-return]
            outcome, error = None, None
            try:
                outcome = self.perform(effect)
            except KVStoreError as failed:
                error = failed

    def perform(self, effect: Effect) -> Outcome:
        """One effect, as long as it takes within its own deadline."""
        match effect:
            case Call(link, message, deadline):
                assert isinstance(link, ThreadLink)
                return link.call(message, deadline)
            case Job():
                return self._finish(effect)
            case Hear(link, done, deadline):
                assert isinstance(link, ThreadLink)
                return link.hear(done, deadline)
            case Work(function):
                return function()
            case Connect():
                return ThreadLink.connect(self.core.setup.path, self.core.setup.clock)
            case Watch(link, seconds):
                self._watch(link if isinstance(link, ThreadLink) else None, seconds)
        return None

    def job(self, job: Job, until: float) -> Outcome:
        """The job's completion, or None at `until`; past its own deadline the job is cancelled."""
        copier, now = self.core.copier, self.core.setup.clock.now
        assert copier is not None  # somebody submitted a job
        if now() < job.deadline:
            done = copier.wait(job.id, max(0.0, min(until, job.deadline) - now()))
            if done is not None or now() < job.deadline:
                return done
        copier.cancel(job.id)
        return copier.wait(job.id, max(0.0, until - now()))

    def _finish(self, job: Job) -> Outcome:
        done = self.job(job, job.deadline + self.core.setup.limits.copy_s)
        if done is None:
            raise DeadlineExceeded("a copy is stuck: cancelled, and still not done")
        return done

    def _watch(self, link: ThreadLink | None, seconds: float) -> None:
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        if link is not None:
            poll.register(link, select.POLLRDHUP)
        for fd, _ in poll.poll(max(0, int(seconds * 1000) + 1)):
            if fd == self._wake:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake)
            elif link is not None:
                link.fail("the daemon closed the connection")

    def wake(self) -> None:
        """End a Watch early."""
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """The background thread has ended: nobody can be woken any more."""
        os.close(self._wake)


class Pending(Generic[T]):
    """An operation with copies that is under way. It advances in `poll`, `wait` and `Client.poll`."""

    def __init__(self, driver: Threads, op: Op[T]) -> None:
        self._driver = driver
        self._op = op
        self._turn = threading.Lock()
        self._effect: Effect | None = None
        self._result: T | None = None
        driver.active.add(self)
        self._step(None, None)
        self._advance(0.0)

    @property
    def _longest_s(self) -> float:
        limits = self._driver.core.setup.limits
        return limits.copy_s + limits.call_s

    @property
    def done(self) -> bool:
        """Is there a result? Until then the device blocks must stay untouched."""
        return self._result is not None

    def poll(self) -> T | None:
        """The result if there is one; never waits for a copy."""
        return self._result if self._result is not None else self._advance(0.0)

    def wait(self, timeout_s: float | None = None) -> T | None:
        """The result, or None at the timeout (default: as long as it may take by `limits`)."""
        return self._advance(self._longest_s if timeout_s is None else timeout_s)

    def _advance(self, timeout_s: float) -> T | None:
        now = self._driver.core.setup.clock.now
        until = now() + timeout_s
        if not self._turn.acquire(timeout=max(0.0, timeout_s)):
            return self._result  # another thread is at it
        try:
            while self._effect is not None:
                try:
                    outcome = self._attempt(self._effect, until)
                except KVStoreError as error:
                    self._step(None, error)
                    continue
                if outcome is None and isinstance(self._effect, Job):
                    break
                if outcome is False and isinstance(self._effect, Hear) and now() < self._effect.deadline:
                    break
                self._step(outcome, None)
        finally:
            self._turn.release()
        return self._result

    def _attempt(self, effect: Effect, until: float) -> Outcome:
        match effect:
            case Job():
                return self._driver.job(effect, until)
            case Hear(link, done, deadline):
                return self._driver.perform(Hear(link, done, min(until, deadline)))
        return self._driver.perform(effect)

    def _step(self, outcome: Outcome, error: KVStoreError | None) -> None:
        self._effect = None
        try:
            self._effect = self._op.send(outcome) if error is None else self._op.throw(error)
        except StopIteration as stop:
            self._result = stop.value
            self._driver.active.discard(self)


class Save(Pending[SaveResult]):
    """A save under way. The device blocks must hold the bytes until it is done.

    Saves under one root are published in the order in which they began, whichever is asked for first: a block
    whose parent is not readable yet would be dropped.

    Args:
        root: of its chain, b"" = it waits for no other.
    """

    def __init__(self, driver: Threads, op: Op[SaveResult], root: bytes = b"") -> None:
        self._root: bytes = root
        saves = [pending for pending in list(driver.active) if isinstance(pending, Save)]
        self._before = [save for save in saves if root and save._root == root]
        super().__init__(driver, op)

    def _attempt(self, effect: Effect, until: float) -> Outcome:
        if isinstance(effect, Job):  # what follows its end is to publish
            now = self._driver.core.setup.clock.now
            while self._before:
                if self._before[-1]._advance(max(0.0, until - now())) is None:
                    return None
                self._before.pop()
        return super()._attempt(effect, until)


class Load(Pending[LoadResult]):
    """A load under way. The device blocks hold undefined bytes until it is done."""

    def __init__(self, driver: Threads, loading: Loading) -> None:
        self._loading = loading
        self._reached = 0
        super().__init__(driver, load(driver.core, loading))

    @property
    def _longest_s(self) -> float:
        return super()._longest_s + self._driver.core.setup.limits.fetch_s

    def progress(self) -> int:
        """Leading blocks that are copied and verified."""
        result = self._result
        now = result.good if result is not None else self._loading.progress()
        self._reached = max(self._reached, now)
        return self._reached

    def cancel(self) -> None:
        """Blocks not yet begun are dropped, no more are fetched; the load still ends by itself, soon."""
        if self._result is None:
            self._loading.cancel()


class TailLoad(Pending[LoadResult]):
    """A load from its last block down; its caller computes from the first one up, and claims what it writes.

    Blocks that are not claimed hold undefined bytes until it is done. `good` and `arrived` of its result are
    counted from the end; `status` is in chain order.
    """

    def __init__(self, driver: Threads, loading: TailLoading) -> None:
        self._loading = loading
        super().__init__(driver, load_tail(driver.core, loading))

    @property
    def lowest(self) -> int:
        """Blocks from here to the end of the load range are copied and verified."""
        result = self._result
        return self._loading.top - result.good if result is not None else self._loading.lowest

    def claim(self, stop: int) -> int:
        """Claim blocks of the chain before `stop` for computing.

        Returns:
            Before which block the caller may write, once and for all; below `stop` where the load has claimed
            the next one. It comes, or is given back, within the time of a copy: ask again.
        """
        return self._loading.claim(stop)

    def cancel(self) -> None:
        """Blocks not yet begun are dropped, no more are fetched; the load still ends by itself, soon."""
        if not self.done:
            self._loading.cancel()


class Fetch(Pending[FetchResult]):
    """A fetch under way."""

    def __init__(self, driver: Threads, lease: int, start: int, stop: int) -> None:
        self._arrived = Arrived(start)
        super().__init__(driver, fetch(driver.core, lease, stop, self._arrived))

    @property
    def _longest_s(self) -> float:
        return super()._longest_s + self._driver.core.setup.limits.fetch_s

    @property
    def ready(self) -> int:
        """Blocks [start, ready) can be copied now."""
        return self._arrived.reached

    def slots(self) -> U32:
        """(ready - start,) their arena slots."""
        return self._arrived.slots()

    def cancel(self) -> None:
        """The rest is not wanted any more: it ends soon with what has come. Its lease goes on."""
        self._arrived.unwanted = self._arrived.unwanted or "cancelled"
