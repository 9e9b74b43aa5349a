"""The values every floor speaks in: identity, layout, match, plan, results.

Frozen dataclasses with slots. Intervals are half-open `[start, stop)` in blocks. Per-block data travels as
arrays; an object exists per request only.
"""

from __future__ import annotations

import enum
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from kvstore.errors import BadRequest

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = [
    "BlockLayout",
    "Busy",
    "Choice",
    "FetchPlan",
    "Hit",
    "LookupResult",
    "Miss",
    "Namespace",
    "Part",
    "Reuse",
    "SaveResult",
    "Span",
    "Tier",
    "align",
    "root_of",
]

CELL_ALIGN = 64  # bytes: a cell starts on a cache line (native/src/types.h)
CELLS_MAX = 65_536  # per slot (native/src/copy.h)
PAGE_BYTES = 4096  # slot granularity (native/src/types.h)


def align(size: int, unit: int) -> int:
    """Smallest multiple of `unit` that holds `size` bytes."""
    return -(-size // unit) * unit


class Tier(enum.StrEnum):
    """Where a block's bytes are. L1 and L2 are both GPU: mapped (pins > 0) and idle."""

    GPU = "GPU"
    HOST = "HOST"
    NVME = "NVME"
    PEER = "PEER"
    REMOTE = "REMOTE"


class Reuse(enum.StrEnum):
    """How far a request's blocks may be shared.

    NONE: neither looked up nor saved, on any tier. OWN: within the tenant. GROUP: with every tenant of the
    trust group that shares too.
    """

    NONE = "none"
    OWN = "own"
    GROUP = "group"

    @property
    def width(self) -> int:
        return list(Reuse).index(self)


_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1, "int8": 1}
_NAME = re.compile(r"[^\x00-\x1f\x7f\ud800-\udfff]{1,512}")  # lone surrogates have no UTF-8


def _need_name(owner: str, name: str, value: object) -> None:
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise BadRequest(f"{owner}.{name}: need 1 to 512 printable characters, got {value!r:.80}")


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Shape of one block and of its cells; its fingerprint is part of every key (LAWS D18).

    A *cell* is what one KV head of one layer holds for one block, `cell_bytes` long, opaque to us; cells lie
    in the order [layer][head].

    Attributes:
        layers: attention layers in the block.
        kv_heads: KV heads of the whole model (all tensor-parallel ranks together).
        head_dim: elements of one head.
        dtype: a key of the table above.
        block_tokens: tokens in a block.
        cell_format: order of bytes inside a cell, e.g. "[K|V][token][dim]", or "opaque:BACKEND:ISA".
        kernel_block_tokens: block size the attention kernel sees (0 = block_tokens).
        attention: everything else that changes bytes: rope, window, softcap, quantization scales, context
            parallel sizes, draft layers; free text, compared exactly.
        groups: layer groups, "full" or e.g. "full:0-15;window:16-31".
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    block_tokens: int
    cell_format: str = "[K|V][token][dim]"
    kernel_block_tokens: int = 0
    attention: str = "causal"
    groups: str = "full"

    def __post_init__(self) -> None:
        for name, top in (("layers", 1024), ("kv_heads", 1024), ("head_dim", 8192), ("block_tokens", 4096)):
            value = getattr(self, name)
            if not isinstance(value, int) or not 1 <= value <= top:
                raise BadRequest(f"layout.{name}: need 1 to {top}, got {value!r:.80}")
        if self.cells > CELLS_MAX:
            raise BadRequest(f"layout: layers × kv_heads is {self.cells}, more than {CELLS_MAX} cells a slot")
        kernel = self.kernel_block_tokens
        if not isinstance(kernel, int) or not 0 <= kernel <= 4096:
            raise BadRequest(f"layout.kernel_block_tokens: need 0 to 4096, got {kernel!r:.80}")
        if self.dtype not in _DTYPE_BYTES:
            raise BadRequest(f"layout.dtype: need one of {', '.join(_DTYPE_BYTES)}, got {self.dtype!r:.80}")
        for name in ("cell_format", "attention", "groups"):
            _need_name("layout", name, getattr(self, name))

    @property
    def cell_bytes(self) -> int:
        return 2 * self.block_tokens * self.head_dim * _DTYPE_BYTES[self.dtype]

    @property
    def cell_stride(self) -> int:
        return align(self.cell_bytes, CELL_ALIGN)

    @property
    def cells(self) -> int:
        return self.layers * self.kv_heads

    @property
    def block_bytes(self) -> int:
        """KV bytes of one block, padding and sums not counted."""
        return self.cells * self.cell_bytes

    @property
    def slot_bytes(self) -> int:
        """Arena bytes of one block: padded cells, a 4-byte sum per cell, rounded to pages."""
        return align(self.cells * self.cell_stride + 4 * self.cells, PAGE_BYTES)

    @property
    def fingerprint(self) -> str:
        """Hex BLAKE2b-128 over every field in name order."""
        text = "\n".join(
            f"{f.name}={getattr(self, f.name)}" for f in sorted(fields(self), key=lambda f: f.name)
        )
        return hashlib.blake2b(text.encode(), digest_size=16, person=b"kvstore-ly-v1").hexdigest()


@dataclass(frozen=True, slots=True)
class Part:
    """The cells that one rank of an engine holds: `[layer_start, +layers) × [head_start, +heads)`."""

    layer_start: int
    layers: int
    head_start: int
    heads: int

    @staticmethod
    def whole(layout: BlockLayout) -> Part:
        return Part(0, layout.layers, 0, layout.kv_heads)

    def holds(self, layer: int, head: int) -> bool:
        """Whether that cell is one of this part's."""
        return 0 <= layer - self.layer_start < self.layers and 0 <= head - self.head_start < self.heads

    def check(self, layout: BlockLayout) -> None:
        """Raises BadRequest unless the part lies inside `layout`."""
        if not (
            0 <= self.layer_start and 1 <= self.layers and self.layer_start + self.layers <= layout.layers
        ):
            raise BadRequest(
                f"part.layers: [{self.layer_start}, +{self.layers}) is not in 0..{layout.layers}"
            )
        if not (0 <= self.head_start and 1 <= self.heads and self.head_start + self.heads <= layout.kv_heads):
            raise BadRequest(f"part.heads: [{self.head_start}, +{self.heads}) is not in 0..{layout.kv_heads}")


@dataclass(frozen=True, slots=True)
class Namespace:
    """Everything that must be equal for bytes to be interchangeable. Eight fields, none optional.

    Attributes:
        model: name of the model, e.g. "HuggingFaceTB/SmolLM2-135M-Instruct".
        weights: revision or fingerprint of the weights.
        tokenizer: tokenizer and chat-template revision.
        adapter: "none", or fingerprint of the adapter that every request uses.
        attention: attention and position configuration (rope, scaling, window).
        kv_dtype: dtype and quantization of the cache.
        layout: `BlockLayout.fingerprint`.
        block_tokens: tokens in a block, as decimal text.
    """

    model: str
    weights: str
    tokenizer: str
    adapter: str
    attention: str
    kv_dtype: str
    layout: str
    block_tokens: str

    def __post_init__(self) -> None:
        for field in fields(self):
            _need_name("namespace", field.name, getattr(self, field.name))

    @staticmethod
    def parse(values: Mapping[str, str]) -> Namespace:
        """From a mapping, e.g. off the wire.

        Raises:
            BadRequest: a field is missing, unknown or empty; the message names it.
        """
        known = [f.name for f in fields(Namespace)]
        for name in known:
            if name not in values:
                raise BadRequest(f"namespace.{name}: missing; all of {', '.join(known)} are needed")
        for name in values:
            if name not in known:
                raise BadRequest(f"namespace.{name:.80}: unknown field; the fields are {', '.join(known)}")
        return Namespace(**values)

    def canonical(self) -> bytes:
        """Fields sorted by name, each `u32le len ‖ name ‖ u32le len ‖ value` (format v1)."""
        out = bytearray()
        for name in sorted(f.name for f in fields(self)):
            for text in (name, getattr(self, name)):
                raw = text.encode()
                out += len(raw).to_bytes(4, "little") + raw
        return bytes(out)

    @property
    def digest(self) -> bytes:
        """32 bytes: BLAKE2b-256(person="kvstore-ns-v1", canonical)."""
        return hashlib.blake2b(self.canonical(), digest_size=32, person=b"kvstore-ns-v1").digest()

    def root(self, salt: bytes) -> bytes:
        """32 bytes, the parent of every first block: BLAKE2b-256(key=salt, person="kvstore-rt-v1", digest).

        Args:
            salt: secret of a tenant or group, 16 to 64 bytes; empty only where sharing was declared.
        """
        return root_of(self.digest, salt)


def root_of(digest: bytes, salt: bytes) -> bytes:
    """`Namespace.root` of the namespace with this digest."""
    return hashlib.blake2b(digest, digest_size=32, key=salt, person=b"kvstore-rt-v1").digest()


@dataclass(frozen=True, slots=True)
class Span:
    """Blocks `[start, stop)` of a chain, all obtainable from one tier."""

    tier: Tier
    start: int
    stop: int


class Choice(enum.StrEnum):
    """What can be done with a match: compute all of it, load, or compute a head while the rest is loading."""

    RECOMPUTE = "recompute"
    LOAD = "load"
    SPLIT = "split"


@dataclass(frozen=True, slots=True)
class FetchPlan:
    """What to reload and what to compute, and why.

    Attributes:
        load_start, load_stop: blocks to load from lower tiers. Those on HOST come first and can be copied at
            once; the others (NVME, …) have to be fetched before (`Hit.ready`).
        spans: where each part comes from, GPU hits included; ascending, none overlaps another.
        reason: one sentence.
        choice: with SPLIT the blocks between the device's and `load_start` are computed while these load.
        id: of the plan in the daemon's memory, to tell what came of it; 0 = it is not remembered.
        lag_from_s, load_s, recompute_s: of the lag rule, in seconds after the lookup: when its clock starts,
            how long the load is predicted to take from then, and how long to compute instead; 0 for
            recompute_s = nothing is to be given up for being late.
    """

    load_start: int
    load_stop: int
    spans: tuple[Span, ...]
    reason: str
    choice: Choice = Choice.LOAD
    id: int = 0
    lag_from_s: float = 0.0
    load_s: float = 0.0
    recompute_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Hit:
    """A granted lease on the longest known prefix.

    Attributes:
        lease: id to release.
        blocks: length of the match in blocks.
        device: leading blocks of the match that the engine's own pool holds.
        plan: what to load.
        slots: (ready - load_start,) arena slots of the blocks to load that are on HOST. They stay where they
            are as long as the lease is held.
    """

    lease: int
    blocks: int
    device: int
    plan: FetchPlan
    slots: NDArray[np.uint32]

    @property
    def ready(self) -> int:
        """Blocks [load_start, ready) can be copied now, [ready, load_stop) have to be fetched first."""
        return self.plan.load_start + len(self.slots)


@dataclass(frozen=True, slots=True)
class Miss:
    """Nothing of this chain is known, or nothing may be used. `plan`: as `FetchPlan.id`."""

    reason: str = ""
    plan: int = 0


@dataclass(frozen=True, slots=True)
class Busy:
    """Not now: a limit or pinned memory is in the way. Recompute, or ask again later."""

    reason: str


LookupResult = Hit | Miss | Busy


@dataclass(frozen=True, slots=True)
class SaveResult:
    """What became of blocks that were handed over.

    `ready + filled + elsewhere + dropped` = blocks asked for.

    Attributes:
        ready: readable now because of this save.
        filled: were readable before.
        elsewhere: another writer is at it.
        dropped: not kept (no room, lost race, missing parent); the reason says which.
    """

    ready: int
    filled: int
    elsewhere: int
    dropped: int
    reason: str = ""
