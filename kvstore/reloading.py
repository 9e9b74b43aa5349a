"""Reload on SIGHUP: what may change while engines are attached, and what has to wait for a restart.

    at once            log level, limits and times of [daemon], speed limits of [host], write budget, stall
                       time and speed limits of [nvme], how loads are planned, new tenants of existing
                       groups (and their salts), tenants that may not attach any more, the reuse that a
                       tenant may ask for, its users and quotas, who administers, tokens of gRPC callers
    after a restart    everything else: sockets, arenas, groups, salts and groups of tenants that exist

Sessions that are attached keep the roots that they were given. A file with a mistake changes nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import structlog

from kvstore.config import Config, DaemonConfig, Salts, SharedConfig, TenantConfig
from kvstore.config.tokens import Tokens
from kvstore.errors import ConfigError
from kvstore.logs import set_level
from kvstore.small_files import read_small
from kvstore.store import Store
from kvstore.tenants import Tenants

__all__ = ["Change", "Reloader", "change"]

log = structlog.get_logger()

LIVE_KEYS = frozenset(
    {
        "daemon.heartbeat_s",
        "daemon.stale_after_s",
        "daemon.attach_timeout_s",
        "daemon.stall_s",
        "daemon.sessions_max",
        "daemon.leases_max",
        "daemon.log_level",
        "daemon.admins",
        "daemon.lookup_time_s",
        "host.limit_bytes_per_s",
        "host.added_latency_s",
        "nvme.write_budget_bytes_per_day",
        "nvme.stall_s",
        "nvme.limit_bytes_per_s",
        "nvme.added_latency_s",
        "plan.mode",
    }
)


@dataclass(frozen=True, slots=True)
class Change:
    """What a new configuration makes of the one that runs.

    Attributes:
        config: to run with from now on.
        applied: keys that changed.
        restart: keys that changed and keep their old value until a restart.
    """

    config: Config
    applied: tuple[str, ...]
    restart: tuple[str, ...]


def change(old: Config, new: Config) -> Change:
    """Take from `new` what may change while the daemon runs."""
    applied: list[str] = []
    restart: list[str] = []
    tables: dict[str, Any] = {}
    lists = ("tenants", "shared")
    for table in (field.name for field in msgspec.structs.fields(Config) if field.name not in lists):
        before, after = getattr(old, table), getattr(new, table)
        fresh = {}
        for key in (field.name for field in msgspec.structs.fields(type(before))):
            path = f"{table}.{key}"
            if getattr(before, key) == getattr(after, key):
                continue
            if path in LIVE_KEYS:
                fresh[key] = getattr(after, key)
                applied.append(path)
            else:
                restart.append(path)
        tables[table] = msgspec.structs.replace(before, **fresh)
    tenants = _tenants(old, new, applied, restart)
    groups = {tenant.group for tenant in tenants}
    shared = tuple(each for each in new.shared if each.group in groups)
    applied += [f"shared.{each.group}" for each in shared if each not in old.shared]
    applied += [f"shared.{each.group} (no limits)" for each in old.shared if _lifted(each, shared)]
    return Change(Config(**tables, tenants=tenants, shared=shared), tuple(applied), tuple(restart))


def _lifted(each: SharedConfig, shared: tuple[SharedConfig, ...]) -> bool:
    return each.group not in {other.group for other in shared}


def _tenants(old: Config, new: Config, applied: list[str], restart: list[str]) -> tuple[TenantConfig, ...]:
    known = {tenant.name: tenant for tenant in old.tenants}
    kept = []
    for tenant in new.tenants:
        before = known.pop(tenant.name, None)
        if before is not None and before.group != tenant.group:
            restart.append(f"tenants.{tenant.name}.group")
            tenant = msgspec.structs.replace(tenant, group=before.group)
        elif before is None and tenant.group not in old.groups():
            restart.append(f"tenants.{tenant.name} (its group {tenant.group} has no arena yet)")
            continue
        if tenant != before:
            applied.append(f"tenants.{tenant.name}")
        kept.append(tenant)
    # A group whose last tenant goes keeps its arena; only a restart gives that memory back.
    left = {tenant.group for tenant in kept}
    for tenant in known.values():
        if tenant.group in left:
            applied.append(f"tenants.{tenant.name} (no longer attaches)")
        else:
            restart.append(f"tenants.{tenant.name} (last of group {tenant.group})")
            kept.append(tenant)
            left.add(tenant.group)
    return tuple(kept)


class Reloader:
    """Reads the configuration again and applies it.

    Args:
        store: gets limits and tenants.
        salts: that run now.
        tell: others who hold limits of [daemon].
        keep: told of what the next daemon has to know; None = nothing is kept.
        take_tokens: told, after each reload, of what `grpc.tokens_file` holds now, of None where there is no
            such file; None = there is nobody to tell.
    """

    def __init__(
        self,
        store: Store,
        salts: Salts,
        tell: Callable[[DaemonConfig], None],
        keep: Callable[[Config, Salts], None] | None = None,
        take_tokens: Callable[[Tokens | None], None] | None = None,
    ) -> None:
        self._store = store
        self._salts = salts
        self._tell = tell
        self._keep = keep
        self._take_tokens = take_tokens
        self._origin = store.config.origin

    async def reload(self) -> None:
        """Never raises for what is in the files: a mistake is logged, and the old configuration goes on."""
        try:
            changed, salts = await self._read()
            tokens = await self._tokens()
            tenants = Tenants(changed.config, salts)  # users may have left this machine
        except ConfigError as error:
            log.error("configuration not reloaded; the old one goes on", reason=str(error))
            return
        config = changed.config
        if self._origin is not None:
            msgspec.structs.force_setattr(config, "_origin", self._origin)
        self._salts = salts
        store = self._store
        store.config, store.tenants = config, tenants
        for group in store.groups.values():
            group.reconfigure(config)
        self._tell(config.daemon)
        if self._keep is not None:
            self._keep(config, salts)
        if self._take_tokens is not None:
            self._take_tokens(tokens)
        set_level(config.daemon.log_level)
        for key in changed.restart:
            log.warning("configuration key not applied", key=key, fix="restart to apply")
        log.info("configuration reloaded", applied=list(changed.applied))

    async def _read(self) -> tuple[Change, Salts]:
        origin = self._origin
        if origin is None:
            raise ConfigError("it was not loaded from a file, the environment or flags")
        text = None if origin.file is None else await _text(origin.file, "")
        new = Config.load(origin.file, origin.environ, origin.flags, text)
        changed = change(self._store.config, new)
        return changed, await self._merged_salts(changed)

    async def _tokens(self) -> Tokens | None:
        name = self._store.config.grpc.tokens_file
        if not name or self._take_tokens is None:
            return None
        path = Path(name)
        return Tokens.load(path, await _text(path, "grpc.tokens_file: "))

    async def _merged_salts(self, changed: Change) -> Salts:
        """Salts of those who have some stay; newcomers get theirs from the file, or minted into it."""
        config, old = changed.config, self._salts
        if config.daemon.secrets_file:
            path = Path(config.daemon.secrets_file)
            found = Salts.load(config, await _text(path, "daemon.secrets_file: "))
        else:  # in nvme.directory: a thread waits for that disk, not the loop
            found = await asyncio.to_thread(Salts.load, config)
        for kind, before, after in (
            ("tenants", old.tenants, found.tenants),
            ("groups", old.groups, found.groups),
        ):
            moved = [name for name in after if name in before and before[name] != after[name]]
            if config.salts_kept:
                for name in moved:
                    log.warning(
                        "configuration key not applied", key=f"salt of {kind}.{name}", fix="restart to apply"
                    )
        salts = Salts({**found.tenants, **old.tenants}, {**found.groups, **old.groups})
        values = [*salts.tenants.values(), *salts.groups.values()]
        if len(set(values)) < len(values):
            key = "daemon.secrets_file" if config.daemon.secrets_file else "nvme.directory"
            raise ConfigError(f"{key}: a new salt equals one that is in use; names need their own")
        return salts


async def _text(path: Path, key: str) -> str:
    try:
        return (await read_small(path)).decode()
    except UnicodeDecodeError:
        raise ConfigError(f"{key}{path} is not UTF-8 text") from None
    except OSError as error:
        raise ConfigError(f"{key}{path} cannot be read: {error.strerror}") from None
