"""Who is asking a trust group, and what is counted of it: chain origins, engines, callers, totals."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvstore._native import SlotFormat
from kvstore.tiers.gpu import BorrowedPool, OwnedPool
from kvstore.tiers.noop import NoTier
from kvstore.types import BlockLayout, Namespace, Part, Reuse, Tier

if TYPE_CHECKING:
    from kvstore.group import Group

__all__ = ["Caller", "Checked", "Counters", "Engine", "Root"]


@dataclass(frozen=True, slots=True)
class Root:
    """One chain origin: a namespace under a tenant's (or a group's) salt."""

    key: bytes
    tenant: str
    reuse: Reuse
    node: int


@dataclass(slots=True)
class Engine:
    """One inference engine and its processes.

    Attributes:
        id: 16 bytes.
        layout, namespace: what its processes attached with; equal for all of them.
        tenants: that its processes attach as; equal for all of them.
        device: its device pool.
        pool_session: session that declared the pool (the pool dies with it).
        sessions: open sessions.
        writers: sessions whose process may be writing to a slot: it was there when slots were reserved, and
            is neither quiesced nor known to be gone since.
    """

    id: bytes
    layout: BlockLayout
    namespace: Namespace
    tenants: frozenset[str] = frozenset()
    device: OwnedPool | BorrowedPool | NoTier = field(default_factory=lambda: NoTier(Tier.GPU))
    pool_session: int = 0
    sessions: set[int] = field(default_factory=set)
    writers: set[int] = field(default_factory=set)


@dataclass(slots=True)
class Caller:
    """Who is asking: one attached session.

    Attributes:
        session: number.
        engine: the engine it belongs to.
        layout, shape: the block, and its form in a slot.
        part: cells that this process holds; of no meaning unless it copies.
        copies: it moves bytes (every role but the scheduler's).
        roots: keys of the roots it may use.
        heard_s: when it last sent something.
        tenants: names it attached with.
    """

    session: int
    group: Group
    engine: Engine
    layout: BlockLayout
    shape: SlotFormat
    part: Part
    roots: frozenset[bytes]
    heard_s: float
    copies: bool = True
    tenants: tuple[str, ...] = ()


@dataclass(slots=True)
class Counters:
    """Totals since start, in blocks unless the name says otherwise."""

    lookups: int = 0
    matches: int = 0
    lookup_blocks: int = 0
    hit_blocks: int = 0
    hit_blocks_by_tier: dict[str, int] = field(
        default_factory=lambda: {Tier.GPU: 0, Tier.HOST: 0, Tier.NVME: 0}
    )
    saved_blocks: int = 0
    saved_bytes: int = 0
    loaded_bytes: int = 0  # of HOST and NVME hits: what engines were told to copy, and did not report as bad
    refused_saves: int = 0
    revoked_leases: int = 0
    demoted_blocks: int = 0
    lost_on_demote: int = 0
    device_removed_blocks: int = 0
    device_closed_blocks: int = 0  # idle ones that went with their whole pool


@dataclass(frozen=True, slots=True)
class Checked:
    """The last check of a group that ended: when, whether counts were compared, and what it found broken."""

    at_s: float
    complete: bool
    broken: str
