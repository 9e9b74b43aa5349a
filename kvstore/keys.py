"""Block keys: who a block is (format v1).

    key_i = BLAKE2b-256(person="kvstore-bk-v1", key_{i-1} ‖ u32le len(extra_i) ‖ extra_i ‖ u32le tokens…)

with the root of the namespace and tenant as key_{-1}. Only full blocks have keys. `extra` binds what is in
this block beside tokens: content digests of images, fingerprints of adapters, a per-request salt in block 0.
Hashing runs in native code over one array; `hashlib.blake2b` computes the same in any language's terms.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstore import _native
from kvstore.errors import BadRequest

__all__ = [
    "KEY_BYTES",
    "WHOLE_MAX",
    "KeyChain",
    "as_tokens",
    "extra_of",
    "framed",
    "probe_positions",
    "salt_piece",
    "test_vector",
]

KEY_BYTES = 32
TOKENS_MAX = 1 << 24  # 16 M tokens: far above any context, below any accident
EXTRA_BYTES_MAX = 4096  # per block
_TAIL = 8  # a growing conversation differs from its last turn here
# 32 KiB of keys take some 15 µs more on a socket than the spread ones; a second trip takes 60 µs.
WHOLE_MAX = 1024


def as_tokens(tokens: Sequence[int] | NDArray[np.integer]) -> NDArray[np.uint32]:
    """Token ids as one contiguous uint32 array.

    Args:
        tokens: (n,) ids.

    Raises:
        BadRequest: an id is negative or does not fit 32 bits, the array is not one-dimensional or not of
            integers, or there are more than 2**24 tokens.
    """
    try:
        array = np.asarray(tokens)
    except (OverflowError, ValueError) as error:
        raise BadRequest(f"tokens: not a flat list of integers ({error})") from None
    if array.ndim != 1:
        raise BadRequest(f"tokens: need one dimension, got shape {array.shape}")
    if array.size == 0:
        return np.empty(0, np.uint32)
    if array.size > TOKENS_MAX:
        raise BadRequest(f"tokens: {array.size} are more than tokens_max = {TOKENS_MAX}")
    if array.dtype.kind not in "iu":
        raise BadRequest(f"tokens: need integers below 2**32, got {array.dtype}")
    if array.dtype != np.uint32:
        low, high = int(array.min()), int(array.max())
        if low < 0 or high >= 1 << 32:
            raise BadRequest(f"tokens: every id must be in [0, 2**32), got {low if low < 0 else high}")
    return np.ascontiguousarray(array, np.uint32)


def probe_positions(blocks: int, whole_max: int = WHOLE_MAX) -> NDArray[np.uint32]:
    """Positions of the keys that a first lookup sends.

    Short chains send all: one trip decides them, which costs less than the second trip that half of a chain
    would need. Longer ones send 0, about √n spread, the last 8 (LAWS C13): a growing conversation mostly ends
    within the last 8, so it needs no second trip; otherwise the deepest known probe leaves a gap of about √n
    keys for one.

    Args:
        blocks: length of the chain in full blocks.
        whole_max: chains up to this long are short.

    Returns:
        (k,) ascending positions: all of a short chain, else at most 2·√n + 9.
    """
    if blocks <= whole_max:
        return np.arange(blocks, dtype=np.uint32)
    step, tail = max(1, math.isqrt(blocks)), max(0, blocks - _TAIL)
    spread = (tail + step - 1) // step  # positions 0, step, 2 · step, … below the tail
    positions = np.empty(spread + blocks - tail, np.uint32)
    positions[:spread] = np.arange(0, tail, step, dtype=np.uint32)
    positions[spread:] = np.arange(tail, blocks, dtype=np.uint32)
    return positions


def framed(*parts: bytes) -> bytes:
    """Parts that can be told apart again: how many, then each with its length."""
    return len(parts).to_bytes(4, "little") + b"".join(len(p).to_bytes(4, "little") + p for p in parts)


def salt_piece(salt: str) -> bytes:
    """What a request's own salt (vLLM's `cache_salt`) adds to block 0."""
    return framed(b"salt", salt.encode("utf-8", "surrogatepass"))  # any text has bytes, no two the same


def extra_of(pieces: Sequence[bytes]) -> bytes:
    """The `extra` of one block that several things are bound into, in their order: 32 bytes."""
    return hashlib.blake2b(framed(*pieces), digest_size=32, person=b"kvstore-vx-v1").digest()


@dataclass(frozen=True, slots=True)
class KeyChain:
    """Keys of one token sequence under one root.

    Attributes:
        root: 32 bytes, parent of the first key.
        keys: (n, 32) uint8, one per full block.
        digests: (n,) of the first key, of the first two, …, made while they are in the cache; None = none.
    """

    root: bytes
    keys: NDArray[np.uint8]
    digests: NDArray[np.uint64] | None = None

    @staticmethod
    def of(
        root: bytes,
        tokens: Sequence[int] | NDArray[np.integer],
        block_tokens: int,
        extra: Mapping[int, bytes] | None = None,
    ) -> KeyChain:
        """Hash the full blocks of `tokens`.

        Args:
            root: 32 bytes.
            tokens: (n,) ids in [0, 2**32).
            block_tokens: tokens per block.
            extra: bytes bound into single blocks, by block number (at most 4,096 each).

        Cost: about 150 ns per 16-token block.

        Raises:
            BadRequest: bad root, ids or extra.
        """
        if len(root) != KEY_BYTES:
            raise BadRequest(f"root: need {KEY_BYTES} bytes, got {len(root)}")
        if block_tokens < 1:
            raise BadRequest(f"block_tokens: need at least 1, got {block_tokens}")
        ids = as_tokens(tokens)
        blocks = ids.size // block_tokens
        if not extra or not blocks:
            return _digested(root, _native.chain_keys(root, ids, block_tokens))
        lengths = np.zeros(blocks + 1, np.uint32)
        parts = []
        for block in sorted(extra):  # a handful of blocks, not all of them
            if block >= blocks:
                continue  # it belongs to the tail, which has no key
            piece = extra[block]
            if block < 0 or not isinstance(piece, bytes) or len(piece) > EXTRA_BYTES_MAX:
                raise BadRequest(f"extra[{block}]: need block >= 0 and at most {EXTRA_BYTES_MAX} bytes")
            parts.append(piece)
            lengths[block + 1] = len(piece)
        offsets = np.cumsum(lengths, dtype=np.uint32)
        return _digested(root, _native.chain_keys(root, ids, block_tokens, b"".join(parts), offsets))

    def __len__(self) -> int:
        return int(self.keys.shape[0])

    def parent(self, block: int) -> bytes:
        """Key that `block` chains from: the root for block 0."""
        return self.root if block == 0 else self.keys[block - 1].tobytes()

    def digest(self, blocks: int) -> int:
        """64-bit digest of the first `blocks` keys, as a daemon reports it for its own walk."""
        if blocks and self.digests is not None:
            return int(self.digests[blocks - 1])
        return _native.keys_digest(self.keys[:blocks])


def _digested(root: bytes, keys: NDArray[np.uint8]) -> KeyChain:
    return KeyChain(root, keys, _native.keys_digests(keys))


# Any fixed input will do; this one has an extra, a full and a partial block.
_VECTOR_ROOT = bytes(range(32))
_VECTOR_TOKENS = np.arange(70_000, 70_000 + 40, dtype=np.uint32)


def test_vector() -> bytes:
    """Key of a fixed input: both ends of an attach compare it, so a hash that differs is found before use."""
    chain = KeyChain.of(_VECTOR_ROOT, _VECTOR_TOKENS, 16, {1: b"kvstore test vector"})
    return bytes(chain.keys[-1])
