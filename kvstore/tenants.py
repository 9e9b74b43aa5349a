"""Who the configured tenants are, and where their chains start. Salts stay in here."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.config import Config, Salts
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

    def names(self) -> list[str]:
        """All of them."""
        return list(self._tenants)

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
