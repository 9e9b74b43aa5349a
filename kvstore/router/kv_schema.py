"""KV events as vLLM puts them on the wire: a payload of msgpack becomes named values.

    payload   [ts, [event, …], data_parallel_rank?]
    event     ["BlockStored", block_hashes, parent, token_ids, block_size, lora_id?, medium?, lora_name?,
               extra_keys?, group_idx?, kv_cache_spec_kind?, …]
              ["BlockRemoved", block_hashes, medium?, group_idx?, …]
              ["AllBlocksCleared", medium?]           (the medium is kvstore's: vLLM clears everything)

Events are arrays, whose trailing fields are absent in older versions (also SGLang's), or maps with a "type"
(vLLM since 0.32); unknown fields are ignored, unknown types counted. Hashes are 64-bit integers or bytes.
Whatever the bytes are, the outcome is a `Batch` or `BadEvent`.

Cost: some 50 ns per token id (msgspec makes each an integer first), 60 ns per hash, 3 µs per event.
"""

from __future__ import annotations

import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta, Raw, Struct
from numpy.typing import NDArray

from kvstore.errors import BadRequest
from kvstore.types import Tier

__all__ = ["BadEvent", "Batch", "Cleared", "Removed", "Stored", "decode_batch", "extra_of"]

# A step of an engine stores what it computed: a million tokens are 5 MB.
PAYLOAD_BYTES_MAX = 16 << 20
EVENTS_MAX = 65_536
BLOCKS_MAX = 131_072
TOKENS_MAX = 1 << 22
HASH_BYTES_MAX = 64
# Of one block's extra keys: a salt and some images. It becomes part of an index, so it must stay small.
EXTRA_BYTES_MAX = 4096

_TIERS = {
    "GPU": Tier.GPU,
    "CPU": Tier.HOST,
    "CPU_PINNED": Tier.HOST,
    "DISK": Tier.NVME,
    "STORAGE": Tier.NVME,
}
_TAGS = ("BlockStored", "BlockRemoved", "AllBlocksCleared")


class BadEvent(BadRequest):
    """A payload that is none: it tells nothing, and what it was to tell is lost."""


class Stored(Struct, frozen=True, gc=False):  # made in a sixth of a dataclass's time
    """Blocks that became readable, in the order of their chain.

    Attributes:
        hashes: n × width bytes; 64-bit integers are little-endian, width 8.
        width: bytes of one hash.
        parent: hash of the block before the first, None at the start of a prompt or where it is not told.
        tokens: (n · block_tokens,) uint32, None where the publisher does not tell them (kvstore).
        block_tokens: tokens of one block, 0 = not told.
        extra: what makes each of these blocks differ beside its tokens (`extra_of`), b"" = nothing.
        tier: where.
        group: index of the layer group of a model with several.
        kind: what that group's attention is, as vLLM calls it, "" = not told.
    """

    hashes: bytes
    width: int
    parent: bytes | None
    tokens: NDArray[np.uint32] | None
    block_tokens: int
    extra: bytes
    tier: Tier
    group: int = 0
    kind: str = ""

    def __len__(self) -> int:
        return len(self.hashes) // self.width


class Removed(Struct, frozen=True, gc=False):
    """Blocks that left a tier; fields as of `Stored`."""

    hashes: bytes
    width: int
    tier: Tier
    group: int = 0

    def __len__(self) -> int:
        return len(self.hashes) // self.width


@dataclass(frozen=True, slots=True)
class Cleared:
    """Nothing is left on a tier, or (None) anywhere."""

    tier: Tier | None


@dataclass(frozen=True, slots=True)
class Batch:
    """One payload.

    Attributes:
        ts_s: when it was made, as the publisher's clock had it; tells two processes apart.
        rank: data-parallel rank, None where it is not told.
        events: in order. Blocks of one wire event whose `extra` differs come as several `Stored`.
        skipped: events of unknown type, or whose tokens do not fill their blocks.
    """

    ts_s: float
    rank: int | None
    events: tuple[Stored | Removed | Cleared, ...]
    skipped: int


# ---- what the wire may hold -------------------------------------------------------------------------------

_Hash = int | bytes
_Hashes = Annotated[list[_Hash], Meta(max_length=BLOCKS_MAX)]
_Tokens = Annotated[list[int], Meta(max_length=TOKENS_MAX)]
_Events = Annotated[list[Raw], Meta(max_length=EVENTS_MAX)]


class _Batch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: _Events
    data_parallel_rank: Any = None


class _BatchMap(msgspec.Struct, gc=False):
    ts: float
    events: _Events
    data_parallel_rank: Any = None


class _Stored(msgspec.Struct, array_like=True, tag="BlockStored", gc=False):
    block_hashes: _Hashes
    parent_block_hash: _Hash | None
    token_ids: _Tokens
    block_size: int
    lora_id: int | str | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[Any] | None = None
    group_idx: Any = None
    kv_cache_spec_kind: Any = None


class _Removed(msgspec.Struct, array_like=True, tag="BlockRemoved", gc=False):
    block_hashes: _Hashes
    medium: str | None = None
    group_idx: Any = None


class _Cleared(msgspec.Struct, array_like=True, tag="AllBlocksCleared", gc=False):
    medium: Any = None


class _StoredMap(msgspec.Struct, tag="BlockStored", gc=False):
    block_hashes: _Hashes
    token_ids: _Tokens
    block_size: int
    parent_block_hash: _Hash | None = None
    lora_id: int | str | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[Any] | None = None
    group_idx: Any = None
    kv_cache_spec_kind: Any = None


class _RemovedMap(msgspec.Struct, tag="BlockRemoved", gc=False):
    block_hashes: _Hashes
    medium: str | None = None
    group_idx: Any = None


class _ClearedMap(msgspec.Struct, tag="AllBlocksCleared", gc=False):
    medium: Any = None


class _Type(msgspec.Struct, gc=False):
    type: str


_AnyStored = _Stored | _StoredMap
_batch = msgspec.msgpack.Decoder(_Batch).decode
_batch_map = msgspec.msgpack.Decoder(_BatchMap).decode
_array = msgspec.msgpack.Decoder(_Stored | _Removed | _Cleared).decode
_map = msgspec.msgpack.Decoder(_StoredMap | _RemovedMap | _ClearedMap).decode
_array_parts = msgspec.msgpack.Decoder(list[Raw]).decode
_map_type = msgspec.msgpack.Decoder(_Type).decode
_text = msgspec.msgpack.Decoder(str).decode
# msgspec's own errors, and what nesting without end and text that is none make of it.
_WRONG = (msgspec.DecodeError, RecursionError, UnicodeDecodeError, OverflowError, MemoryError)


# ---- decoding ---------------------------------------------------------------------------------------------


def decode_batch(payload: bytes | memoryview) -> Batch:
    """What one payload tells.

    Raises:
        BadEvent: it is no such payload, or beyond a limit; names the field.
    """
    if not 0 < len(payload) <= PAYLOAD_BYTES_MAX:
        raise BadEvent(f"payload: need 1 to {PAYLOAD_BYTES_MAX} bytes, got {len(payload)}")
    try:
        batch = (_batch_map if _is_map(payload[0]) else _batch)(payload)
    except _WRONG as error:
        raise BadEvent(f"payload: {error!s:.200}") from None
    events: list[Stored | Removed | Cleared] = []
    skipped = 0
    for raw in batch.events:
        found = _event(memoryview(raw))
        if found is None:
            skipped += 1
        else:
            events += found
    rank = batch.data_parallel_rank
    return Batch(batch.ts, rank if isinstance(rank, int) else None, tuple(events), skipped)


def extra_of(lora: str | int | None, keys: Sequence[Any]) -> bytes:
    """What makes a block differ beside its tokens, canonically: equal for equal causes, whatever was sent.

    Args:
        lora: name of the adapter, its id where no name is told, None = none.
        keys: of the block, in vLLM's order: (identifier, offset) pairs of images and other inputs, the cache
            salt (of the first block only), digests of prompt embeddings. A leading name of the adapter, which
            newer versions repeat here, is left out.

    Returns:
        b"" where there is neither, else msgpack of [lora, [key…]].

    Raises:
        BadEvent: a key is none (a map, an object), or all together are longer than EXTRA_BYTES_MAX.
    """
    kept = list(keys[1:]) if keys and isinstance(lora, str) and keys[0] == lora else list(keys)
    if lora is None and not kept:
        return b""
    if not all(_is_key(key, depth=2) for key in kept):
        raise BadEvent("extra_keys: need text, numbers, bytes, or arrays of these")
    extra = msgspec.msgpack.encode([lora, kept])
    if len(extra) > EXTRA_BYTES_MAX:
        raise BadEvent(f"extra_keys: {len(extra)} bytes of one block are more than {EXTRA_BYTES_MAX}")
    return extra


def _is_map(first: int) -> bool:
    return 0x80 <= first <= 0x8F or first in (0xDE, 0xDF)


def _is_key(key: object, depth: int) -> bool:
    if isinstance(key, list | tuple):
        return depth > 0 and all(_is_key(inner, depth - 1) for inner in key)
    return key is None or isinstance(key, str | int | float | bytes)


def _event(raw: memoryview) -> list[Stored | Removed | Cleared] | None:
    """None = nothing that can be used, and nothing wrong either."""
    is_map = _is_map(raw[0])
    try:
        event = (_map if is_map else _array)(raw)
    except _WRONG as error:
        if _tag(raw, is_map) in _TAGS:
            raise BadEvent(f"event: {error!s:.200}") from None
        return None
    if isinstance(event, _Stored | _StoredMap):
        return _stored(event)
    if isinstance(event, _Removed | _RemovedMap):
        hashes, width = _packed(event.block_hashes)
        return [Removed(hashes, width, _tier(event.medium), _group(event.group_idx))] if width else []
    return [Cleared(_tier(event.medium) if isinstance(event.medium, str) else None)]


def _tag(raw: memoryview, is_map: bool) -> str:
    try:
        return _map_type(raw).type if is_map else _text(_array_parts(raw)[0])
    except (*_WRONG, IndexError) as error:
        raise BadEvent(f"event: has no type ({error!s:.200})") from None


def _stored(event: _AnyStored) -> list[Stored | Removed | Cleared] | None:
    hashes, width = _packed(event.block_hashes)
    if not width:
        return []
    count, size = len(event.block_hashes), event.block_size
    tokens = _numbers(event.token_ids)
    if not 0 <= size <= TOKENS_MAX:
        raise BadEvent(f"block_size: need 0 to {TOKENS_MAX}, got {size}")
    if tokens is not None and len(tokens) != count * size:
        return None  # groups with a window leave blocks out: which hash has which tokens is not told
    parent = None
    if event.parent_block_hash is not None:
        parent, parent_width = _packed([event.parent_block_hash])
        if parent_width != width:
            raise BadEvent(f"parent_block_hash: {parent_width} bytes beside hashes of {width}")
    lora = event.lora_name if event.lora_name is not None else event.lora_id
    found: list[Stored | Removed | Cleared] = []
    for start, stop, extra in _runs(lora, event.extra_keys, count):
        found.append(
            Stored(
                hashes[start * width : stop * width],
                width,
                hashes[(start - 1) * width : start * width] if start else parent,
                tokens[start * size : stop * size] if tokens is not None else None,
                size,
                extra,
                _tier(event.medium),
                _group(event.group_idx),
                event.kv_cache_spec_kind if isinstance(event.kv_cache_spec_kind, str) else "",
            )
        )
    return found


def _runs(lora: str | int | None, keys: list[Any] | None, count: int) -> Iterator[tuple[int, int, bytes]]:
    """(start, stop, extra) of blocks in a row whose extra keys are the same."""
    plain = extra_of(lora, ())
    if not keys or not any(keys):
        yield 0, count, plain
        return
    if len(keys) != count:
        raise BadEvent(f"extra_keys: {len(keys)} entries for {count} blocks")
    start, extra = 0, b""
    for block, entry in enumerate(keys):
        if entry is not None and not isinstance(entry, list):
            raise BadEvent("extra_keys: need an array or nil for each block")
        now = extra_of(lora, entry) if entry else plain
        if block and now != extra:
            yield start, block, extra
            start = block
        extra = now
    yield start, count, extra


def _packed(hashes: list[_Hash]) -> tuple[bytes, int]:
    """Hashes behind one another, and the width of one; 0 of none."""
    if not hashes:
        return b"", 0
    plain: Any = hashes  # one kind or the other: numpy and join say so faster than a loop would
    try:
        if isinstance(hashes[0], int):
            return np.array(plain, np.uint64 if min(plain) >= 0 else np.int64).tobytes(), 8
        packed, width = b"".join(plain), len(hashes[0])
    except (TypeError, ValueError, OverflowError):
        raise BadEvent("block_hashes: need integers of 64 bits, or bytes, and not both") from None
    if not 1 <= width <= HASH_BYTES_MAX or {len(each) for each in plain} != {width}:
        raise BadEvent(f"block_hashes: need 1 to {HASH_BYTES_MAX} bytes each, and of one width")
    return packed, width


def _numbers(tokens: list[int]) -> NDArray[np.uint32] | None:
    if not tokens:
        return None
    try:
        return np.frombuffer(array.array("I", tokens), np.uint32)  # three times as fast as np.array
    except OverflowError:
        raise BadEvent("token_ids: need integers of 32 bits") from None


def _tier(medium: str | None) -> Tier:
    """vLLM tells none for the device; a medium that nobody here knows is taken for a far one."""
    return Tier.GPU if medium is None else _TIERS.get(medium.upper(), Tier.REMOTE)


def _group(index: object) -> int:
    return index if isinstance(index, int) else 0
