"""The thread that talks to the daemon for the scheduler, so that no step of the engine ever waits for it.

Errands run one after the other, in the order they were given: a report goes before the release of its lease.
When none waits the daemon is told what the device pool holds by now. A daemon that hangs holds up the
errands, never a step: the scheduler asks for an answer and goes on without one.

A request's keys are made here, too, and grow with it: no block is hashed twice. What a lookup finds below
HOST is brought there before its answer is given, in other threads (fetches).
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvstore.client import Client, Reservation
from kvstore.intent import Intent
from kvstore.keys import KeyChain, as_tokens
from kvstore.types import Hit, Miss

from .binding import Binder, Bound
from .fetches import Fetches
from .mirror import Mirror
from .tracked import Answer, Asked, Keys, Tracked

__all__ = ["Courier", "is_plain"]

T = TypeVar("T")
_TICK_S = 1.0  # callbacks and the mirror, when nothing else happens
_log = logging.getLogger("vllm.kvstore")


class Courier:
    """One thread, one client of role "scheduler".

    Args:
        block_tokens: tokens in a block.
        tenant: whose roots to use.
        fetch_s: how long a request waits for blocks from the disk.
    """

    def __init__(self, block_tokens: int, tenant: str, fetch_s: float) -> None:
        self._block_tokens = block_tokens
        self._tenant = tenant
        self._client: Client | None = None
        self._mirror: Mirror | None = None
        self._since_reset = b""
        self._binder = Binder()
        self._fetches = Fetches(fetch_s)
        self._errands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._digests = ThreadPoolExecutor(1, thread_name_prefix="kvstore-digests")
        self._thread = threading.Thread(target=self._run, name="kvstore-courier", daemon=True)
        self._thread.start()

    # ---- for the scheduler's thread ----------------------------------------------------------------------

    def serve(self, client: Client) -> None:
        """From now on there is a client; it is closed by `close`."""
        client.on_attach = self._on_attach
        self._client = client

    @property
    def epoch(self) -> bytes:
        """Boot epoch of the daemon that answers, b"" without one."""
        client = self._client
        return client.epoch if client is not None else b""

    def watch(self, pool: Any, blocks: int, groups: int) -> None:
        """Mirror vLLM's block pool from now on."""
        self._mirror = Mirror(pool, blocks, groups, self._block_tokens)

    def arrived(self, tracked: Tracked) -> None:
        """A new request. What it carries beside tokens is read now, in the order of arrival, kept or not.

        vLLM remembers images and adapters by names that a caller may choose: only whoever has seen all of
        them, in order, knows what a name stood for when a block was computed.
        """
        if tracked.request.resumable:  # it may bring more images, which nobody shows us
            self._binder.distrust_media()
        if not is_plain(tracked.request):
            tracked.binding = self._digests.submit(self._bind, tracked.request, self._since_reset)

    def look_up(self, tracked: Tracked, until: float, intent: Intent, *, afresh: bool = False) -> Asked:
        """Ask how much of a request's tokens can be loaded. The answer may be dropped.

        Args:
            until: on the monotonic clock: after it nobody waits for the daemon's answer; put off while blocks
                are brought from the disk.
            intent: for the request's plan.
            afresh: tell the daemon first what the device pool holds by now.
        """
        asked = Asked(until)

        def ask(bound: Bound) -> None:
            self._errands.put(lambda: self._answer(asked, tracked, bound, intent, afresh))

        self._once_bound(tracked, ask)
        return asked

    def reserve(self, tracked: Tracked, start: int, stop: int) -> Future[Reservation]:
        """Slots for blocks [start, stop) of a request."""
        reserved: Future[Reservation] = Future()

        def ask(bound: Bound) -> None:
            self._errands.put(lambda: _settle(reserved, lambda: self._reserve(tracked, bound, start, stop)))

        self._once_bound(tracked, ask)
        return reserved

    def _once_bound(self, tracked: Tracked, use: Callable[[Bound], None]) -> None:
        """Digests of images and adapters take their time: errands of others need not wait for them."""
        if is_plain(tracked.request):
            use(self._bind(tracked.request, self._since_reset))
            return
        if tracked.binding is None:
            tracked.binding = self._digests.submit(self._bind, tracked.request, self._since_reset)
        binding = tracked.binding
        # Behind every binding that was asked for so far: one of them may have shown that ours does not hold.
        self._digests.submit(lambda: use(self._still(binding)))

    def finish_load(self, lease: int, bad: set[int]) -> None:
        """Report positions whose stored bytes were wrong, then end the lease."""
        self._errands.put(lambda: self._finish_load(lease, bad))

    def abort(self, reservation: Reservation) -> None:
        """Give up slots that nobody will write."""
        self._errands.put(lambda: self._with_client(lambda client: client.abort(reservation)))

    def release(self, lease: int) -> None:
        """End a lease that was not used."""
        self._errands.put(lambda: self._with_client(lambda client: client.release(lease)))

    def stepped(self) -> None:
        """The engine made a step: the device pool may have changed."""
        if self._mirror is not None:
            self._mirror.changed = True

    def reset(self) -> None:
        """From now on every key is new: what was stored before belongs, perhaps, to other weights."""
        self._since_reset = os.urandom(16)
        if self._mirror is not None:
            self._errands.put(self._mirror.forget_names)

    def close(self) -> None:
        """Errands that wait are run, then the client goes."""
        self._digests.shutdown(wait=True)
        self._errands.put(None)
        self._thread.join()
        self._fetches.close()
        if self._client is not None:
            self._client.close()

    # ---- in the courier's thread -------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            try:
                errand = self._errands.get(timeout=_TICK_S)
            except queue.Empty:
                errand = self._tick
            if errand is None:
                return
            try:
                errand()
                if self._errands.empty():  # nobody waits for what a look at a large pool takes
                    self._tick()
            except Exception:  # noqa: BLE001 one request's mistake must not end everybody's cache
                _log.exception("kvstore: an errand failed")

    def _tick(self) -> None:
        client = self._client
        if client is not None:
            client.poll()
            if self._mirror is not None:
                self._mirror.tell(client)

    def _on_attach(self) -> None:
        if self._mirror is not None and self._client is not None:
            self._mirror.forget_told()
            self._mirror.tell(self._client, now=True)

    def _with_client(self, use: Callable[[Client], object]) -> None:
        if self._client is not None:
            use(self._client)

    def _bind(self, request: Any, epoch: bytes) -> Bound:
        try:
            return self._binder.bind(request, self._block_tokens, epoch)
        except Exception as error:  # noqa: BLE001 what we cannot read has no digest
            _log.exception("kvstore: request %s cannot be bound", request.request_id)
            return Bound({}, f"its digest failed: {error!r}")

    def _still(self, binding: Future[Bound]) -> Bound:
        """The same, unless a later request has shown that its names stood for something else."""
        try:
            bound = binding.result()
            if bound.reason or self._binder.holds(bound):
                return bound
        except Exception as error:  # noqa: BLE001 whoever waits for it must get an answer
            _log.exception("kvstore: a binding failed")
            return Bound({}, f"its digest failed: {error!r}")
        return Bound({}, "an image or adapter of this name has other content by now")

    def _answer(self, asked: Asked, tracked: Tracked, bound: Bound, intent: Intent, afresh: bool) -> None:
        """Look up, and answer now or when what was found is on HOST."""
        if not asked.set_running_or_notify_cancel():
            return
        try:
            found, client = self._look_up(tracked, bound, intent, afresh), self._client
            if client is None or found.hit is None or found.hit.ready == found.hit.plan.load_stop:
                asked.set_result(found)
            else:
                self._fetches.begin(client, found, asked)
        except Exception as error:  # noqa: BLE001 whoever asked decides what to do without an answer
            _log.exception("kvstore: a lookup failed")
            asked.set_exception(error)

    def _look_up(self, tracked: Tracked, bound: Bound, intent: Intent, afresh: bool) -> Answer:
        if bound.reason:
            return Answer(None, reason=bound.reason, bindable=False)
        client = self._client
        if client is None or not client.attached:
            return Answer(None, reason="no daemon is attached")
        if afresh and self._mirror is not None:
            self._mirror.tell(client, now=True)
        chain = self._chain(client, tracked, bound, tracked.request.num_tokens // self._block_tokens)
        if chain is None:
            return Answer(None, reason=f"tenant {self._tenant!r} may not share as {tracked.reuse.value!r}")
        epoch = client.epoch
        asked_s = time.monotonic()
        found = client.lookup(chain, intent=intent)
        if isinstance(found, Hit):
            return Answer(found, chain, epoch, plan=found.plan.id, asked_s=asked_s)
        if isinstance(found, Miss):
            return Answer(None, reason=found.reason, plan=found.plan, asked_s=asked_s)
        return Answer(None, reason=f"busy: {found.reason}")

    def _chain(self, client: Client, tracked: Tracked, bound: Bound, blocks: int) -> KeyChain | None:
        """Keys of a request's first `blocks` blocks, or more, under the daemon's root of today."""
        root = client.roots(self._tenant, tracked.reuse)
        kept = tracked.keys
        if root is None or bound.reason:
            return None
        if kept is None or kept.chain.root != root or kept.bound.extra != bound.extra:
            tokens = self._tokens(tracked.request, 0, blocks)
            chain = client.chain(tokens, self._tenant, tracked.reuse, bound.extra)
            if chain is None:
                return None
            kept = tracked.keys = Keys(bound, chain)
        elif len(kept.chain) < blocks:
            kept.chain = self._longer(tracked.request, kept, blocks)
        if self._mirror is not None:
            self._mirror.learn(tracked.request.block_hashes, kept.chain.keys)
        return kept.chain

    def _longer(self, request: Any, kept: Keys, blocks: int) -> KeyChain:
        have, chain = len(kept.chain), kept.chain
        extra = {block - have: piece for block, piece in kept.bound.extra.items() if block >= have}
        tokens = self._tokens(request, have, blocks)
        more = KeyChain.of(chain.parent(have), tokens, self._block_tokens, extra)
        return KeyChain(chain.root, np.concatenate([chain.keys, more.keys]))

    def _tokens(self, request: Any, start: int, stop: int) -> NDArray[np.uint32]:
        size = self._block_tokens
        return as_tokens(request.all_token_ids[start * size : stop * size])

    def _reserve(self, tracked: Tracked, bound: Bound, start: int, stop: int) -> Reservation:
        client = self._client
        chain = self._chain(client, tracked, bound, stop) if client is not None else None
        if client is None or chain is None or len(chain) < stop:
            tracked.closed = tracked.closed or bool(bound.reason)
            return Reservation(0, np.empty(0, np.uint32), 0, 0, stop - start, "no keys for these blocks")
        return client.reserve(chain, start, stop)

    def _finish_load(self, lease: int, bad: set[int]) -> None:
        if self._client is not None:
            if bad:
                self._client.report(lease, sorted(bad))
            self._client.release(lease)


def is_plain(request: Any) -> bool:
    """Nothing but tokens, and perhaps a salt: its keys need no digest of anything large."""
    return not (request.mm_features or request.lora_request or request.prompt_embeds is not None)


def _settle(future: Future[T], work: Callable[[], T]) -> None:
    """Set a future's result, unless nobody wants it any more; an error is a result, too."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(work())
    except Exception as error:  # noqa: BLE001 whoever asked decides what to do without an answer
        _log.exception("kvstore: an errand failed")
        future.set_exception(error)
