"""What a request asks about: tenant, root, layout and keys, checked and hashed."""

from __future__ import annotations

import asyncio
import dataclasses
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstore._native import SlotFormat
from kvstore.config import GrpcConfig
from kvstore.errors import BadRequest, LimitExceeded, Refused
from kvstore.group import Group
from kvstore.keys import KEY_BYTES, KeyChain, as_tokens
from kvstore.store import Store
from kvstore.tenants import Origin
from kvstore.types import BlockLayout, Namespace, Reuse
from kvstore.v1 import store_pb2 as pb

__all__ = ["Asked", "namespace_of", "resolve"]

# 64 Ki tokens are hashed in about 0.6 ms; then the loop serves others.
SLICE_TOKENS = 1 << 16
# Blocks of one prompt with something beside tokens in them: far more than images in a prompt.
EXTRAS_MAX = 1024
_REUSE = {pb.REUSE_UNSPECIFIED: Reuse.OWN, pb.REUSE_OWN: Reuse.OWN, pb.REUSE_GROUP: Reuse.GROUP}


@dataclass(frozen=True, slots=True)
class Asked:
    """A chain as the store knows it.

    Attributes:
        group: the tenant's trust group.
        tenant: its name.
        origin: where the chain starts, None for a tenant that reuses nothing.
        namespace, layout, shape: of its blocks.
        chain: keys of all full blocks; of no meaning without an origin.
    """

    group: Group
    tenant: str
    origin: Origin | None
    namespace: Namespace
    layout: BlockLayout
    shape: SlotFormat
    chain: KeyChain

    def __len__(self) -> int:
        return len(self.chain)

    @property
    def root(self) -> bytes:
        """32 bytes, b"" when nothing is reused."""
        return self.origin.key if self.origin is not None else b""

    def root_is_known(self) -> bool:
        """Whether anything can be known of the chain; makes no root."""
        return self.origin is not None and self.group.roots.known(self.origin) is not None


async def resolve(store: Store, limits: GrpcConfig, chain: pb.Chain) -> Asked:
    """Check a `Chain` message and hash its tokens; changes nothing.

    Cost: about 150 ns per 16-token block, in slices of less than a millisecond.

    Raises:
        BadRequest, Refused, LimitExceeded: the message names the field.
    """
    group = store.group_of([chain.tenant])
    layout = _layout(chain.layout)
    if layout.slot_bytes > store.config.host.slab_bytes:
        raise BadRequest(
            f"layout: a block needs {layout.slot_bytes} bytes of a slab of host.slab_bytes = "
            f"{store.config.host.slab_bytes}; raise it or use smaller blocks"
        )
    namespace = _namespace(chain.namespace, layout)
    origin = _origin(store, chain, namespace)
    root = origin.key if origin is not None else bytes(KEY_BYTES)
    if chain.WhichOneof("blocks") is None:
        raise BadRequest("chain: name its blocks by tokens or by keys")
    if chain.WhichOneof("blocks") == "keys":
        keys = KeyChain(root, _keys(chain.keys.packed, limits))
    else:
        keys = await _hash(root, chain.tokens, layout.block_tokens, limits)
    shape = SlotFormat(layout.layers, layout.kv_heads, layout.cell_bytes)
    return Asked(group, chain.tenant, origin, namespace, layout, shape, keys)


def namespace_of(message: pb.Namespace) -> Namespace:
    """A whole Namespace message.

    Raises:
        BadRequest: a field is missing.
    """
    if not message.block_tokens:
        raise BadRequest("namespace.block_tokens: need at least 1")
    return Namespace(
        message.model,
        message.weights,
        message.tokenizer,
        message.adapter,
        message.attention,
        message.kv_dtype,
        message.layout,
        str(message.block_tokens),
    )


def _layout(message: pb.Layout) -> BlockLayout:
    defaults = {f.name: f.default for f in dataclasses.fields(BlockLayout)}
    return BlockLayout(
        message.layers,
        message.kv_heads,
        message.head_dim,
        message.dtype,
        message.block_tokens,
        message.cell_format or str(defaults["cell_format"]),
        message.kernel_block_tokens,
        message.attention or str(defaults["attention"]),
        message.groups or str(defaults["groups"]),
    )


def _namespace(message: pb.Namespace, layout: BlockLayout) -> Namespace:
    """The namespace, completed by what the layout says and refused where the two differ."""
    if message.layout and message.layout != layout.fingerprint:
        raise BadRequest(f"namespace.layout: {message.layout:.80} is not the layout's {layout.fingerprint}")
    if message.block_tokens and message.block_tokens != layout.block_tokens:
        raise BadRequest(f"namespace.block_tokens: {message.block_tokens} is not {layout.block_tokens}")
    whole = pb.Namespace()
    whole.CopyFrom(message)
    whole.layout, whole.block_tokens = layout.fingerprint, layout.block_tokens
    return namespace_of(whole)


def _origin(store: Store, chain: pb.Chain, namespace: Namespace) -> Origin | None:
    reuse = _REUSE.get(chain.reuse)
    if reuse is None:
        raise BadRequest(f"reuse: {chain.reuse} is not a value of Reuse")
    origins = store.tenants.origins(chain.tenant, namespace.digest)
    if origins and reuse not in origins:
        raise Refused(f"reuse: tenant {chain.tenant} shares nothing with its trust group (its reuse is own)")
    return origins.get(reuse)


def _keys(packed: bytes, limits: GrpcConfig) -> NDArray[np.uint8]:
    if len(packed) % KEY_BYTES:
        raise BadRequest(f"keys.packed: need {KEY_BYTES} bytes each, got {len(packed)} bytes")
    _check_blocks(len(packed) // KEY_BYTES, limits)
    return np.frombuffer(packed, np.uint8).reshape(-1, KEY_BYTES)


def _check_blocks(blocks: int, limits: GrpcConfig) -> None:
    if blocks > limits.blocks_max:
        raise LimitExceeded(f"chain: {blocks} blocks are more than grpc.blocks_max = {limits.blocks_max}")


async def _hash(root: bytes, tokens: pb.Tokens, block_tokens: int, limits: GrpcConfig) -> KeyChain:
    count = len(tokens.ids)
    if count > limits.tokens_max:
        raise LimitExceeded(f"tokens.ids: {count} are more than grpc.tokens_max = {limits.tokens_max}")
    blocks = count // block_tokens
    _check_blocks(blocks, limits)
    if len(tokens.extra) > EXTRAS_MAX:
        raise LimitExceeded(f"tokens.extra: {len(tokens.extra)} are more than extras_max = {EXTRAS_MAX}")
    extra = dict(tokens.extra)  # what belongs to the tail goes unused: the tail has no key
    ids = as_tokens(np.array(tokens.ids, np.uint32))
    step = max(1, SLICE_TOKENS // block_tokens)
    parts, parent = [], root
    for start in range(0, blocks, step):
        here = {block - start: extra[block] for block in extra if start <= block < start + step}
        piece = KeyChain.of(
            parent, ids[start * block_tokens : (start + step) * block_tokens], block_tokens, here
        )
        parts.append(piece.keys)
        parent = piece.keys[-1].tobytes()
        await asyncio.sleep(0)
    return KeyChain(root, np.concatenate(parts) if parts else np.empty((0, KEY_BYTES), np.uint8))
