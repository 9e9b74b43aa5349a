"""Blocks below HOST, brought there before their request is answered.

vLLM is offered only what can be copied at once, so a lookup that found blocks on the disk is answered when
they have come. Each fetch waits in a thread of its own: a slow disk holds up its own request, no other.
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from kvstore.client import Client, FetchResult
from kvstore.types import Hit

from .tracked import Answer, Asked

__all__ = ["Fetches"]

_log = logging.getLogger("vllm.kvstore")
# At once, each with a thread that sleeps: a few keep any disk busy. Others wait for their turn.
_FETCHES_MAX = 8
_END_S = 0.5  # a fetch that was cancelled has ended by then


class Fetches:
    """Fetches of one scheduler.

    Args:
        fetch_s: a request waits at most so long.
    """

    def __init__(self, fetch_s: float) -> None:
        self._fetch_s = fetch_s
        self._threads = ThreadPoolExecutor(_FETCHES_MAX, thread_name_prefix="kvstore-fetches")
        self._waiting: set[Asked] = set()

    def begin(self, client: Client, found: Answer, asked: Asked) -> None:
        """Bring what a hit lacks, then answer with what is on HOST by that time."""
        began = time.monotonic()
        asked.until = began + self._fetch_s + _END_S
        asked.fetching = True
        self._waiting.add(asked)
        self._threads.submit(self._run, client, found, asked, began)

    def close(self) -> None:
        """What is under way ends now, with what has come."""
        for asked in tuple(self._waiting):
            asked.drop()
        self._threads.shutdown(wait=True)

    # ---- in a thread of its own --------------------------------------------------------------------------

    def _run(self, client: Client, found: Answer, asked: Asked, began: float) -> None:
        hit = found.hit
        assert hit is not None, "only a hit has something to fetch"
        try:
            result = self._bring(client, hit, asked, began + self._fetch_s)
        except Exception as error:  # noqa: BLE001 whoever asked must get an answer
            _log.exception("kvstore: a fetch failed")
            result = _nothing(hit, f"the fetch failed: {error!r}")
        self._waiting.discard(asked)
        asked.set_result(_answer(found, hit, result, time.monotonic() - began))

    def _bring(self, client: Client, hit: Hit, asked: Asked, until: float) -> FetchResult:
        left = until - time.monotonic()
        if left <= 0 or asked.dropped:
            return _nothing(hit, "the disk was busy with other requests")
        fetch = client.fetch(hit, hit.ready, hit.plan.load_stop)
        asked.begin(fetch)
        result = fetch.wait(left)
        if result is None:
            fetch.cancel()
            result = fetch.wait(_END_S)
        return result or _nothing(hit, "the fetch did not end")


def _nothing(hit: Hit, reason: str) -> FetchResult:
    return FetchResult(hit.ready, np.empty(0, np.uint32), reason)


def _answer(found: Answer, hit: Hit, result: FetchResult, seconds: float) -> Answer:
    """A hit on what is on HOST by now. What has not come does not count as known: it may be saved again."""
    fetched, missed = result.ready - hit.ready, hit.plan.load_stop - result.ready
    plan = replace(hit.plan, load_stop=result.ready)
    slots = np.concatenate([hit.slots, result.slots])
    blocks = result.ready if missed else hit.blocks
    reason = f"{missed} of {fetched + missed} blocks did not come from the disk: {result.reason}"
    return replace(
        found,
        hit=replace(hit, blocks=blocks, plan=plan, slots=slots),
        reason=reason if missed else "",
        fetched=fetched,
        missed=missed,
        fetch_s=seconds,
    )
