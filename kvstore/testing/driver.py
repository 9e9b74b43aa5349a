"""A small real store on a clock of its own, and sessions without sockets."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable
from types import TracebackType
from typing import Literal, Self

import numpy as np

from kvstore import engines, keys
from kvstore.config import Config, EventsConfig, HostConfig, IndexConfig, NvmeConfig, Salts, TenantConfig
from kvstore.group import Group
from kvstore.rpc.attach import caller_of
from kvstore.rpc.messages import PROTOCOL_VERSION, Attach, Layout
from kvstore.store import Store
from kvstore.testing.clock import SimClock
from kvstore.testing.session import SessionDriver
from kvstore.testing.slots import slot_fault
from kvstore.tiers.nvme import Flushed, NvmeTier
from kvstore.types import BlockLayout, Part

__all__ = ["StoreDriver", "small_config", "small_disk", "small_layout"]

MIB = 1 << 20


def small_config(
    *,
    capacity_bytes: int = 4 * MIB,
    slab_bytes: int = 2 * MIB,
    tenants: tuple[TenantConfig, ...] = (TenantConfig(name="default"),),
    nodes_max: int = 4096,
    log_max: int = 100_000,
    nvme: NvmeConfig | None = None,
) -> Config:
    """A configuration with an arena of a few slabs, made in milliseconds, and a disk if `nvme` says so."""
    host = HostConfig(capacity_bytes=capacity_bytes, slab_bytes=slab_bytes, huge_pages=False, threads=1)
    return Config(
        host=host,
        index=IndexConfig(nodes_max=nodes_max),
        events=EventsConfig(log_max=log_max),
        tenants=tenants,
        nvme=nvme if nvme is not None else NvmeConfig(),
    )


def small_disk(directory: str | os.PathLike[str], *, capacity_bytes: int = 8 * MIB) -> NvmeConfig:
    """A disk of segments of 1 MiB, each with room for six blocks of small_layout(), and no budget."""
    return NvmeConfig(
        directory=os.fspath(directory),
        capacity_bytes=capacity_bytes,
        segment_bytes=MIB,
        write_budget_bytes_per_day=0,
    )


def small_layout(*, head_dim: int = 1024, layers: int = 2, kv_heads: int = 2) -> BlockLayout:
    """A block of 4 tokens in float32: 132 KiB in a slot as it stands, 15 slots to a slab of 2 MiB."""
    return BlockLayout(layers, kv_heads, head_dim, "float32", block_tokens=4)


class StoreDriver:
    """A store, its clock, and every session that was attached.

    Args:
        config: small_config() when None.
        salts: fresh random ones when None.
        disk_faults: what the disk shall do wrong (native/src/disk_faulty.h).
    """

    def __init__(
        self, config: Config | None = None, salts: Salts | None = None, disk_faults: str = ""
    ) -> None:
        self.clock = SimClock()
        self.config = config if config is not None else small_config()
        self.salts = salts or Salts.load(self.config)
        self.store = Store(self.config, self.salts, self.clock, disk_faults)
        self.store.open()
        self.sessions: dict[int, SessionDriver] = {}
        self._last_session = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End every session and drop the arenas."""
        for session in tuple(self.sessions.values()):
            session.disconnect()
        self.store.close()

    def group(self, name: str = "default") -> Group:
        """One trust group."""
        return self.store.groups[name]

    @property
    def nvme(self) -> NvmeTier:
        """The disk of the default group."""
        nvme = self.group().nvme
        assert isinstance(nvme, NvmeTier), "small_config() has no disk unless told so"
        return nvme

    def pump(self, done: Callable[[], bool], timeout_s: float = 30.0) -> None:
        """What the daemon's loop does for the disk, until `done`.

        Raises:
            AssertionError: that did not come about.
        """
        deadline = time.monotonic() + timeout_s
        while not done():
            assert time.monotonic() < deadline, f"the disk did not get there: {self.nvme.counts()}"
            select.select([self.nvme.eventfd], [], [], 0.05)
            self.nvme.pump()
            self.nvme.tick()

    def settle(self) -> None:
        """Until everything that was offered is on the disk, and the disk has nothing under way."""
        answers: list[Flushed] = []
        self.nvme.flush(answers.append)
        self.pump(lambda: bool(answers))
        assert not answers[0].error, answers[0].error

    def attach(
        self,
        tenants: tuple[str, ...] = ("default",),
        *,
        engine: bytes = b"",
        layout: BlockLayout | None = None,
        part: Part | None = None,
        model: str = "model",
        role: Literal["both", "scheduler", "worker"] = "both",
    ) -> SessionDriver:
        """A session past its layout proof.

        Args:
            tenants: whose roots it may use.
            engine: id of an engine that other sessions joined; b"" = a new one.
            layout: small_layout() when None.
            part: cells that this process holds; the whole block when None.
            model: name in the namespace.
            role: "scheduler" copies nothing.

        Raises:
            KVStoreError: as a daemon would refuse it.
        """
        self._last_session += 1
        layout = layout if layout is not None else small_layout()
        part = part if part is not None else Part.whole(layout)
        ask = Attach(
            PROTOCOL_VERSION,
            role,
            engine,
            namespace_of(layout, model),
            wire_layout(layout),
            (part.layer_start, part.layers, part.head_start, part.heads),
            list(tenants),
            keys.test_vector(),
        )
        caller, roots = caller_of(self.store, ask, self._last_session)
        engines.attach(caller)
        session = SessionDriver(self.store, caller, roots, self._forget)
        self.sessions[caller.session] = session
        return session

    def _forget(self, session: SessionDriver) -> None:
        del self.sessions[session.caller.session]

    def faults(self, session: SessionDriver) -> list[str]:
        """What is wrong with the bytes of READY blocks of this session's block shape; [] when nothing is."""
        group, shape = session.caller.group, session.caller.shape
        nodes = group.host.pool.ready_nodes()
        slots = group.host.pool.slots(nodes)
        found = []
        for key, slot in zip(group.index.keys(nodes), slots.tolist(), strict=True):
            if group.arena.control(slot).length == shape.length:
                found.append(slot_fault(group.arena, shape, slot, np.ascontiguousarray(key).tobytes()))
        return [fault for fault in found if fault]


def namespace_of(layout: BlockLayout, model: str) -> dict[str, str]:
    """The eight identity fields of a made-up model."""
    return {
        "model": model,
        "weights": "r1",
        "tokenizer": "t1",
        "adapter": "none",
        "attention": layout.attention,
        "kv_dtype": layout.dtype,
        "layout": layout.fingerprint,
        "block_tokens": str(layout.block_tokens),
    }


def wire_layout(layout: BlockLayout) -> Layout:
    """A layout as an attach message carries it."""
    return Layout(
        layout.layers,
        layout.kv_heads,
        layout.head_dim,
        layout.dtype,
        layout.block_tokens,
        layout.cell_format,
        layout.kernel_block_tokens,
        layout.attention,
        layout.groups,
    )
