"""Tenants, and what each of them may use."""

from __future__ import annotations

import pwd
import re
from collections.abc import Iterable, Sequence

from kvstore.config.tables import Table
from kvstore.errors import ConfigError
from kvstore.types import Reuse

__all__ = ["Quota", "SharedConfig", "TenantConfig", "check_tenants", "user_ids"]

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_DAY_S = 86_400
# Of accounts: native/src/usage.h, kLanesMax.
QUOTAS_PER_GROUP_MAX = 255


class Quota(Table, frozen=True, kw_only=True):
    """What somebody may use at most; 0 = as much as there is.

    Attributes:
        host_bytes: of the arena; beyond it a save makes room among one's own blocks, oldest first.
        nvme_bytes: of the disk; the same.
        nvme_write_bytes_per_day: written to the disk; what goes beyond stays on HOST only.
    """

    host_bytes: int = 0
    nvme_bytes: int = 0
    nvme_write_bytes_per_day: int = 0

    def check_quota(self, owner: str) -> None:
        """Raises ConfigError: names the key; `owner` is whose table it is."""
        for key in ("host_bytes", "nvme_bytes"):
            if not 0 <= getattr(self, key) <= 1 << 46:
                raise ConfigError(f"{owner}.{key}: need 0 (no limit) to 64 TiB, got {getattr(self, key)}")
        daily = self.nvme_write_bytes_per_day
        if daily and not _DAY_S <= daily <= 1 << 50:  # a byte a second is the slowest there is
            raise ConfigError(
                f"{owner}.nvme_write_bytes_per_day: need 0 (no limit) or {_DAY_S} to 1 PiB, got {daily}"
            )


class TenantConfig(Quota, frozen=True, kw_only=True):
    """[[tenants]]

    Attributes:
        name: letters, digits, `_.-`.
        group: trust group = arena = fault domain; its members may share.
        reuse: the most this tenant's requests may ask for: none, own or group.
        users: names or ids of the machine's users whose processes may attach as this tenant; empty = of all
            whom `daemon.socket_mode` lets in. Root and the daemon's own user always may.
        leases_max: prefixes that its engines hold at once; 0 = no limit but those of [daemon] and [grpc].
        lookups_per_s: questions a second, a second's worth at once; beyond it the engine computes.
        save_bytes_per_s: saved to HOST, a second's worth at once; beyond it saves are refused.
    """

    name: str
    group: str = "default"
    reuse: Reuse = Reuse.OWN
    users: tuple[str | int, ...] = ()
    leases_max: int = 0
    lookups_per_s: float = 0.0
    save_bytes_per_s: int = 0

    def check(self) -> None:
        """Raises ConfigError: names the key."""
        owner = f"tenants.{self.name}"
        for field, value in (("name", self.name), ("group", self.group)):
            if not _NAME.fullmatch(value):
                raise ConfigError(f"tenants.{field}: {value!r:.80} needs 1 to 64 of A–Z a–z 0–9 _ . -")
        self.check_quota(owner)
        for key, most in (("leases_max", 1 << 24), ("lookups_per_s", 1e9), ("save_bytes_per_s", 1 << 40)):
            value = getattr(self, key)
            least = 0 if key == "leases_max" else 1
            if value and not least <= value <= most:
                raise ConfigError(f"{owner}.{key}: need 0 (no limit) or {least} to {most:g}, got {value:g}")
        user_ids(self.users, f"{owner}.users")


class SharedConfig(Quota, frozen=True, kw_only=True):
    """[[shared]]: what the tenants of a trust group with reuse = "group" may keep together.

    Attributes:
        group: its name.
    """

    group: str = "default"


def user_ids(users: Iterable[str | int], key: str) -> frozenset[int]:
    """Ids of users of this machine.

    Args:
        key: where they are named, for messages.

    Raises:
        ConfigError: nobody is called so.
    """
    users, found = list(users), set()
    if users and users != [""] and not any(str(user).strip() for user in users):
        raise ConfigError(f"{key}: names nobody; leave it out if everybody may")
    for user in users:
        name = str(user).strip()
        if re.fullmatch(r"-?\d{1,20}", name):
            if not 0 <= int(name) < 1 << 32:
                raise ConfigError(f"{key}: {name} is no user id")
            found.add(int(name))
            continue
        if not name:  # of "a,,b", and of nothing at all
            continue
        try:
            found.add(pwd.getpwnam(name).pw_uid)
        except (KeyError, ValueError):
            raise ConfigError(f"{key}: this machine has no user {name!r:.80}; name one, or its id") from None
    return frozenset(found)


def check_tenants(tenants: Sequence[TenantConfig], shared: Sequence[SharedConfig]) -> None:
    """Raises ConfigError: names the key that is wrong, or a name that is there twice."""
    if not tenants:
        raise ConfigError("tenants: need at least one")
    names = [tenant.name for tenant in tenants]
    for tenant in tenants:
        tenant.check()
        if names.count(tenant.name) > 1:
            raise ConfigError(f"tenants.name: {tenant.name} appears twice")
    groups = [tenant.group for tenant in tenants]
    for each in shared:
        if each.group not in groups:
            raise ConfigError(f"shared.group: no tenant is in {each.group!r:.80}; name a tenant's group")
        if [other.group for other in shared].count(each.group) > 1:
            raise ConfigError(f"shared.group: {each.group} appears twice")
        each.check_quota(f"shared.{each.group}")
    for group in dict.fromkeys(groups):
        limited = [t for t in tenants if t.group == group and (t.host_bytes or t.nvme_bytes)]
        if len(limited) >= QUOTAS_PER_GROUP_MAX:
            raise ConfigError(
                f"tenants: {len(limited)} of group {group} have host_bytes or nvme_bytes, need less than "
                f"{QUOTAS_PER_GROUP_MAX}; use more groups"
            )
