"""Who the configured tenants are, and where their chains start. Salts stay in here."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass

from kvstore.config import Config, Salts, user_ids
from kvstore.errors import BadRequest, Refused
from kvstore.types import Reuse, root_of

__all__ = ["Origin", "Tenants"]


@dataclass(frozen=True, slots=True)
class Origin:
    """Where chains of one namespace start.

    Attributes:
        key: the root, 32 bytes.
        owner: name of the tenant (OWN) or of the trust group (GROUP).
        reuse: OWN or GROUP.
    """

    key: bytes
    owner: str
    reuse: Reuse


class Tenants:
    """The tenants of one daemon."""

    def __init__(self, config: Config, salts: Salts) -> None:
        self._tenants = {tenant.name: tenant for tenant in config.tenants}
        self._salts = salts
        self._users = {t.name: user_ids(t.users, "tenants.users") for t in config.tenants if t.users}
        self._admins = user_ids(config.daemon.admins.split(","), "daemon.admins")

    def names(self) -> list[str]:
        """All of them."""
        return list(self._tenants)

    def check_user(self, names: list[str], user: int) -> None:
        """A process of this user of the machine wants to attach as these tenants.

        Raises:
            Refused: one of them is for others (`tenants.users`), or is not there: it does not say which.
        """
        if not self._users or user in (0, os.geteuid()):  # who can read this process's memory
            return
        for name in names[: len(self._tenants) + 1]:
            if name not in self._tenants or user not in self._users.get(name, {user}):
                raise Refused(
                    f"tenants: {name!r:.80} is not configured on this daemon, or not for user {user} "
                    "(tenants.users)"
                )

    def check_admin(self, user: int) -> None:
        """A tool of this user of the machine wants to attach.

        Raises:
            Refused: it is none of `daemon.admins`.
        """
        if self._admins and user not in (self._admins | {0, os.geteuid()}):
            raise Refused(f"role: user {user} is none of daemon.admins; ask one of them, or root")

    def check_unseen(self, name: str, *, admin: bool) -> None:
        """Somebody acts for a tenant ("" = for all) who let himself in by nothing but a socket's mode.

        gRPC does not tell which user is at the other end of a Unix socket.

        Raises:
            Refused: only some users may.
        """
        bound = name in self._users if name else bool(self._users)
        if bound or (admin and self._admins):
            key = "daemon.admins" if admin and self._admins else f"users of tenant {name!r:.80}"
            raise Refused(
                f"authorization: {key}: only some users of this machine, and gRPC cannot tell which one "
                "calls; show a token (grpc.tokens_file)"
            )

    def group_of(self, names: list[str]) -> str:
        """Name of the one trust group that all these tenants share.

        Raises:
            BadRequest: none named, or of several groups (an engine maps one arena).
            Refused: a tenant is not configured.
        """
        if not names:
            raise BadRequest("tenants: name at least one")
        if len(names) != len(set(names[: len(self._tenants) + 1])):
            raise BadRequest("tenants: name each configured tenant at most once")
        for name in names:
            if name not in self._tenants:
                raise Refused(f"tenants: {name!r:.80} is not configured on this daemon")
        groups = {self._tenants[name].group for name in names}
        if len(groups) > 1:
            raise BadRequest(
                f"tenants: of several trust groups ({', '.join(sorted(groups))}); attach to each"
            )
        return groups.pop()

    def alias(self, name: str, reuse: Reuse = Reuse.OWN) -> str:
        """A name for labels that tells nothing of the real one, and stays as long as its salt does.

        Names without a salt (those of series for all the others) are their own.
        """
        salt = (self._salts.tenants if reuse is Reuse.OWN else self._salts.groups).get(name, b"")
        return hashlib.blake2b(salt, digest_size=6, person=b"kvstore-alias-v1").hexdigest() if salt else name

    def beside(self, name: str) -> list[str]:
        """The other tenants of its trust group; none for a tenant that is not configured."""
        group = self._tenants[name].group if name in self._tenants else None
        return [t.name for t in self._tenants.values() if t.group == group and t.name != name]

    def origins(self, name: str, digest: bytes) -> dict[Reuse, Origin]:
        """Where chains of a tenant may start in the namespace with this digest, by reuse; makes nothing.

        Returns:
            OWN, and GROUP for a tenant that shares; empty for one that reuses nothing.
        """
        tenant, out = self._tenants[name], {}
        if tenant.reuse is not Reuse.NONE:
            out[Reuse.OWN] = Origin(root_of(digest, self._salts.tenants[name]), name, Reuse.OWN)
        if tenant.reuse is Reuse.GROUP:
            salt = self._salts.groups[tenant.group]
            out[Reuse.GROUP] = Origin(root_of(digest, salt), tenant.group, Reuse.GROUP)
        return out
