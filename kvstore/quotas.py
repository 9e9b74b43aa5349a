"""Quotas: how much of one trust group's tiers each tenant may use, and how fast.

    bytes      native pools count them by root; a tenant at its limit makes room among its own blocks
    a day's    of writes to the disk, and rates of lookups and saves: token buckets that begin full; the
               day's holds an hour's worth, so that a restart grants no second day
    leases     counted where they are held (kvstore/leases.py)

What goes beyond is refused with a reason that names the key, and counted; it is never an error of a request:
an engine that is refused computes. Blocks that tenants share count for the group ([[shared]]), not for
whoever saved them.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import structlog

from kvstore._native import DiskPool, HostPool, Index
from kvstore.clock import Clock
from kvstore.config import Config, Quota, TenantConfig
from kvstore.policy.throttle import TokenBucket
from kvstore.tenants import Origin
from kvstore.types import Reuse

__all__ = ["Quotas", "Refused", "Used"]

log = structlog.get_logger()

_DAY_S = 86_400.0
# What a day's bucket holds: so much may pass at once after a pause.
_BURST_S = 3600.0
# Of a tenant's bytes on the disk: how much room is made at once.
_TRIM_AHEAD = 64
# Where no room could be made, none is looked for for so long: that costs the loop a millisecond each time.
_FULL_S = 0.05
# A report must fit in one frame.
USED_LISTED_MAX = 1000
# A bucket that is exactly full enough must not fail by what a subtraction rounds.
_ROUNDING_S = 1e-6


class Refused(enum.StrEnum):
    """What a tenant had enough of."""

    HOST_BYTES = "host_bytes"
    NVME_BYTES = "nvme_bytes"
    NVME_WRITES = "nvme_write_bytes_per_day"
    LEASES = "leases_max"
    LOOKUPS = "lookups_per_s"
    SAVES = "save_bytes_per_s"


@dataclass(frozen=True, slots=True)
class Used:
    """What somebody uses at one moment.

    Attributes:
        owner, reuse: a tenant (OWN), or a trust group with what it shares (GROUP).
        host_bytes, nvme_bytes: on these tiers.
        limits: those that there are.
        refused: how often, since the start.
    """

    owner: str
    reuse: Reuse
    host_bytes: int
    nvme_bytes: int
    limits: Mapping[Refused, float]
    refused: Mapping[Refused, int]

    @property
    def name(self) -> str:
        """Of its own among tenants and groups."""
        return self.owner if self.reuse is Reuse.OWN else f"group:{self.owner}"


class _Rate:
    """A token bucket whose limit may change; without one it lets everything pass."""

    def __init__(self, per_s: float, burst: float) -> None:
        self._of = (per_s, burst)
        self._bucket = TokenBucket(per_s, burst) if per_s else None

    def limited(self, per_s: float, burst: float, now_s: float) -> _Rate:
        """Itself if that is its limit, else one that goes on at the level of this one, or begins full."""
        if self._of == (per_s, burst):
            return self
        made = _Rate(per_s, burst)
        if self._bucket is not None and made._bucket is not None:
            level = (now_s - self._bucket.starts_s(now_s)) * self._of[0]  # below 0: what is owed
            made.take(max(0.0, burst - level), now_s)
        return made

    def has(self, size: float, now_s: float) -> bool:
        """Whether so much may pass now."""
        return (
            self._bucket is None or self._bucket.ready_s(min(size, self._of[1]), now_s) <= now_s + _ROUNDING_S
        )

    def take(self, size: float, now_s: float) -> None:
        """So much has passed, whether or not there was enough: later ones wait for it."""
        if self._bucket is not None:
            self._bucket.take(size, now_s)


class _Account:
    """What is counted of one tenant, or of what a group shares.

    Attributes:
        owner: the tenant's name, or the group's.
        number: in the native pools; 0 is nobody's.
        limits: its table of the configuration.
        full_until_s: until then there is no room on the disk.
        refused: calls, or parts of offers, that were refused, by reason.
    """

    def __init__(self, owner: str, number: int, limits: Quota, now_s: float) -> None:
        self.owner = owner
        self.number = number
        self.limits = limits
        self.full_until_s = -math.inf
        self.refused: Counter[Refused] = Counter()
        self.writes, self.lookups, self.saves = _Rate(0, 0), _Rate(0, 0), _Rate(0, 0)
        self.set_limits(limits, now_s)

    def set_limits(self, limits: Quota, now_s: float) -> None:
        self.limits = limits
        daily = limits.nvme_write_bytes_per_day
        self.writes = self.writes.limited(daily / _DAY_S, daily * _BURST_S / _DAY_S, now_s)
        if isinstance(limits, TenantConfig):
            self.lookups = self.lookups.limited(limits.lookups_per_s, max(1.0, limits.lookups_per_s), now_s)
            self.saves = self.saves.limited(limits.save_bytes_per_s, limits.save_bytes_per_s, now_s)


class Quotas:
    """Those of one trust group.

    Args:
        name: of the group.
        index, host, disk: of it; no disk = nothing to count there.
        clock: for rates.
    """

    def __init__(self, name: str, index: Index, host: HostPool, disk: DiskPool | None, clock: Clock) -> None:
        self._name = name
        self._index, self._host, self._disk = index, host, disk
        self._clock = clock
        self._accounts: dict[tuple[str, Reuse], _Account] = {}
        self._of_root: dict[int, _Account] = {}

    def configure(self, config: Config) -> None:
        """Limits of a configuration hold from now on; who is not in it any more keeps what it had."""
        for tenant in config.tenants:
            if tenant.group == self._name:
                self._set(tenant.name, Reuse.OWN, tenant)
        shared = {each.group: each for each in config.shared}
        self._set(self._name, Reuse.GROUP, shared.get(self._name, Quota()))
        self._host.settle_lanes()

    def _set(self, owner: str, reuse: Reuse, limits: Quota) -> None:
        account = self._accounts.get((owner, reuse))
        if account is None:
            number = len(self._accounts) + 1
            account = self._accounts[owner, reuse] = _Account(owner, number, limits, self._clock.now())
        before = account.limits
        account.set_limits(limits, self._clock.now())
        # Only accounts with a limit cost something: none is named that never had one.
        try:
            if limits.host_bytes or before.host_bytes:
                self._host.set_limit(account.number, limits.host_bytes or None)
            if self._disk is not None and (limits.nvme_bytes or before.nvme_bytes):
                self._disk.set_limit(account.number, limits.nvme_bytes or None)
        except ValueError:  # those that have left keep their place until a restart
            log.warning("configuration key not applied", key=f"quota of {owner}", fix="restart to apply")

    def claim(self, origin: Origin, node: int) -> None:
        """The root of `origin` stands at this node: what is under it is its owner's."""
        account = self._accounts.get((origin.owner, origin.reuse))
        if account is None:  # it has left the configuration, and its blocks have not
            return
        self._of_root[node] = account
        self._host.claim(node, account.number)
        self._host.settle_lanes()
        if self._disk is not None:
            self._disk.claim(node, account.number)

    # ---- questions of the request path: "" = go on, else why not -----------------------------------------

    def lookup(self, tenant: str, held: int) -> str:
        """A tenant that holds so many leases asks what is known of a prompt."""
        account = self._accounts.get((tenant, Reuse.OWN))
        if account is None or not isinstance(account.limits, TenantConfig):
            return ""
        now_s, most = self._clock.now(), account.limits.leases_max
        if most and held >= most:
            return self._refuse(account, Refused.LEASES, "it holds as many")
        if not account.lookups.has(1, now_s):
            return self._refuse(account, Refused.LOOKUPS, "it asks more often")
        account.lookups.take(1, now_s)
        return ""

    def save(self, tenant: str) -> str:
        """A tenant wants to save something."""
        account = self._accounts.get((tenant, Reuse.OWN))
        if account is None or account.saves.has(1, self._clock.now()):
            return ""
        return self._refuse(account, Refused.SAVES, "it saves more")

    def saves(self, tenant: str, size_bytes: int) -> None:
        """A tenant was given slots for so many bytes."""
        account = self._accounts.get((tenant, Reuse.OWN))
        if account is not None and size_bytes:
            account.saves.take(size_bytes, self._clock.now())

    def full(self, root: int) -> str:
        """HOST has no room within the limit of whoever owns the root at this node: the reason, counted."""
        account = self._of_root.get(root)
        if account is None:
            return "a quota is used up"
        return self._refuse(account, Refused.HOST_BYTES, "its other blocks are in use")

    def _refuse(self, account: _Account, why: Refused, because: str) -> str:
        account.refused[why] += 1
        table = "tenants" if isinstance(account.limits, TenantConfig) else "shared"
        return f"{table}.{why} = {getattr(account.limits, why)} of {account.owner}: {because}"

    # ---- the disk ----------------------------------------------------------------------------------------

    def may_write(self, node: int, size_bytes: int) -> bool:
        """Whether so many bytes of a chain could be written to the disk; nothing is paid, nobody leaves."""
        account = self._of_root.get(self._index.root_of(node)) if self._of_root else None
        if account is None or self._disk is None:
            return True
        limits, now_s = account.limits, self._clock.now()
        if not account.writes.has(size_bytes, now_s):
            account.refused[Refused.NVME_WRITES] += 1
            return False
        if limits.nvme_bytes and (size_bytes > limits.nvme_bytes or now_s < account.full_until_s):
            account.refused[Refused.NVME_BYTES] += 1
            return False
        return True

    def wrote(self, node: int, size_bytes: int) -> bool:
        """So many bytes of a chain were admitted: they are paid for, and older ones make room for them.

        Cost: a few µs; with `nvme_bytes` reached up to 1 ms. False: there is no room, at least for now.
        """
        account = self._of_root.get(self._index.root_of(node)) if self._of_root else None
        if account is None or self._disk is None:
            return True
        limit = account.limits.nvme_bytes
        # Somewhat more than is needed: the next one need not look for leaves again.
        more = max(size_bytes, min(limit // _TRIM_AHEAD, limit - size_bytes))
        room = not limit or self._disk.trim(account.number, more, node)
        if not room and self._disk.used_bytes(account.number) + size_bytes > limit:
            account.full_until_s = self._clock.now() + _FULL_S
            account.refused[Refused.NVME_BYTES] += 1
            return False
        account.writes.take(size_bytes, self._clock.now())
        return True

    # ---- reports -----------------------------------------------------------------------------------------

    def used(self) -> Iterator[Used]:
        """What those use who have anything, or a limit, or were refused something."""
        for (owner, reuse), account in self._accounts.items():
            host = self._host.used_bytes(account.number)
            nvme = self._disk.used_bytes(account.number) if self._disk is not None else 0
            limits = _limits(account.limits)
            if host or nvme or limits or account.refused:
                yield Used(owner, reuse, host, nvme, limits, account.refused)

    def report(self) -> dict[str, dict[str, object]]:
        """used(), by tenant, and `group:NAME` for what it shares; the first USED_LISTED_MAX; JSON-ready."""
        return {
            used.name: {
                "host_bytes": used.host_bytes,
                "nvme_bytes": used.nvme_bytes,
                "limits": {why.value: limit for why, limit in used.limits.items()},
                "refused": {why.value: count for why, count in used.refused.items()},
            }
            for used in itertools.islice(self.used(), USED_LISTED_MAX)
        }


def _limits(limits: Quota) -> dict[Refused, float]:
    """Those that there are."""
    found = {why: getattr(limits, why, 0) for why in Refused}
    return {why: limit for why, limit in found.items() if limit and math.isfinite(limit)}
