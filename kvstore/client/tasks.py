"""How operations run on an event loop: the driver, and handles for operations with copies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvstore._native import Completion
from kvstore.client.alink import LoopLink
from kvstore.client.core import Core
from kvstore.client.effects import Call, Connect, Effect, Hear, Job, Op, Outcome, Watch, Work
from kvstore.client.fetching import Arrived, fetch
from kvstore.client.loading import Loading, load
from kvstore.client.tails import TailLoading, load_tail
from kvstore.client.values import FetchResult, LoadResult
from kvstore.errors import DeadlineExceeded, KVStoreError
from kvstore.types import SaveResult

__all__ = ["AsyncFetch", "AsyncLoad", "AsyncPending", "AsyncSave", "AsyncTailLoad", "Tasks"]

T = TypeVar("T")
U32 = NDArray[np.uint32]


class Tasks:
    """Performs effects on one loop; copier jobs are awaited through the copier's eventfd."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.active: set[asyncio.Task[Any]] = set()
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        self._awaited: dict[int, asyncio.Future[None]] = {}
        # Two threads: a long populate must not hold up a quiesce.
        self._workers = ThreadPoolExecutor(2, thread_name_prefix="kvstore-client")
        if core.copier is not None:
            self._loop.add_reader(core.copier.eventfd, self._collect)

    def start(self, op: Op[T]) -> asyncio.Task[T]:
        """An operation as a task that `close` waits for."""
        task = self._loop.create_task(self.run(op))
        self.active.add(task)
        task.add_done_callback(self.active.discard)
        return task

    async def shielded(self, op: Op[T], undo: Callable[[T], Op[None] | None] | None = None) -> T:
        """An operation that ends in order even if its caller is cancelled; `undo` gives its gain back."""
        task = self.start(op)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if undo is not None:
                task.add_done_callback(lambda done: self._give_back(done, undo))
            raise

    async def run(self, op: Op[T]) -> T:
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
                outcome = await self.perform(effect)
            except KVStoreError as failed:
                error = failed

    async def perform(self, effect: Effect) -> Outcome:
        """One effect, as long as it takes within its own deadline."""
        match effect:
            case Call(link, message, deadline):
                assert isinstance(link, LoopLink)
                return await link.call(message, deadline)
            case Job():
                return await self._job(effect)
            case Hear(link, done, deadline):
                assert isinstance(link, LoopLink)
                return await link.hear(done, deadline)
            case Work(function):
                return await self._loop.run_in_executor(self._workers, function)
            case Connect():
                return LoopLink.connect(self.core.setup.path, self.core.setup.clock, self._wake)
            case Watch(link, seconds):
                await self._watch(link if isinstance(link, LoopLink) else None, seconds)
        return None

    async def _watch(self, link: LoopLink | None, seconds: float) -> None:
        self._wake.clear()
        if self.core.closing or (link is not None and link.dead):
            return
        try:
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        except TimeoutError:
            return

    async def _job(self, job: Job) -> Completion:
        limits, now = self.core.setup.limits, self.core.setup.clock.now
        done = await self._completion(job.id, job.deadline - now())
        if done is None:
            self.core.cancel(job.id)
            done = await self._completion(job.id, None if job.patient else limits.copy_s)
        if done is None:
            raise DeadlineExceeded("a copy is stuck: cancelled, and still not done")
        return done

    async def _completion(self, job: int, seconds: float | None) -> Completion | None:
        if job not in self.core.done:
            arrived = self._awaited[job] = self._loop.create_future()
            try:
                async with asyncio.timeout(seconds):
                    await arrived
            except TimeoutError:
                return None
            finally:
                del self._awaited[job]
        return self.core.done.pop(job)

    def _collect(self) -> None:
        copier = self.core.copier
        assert copier is not None  # this is its reader
        for done in copier.completions():
            self.core.done[done.job] = done
            arrived = self._awaited.get(done.job)
            if arrived is not None and not arrived.done():
                arrived.set_result(None)

    def wake(self) -> None:
        """End a Watch early."""
        self._wake.set()

    def close(self) -> None:
        """Every operation has ended: stop listening to the copier."""
        if self.core.copier is not None:
            self._loop.remove_reader(self.core.copier.eventfd)
        self._workers.shutdown(wait=True)

    def _give_back(self, task: asyncio.Task[T], undo: Callable[[T], Op[None] | None]) -> None:
        if not task.cancelled() and task.exception() is None:
            op = undo(task.result())
            if op is not None:
                self.start(op)


class AsyncPending(Generic[T]):
    """An operation with copies that is under way. It advances by itself."""

    def __init__(self, driver: Tasks, op: Op[T]) -> None:
        self._driver = driver
        self._task = driver.start(op)

    @property
    def _longest_s(self) -> float:
        limits = self._driver.core.setup.limits
        return limits.copy_s + limits.call_s

    @property
    def done(self) -> bool:
        """Is there a result? Until then the device blocks must stay untouched."""
        return self._task.done()

    def poll(self) -> T | None:
        """The result if there is one."""
        return self._task.result() if self._task.done() else None

    async def wait(self, timeout_s: float | None = None) -> T | None:
        """The result, or None at the timeout (default: as long as it may take by `limits`)."""
        timeout_s = self._longest_s if timeout_s is None else timeout_s
        await asyncio.wait({self._task}, timeout=timeout_s)
        return self.poll()


class AsyncSave(AsyncPending[SaveResult]):
    """A save under way. The device blocks must hold the bytes until it is done."""


class AsyncLoad(AsyncPending[LoadResult]):
    """A load under way. The device blocks hold undefined bytes until it is done."""

    def __init__(self, driver: Tasks, loading: Loading) -> None:
        self._loading = loading
        self._reached = 0
        super().__init__(driver, load(driver.core, loading))

    @property
    def _longest_s(self) -> float:
        return super()._longest_s + self._driver.core.setup.limits.fetch_s

    def progress(self) -> int:
        """Leading blocks that are copied and verified."""
        result = self.poll()
        now = result.good if result is not None else self._loading.progress()
        self._reached = max(self._reached, now)
        return self._reached

    def cancel(self) -> None:
        """Blocks not yet begun are dropped, no more are fetched; the load still ends by itself, soon."""
        if not self.done:
            self._loading.cancel()


class AsyncTailLoad(AsyncPending[LoadResult]):
    """A load from its last block down; its caller computes from the first one up, and claims what it writes.

    Blocks that are not claimed hold undefined bytes until it is done. `good` and `arrived` of its result are
    counted from the end; `status` is in chain order.
    """

    def __init__(self, driver: Tasks, loading: TailLoading) -> None:
        self._loading = loading
        super().__init__(driver, load_tail(driver.core, loading))

    @property
    def lowest(self) -> int:
        """Blocks from here to the end of the load range are copied and verified."""
        result = self.poll()
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


class AsyncFetch(AsyncPending[FetchResult]):
    """A fetch under way."""

    def __init__(self, driver: Tasks, lease: int, start: int, stop: int) -> None:
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
