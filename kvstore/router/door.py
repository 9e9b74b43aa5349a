"""Who calls: a bearer token leads to a tenant, a tenant to the `cache_salt` that keeps its prefixes apart."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from kvstore.clock import unix_time_s
from kvstore.config.tokens import EVERYBODY, Token, Tokens
from kvstore.errors import Refused, Unauthenticated

__all__ = ["Caller", "Door", "OpenDoor", "TokenDoor", "cache_salt"]


@dataclass(frozen=True, slots=True)
class Caller:
    """Whoever was let in.

    Attributes:
        tenant: "" where callers are not told apart.
        salt: for the engine's `cache_salt`; "" = none.
    """

    tenant: str = ""
    salt: str = field(default="", repr=False)


class Door(Protocol):
    """Lets callers in."""

    opaque: bool
    """The caller's Authorization is for us: it must not reach a replica."""

    def admit(self, authorization: str, tenant: str) -> Caller:
        """Find out who calls.

        Args:
            authorization: the header's value, "" = it was not there.
            tenant: in whose name, as the caller says; "" = it does not.

        Raises:
            Unauthenticated: nobody knows.
            Refused: known, but not allowed to act for this tenant.
        """
        ...

    def administer(self, authorization: str) -> None:
        """Let somebody do what concerns all tenants.

        Raises:
            Unauthenticated, Refused: not this caller.
        """
        ...


class OpenDoor:
    """Everybody is the same caller, who brings the replicas' own key if they want one.

    Args:
        caller: what all of them are.
    """

    opaque = False

    def __init__(self, caller: Caller | None = None) -> None:
        self._caller = caller or Caller()

    def admit(self, authorization: str, tenant: str) -> Caller:
        """The one there is."""
        return self._caller

    def administer(self, authorization: str) -> None:
        """Everybody may."""


class TokenDoor:
    """Callers show a token of the tokens file; each tenant has a salt.

    Args:
        tokens: which tenants each token opens; a token needs the verb `read`.
        salts: tenant → 16 to 64 secret bytes.
    """

    opaque = True

    def __init__(self, tokens: Tokens, salts: Mapping[str, bytes]) -> None:
        self._tokens = tokens
        self._salts = {tenant: cache_salt(salt) for tenant, salt in salts.items()}

    def admit(self, authorization: str, tenant: str) -> Caller:
        """By the token alone where it opens one tenant; else the caller has to say which."""
        token = self._shown(authorization)
        if "read" not in token.verbs:
            raise Refused("authorization: this token does not have the verb read")
        if not tenant and len(token.tenants) == 1 and EVERYBODY not in token.tenants:
            (tenant,) = token.tenants
        if not tenant:
            raise Refused("x-kvstore-tenant: this token opens several tenants; name one in this header")
        if not token.opens(tenant) or tenant not in self._salts:
            raise Refused(f"x-kvstore-tenant: this token does not open tenant {tenant!r:.80}")
        return Caller(tenant, self._salts[tenant])

    def administer(self, authorization: str) -> None:
        """By a token for all tenants with the verb admin."""
        token = self._shown(authorization)
        if "admin" not in token.verbs or EVERYBODY not in token.tenants:
            raise Refused('authorization: this needs a token with the verb admin and tenants = ["*"]')

    def _shown(self, authorization: str) -> Token:
        scheme, _, shown = authorization.partition(" ")
        if scheme.lower() != "bearer" or not shown.strip():
            raise Unauthenticated("authorization: need 'Authorization: Bearer TOKEN'")
        token = self._tokens.find(shown.strip())
        if token is None or token.expires_s <= unix_time_s():
            raise Unauthenticated("authorization: this token is unknown or has expired")
        return token


def cache_salt(salt: bytes) -> str:
    """What an engine is given in a tenant's name: 43 characters, from which the salt cannot be computed."""
    digest = hashlib.blake2b(b"cache_salt", key=salt, digest_size=32, person=b"kvstore-cs-v1")
    return base64.urlsafe_b64encode(digest.digest()).decode().rstrip("=")
