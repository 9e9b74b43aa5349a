"""Finding a chain in the index, and what that means to the tiers that hold it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvstore._native import NONE, Walk
from kvstore.callers import Caller
from kvstore.errors import BadRequest
from kvstore.group import Group

__all__ = ["touch", "walk_of"]


def walk_of(
    group: Group, root: bytes, blocks: int, positions: NDArray[np.uint32], keys: NDArray[np.uint8]
) -> Walk:
    if not 0 <= blocks < NONE:
        raise BadRequest(f"blocks: need 0 to {NONE - 1}, got {blocks}")
    try:
        return group.index.walk(root, blocks, positions, keys)
    except ValueError as error:
        raise BadRequest(f"keys: {error}") from None


def touch(caller: Caller, nodes: NDArray[np.uint32], on_host: int) -> None:
    """A chain was found: it is among the last to leave any tier, and the disk may want what it refused."""
    group, deepest = caller.group, int(nodes[-1])
    group.host.touch(deepest)
    caller.engine.device.touch(deepest)
    if group.nvme.touch(nodes) and on_host:
        group.offer(int(nodes[on_host - 1]), caller.shape, caller.layout.block_tokens, reused=True)
