"""What both clients show without I/O: construction, state, keys, callbacks."""

from __future__ import annotations

import inspect
import os
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvstore import _native
from kvstore.client.core import Core
from kvstore.client.loading import Loading
from kvstore.client.tails import TailLoading
from kvstore.client.values import Counters, KVMemory, Limits, PoolSpec, Role, Setup
from kvstore.errors import BadRequest, KVStoreError
from kvstore.keys import KeyChain
from kvstore.policy.prefill import Step
from kvstore.types import BlockLayout, Hit, Namespace, Reuse

__all__ = ["Face", "as_blocks", "as_keys"]

U32 = NDArray[np.uint32]
U8 = NDArray[np.uint8]


class Face:
    """Base of `Client` and `AsyncClient`.

    Args:
        socket_path: the daemon's session socket; nobody needs to listen there yet.
        namespace: identity of every block; a tool needs none.
        memory: the engine's paged KV memory (roles "both" and "worker").
        layout: the block layout, where there is no memory to take it from (role "scheduler").
        tenants: names whose roots are wanted, all of one trust group.
        role: "both", "scheduler", "worker" or "tool".
        pool: the device pool to declare.
        engine: id to join an engine that exists; b"" to be given one (`client.engine`).
        copy_threads: native threads that copy.
        scratch_block: a device block that the engine never uses, beyond the blocks of an owned pool. The
            layout proof overwrites it at every attach, from the background.
        scratch_lock: held during the proof, where clients of one process have the same scratch memory.
        scratch_restore: write the scratch block's former content back; safe only while the engine is idle.
        limits: every deadline.

    Raises:
        BadRequest: the arguments contradict each other; the message names the argument.
    """

    def __init__(
        self,
        socket_path: str | os.PathLike[str],
        namespace: Namespace | None,
        memory: KVMemory | None = None,
        *,
        layout: BlockLayout | None = None,
        tenants: Sequence[str] = ("default",),
        role: Role = "both",
        pool: PoolSpec | None = None,
        engine: bytes = b"",
        copy_threads: int = 1,
        scratch_block: int = 0,
        scratch_lock: threading.Lock | None = None,
        scratch_restore: bool = False,
        limits: Limits | None = None,
    ) -> None:
        self.on_attach: Callable[[], object] | None = None
        """Run by `poll()` after every attach; adopts the tables in use. False: not finished, so the pool
        stays closed and the next `poll()` asks again. Anything else (None too) opens it."""
        self.on_detach: Callable[[], object] | None = None
        """Run by `poll()` after the daemon was lost."""
        self._pid = os.getpid()
        self._core = Core(
            Setup(
                Path(socket_path),
                namespace,
                memory,
                memory.layout if memory is not None else layout,
                tuple(tenants),
                role,
                pool,
                engine,
                copy_threads,
                scratch_block,
                scratch_lock,
                scratch_restore,
                limits or Limits(),
            )
        )
        self._start()

    def _start(self) -> None:
        """Begin to attach."""
        raise NotImplementedError

    # ---- state -----------------------------------------------------------------------------------------

    @property
    def attached(self) -> bool:
        """Is there a daemon that answers?"""
        return self._core.attachment is not None

    @property
    def epoch(self) -> bytes:
        """Boot epoch of the daemon, b"" while detached."""
        attachment = self._core.attachment
        return attachment.epoch if attachment is not None else b""

    @property
    def generation(self) -> int:
        """Successful attaches so far."""
        return self._core.generation

    @property
    def engine(self) -> bytes:
        """16 bytes to hand to the engine's other processes; b"" before the first attach."""
        return self._core.engine

    @property
    def refusal(self) -> KVStoreError | None:
        """Why the daemon does not want us, if that was its last answer."""
        return self._core.refusal

    @property
    def counters(self) -> Counters:
        """Live counters."""
        return self._core.counters

    @property
    def limits(self) -> Limits:
        """As given."""
        return self._core.setup.limits

    # ---- keys ------------------------------------------------------------------------------------------

    def roots(self, tenant: str, reuse: Reuse) -> bytes | None:
        """Root of a tenant's chains; None while detached, for Reuse.NONE, and where it is not allowed."""
        self._check()
        attachment = self._core.attachment
        if attachment is None or reuse is Reuse.NONE:
            return None
        return attachment.roots.get(tenant, {}).get(reuse.value)

    def chain(
        self,
        tokens: Sequence[int] | NDArray[np.integer],
        tenant: str,
        reuse: Reuse,
        extra: Mapping[int, bytes] | None = None,
    ) -> KeyChain | None:
        """Keys of the full blocks of `tokens`; None when `roots` is None: then there is nothing to ask.

        Cost: about 150 ns per 16-token block.

        Raises:
            BadRequest: bad token ids or extra.
        """
        root = self.roots(tenant, reuse)
        layout = self._core.setup.layout
        if root is None or layout is None:
            return None
        return KeyChain.of(root, tokens, layout.block_tokens, extra)

    # ---- timings ---------------------------------------------------------------------------------------

    def note_request(self, tenant: str, ttft_s: float, prompt_tokens: int, reused_tokens: int) -> None:
        """A request got its first token: noted here, told to the daemon with a heartbeat, for its metrics.

        Args:
            tenant: one of this client's.
            ttft_s: from the request's arrival to its first token.
            prompt_tokens: of the request.
            reused_tokens: of those, not computed because their KV was there.

        Raises:
            BadRequest: not a tenant of this client, or counts and seconds that cannot be.
        """
        if tenant not in self._core.setup.tenants:
            raise BadRequest(f"tenant: {tenant!r:.80} is none of this client's")
        if not 0 <= reused_tokens <= prompt_tokens or not 0.0 <= ttft_s < float("inf"):
            raise BadRequest(f"note_request: {reused_tokens} of {prompt_tokens} tokens in {ttft_s} s")
        self._core.timings.note_request(tenant, float(ttft_s), int(prompt_tokens), int(reused_tokens))

    def note_plan(self, plan: int, seconds: float) -> None:
        """A plan was carried out: noted here, told to the daemon with a heartbeat, for `kvstore explain`.

        Args:
            plan: `FetchPlan.id` of a hit, or `Miss.plan`; 0 is ignored.
            seconds: from the lookup until the whole prompt had its KV: about until its first token.

        Raises:
            BadRequest: seconds that cannot be.
        """
        if not 0.0 <= seconds < float("inf"):
            raise BadRequest(f"note_plan: {seconds} s")
        if plan > 0:
            self._core.timings.note_plan(int(plan), float(seconds))

    def note_prefill(
        self,
        tokens: int,
        seconds: float,
        area: float | None = None,
        decodes: int = 0,
        decode_context: int = 0,
    ) -> None:
        """A step of the engine ended: noted here, told to the daemon with a heartbeat, for its prefill curve.

        Note those that only decode, too: they tell what load costs. Leave out steps that waited for a load.

        Args:
            tokens: of prompts, computed in this step.
            seconds: of the whole step.
            area: sum of p * (start + p / 2) over its chunks of p prompt tokens that begin at position
                `start`; None = a single chunk at the beginning of a prompt.
            decodes: sequences that computed one token in it.
            decode_context: sum of their lengths in tokens.

        Raises:
            BadRequest: names the number that cannot be.
        """
        area = tokens * tokens / 2 if area is None else area
        try:
            step = Step(int(tokens), float(area), int(decodes), int(decode_context), float(seconds))
        except (ValueError, OverflowError) as error:  # of an infinity that should be an integer, too
            raise BadRequest(f"note_prefill: {error}") from None
        self._core.timings.note_step(
            (step.prefill_tokens, step.prefill_area, step.decodes, step.decode_context, step.seconds)
        )

    # ---- callbacks -------------------------------------------------------------------------------------

    def _due(self) -> Iterator[Callable[[], object]]:
        """Callbacks for what happened since the last time, each to be run before the next is asked for.

        One that raises is not marked as told, and so is due again; so is an `on_attach` that answers False.
        """
        core = self._core
        attachment = core.attachment
        now = attachment.generation if attachment is not None else 0
        if core.told and core.told != now:
            if self.on_detach is not None:
                yield self.on_detach
            core.told = 0
        if now and core.told != now:
            answer = _Answer(self.on_attach)
            if self.on_attach is not None:
                yield answer
            if answer.value is not False:
                core.told = now

    # ---- for the drivers -------------------------------------------------------------------------------

    def _check(self) -> None:
        if os.getpid() != self._pid:
            raise BadRequest(
                f"client: made in process {self._pid}, used in {os.getpid()}; make a new client after fork"
            )

    def _begin_load(self, hit: Hit, blocks: object) -> Loading:
        """Submit the copies of what a hit's load range has on HOST."""
        core, start, stop = self._core, hit.plan.load_start, hit.plan.load_stop
        target = as_blocks(core, blocks, stop - start)
        grant = core.leases.get(hit.lease)
        if grant is None or grant.chain is None:
            return Loading.never(core, stop - start, start, "the lease is not held any more")
        keys = grant.chain.keys[start:stop]
        if not len(hit.slots) <= stop - start == len(keys):
            raise BadRequest(
                f"hit: {len(hit.slots)} slots for a load of {stop - start} of {len(grant.chain)} blocks"
            )
        loading = Loading(core, grant.attachment, hit.lease, start, keys, target)
        loading.begin(hit.ready, hit.slots)
        return loading

    def _begin_tail(self, hit: Hit, blocks: object) -> TailLoading:
        """A hit's load range from its end; nothing is copied before the daemon was asked."""
        core, start, stop = self._core, hit.plan.load_start, hit.plan.load_stop
        target = as_blocks(core, blocks, stop - start)
        grant = core.leases.get(hit.lease)
        if grant is None or grant.chain is None:
            return TailLoading.refuse_tail(core, start, stop - start, "the lease is not held any more")
        keys = grant.chain.keys[start:stop]
        if len(keys) != stop - start:
            raise BadRequest(f"hit: a load of blocks {start} to {stop} of {len(grant.chain)}")
        core.counters.loads += 1
        loading = TailLoading(core, grant.attachment, hit.lease, start, keys, target)
        loading.refused = core.full
        return loading

    def _begin_load_slots(self, slots: U32, keys: U8, blocks: object) -> Loading:
        core, count = self._core, len(slots)
        target = as_blocks(core, blocks, count)
        if len(as_keys(keys)) != count:
            raise BadRequest(f"keys: need {count}, one per slot, got {len(keys)}")
        source = np.ascontiguousarray(slots, np.uint32)
        attachment = core.attachment
        if attachment is None:
            return Loading.never(core, count, 0, "no daemon is attached")
        if count and int(source.max()) > attachment.pages - core.slot_pages:
            return Loading.never(core, count, 0, "a slot is outside the arena of this attach")
        loading = Loading(core, attachment, 0, 0, keys, target)
        loading.begin(count, source)
        return loading


class _Answer:
    """A callback that remembers what it answered, also when it is a coroutine that its caller awaits."""

    def __init__(self, callback: Callable[[], object] | None) -> None:
        self._callback = callback
        self.value: object = None

    def __call__(self) -> object:
        outcome = self._callback() if self._callback is not None else None
        if inspect.isawaitable(outcome):
            return self._later(outcome)
        self.value = outcome
        return outcome

    async def _later(self, outcome: Awaitable[object]) -> None:
        self.value = await outcome


def as_blocks(core: Core, blocks: object, expected: int | None = None) -> U32:
    """Device blocks given by a caller, as contiguous uint32.

    Raises:
        BadRequest: not one-dimensional integers below the memory's block count, or not `expected` of them.
    """
    array = np.asarray(blocks)
    if array.size == 0:
        array = array.astype(np.uint32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise BadRequest(f"blocks: need one dimension of integers, got {array.dtype} {array.shape}")
    if expected is not None and array.size != expected:
        raise BadRequest(f"blocks: need {expected} device blocks, got {array.size}")
    top = core.setup.memory.blocks if core.setup.memory else _native.NONE
    if array.size and not 0 <= int(array.min()) <= int(array.max()) < top:
        raise BadRequest(f"blocks: every device block must be in [0, {top})")
    return np.ascontiguousarray(array, np.uint32)


def as_keys(keys: object) -> U8:
    """Keys given by a caller. Raises BadRequest unless they are (n, 32) uint8."""
    array = np.asarray(keys)
    if array.dtype != np.uint8 or array.ndim != 2 or array.shape[1] != 32:
        raise BadRequest(f"keys: need (n, 32) uint8, got {array.dtype} {array.shape}")
    return array
