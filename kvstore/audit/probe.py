"""Who asks, about which made-up blocks, and what nobody else may ever see of them."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvstore.config import Config, TenantConfig
from kvstore.errors import BadRequest
from kvstore.keys import KeyChain
from kvstore.types import BlockLayout, Namespace, Reuse, root_of

__all__ = [
    "BLOCKS",
    "LAYOUT",
    "Pair",
    "Probe",
    "SavedChain",
    "Secret",
    "fresh_tokens",
    "namespace_of",
    "pick",
]

# One page a block, the smallest there is: 4 tokens in one layer of one head. Four random token ids are 124
# random bits: nobody else's block has them.
LAYOUT = BlockLayout(layers=1, kv_heads=1, head_dim=64, dtype="float32", block_tokens=4)
# A chain: a head, something between, and a tail.
BLOCKS = 3


@dataclass(frozen=True, slots=True)
class Pair:
    """The two tenants in whose names the daemon is asked: `a` saves, and `b` tries to get at it."""

    a: TenantConfig
    b: TenantConfig

    @property
    def together(self) -> bool:
        """Both are of one trust group, so they map one arena."""
        return self.a.group == self.b.group

    @property
    def names(self) -> tuple[str, str]:
        """Of a and b."""
        return self.a.name, self.b.name


def pick(config: Config, named: Sequence[str]) -> Pair:
    """The tenants to ask as: those named, else the first two that reuse anything.

    Raises:
        BadRequest: names the option or the table, and what to write.
    """
    known = {tenant.name: tenant for tenant in config.tenants}
    reusing = [tenant for tenant in config.tenants if tenant.reuse is not Reuse.NONE]
    if not named:
        if len(reusing) < 2:
            have = ", ".join(tenant.name for tenant in reusing) or "none"
            raise BadRequest(
                f"tenants: an audit needs two that reuse blocks, the configuration has {len(reusing)} "
                f'({have}); add [[tenants]] with name = "probe" and group = '
                f'"{config.tenants[0].group}" to its file, and restart the daemon'
            )
        return Pair(reusing[0], reusing[1])
    if len(named) != 2 or named[0] == named[1]:
        raise BadRequest(f"--as: name two different tenants, as in --as {_two_names(reusing)}")
    for name in named:
        if name not in known:
            raise BadRequest(
                f"--as: the configuration has no tenant {name!r:.80}, only {', '.join(known)}; name one of "
                "these, or the daemon's own --config"
            )
        if known[name].reuse is Reuse.NONE:
            raise BadRequest(
                f"--as: tenant {name} neither looks up nor saves (its reuse is none), so there is nothing of "
                "it to find; name another"
            )
    return Pair(known[named[0]], known[named[1]])


def _two_names(tenants: Sequence[TenantConfig]) -> str:
    """Two names that could be given."""
    names = [tenant.name for tenant in tenants][:2]
    return " --as ".join(names if len(names) == 2 else ["ALICE", "BOB"])


def namespace_of(epoch: str) -> Namespace:
    """Of the probe's blocks: a model that no engine has.

    The same for every audit of one life of the daemon, because a daemon remembers every namespace until it
    ends, and another one after that: what an audit of a faulty daemon left on the disk does not count then.

    Args:
        epoch: the daemon's, hex.
    """
    life = hashlib.blake2b(epoch.encode(), digest_size=16).hexdigest()
    return Namespace(
        model="kvstore audit-isolation",
        weights=f"no weights: {life}",
        tokenizer="none",
        adapter="none",
        attention=LAYOUT.attention,
        kv_dtype=LAYOUT.dtype,
        layout=LAYOUT.fingerprint,
        block_tokens=str(LAYOUT.block_tokens),
    )


def fresh_tokens(blocks: int = BLOCKS) -> NDArray[np.uint32]:
    """(blocks × 4,) random ids, of ten digits each so that a page can be searched for them."""
    raw = np.frombuffer(os.urandom(4 * blocks * LAYOUT.block_tokens), "<u4")
    return raw.astype(np.uint32) | np.uint32(1 << 31)


@dataclass(frozen=True, slots=True)
class Secret:
    """Something that no page, file or reply may hold.

    Attributes:
        what: how it is called in a report.
        forms: the ways to write it that are searched for.
    """

    what: str
    forms: tuple[bytes, ...]

    @staticmethod
    def of(what: str, raw: bytes) -> Secret:
        """A salt, root or key: raw, hex of either case, base64."""
        text = raw.hex().encode()
        return Secret(what, (raw, text, text.upper(), base64.b64encode(raw).rstrip(b"=")))

    def __repr__(self) -> str:
        return f"Secret({self.what})"


@dataclass(frozen=True, slots=True)
class SavedChain:
    """What one save of a tenant brought.

    Attributes:
        tokens: (n,) their ids.
    """

    tenant: str
    tokens: NDArray[np.uint32]


@dataclass(slots=True)
class Probe:
    """One audit's facts.

    Attributes:
        config: as the command was told; it should be the daemon's.
        pair: the two tenants.
        epoch: of the daemon, hex.
        salts: tenant name, or "group:" and a group's → salt, as far as they could be read.
        salts_place: file they are from; "" = they are in no file.
        salts_unread: why not all are there, "" = they are.
        roots: tenant name → its own root, as the session gave it.
        tokens: tenant name → the ids of the chain that it saved through its session.
        daemon_uid: of the process at the socket; -1 = not known.
        saved_blocks: by all doors, so far.
        listens: of the daemon, by key of its configuration (`door_facts`); None = it does not say.
        no_room: why nothing may be saved, "" = it may.
        bearers: tenant name, or "*" → bearer token for the gRPC API.
        grpc_saved: (tenant, ids) of each chain that was saved through the gRPC API.
    """

    config: Config
    pair: Pair
    epoch: str
    salts: Mapping[str, bytes] = field(default_factory=dict)
    salts_place: str = ""
    salts_unread: str = ""
    roots: dict[str, bytes] = field(default_factory=dict)
    tokens: dict[str, NDArray[np.uint32]] = field(default_factory=dict)
    daemon_uid: int = -1
    saved_blocks: int = 0
    listens: Mapping[str, str] | None = None
    no_room: str = ""
    bearers: Mapping[str, str] = field(default_factory=dict)
    grpc_saved: list[SavedChain] = field(default_factory=list)

    def __repr__(self) -> str:
        return f"Probe({self.pair.a.name}, {self.pair.b.name})"

    @property
    def socket(self) -> Path:
        """Of the daemon."""
        return Path(self.config.daemon.socket)

    @property
    def namespace(self) -> Namespace:
        """Of the probe's blocks."""
        return namespace_of(self.epoch)

    @property
    def unsalted(self) -> bytes:
        """Root that anybody could compute: the namespace's without a salt."""
        return root_of(self.namespace.digest, b"")

    def chain(self, root: bytes, tokens: NDArray[np.uint32]) -> KeyChain:
        """Keys of some tokens under a root."""
        return KeyChain.of(root, tokens, LAYOUT.block_tokens)

    def hidden(self) -> list[Secret]:
        """Salts and bearer tokens: of what nobody else may ever see what no audit has made up."""
        salts = [Secret.of(f"the salt of {name}", salt) for name, salt in self.salts.items()]
        tokens = [
            Secret.of(f"a bearer token of {name}", text.encode()) for name, text in self.bearers.items()
        ]
        return salts + tokens

    def secrets(self) -> list[Secret]:
        """Salts that are known, bearer tokens, and of what the sessions saved roots, keys and token ids."""
        found = self.hidden()
        for name, root in self.roots.items():
            found.append(Secret.of(f"the root of {name}", root))
            if name in self.tokens:
                tokens = self.tokens[name]
                keys = [Secret.of(f"a key of {name}", key.tobytes()) for key in self.chain(root, tokens).keys]
                found += keys
                forms = tuple(str(token).encode() for token in tokens.tolist())
                found.append(Secret(f"a token id of {name}", forms))
        return found
