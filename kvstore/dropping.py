"""Dropping a namespace: everything under some roots, in slices between which the loop serves others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import structlog
from numpy.typing import NDArray

from kvstore._native import NONE
from kvstore.callers import Engine
from kvstore.errors import Unavailable
from kvstore.group import Group
from kvstore.small_files import write_atomic
from kvstore.store import Store
from kvstore.tiers.gpu import OwnedPool
from kvstore.tiers.nvme import NvmeTier
from kvstore.types import Reuse

__all__ = ["Dropped", "drop_namespace"]

log = structlog.get_logger()

# Nodes looked at, and dropped at most, between two turns of the loop: a root is found in depth / 64 steps, a
# block dropped in microseconds (some 0.1 ms while a thousand leases are held), so a slice ends within 5 ms.
FIND_NODES, DROP_NODES = 2048, 32
REASON = "namespace"


@dataclass(slots=True)
class Dropped:
    """Blocks that were dropped, by where they were."""

    host: int = 0
    device: int = 0
    nvme: int = 0


async def drop_namespace(store: Store, digest: bytes, tenant: str = "") -> Dropped:
    """Drop every block of a namespace; leases on them go on, and their memory is free when they end.

    Every slice is recorded as REMOVED events and counted as `namespace` in the host tier's `dropped`. What
    running saves publish meanwhile stays; so does what engines hold in pools that they run themselves.

    Args:
        digest: 32 bytes, `Namespace.digest`.
        tenant: only the blocks that are its own; "" = everybody's, shared ones too.

    Cost: walks all readable blocks of the trust groups concerned, some 0.5 s per million, in slices.

    Raises:
        Refused: the tenant is not configured.
        Unavailable: blocks on the disk would come back with a restart.
    """
    names = [tenant] if tenant else store.tenants.names()
    roots: dict[str, set[int]] = {}
    for name in names:
        group = store.group_of([name])
        for origin in store.tenants.origins(name, digest).values():
            known = group.roots.known(origin)
            if known is not None and not (tenant and origin.reuse is Reuse.GROUP):
                roots.setdefault(group.name, set()).add(known.node)
    dropped = Dropped()
    for group_name, nodes in roots.items():
        await _drop_on_host(store.groups[group_name], nodes, dropped)
        await _drop_on_devices(store.groups[group_name], nodes, dropped)
        await _drop_on_disk(store.groups[group_name], nodes, dropped)
    log.info(
        "namespace dropped",
        namespace=digest.hex(),
        host=dropped.host,
        device=dropped.device,
        nvme=dropped.nvme,
    )
    return dropped


async def _drop_on_host(group: Group, roots: set[int], dropped: Dropped) -> None:
    def drop(nodes: NDArray[np.uint32]) -> None:
        dropped.host += group.host.drop(nodes, REASON)
        group.record_changes()

    await _in_slices(group, roots, group.host.ready_nodes(), group.host.readable, drop)


async def _drop_on_disk(group: Group, roots: set[int], dropped: Dropped) -> None:
    nvme = group.nvme
    if not isinstance(nvme, NvmeTier):
        return
    keys = [group.index.keys(np.array([root], np.uint32)).tobytes() for root in roots]
    mark = nvme.marks.now()  # first: what is saved from now on is not meant

    def drop(nodes: NDArray[np.uint32]) -> None:
        dropped.nvme += nvme.drop(nodes, REASON)
        group.record_changes()

    for nodes in nvme.nodes_in_parts():
        await _in_slices(group, roots, nodes, nvme.present, drop)
    if nvme.marks.forgotten() > mark:  # an evacuation has carried some of it on: all up to now
        mark = nvme.marks.now()
        dropped.nvme += nvme.marks.drop_before(roots, mark, REASON)
        group.record_changes()
    try:
        async with nvme.dropping:
            await write_atomic(*nvme.marks.file(keys, mark))
    except OSError as error:
        raise Unavailable(
            f"dropped, but that could not be written down ({error.strerror}): a restart brings blocks on the "
            "disk back; make room in nvme.directory and drop again"
        ) from None


async def _drop_on_devices(group: Group, roots: set[int], dropped: Dropped) -> None:
    for engine in tuple(group.engines.values()):
        if isinstance(engine.device, OwnedPool):
            await _drop_on_device(group, engine, engine.device, roots, dropped)


async def _drop_on_device(
    group: Group, engine: Engine, pool: OwnedPool, roots: set[int], dropped: Dropped
) -> None:
    def drop(nodes: NDArray[np.uint32]) -> None:
        dropped.device += pool.drop(nodes)
        group.record_changes(engine)

    def still_there(nodes: NDArray[np.uint32]) -> NDArray[np.bool_]:
        held: NDArray[np.bool_] = pool.blocks_of(nodes) != NONE
        return held if engine.device is pool else np.zeros(len(nodes), np.bool_)  # closed meanwhile

    await _in_slices(group, roots, pool.nodes(), still_there, drop)


async def _in_slices(
    group: Group,
    roots: set[int],
    nodes: NDArray[np.uint32],
    still_there: Callable[[NDArray[np.uint32]], NDArray[np.bool_]],
    drop: Callable[[NDArray[np.uint32]], None],
) -> None:
    """Drop those of `nodes` that lie under a root and are still there when their turn comes."""
    for start in range(0, len(nodes), FIND_NODES):
        part = nodes[start : start + FIND_NODES]
        part = part[still_there(part)]
        under = [node for node in part.tolist() if group.index.root_of(node) in roots]
        for first in range(0, len(under), DROP_NODES):
            await asyncio.sleep(0)
            batch = np.array(under[first : first + DROP_NODES], np.uint32)
            batch = batch[still_there(batch)]
            drop(np.array([n for n in batch.tolist() if group.index.root_of(n) in roots], np.uint32))
        await asyncio.sleep(0)
