"""Attach, layout proof, detach: how a client gets the arena and gives it back.

    Attach ─▶ Attached + fds ─▶ map, populate ─▶ proof ─▶ Pool ─▶ attached
    detached ─▶ copies joined ─▶ (Quiesced) ─▶ mapping dropped ─▶ socket closed            (LAWS A7)

The proof writes a pattern through the engine's own indexing, stores it through `paged()`, and the daemon
reads the canonical slot; then the other way round. A layout that lies is found here, not by a user.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import TypeVar, cast

import numpy as np

from kvstore import _native
from kvstore._native import Arena, Completion, PagedLayout
from kvstore.client.asking import tell
from kvstore.client.core import Attachment, Core, ask
from kvstore.client.effects import Call, Connect, Job, Link, Op, Watch, Work
from kvstore.client.sockets import close_fds
from kvstore.client.values import KVMemory, PoolSpec
from kvstore.errors import BadRequest, KVStoreError, LayoutRefused, OutOfMemory, Refused, Unavailable
from kvstore.keys import KEY_BYTES, test_vector
from kvstore.rpc.messages import (
    PROTOCOL_VERSION,
    Attach,
    Attached,
    Done,
    Layout,
    Pool,
    Prove,
    Proved,
    ProvedStore,
    ProveLoad,
    ProveSlot,
    Quiesced,
    Quieted,
    pattern,
)
from kvstore.types import Part

__all__ = ["attach", "detach"]

T = TypeVar("T")
_QUIESCE_S = 1.0  # one try; joining is tried again until nothing can write any more


def attach(core: Core) -> Op[Attachment]:
    """Connect and go through the whole attach.

    Raises:
        Unavailable, DeadlineExceeded: nobody is there, or it went away; try again.
        Refused, LayoutRefused, BadRequest: this client may not; trying again soon is useless.
    """
    link = cast(Link, (yield Connect(core.setup.clock.now() + core.setup.limits.attach_s)))
    arena: Arena | None = None
    welcome: Attached | None = None
    core.attaching = link
    try:
        if core.closing:
            raise Unavailable("closing")
        welcome = yield from ask(core, link, _hello(core), Attached, _deadline(core))
        _check(core, link, welcome)
        token = welcome.token
        if core.generation and core.setup.copies:
            # Nothing of an earlier attach can write any more: what it was filling may be freed.
            token = (yield from ask(core, link, Quiesced(), Quieted, _deadline(core))).token
        arena = _map(core, link, welcome)
        if arena is not None:
            yield Work(partial(_populate, core, arena))
        paged = None
        if core.setup.memory is not None and arena is not None:
            paged = _by_engine(core.setup.memory.paged)()
            yield from _prove_alone(core, link, arena, paged, core.setup.memory)
        pool = core.setup.pool
        if pool is not None:
            yield from _declare(core, link, pool)
    except Exception:  # whatever it was: nothing of a half attach may stay
        if core.copier is not None:
            yield from _join(core)
            if welcome is not None:  # the slot of a proof that failed must not wait for our process to end
                yield from _say_quiesced(core, link)
        if arena is not None:
            arena.close()
        close_fds(link.take_fds())
        link.close()
        raise
    finally:
        core.attaching = None
    link.on_notice = core.on_notice
    return Attachment(
        core.generation + 1,
        link,
        welcome.epoch,
        welcome.session,
        welcome.engine,
        welcome.roots,
        welcome.keys_max,
        welcome.heartbeat_s,
        welcome.capacity_bytes // _native.PAGE_BYTES,
        token,
        arena,
        paged,
    )


def _declare(core: Core, link: Link, pool: PoolSpec) -> Op[None]:
    try:
        message = Pool(pool.kind, pool.blocks, pool.idle_max)
        yield from ask(core, link, message, Done, _deadline(core))
    except (BadRequest, Refused) as error:
        # An earlier session of ours may not have ended on the daemon's side yet: soon, it will.
        raise Unavailable(f"pool: {error}") from None


def detach(core: Core, attachment: Attachment) -> Op[None]:
    """Join every copy, say so if the daemon can still hear it, drop the mapping, close the socket."""
    with core.lock:
        core.attachment = None
        core.leases.clear()
        core.reported.clear()
        core.fetches.clear()
    core.changed()
    link = attachment.link
    if core.copier is not None:
        yield from _join(core)
    yield from tell(core, link, core.call_deadline())
    yield from _say_quiesced(core, link)
    if attachment.arena is not None:
        attachment.arena.close()
    link.close()


def _say_quiesced(core: Core, link: Link) -> Op[None]:
    """Nothing of ours can write any more: say so if the daemon can still hear it."""
    if not link.dead:
        try:
            yield Call(link, Quiesced(), core.call_deadline())
        except KVStoreError as error:
            link.fail(str(error))


def _join(core: Core) -> Op[None]:
    """Until nothing of ours can write to the arena."""
    copier = core.copier
    while copier is not None and not (yield Work(lambda: copier.quiesce(_QUIESCE_S))):
        yield Watch(None, core.setup.limits.retry_s)


def _deadline(core: Core) -> float:
    return core.setup.clock.now() + core.setup.limits.attach_s


def _hello(core: Core) -> Attach:
    setup = core.setup
    layout = None
    if setup.layout is not None:
        of = setup.layout
        layout = Layout(
            of.layers,
            of.kv_heads,
            of.head_dim,
            of.dtype,
            of.block_tokens,
            of.cell_format,
            of.kernel_block_tokens,
            of.attention,
            of.groups,
        )
    part = (0, 0, 0, 0)
    if setup.memory is not None:
        part = _quad(setup.memory.part)
    elif setup.layout is not None:
        part = _quad(Part.whole(setup.layout))
    return Attach(
        PROTOCOL_VERSION,
        setup.role,
        core.engine,
        asdict(setup.namespace) if setup.namespace is not None else {},
        layout,
        part,
        list(setup.tenants),
        test_vector(),
    )


def _quad(part: Part) -> tuple[int, int, int, int]:
    return part.layer_start, part.layers, part.head_start, part.heads


def _check(core: Core, link: Link, welcome: Attached) -> None:
    """Every field that is used later is what it must be."""
    if len(welcome.epoch) != 16 or (len(welcome.engine) != 16 and core.setup.role != "tool"):
        raise core.broken(link, "epoch and engine need 16 bytes")
    if welcome.keys_max < 1 or not 0 < welcome.heartbeat_s <= 3600 or welcome.capacity_bytes < 0:
        raise core.broken(link, "keys_max, heartbeat_s or capacity_bytes is out of range")
    for roots in welcome.roots.values():
        if any(len(root) != KEY_BYTES for root in roots.values()):
            raise core.broken(link, f"a root needs {KEY_BYTES} bytes")


def _map(core: Core, link: Link, welcome: Attached) -> Arena | None:
    """Map the arena from the fds that came along; the fds are closed whatever happens."""
    fds = link.take_fds()
    try:
        if not core.setup.copies:
            return None
        if len(fds) != 2:
            raise core.broken(link, f"Attached came with {len(fds)} file descriptors, need 2")
        return Arena.attach(fds[0], fds[1], welcome.capacity_bytes)
    except (OSError, ValueError, RuntimeError, MemoryError) as error:
        raise OutOfMemory(f"cannot map the arena of {welcome.capacity_bytes} bytes: {error}") from error
    finally:
        close_fds(fds)


def _populate(core: Core, arena: Arena) -> None:
    try:
        arena.populate(core.setup.limits.populate_threads)
    except (OSError, RuntimeError, MemoryError) as error:
        raise OutOfMemory(f"cannot fill the page tables of the arena: {error}") from error


def _by_engine(function: Callable[[], T]) -> Callable[[], T]:
    """The engine's own code: whatever it raises, its layout cannot be proven."""

    def run() -> T:
        try:
            return function()
        except Exception as error:  # an engine's own code may raise anything
            raise LayoutRefused(f"memory: the engine's KVMemory failed: {error!r}") from error

    return run


def _prove_alone(core: Core, link: Link, arena: Arena, paged: PagedLayout, memory: KVMemory) -> Op[None]:
    """The proof, while no other client of this process writes to the same scratch memory."""
    lock = core.setup.scratch_lock
    if lock is None:
        yield from _prove(core, link, arena, paged, memory)
        return
    if not (yield Work(partial(lock.acquire, timeout=core.setup.limits.attach_s))):
        raise Unavailable("the scratch block is in use by another client's layout proof")
    try:
        yield from _prove(core, link, arena, paged, memory)
    finally:
        lock.release()


def _prove(core: Core, link: Link, arena: Arena, paged: PagedLayout, memory: KVMemory) -> Op[None]:
    """Both directions of the layout proof, through the scratch block. Raises LayoutRefused."""
    block = core.setup.scratch_block
    blocks = np.array([block], np.uint32)
    copier, form = core.copier, core.format
    assert copier is not None  # Setup: who has memory has both
    assert form is not None
    task = yield from ask(core, link, Prove(), ProveSlot, _deadline(core))
    outside = not 0 <= task.slot <= int(arena.pages) - core.slot_pages
    if len(task.key) != KEY_BYTES or outside or not 0 <= task.generation < 1 << 64:
        raise core.broken(link, "ProveSlot names no slot of the arena, no generation, or no key")
    slots, generations = np.array([task.slot], np.uint32), np.array([task.generation], np.uint64)
    former = None
    if core.setup.scratch_restore:
        former = cast(list[bytes], (yield Work(_by_engine(partial(_read, memory, block)))))
    try:
        yield Work(_by_engine(partial(_write, memory, block, task.seed)))
        yield from _copied(core, lambda: copier.store(arena, form, paged, blocks, slots, generations))
        answer = yield from ask(core, link, ProvedStore(), ProveLoad, _deadline(core))
        yield Work(_by_engine(partial(_clear, memory, block)))
        key = np.frombuffer(task.key, np.uint8).reshape(1, KEY_BYTES)
        same = yield from _copied(core, lambda: copier.load(arena, form, paged, blocks, slots, key))
        if same:
            same = bool((yield Work(_by_engine(partial(_equal, memory, block, answer.seed)))))
    finally:
        if former is not None:
            _by_engine(partial(_restore, memory, block, former))()
    yield from ask(core, link, Proved(same), Done, _deadline(core))
    if not same:
        raise LayoutRefused(
            "layout: what was loaded through paged() is not what read_cell() sees; this engine runs uncached"
        )


def _copied(core: Core, submit: Callable[[], int]) -> Op[bool]:
    try:
        job = submit()
    except ValueError as error:
        raise LayoutRefused(f"memory: paged() does not fit the block layout: {error}") from None
    done = cast(Completion, (yield Job(job, core.copy_deadline())))
    if (done.status == _native.DROPPED).any():
        raise Unavailable("a copy of the layout proof was cancelled")
    return bool((done.status == _native.OK).all())


def _cells(memory: KVMemory) -> list[tuple[int, int]]:
    part = memory.part
    return [
        (layer, head)
        for layer in range(part.layer_start, part.layer_start + part.layers)
        for head in range(part.head_start, part.head_start + part.heads)
    ]


def _read(memory: KVMemory, block: int) -> list[bytes]:
    return [bytes(memory.read_cell(block, layer, head)) for layer, head in _cells(memory)]


def _restore(memory: KVMemory, block: int, former: list[bytes]) -> None:
    for (layer, head), data in zip(_cells(memory), former, strict=True):
        memory.write_cell(block, layer, head, data)


def _write(memory: KVMemory, block: int, seed: bytes) -> None:
    size = memory.layout.cell_bytes
    for layer, head in _cells(memory):
        memory.write_cell(block, layer, head, pattern(seed, layer, head, size))


def _clear(memory: KVMemory, block: int) -> None:
    zero = bytes(memory.layout.cell_bytes)
    for layer, head in _cells(memory):
        memory.write_cell(block, layer, head, zero)


def _equal(memory: KVMemory, block: int, seed: bytes) -> bool:
    size = memory.layout.cell_bytes
    return all(
        bytes(memory.read_cell(block, layer, head)) == pattern(seed, layer, head, size)
        for layer, head in _cells(memory)
    )
