"""A rank's side: bytes between vLLM's KV memory and the arena. It decides nothing.

    orders ─▶ loads   submitted to native threads, polled once a step, reported in the step they end
           ─▶ saves   handed to a Python thread that submits them and sleeps until they end

Nothing here waits for a copy while the engine computes, and nothing raises because a daemon is absent: then
a load ends at once with every block missing, and a save with every block dropped.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore._native import DROPPED, OK
from kvstore.client import Client, Load, LoadResult, Save

from .messages import LoadOrder, Saved, SaveOrder, StepOrders, StepReport
from .metrics import Tally

__all__ = ["Worker"]

U32 = NDArray[np.uint32]
_log = logging.getLogger("vllm.kvstore")
# How long a step that computes nothing may sleep for what is about to end, instead of spinning.
_IDLE_S = 0.003


@dataclass(slots=True)
class _Loading:
    """A load under way: one copy per bank."""

    order: LoadOrder
    parts: list[tuple[U32, Load]]  # positions that the bank needs, and its copy
    reason: str = ""


class Worker:
    """Copies for one rank.

    Until `attach`, or for ever where the daemon refuses this rank, every load fails and every save is
    dropped: the scheduler is a process of its own and waits for each answer.

    Args:
        banks: KV groups of this rank; each answers for every save.
        tally: what vLLM's logger and metrics are told.
    """

    def __init__(self, banks: int, tally: Tally) -> None:
        self._writes = True
        self._banks = banks
        self._tally = tally
        self._clients: Sequence[Client] = ()
        self._loading: list[_Loading] = []
        self._invalid: set[int] = set()
        self._failed: set[str] = set()
        self._report = StepReport()
        self._idle = False
        self._saves: queue.SimpleQueue[SaveOrder | None] = queue.SimpleQueue()
        self._saved: deque[tuple[int, Saved]] = deque()
        self._under_way = 0
        self._saver = threading.Thread(target=self._copy_out, name="kvstore-saves", daemon=True)
        self._saver.start()

    def attach(self, clients: Sequence[Client], writes: bool) -> None:
        """From now on there is somebody to copy for.

        Args:
            clients: one per bank.
            writes: this rank owns its cells; a replica of a lower rank loads but never writes.
        """
        self._writes = writes
        self._clients = clients

    # ---- one step --------------------------------------------------------------------------------------

    def begin_loads(self, orders: StepOrders) -> None:
        """Submit the step's loads. Copies go on while the engine computes."""
        self._idle, self._report.step = orders.idle, orders.step
        self._loading += [self._begin_load(order) for order in orders.loads]

    def begin_saves(self, orders: StepOrders) -> None:
        """Hand over the step's saves; their blocks are computed by now, and pinned until answered."""
        self._under_way += len(orders.saves)
        for order in orders.saves:
            self._saves.put(order)

    def _begin_load(self, order: LoadOrder) -> _Loading:
        loading = _Loading(order, [])
        clients = self._clients
        if not clients or any(client.epoch != order.epoch for client in clients):
            loading.reason = "this rank is not attached to the daemon that named the slots"
            return loading
        try:
            for client, blocks in zip(clients, order.blocks, strict=True):
                needed = np.flatnonzero(blocks).astype(np.uint32)
                if needed.size:
                    copy = client.load_slots(order.slots[needed], order.keys[needed], blocks[needed])
                    loading.parts.append((needed, copy))
        except Exception as error:  # noqa: BLE001 the engine must go on
            _log.exception("kvstore: a load could not begin")
            loading.reason = f"the load could not begin: {error!r}"
        return loading

    # ---- what ended ------------------------------------------------------------------------------------

    def finished(self, gone: Collection[str]) -> set[str]:
        """Requests whose load has ended, each named once; their bad blocks are known from here on.

        Args:
            gone: requests that ended in this step; what of their load has not begun is dropped.
        """
        for loading in self._loading:
            if loading.order.request in gone:
                for _, copy in loading.parts:
                    copy.cancel()
        if self._idle and (self._loading or self._under_way):
            self._doze()
        ended = set()
        still = []
        for loading in self._loading:
            results = [copy.poll() for _, copy in loading.parts]
            if any(result is None for result in results):
                still.append(loading)
                continue
            ended.add(loading.order.request)
            self._settle(loading, [result for result in results if result is not None])
        self._loading = still
        return ended

    def _doze(self) -> None:
        """Until the first load has ended, or a moment."""
        if not self._loading:
            time.sleep(_IDLE_S)
            return
        for _, copy in self._loading[0].parts:
            copy.wait(_IDLE_S)

    def _settle(self, loading: _Loading, results: Sequence[LoadResult]) -> None:
        order = loading.order
        whole = np.full(len(order.slots), DROPPED if loading.reason else OK, np.uint8)
        reason = loading.reason
        for (needed, _), result in zip(loading.parts, results, strict=True):
            whole[needed] = np.where(whole[needed] == OK, result.status, whole[needed])
            reason = reason or result.reason
            self._tally.copied("load", result.bytes, result.seconds)
        wrong = np.flatnonzero(whole != OK)
        if not wrong.size:
            self._report.loaded[order.request] = len(whole)
            return
        rotten = np.flatnonzero((whole != OK) & (whole != DROPPED))
        if rotten.size:
            self._report.bad[order.request] = set(rotten.tolist())
        self._report.reasons[order.request] = reason
        if len(order.blocks) == 1:
            self._report.loaded[order.request] = int(wrong[0])
            self._invalid.update(order.blocks[0][wrong].tolist())
        else:  # vLLM cannot keep a part where groups differ: the request fails as a whole
            self._report.loaded[order.request] = 0
            self._failed.add(order.request)

    def invalid(self) -> set[int]:
        """Device blocks whose load failed, since the last call."""
        invalid, self._invalid = self._invalid, set()
        return invalid

    def failed(self) -> set[str]:
        """Requests of a model with several KV groups whose load failed, since the last call."""
        failed, self._failed = self._failed, set()
        return failed

    def report(self) -> StepReport | None:
        """What the scheduler has to know of this step; None if it had no orders of ours."""
        while self._saved:
            number, saved = self._saved.popleft()
            self._under_way -= 1
            self._report.saves[number] = saved
        report, self._report = self._report, StepReport()
        return report if report.step or report.saves or report.loaded else None

    # ---- the thread that copies out ----------------------------------------------------------------------

    def _copy_out(self) -> None:
        """Submit what waits, all of it, then sleep until each has ended: copies overlap with publishing."""
        while (order := self._saves.get()) is not None:
            orders = [order]
            while not self._saves.empty():
                following = self._saves.get()
                if following is None:
                    self._saves.put(None)
                    break
                orders.append(following)
            handles = [self._write(order) for order in orders]
            for order, writes in zip(orders, handles, strict=True):
                self._saved.append((order.save, self._written(order, writes)))

    def _write(self, order: SaveOrder) -> list[Save]:
        """Begin to copy; nothing where this rank does not write, or cannot."""
        clients = self._clients
        if not self._writes or not clients:
            return []
        try:
            pairs = zip(clients, order.blocks, strict=True)
            return [client.write(order.reservation, blocks) for client, blocks in pairs]
        except Exception:  # noqa: BLE001 its blocks are pinned until they are answered for
            _log.exception("kvstore: a save could not begin")
            return []

    def _written(self, order: SaveOrder, writes: Sequence[Save]) -> Saved:
        if not writes:
            return Saved(self._banks, 0, len(order.reservation.slots) if self._writes else 0)
        results = [_ended(write) for write in writes]
        ready = sum(result.ready for result in results)
        return Saved(self._banks, ready, max(result.dropped for result in results))

    def close(self) -> None:
        """Every copy joined; the clients are their owner's to close."""
        self._saves.put(None)
        self._saver.join()
        for loading in self._loading:
            for _, copy in loading.parts:
                copy.cancel()
                _ended(copy)


def _ended(handle: Save | Load) -> Any:
    """A handle's result, however long that takes: until then its blocks must not be touched."""
    while (result := handle.wait()) is None:
        pass
    return result
