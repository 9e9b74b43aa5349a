"""How the router calls the blocks of a prompt: 64 bits each, chained, whatever the engines call them.

  TokenNames   a seeded hash over token ids, of this process alone. Engines' events carry token ids, so their
               own hashes, of whatever algorithm and seed, are only looked up, never computed.
  KeyNames     the first 8 bytes of kvstore's own keys, for daemons' events, which carry no tokens. It needs
               the root of each tenant, which the daemon tells who may ask.

A name is a hint's name: the engine compares whole keys before it uses a block.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from random import Random
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvstore._native import EngineBlocks, token_fingerprints
from kvstore.errors import BadRequest
from kvstore.keys import KEY_BYTES, KeyChain, salt_piece
from kvstore.keys import extra_of as key_extra_of
from kvstore.router.kv_schema import Removed, Stored, extra_of
from kvstore.router.placing import RouteRequest

__all__ = ["BLOCK_TOKENS", "ChainNames", "KeyNames", "TokenNames"]

Names = NDArray[np.uint64]

BLOCK_TOKENS = 16
"""Where nobody says how many tokens a block has."""
_NAME_BYTES = 8
_NONE = np.empty(0, np.uint64)
_NO_TOKENS = np.empty(0, np.uint32)


class ChainNames(Protocol):
    """Names of blocks; the same block has the same name wherever it comes from."""

    @property
    def block_tokens(self) -> int:
        """Tokens of one block."""

    def of_prompt(self, request: RouteRequest) -> Names:
        """(n,) of the full blocks of a prompt, in order. 30 ns each (TokenNames), or 150 ns (KeyNames)."""

    def of_event(self, event: Stored, engine: EngineBlocks, tier: int) -> bytes:
        """8 bytes of each block that was stored; b"" where it cannot be named: its parent is unknown, or it
        is of another block size."""

    def of_removal(self, event: Removed, engine: EngineBlocks, tier: int) -> bytes:
        """8 bytes of each block that left that tier for good."""


class TokenNames:
    """By token ids.

    Args:
        block_tokens: of a block; 0 = as the first event says, and BLOCK_TOKENS until then.
        adapters: model names under which engines serve an adapter: their blocks are others.
        random: of the seed; nobody outside can make two prompts collide on purpose.

    Raises:
        BadRequest: block_tokens is negative.
    """

    def __init__(self, block_tokens: int, adapters: Collection[str], random: Random) -> None:
        if block_tokens < 0:
            raise BadRequest(f"block_tokens: need 0 at least, got {block_tokens}")
        self._block_tokens = block_tokens
        self._adapters = frozenset(adapters)
        self._seed = random.getrandbits(64)
        self.other_sizes = 0
        """Events whose blocks have another size: nothing of them can be found."""

    @property
    def block_tokens(self) -> int:
        """See `ChainNames`."""
        return self._block_tokens or BLOCK_TOKENS

    def of_prompt(self, request: RouteRequest) -> Names:
        """See `ChainNames`. Salt and adapter are bound into the first block, and so into the chain."""
        lora = request.model if request.model in self._adapters else None
        extra = extra_of(lora, (request.salt,) if request.salt else ())
        return token_fingerprints(request.tokens, self.block_tokens, self._seed, extra)

    def of_event(self, event: Stored, engine: EngineBlocks, tier: int) -> bytes:
        """See `ChainNames`."""
        if not event.block_tokens:
            return b""
        tokens = _NO_TOKENS if event.tokens is None else event.tokens
        if not self._block_tokens:
            self._block_tokens = event.block_tokens
        if event.block_tokens != self._block_tokens:
            self.other_sizes += 1
            return b""
        size, seed = event.block_tokens, self._seed
        return engine.stored(event.parent, event.hashes, event.width, tokens, size, seed, event.extra, tier)

    def of_removal(self, event: Removed, engine: EngineBlocks, tier: int) -> bytes:
        """See `ChainNames`."""
        return engine.removed(event.hashes, event.width, tier)


class KeyNames:
    """By kvstore's keys.

    Args:
        block_tokens: of a block.
        roots: tenant → 32 bytes; the router has them from the daemons.
        tenant: in whose name callers act that say none.

    Raises:
        BadRequest: names the argument.
    """

    def __init__(self, block_tokens: int, roots: Mapping[str, bytes], tenant: str = "") -> None:
        if block_tokens < 1:
            raise BadRequest(f"block_tokens: need 1 at least, got {block_tokens}")
        if any(len(root) != KEY_BYTES for root in roots.values()):
            raise BadRequest(f"roots: need {KEY_BYTES} bytes each")
        self.block_tokens = block_tokens
        self._roots = roots
        self._tenant = tenant

    def of_prompt(self, request: RouteRequest) -> Names:
        """See `ChainNames`. (0,) for a tenant without a root: it shares nothing that anybody could know."""
        root = self._roots.get(request.tenant or self._tenant)
        if root is None:
            return _NONE
        extra = {0: key_extra_of([salt_piece(request.salt)])} if request.salt else None
        return _names_of(KeyChain.of(root, request.tokens, self.block_tokens, extra).keys.tobytes())

    def of_event(self, event: Stored, engine: EngineBlocks, tier: int) -> bytes:
        """See `ChainNames`."""
        return _packed_names(event.hashes) if event.width == KEY_BYTES else b""

    def of_removal(self, event: Removed, engine: EngineBlocks, tier: int) -> bytes:
        """See `ChainNames`."""
        return _packed_names(event.hashes) if event.width == KEY_BYTES else b""


def _packed_names(keys: bytes) -> bytes:
    if len(keys) == KEY_BYTES:  # most events are of one block, and numpy takes a microsecond
        return keys[:_NAME_BYTES]
    return _names_of(keys).tobytes()


def _names_of(keys: bytes) -> Names:
    return np.frombuffer(keys, "<u8").reshape(-1, KEY_BYTES // 8)[:, 0].astype(np.uint64)
