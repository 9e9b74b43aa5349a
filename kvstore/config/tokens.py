"""Bearer tokens of gRPC callers: which tenants and verbs each opens. Only their hashes are kept.

[[tokens]]
name = "router"                            # for logs
sha256 = "…64 hex digits…"                 # of the token, as `kvstore token` prints it
tenants = ["alice", "bob"]                 # or ["*"]
verbs = ["read"]                           # read, write, admin
expires = 2027-01-31T00:00:00Z             # may be left out
"""

from __future__ import annotations

import hashlib
import math
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Annotated, Any

import msgspec

from kvstore.config.sources import read_file
from kvstore.errors import ConfigError

__all__ = ["EVERYBODY", "TOKEN_CHARS_MAX", "TOKEN_VERBS", "Token", "Tokens", "digest_of", "is_name"]

EVERYBODY = "*"
TOKEN_VERBS = ("read", "write", "admin")
TOKENS_MAX = 10_000
# What `kvstore token` makes has 43; what is longer is not hashed.
TOKEN_CHARS_MAX = 256


def digest_of(token: str) -> str:
    """Hex of the hash that stands for a token. They are random, so one round is enough."""
    return hashlib.sha256(token.encode()).hexdigest()


def is_name(text: str) -> bool:
    """Whether a caller, or a tenant, may be called so."""
    return re.fullmatch(_NAME, text) is not None


@dataclass(frozen=True, slots=True)
class Token:
    """What one token opens.

    Attributes:
        name: of whoever has it, for logs and messages.
        tenants: in whose name it may act; EVERYBODY = any, and the daemon as a whole.
        verbs: some of TOKEN_VERBS.
        expires_s: Unix time from which on it opens nothing; inf = never.
    """

    name: str
    tenants: frozenset[str]
    verbs: frozenset[str]
    expires_s: float = math.inf

    def opens(self, tenant: str) -> bool:
        """Whether it may act for a tenant; "" = for what concerns the whole daemon."""
        return EVERYBODY in self.tenants or (bool(tenant) and tenant in self.tenants)


class Tokens:
    """All that are known."""

    def __init__(self, by_digest: Mapping[str, Token]) -> None:
        self._by_digest = by_digest

    def __len__(self) -> int:
        return len(self._by_digest)

    def __repr__(self) -> str:
        return f"Tokens({len(self)})"

    def find(self, token: str) -> Token | None:
        """The one that a caller shows, also when it has expired."""
        # The search compares hashes: how long it takes says nothing of the token.
        return self._by_digest.get(digest_of(token)) if 0 < len(token) <= TOKEN_CHARS_MAX else None

    @staticmethod
    def load(path: Path, text: str | None = None) -> Tokens:
        """Read `grpc.tokens_file`.

        Args:
            text: its content, if somebody has read it already.

        Raises:
            ConfigError: unreadable, open to others, or not as above; the message names the entry.
        """
        if not path.is_file():
            raise ConfigError(f"grpc.tokens_file: {path} is not there; `kvstore token NAME` prints an entry")
        if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise ConfigError(f"grpc.tokens_file: {path} is open to others; run chmod 600 {path}")
        try:
            file = msgspec.convert(read_file(path, text), _File)
        except msgspec.ValidationError as error:
            raise ConfigError(f"grpc.tokens_file: {path}: {error}") from None
        found: dict[str, Token] = {}
        for entry in file.tokens:
            if entry.sha256 in found:
                other = found[entry.sha256].name
                raise ConfigError(f"grpc.tokens_file: {path}: {entry.name} and {other} have the same token")
            expires_s = math.inf if entry.expires is None else _unix(entry.expires)
            found[entry.sha256] = Token(
                entry.name, frozenset(entry.tenants), frozenset(entry.verbs), expires_s
            )
        return Tokens(found)


_NAME = r"[A-Za-z0-9_.-]{1,64}"
_Name = Annotated[str, msgspec.Meta(pattern=rf"^{_NAME}$")]
_Tenant = Annotated[str, msgspec.Meta(pattern=rf"^(\*|{_NAME})$")]
_Verb = Annotated[str, msgspec.Meta(pattern=rf"^({'|'.join(TOKEN_VERBS)})$")]


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    name: _Name
    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
    tenants: Annotated[list[_Tenant], msgspec.Meta(min_length=1, max_length=10_000)]
    verbs: Annotated[list[_Verb], msgspec.Meta(min_length=1, max_length=8)]
    expires: Any = None


class _File(msgspec.Struct, forbid_unknown_fields=True):
    tokens: Annotated[list[_Entry], msgspec.Meta(max_length=TOKENS_MAX)] = []


def _unix(expires: object) -> float:
    """Of a TOML date, at its beginning, or of a date-time; without a zone it is UTC."""
    if isinstance(expires, datetime):
        when = expires if expires.tzinfo is not None else expires.replace(tzinfo=UTC)
        return when.timestamp()
    if isinstance(expires, date):
        return datetime(expires.year, expires.month, expires.day, tzinfo=UTC).timestamp()
    raise ConfigError(f"tokens.expires: need a date such as 2027-01-31T00:00:00Z, got {expires!r:.80}")
