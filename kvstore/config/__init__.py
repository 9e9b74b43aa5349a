"""Configuration: flags > environment > file > defaults, and errors that name the key.

The file is TOML. A key `host.capacity_bytes` is set by the file's table [host], by the environment variable
`KVSTORE_HOST__CAPACITY_BYTES`, or by the flag `--set host.capacity_bytes=8GiB`. Sizes take 4GiB, 512MiB or
plain bytes. Unknown keys are errors.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from kvstore.config.publishing import outlets
from kvstore.config.salts import Salts
from kvstore.config.sources import anchor_paths, assign, explain, parse_units, read_file
from kvstore.config.tables import (
    RANGES,
    DaemonConfig,
    EventsConfig,
    GrpcConfig,
    HostConfig,
    IndexConfig,
    MetricsConfig,
    NvmeConfig,
    PlanConfig,
    Table,
)
from kvstore.config.tenancy import Quota, SharedConfig, TenantConfig, check_tenants, user_ids
from kvstore.errors import ConfigError

__all__ = [
    "Config",
    "DaemonConfig",
    "EventsConfig",
    "GrpcConfig",
    "HostConfig",
    "IndexConfig",
    "MetricsConfig",
    "NvmeConfig",
    "Origin",
    "PlanConfig",
    "Quota",
    "Salts",
    "SharedConfig",
    "TenantConfig",
    "user_ids",
]

_ENV_PREFIX = "KVSTORE_"


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a configuration was read from, so that it can be read again."""

    file: Path | None
    environ: Mapping[str, str]
    flags: tuple[str, ...]


class Config(Table, frozen=True, dict=True):
    """The whole configuration; see the classes of its tables."""

    daemon: DaemonConfig = DaemonConfig()
    host: HostConfig = HostConfig()
    index: IndexConfig = IndexConfig()
    events: EventsConfig = EventsConfig()
    metrics: MetricsConfig = MetricsConfig()
    grpc: GrpcConfig = GrpcConfig()
    nvme: NvmeConfig = NvmeConfig()
    plan: PlanConfig = PlanConfig()
    tenants: tuple[TenantConfig, ...] = (TenantConfig(name="default"),)
    shared: tuple[SharedConfig, ...] = ()

    @staticmethod
    def load(
        file: Path | None = None,
        environ: Mapping[str, str] | None = None,
        flags: Sequence[str] = (),
        text: str | None = None,
    ) -> Config:
        """Merge and check all sources.

        Args:
            file: TOML file, or None.
            environ: the environment (None = this process's).
            flags: `table.key=value` each.
            text: content of the file, if somebody has read it already.

        Raises:
            ConfigError: names the key, where it came from and the fix.
        """
        merged: dict[str, Any] = read_file(file, text) if file is not None else {}
        if file is not None:
            anchor_paths(merged, file)
        source = {"": str(file) if file is not None else "defaults"}
        environ = os.environ if environ is None else environ
        for name in sorted(environ):
            if name.startswith(_ENV_PREFIX) and "__" in name:
                path = name.removeprefix(_ENV_PREFIX).lower().replace("__", ".")
                assign(merged, path, environ[name], origin=name)
                source[path] = name
        for flag in flags:
            path, equals, value = flag.partition("=")
            if not equals:
                raise ConfigError(f"--set {flag}: need table.key=value, e.g. host.capacity_bytes=4GiB")
            assign(merged, path, value, origin=f"--set {path}")
            source[path] = f"--set {path}"
        config = _checked(_convert(merged, source))
        # Not a field: it is no key, and two configurations are equal whatever they were read from.
        ours = {name: value for name, value in environ.items() if name.startswith(_ENV_PREFIX)}
        msgspec.structs.force_setattr(config, "_origin", Origin(file, ours, tuple(flags)))
        return config

    @property
    def origin(self) -> Origin | None:
        """What `load` read, None for a configuration that was made otherwise."""
        origin: Origin | None = self.__dict__.get("_origin")
        return origin

    @property
    def salts_kept(self) -> bool:
        """Whether the next process will have the same salts, because they are in a file (`Salts.load`)."""
        return bool(self.daemon.secrets_file or self.nvme.directory)

    def groups(self) -> list[str]:
        """Names of the trust groups, in order of first mention."""
        return list(dict.fromkeys(tenant.group for tenant in self.tenants))


def _convert(merged: dict[str, Any], source: Mapping[str, str]) -> Config:
    parse_units(merged)
    try:
        # strict=False lets "8" and "true" from environment and flags become numbers and booleans.
        return msgspec.convert(merged, Config, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(explain(str(error), source, _tables())) from None


def _tables() -> dict[str, type[msgspec.Struct]]:
    """Name in the file → table; "" is the whole."""
    return {
        "": Config,
        "daemon": DaemonConfig,
        "host": HostConfig,
        "index": IndexConfig,
        "events": EventsConfig,
        "metrics": MetricsConfig,
        "grpc": GrpcConfig,
        "nvme": NvmeConfig,
        "plan": PlanConfig,
        "tenants": TenantConfig,
        "shared": SharedConfig,
    }


def _checked(config: Config) -> Config:
    for key, (least, most) in RANGES.items():
        table, _, name = key.partition(".")
        value = getattr(getattr(config, table), name)
        if not least <= value <= most:
            raise ConfigError(f"{key}: need {least:g} to {most:g}, got {value}")
    if config.host.slab_bytes % (2 << 20):
        raise ConfigError(f"host.slab_bytes: need a multiple of 2 MiB, got {config.host.slab_bytes}")
    if config.host.slab_bytes > config.host.capacity_bytes:
        raise ConfigError("host.slab_bytes: larger than host.capacity_bytes; lower it or raise the capacity")
    if config.daemon.stale_after_s < 2 * config.daemon.heartbeat_s:
        raise ConfigError("daemon.stale_after_s: need at least two heartbeats (2 × daemon.heartbeat_s)")
    if not 1 <= len(config.daemon.socket.encode()) <= 107:  # sockaddr_un
        raise ConfigError("daemon.socket: need a path of 1 to 107 bytes (the kernel's limit)")
    if config.daemon.log_level not in ("debug", "info", "warning", "error"):
        raise ConfigError("daemon.log_level: need debug, info, warning or error")
    config.metrics.check()
    config.plan.check()
    config.grpc.check()
    user_ids(config.daemon.admins.split(","), "daemon.admins")
    check_tenants(config.tenants, config.shared)
    config.nvme.check(config.groups())
    outlets(config.events, config.groups())
    return config
