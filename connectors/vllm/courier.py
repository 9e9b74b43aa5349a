"""The thread that talks to the daemon for the scheduler, so that no step of the engine ever waits for it.

Errands run one after the other, in the order they were given: a report goes before the release of its lease,
and an observation of the device pool before the lookup that relies on it. A daemon that hangs holds up the
errands, never a step: the scheduler asks for an answer and goes on without one.

Key chains live here, too: they grow with their request, a block's keys hashed once.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from kvstore.client import Client, Reservation
from kvstore.keys import KeyChain, as_tokens
from kvstore.types import Hit, Miss, Reuse

from .binding import Binder, Bound
from .mirror import Mirror

__all__ = ["Answer", "Courier"]

T = TypeVar("T")
_TICK_S = 1.0  # callbacks and the mirror, when nothing else happens
_log = logging.getLogger("vllm.kvstore")


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of a lookup.

    Attributes:
        hit: a lease that its asker has to give back, or None.
        chain: the request's keys; only with a hit.
        epoch: of the daemon that granted it.
        reason: why there is none.
        bindable: False: this request must not be saved either.
    """

    hit: Hit | None
    chain: KeyChain | None = None
    epoch: bytes = b""
    reason: str = ""
    bindable: bool = True


@dataclass(slots=True)
class _Chain:
    """Keys of one request so far."""

    bound: Bound
    chain: KeyChain


class Courier:
    """One thread, one client of role "scheduler".

    Args:
        block_tokens: tokens in a block.
        tenant: whose roots to use.
    """

    def __init__(self, block_tokens: int, tenant: str) -> None:
        self._block_tokens = block_tokens
        self._tenant = tenant
        self._client: Client | None = None
        self._mirror: Mirror | None = None
        self._bindings: dict[str, Future[Bound]] = {}  # of the scheduler's thread
        self._chains: dict[str, _Chain] = {}  # of the courier's
        self._since_reset = b""
        self._binder = Binder()
        self._errands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._digests = ThreadPoolExecutor(1, thread_name_prefix="kvstore-digests")
        self._thread = threading.Thread(target=self._run, name="kvstore-courier", daemon=True)
        self._thread.start()

    # ---- for the scheduler's thread ----------------------------------------------------------------------

    @property
    def attached(self) -> bool:
        """Is there a daemon that answers?"""
        client = self._client
        return client is not None and client.attached

    def serve(self, client: Client) -> None:
        """From now on there is a client; it is closed by `close`."""
        client.on_attach = self._on_attach
        self._client = client

    def watch(self, pool: Any, blocks: int) -> None:
        """Mirror vLLM's block pool from now on."""
        self._mirror = Mirror(pool, blocks)

    def look_up(self, request: Any, reuse: Reuse, *, afresh: bool = False) -> Future[Answer]:
        """Ask how much of a request's tokens can be loaded.

        Args:
            afresh: tell the daemon first what the device pool holds by now.
        """
        answer: Future[Answer] = Future()

        def ask(bound: Bound) -> None:
            self._errands.put(lambda: _settle(answer, lambda: self._look_up(request, reuse, bound, afresh)))

        self._once_bound(request, ask)
        return answer

    def arrived(self, request: Any) -> None:
        """A new request. What it carries beside tokens is read now, in the order of arrival, kept or not.

        vLLM remembers images and adapters by names that a caller may choose: only whoever has seen all of
        them, in order, knows what a name stood for when a block was computed.
        """
        if not _is_plain(request):
            self._bindings[request.request_id] = self._digests.submit(self._bind, request)

    def _once_bound(self, request: Any, use: Callable[[Bound], None]) -> None:
        """Digests of images and adapters take their time: errands of others need not wait for them."""
        if _is_plain(request):
            use(self._bind(request))
            return
        binding = self._bindings.get(request.request_id)
        if binding is None:
            binding = self._bindings[request.request_id] = self._digests.submit(self._bind, request)
        # Behind every binding that was asked for so far: one of them may have shown that ours does not hold.
        self._digests.submit(lambda: use(self._still(binding.result())))

    def reserve(self, request: Any, reuse: Reuse, start: int, stop: int) -> Future[Reservation]:
        """Slots for blocks [start, stop) of a request that was looked up before."""
        reserved: Future[Reservation] = Future()

        def ask(bound: Bound) -> None:
            self._errands.put(
                lambda: _settle(reserved, lambda: self._reserve(request, reuse, bound, start, stop))
            )

        self._once_bound(request, ask)
        return reserved

    def finish_load(self, lease: int, bad: set[int]) -> None:
        """Report positions whose stored bytes were wrong, then end the lease."""
        self._errands.put(lambda: self._finish_load(lease, bad))

    def abort(self, reservation: Reservation) -> None:
        """Give up slots that nobody will write."""
        self._errands.put(lambda: self._with_client(lambda client: client.abort(reservation)))

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._bindings.pop(request_id, None)
        self._errands.put(lambda: self._forget(request_id))

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
        self._bindings.clear()
        self._errands.put(self._forget_keys)

    def close(self) -> None:
        """Errands that wait are run, then the client goes."""
        self._digests.shutdown(wait=True)
        self._errands.put(None)
        self._thread.join()
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
            except Exception:  # noqa: BLE001 one request's mistake must not end everybody's cache
                _log.exception("kvstore: an errand failed")

    def _tick(self) -> None:
        self._with_client(lambda client: client.poll())
        if self._mirror is not None and self._client is not None:
            self._mirror.tell(self._client)

    def _on_attach(self) -> None:
        if self._mirror is not None and self._client is not None:
            self._mirror.forget_told()
            self._mirror.tell(self._client, now=True)

    def _with_client(self, use: Callable[[Client], object]) -> None:
        if self._client is not None:
            use(self._client)

    def _bind(self, request: Any) -> Bound:
        try:
            return self._binder.bind(request, self._block_tokens, self._since_reset)
        except Exception as error:  # noqa: BLE001 what we cannot read has no digest
            _log.exception("kvstore: request %s cannot be bound", request.request_id)
            return Bound({}, f"its digest failed: {error!r}")

    def _still(self, bound: Bound) -> Bound:
        """The same, unless a later request has shown that its names stood for something else."""
        if bound.reason or self._binder.holds(bound):
            return bound
        return Bound(reason="an image or adapter of this name has other content by now")

    def _look_up(self, request: Any, reuse: Reuse, bound: Bound, afresh: bool) -> Answer:
        if bound.reason:
            return Answer(None, reason=bound.reason, bindable=False)
        client = self._client
        if client is None or not client.attached:
            return Answer(None, reason="no daemon is attached")
        client.poll()
        if self._mirror is not None:
            self._mirror.tell(client, now=afresh)
        chain = self._chain(client, request, reuse, request.num_tokens // self._block_tokens, bound)
        if chain is None:
            return Answer(None, reason=f"tenant {self._tenant!r} may not share as {reuse.value!r}")
        epoch = client.epoch
        found = client.lookup(chain)
        if isinstance(found, Hit):
            return Answer(found, chain, epoch)
        return Answer(None, reason=found.reason if isinstance(found, Miss) else f"busy: {found.reason}")

    def _chain(
        self, client: Client, request: Any, reuse: Reuse, blocks: int, bound: Bound
    ) -> KeyChain | None:
        """Keys of a request's first `blocks` blocks, under the daemon's root of today."""
        root = client.roots(self._tenant, reuse)
        kept = self._chains.get(request.request_id)
        if root is None or bound.reason:
            return None
        if kept is None or kept.chain.root != root or kept.bound.extra != bound.extra:
            chain = client.chain(self._tokens(request, 0, blocks), self._tenant, reuse, bound.extra)
            if chain is None:
                return None
            kept = self._chains[request.request_id] = _Chain(bound, chain)
        elif len(kept.chain) < blocks:
            kept.chain = self._longer(request, kept, blocks)
        if self._mirror is not None:
            self._mirror.learn(request.block_hashes, kept.chain.keys)
        return kept.chain

    def _longer(self, request: Any, kept: _Chain, blocks: int) -> KeyChain:
        have, chain = len(kept.chain), kept.chain
        extra = {block - have: piece for block, piece in kept.bound.extra.items() if block >= have}
        more = KeyChain.of(chain.parent(have), self._tokens(request, have, blocks), self._block_tokens, extra)
        return KeyChain(chain.root, np.concatenate([chain.keys, more.keys]))

    def _tokens(self, request: Any, start: int, stop: int) -> np.ndarray[Any, np.dtype[np.uint32]]:
        size = self._block_tokens
        return as_tokens(request.all_token_ids[start * size : stop * size])

    def _reserve(self, request: Any, reuse: Reuse, bound: Bound, start: int, stop: int) -> Reservation:
        client = self._client
        chain = self._chain(client, request, reuse, stop, bound) if client is not None else None
        if client is None or chain is None or len(chain) < stop:
            reason = bound.reason or "no keys for these blocks"
            return Reservation(0, np.empty(0, np.uint32), 0, 0, stop - start, reason)
        return client.reserve(chain, start, stop)

    def _finish_load(self, lease: int, bad: set[int]) -> None:
        if self._client is not None:
            if bad:
                self._client.report(lease, sorted(bad))
            self._client.release(lease)

    def _forget(self, request_id: str) -> None:
        self._chains.pop(request_id, None)

    def _forget_keys(self) -> None:
        self._chains.clear()
        if self._mirror is not None:
            self._mirror.forget_names()


def _is_plain(request: Any) -> bool:
    return not (request.mm_features or request.lora_request or request.prompt_embeds is not None)


def _settle(future: Future[T], work: Callable[[], T]) -> None:
    """Set a future's result; an error is a result, too."""
    try:
        future.set_result(work())
    except Exception as error:  # noqa: BLE001 whoever asked decides what to do without an answer
        _log.exception("kvstore: an errand failed")
        future.set_exception(error)
