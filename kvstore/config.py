"""Configuration: flags > environment > file > defaults, and errors that name the key.

The file is TOML. A key `host.capacity_bytes` is set by the file's table [host], by the environment variable
`KVSTORE_HOST__CAPACITY_BYTES`, or by the flag `--set host.capacity_bytes=8GiB`. Sizes take 4GiB, 512MiB or
plain bytes. Unknown keys are errors.
"""

from __future__ import annotations

import difflib
import os
import re
import stat
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from kvstore.errors import ConfigError
from kvstore.types import Reuse

__all__ = ["Config", "DaemonConfig", "EventsConfig", "HostConfig", "IndexConfig", "Salts", "TenantConfig"]

_ENV_PREFIX = "KVSTORE_"
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(B|KB|MB|GB|TB|KiB|MiB|GiB|TiB)?", re.IGNORECASE)
_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12} | {
    f"{letter}ib": 1 << (10 * (power + 1)) for power, letter in enumerate("kmgt")
}
SALT_BYTES_MIN, SALT_BYTES_MAX = 16, 64
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def default_socket() -> str:
    """A path of this user's: in $XDG_RUNTIME_DIR, in /run for root, else with the uid in /tmp."""
    folder = os.environ.get("XDG_RUNTIME_DIR")
    if folder:
        return f"{folder}/kvstore.sock"
    return "/run/kvstore.sock" if os.geteuid() == 0 else f"/tmp/kvstore-{os.geteuid()}.sock"


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of the configuration tables."""


class DaemonConfig(_Table, frozen=True):
    """[daemon]

    Attributes:
        socket: path of the Unix socket.
        socket_mode: permission bits of the socket.
        secrets_file: TOML with the tenants' salts; empty = random salts for the life of the daemon.
        heartbeat_s: clients send something at least this often.
        stale_after_s: without a word for this long a session's pins become revocable.
        attach_timeout_s: a connection that has not attached by then is closed.
        stall_s: a slot being filled for longer than this may be filled by another session too.
        sessions_max: most connections at once.
        leases_max: most leases of one session.
        self_check_s: the daemon checks its own laws this often, in the background (0 = never).
        log_level: debug, info, warning or error.
    """

    socket: str = msgspec.field(default_factory=default_socket)
    socket_mode: int = 0o600
    secrets_file: str = ""
    heartbeat_s: float = 1.0
    stale_after_s: float = 5.0
    attach_timeout_s: float = 10.0
    stall_s: float = 5.0
    sessions_max: int = 2048
    leases_max: int = 8192
    self_check_s: float = 60.0
    log_level: str = "info"


class HostConfig(_Table, frozen=True):
    """[host]

    Attributes:
        capacity_bytes: size of one trust group's arena; every group has its own.
        slab_bytes: unit in which the arena changes hands between block sizes; a block must fit in one.
        huge_pages: ask for 2 MiB pages.
        lock: mlock the arena.
        threads: threads that prefault it at start (0 = all cores).
    """

    capacity_bytes: int = 1 << 30
    slab_bytes: int = 32 << 20
    huge_pages: bool = True
    lock: bool = False
    threads: int = 0


class IndexConfig(_Table, frozen=True):
    """[index]

    Attributes:
        nodes_max: most block keys known at once, hollow ones included (about 96 bytes each).
    """

    nodes_max: int = 4_000_000


class EventsConfig(_Table, frozen=True):
    """[events]

    Attributes:
        log_max: events kept for subscribers that fell behind; older ones need a snapshot.
    """

    log_max: int = 10_000


class TenantConfig(_Table, frozen=True):
    """[[tenants]]

    Attributes:
        name: letters, digits, `_.-`.
        group: trust group = arena = fault domain; its members may share.
        reuse: the most this tenant's requests may ask for: none, own or group.
    """

    name: str
    group: str = "default"
    reuse: Reuse = Reuse.OWN


class Config(_Table, frozen=True):
    """The whole configuration; see the classes of its tables."""

    daemon: DaemonConfig = DaemonConfig()
    host: HostConfig = HostConfig()
    index: IndexConfig = IndexConfig()
    events: EventsConfig = EventsConfig()
    tenants: tuple[TenantConfig, ...] = (TenantConfig(name="default"),)

    @staticmethod
    def load(
        file: Path | None = None,
        environ: Mapping[str, str] | None = None,
        flags: Sequence[str] = (),
    ) -> Config:
        """Merge and check all sources.

        Args:
            file: TOML file, or None.
            environ: the environment (None = this process's).
            flags: `table.key=value` each.

        Raises:
            ConfigError: names the key, where it came from and the fix.
        """
        merged: dict[str, Any] = _read_file(file) if file is not None else {}
        if file is not None:
            _anchor_secrets(merged, file)
        source = {"": str(file) if file is not None else "defaults"}
        environ = os.environ if environ is None else environ
        for name in sorted(environ):
            if name.startswith(_ENV_PREFIX) and "__" in name:
                path = name.removeprefix(_ENV_PREFIX).lower().replace("__", ".")
                _assign(merged, path, environ[name], origin=name)
                source[path] = name
        for flag in flags:
            path, equals, value = flag.partition("=")
            if not equals:
                raise ConfigError(f"--set {flag}: need table.key=value, e.g. host.capacity_bytes=4GiB")
            _assign(merged, path, value, origin=f"--set {path}")
            source[path] = f"--set {path}"
        return _checked(_convert(merged, source))

    def groups(self) -> list[str]:
        """Names of the trust groups, in order of first mention."""
        return list(dict.fromkeys(tenant.group for tenant in self.tenants))


def parse_bytes(text: str | int, key: str) -> int:
    """Bytes from 4GiB, 512MiB, 1.5GB or a number.

    Raises:
        ConfigError: not a size.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        return text
    match = _SIZE.fullmatch(str(text).strip())
    if match is None:
        raise ConfigError(f"{key}: {text!r} is not a size; write e.g. 4GiB, 512MiB or a number of bytes")
    return int(float(match[1]) * _UNITS[(match[2] or "").lower()])


def _read_file(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text())
    except FileNotFoundError:
        raise ConfigError(f"{file}: no such configuration file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read ({error})") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file}: not valid TOML: {error}") from None


def _anchor_secrets(merged: dict[str, Any], file: Path) -> None:
    """A relative secrets_file in the file is relative to the file, wherever the daemon is started."""
    daemon = merged.get("daemon")
    if isinstance(daemon, dict) and isinstance(daemon.get("secrets_file"), str) and daemon["secrets_file"]:
        daemon["secrets_file"] = str(file.parent / daemon["secrets_file"])


def _assign(merged: dict[str, Any], path: str, value: str, origin: str) -> None:
    table, dot, key = path.partition(".")
    if not dot or "." in key:
        raise ConfigError(f"{origin}: need a key of the form table.key, got {path!r}")
    if table == "tenants":
        raise ConfigError(f"{origin}: tenants are set in the file only")
    inner = merged.setdefault(table, {})
    if not isinstance(inner, dict):
        raise ConfigError(f"{table}: must be a table")
    inner[key] = value


def _convert(merged: dict[str, Any], source: Mapping[str, str]) -> Config:
    for table, inner in merged.items():
        if isinstance(inner, dict):
            for key, value in inner.items():
                if key.endswith("_bytes"):
                    inner[key] = parse_bytes(value, f"{table}.{key}")
                elif key == "socket_mode" and isinstance(value, str):
                    inner[key] = _octal(value, f"{table}.{key}")
    try:
        # strict=False lets "8" and "true" from environment and flags become numbers and booleans.
        return msgspec.convert(merged, Config, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(_explain(str(error), source)) from None


def _octal(text: str, key: str) -> int:
    try:
        return int(text, 8)
    except ValueError:
        raise ConfigError(f"{key}: {text!r} is not an octal mode such as 0600") from None


def _explain(message: str, source: Mapping[str, str]) -> str:
    """msgspec says "… - at `$.host.capacity_bytes`": put the key first, name its origin, guess the typo."""
    text, _, at = message.partition(" - at `$")
    path = at.rstrip("`").lstrip(".")
    unknown = re.search(r"unknown field `([^`]+)`", text)
    if unknown:
        path = f"{path}.{unknown[1]}".lstrip(".")
        table = path.rpartition(".")[0].split("[")[0]
        near = difflib.get_close_matches(unknown[1], _known(table), 1)
        text = "unknown key" + (
            f"; did you mean {near[0]}?" if near else f"; known: {', '.join(_known(table))}"
        )
    origin = source.get(path) or source.get("", "defaults")
    return f"{path or 'configuration'}: {text} (from {origin})"


def _known(table: str) -> list[str]:
    tables: dict[str, type[msgspec.Struct]] = {
        "": Config,
        "daemon": DaemonConfig,
        "host": HostConfig,
        "index": IndexConfig,
        "events": EventsConfig,
        "tenants": TenantConfig,
    }
    return [field.name for field in msgspec.structs.fields(tables.get(table, Config))]


# key → (least, most); limits with their reason beside them.
_RANGES: dict[str, tuple[float, float]] = {
    "daemon.heartbeat_s": (0.05, 60),
    "daemon.stale_after_s": (0.1, 3600),
    "daemon.attach_timeout_s": (0.1, 600),
    "daemon.stall_s": (0.05, 3600),
    "daemon.sessions_max": (1, 65_536),
    "daemon.leases_max": (1, 1 << 24),
    "daemon.self_check_s": (0, 86_400),
    "daemon.socket_mode": (0, 0o777),
    "host.capacity_bytes": (2 << 20, 1 << 44),  # slot ids are 32-bit page numbers: 16 TiB
    "host.slab_bytes": (2 << 20, 1 << 30),  # no slab may cross a 1 GiB registration border
    "host.threads": (0, 256),  # native/src/arena.cc: kThreadsMax
    "index.nodes_max": (16, 1 << 31),
    "events.log_max": (1, 10_000_000),
}


def _checked(config: Config) -> Config:
    for key, (least, most) in _RANGES.items():
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
    _check_tenants(config.tenants)
    return config


def _check_tenants(tenants: Sequence[TenantConfig]) -> None:
    if not tenants:
        raise ConfigError("tenants: need at least one")
    names = [tenant.name for tenant in tenants]
    for tenant in tenants:
        for field, value in (("name", tenant.name), ("group", tenant.group)):
            if not _NAME.fullmatch(value):
                raise ConfigError(f"tenants.{field}: {value!r:.80} needs 1 to 64 of A–Z a–z 0–9 _ . -")
        if names.count(tenant.name) > 1:
            raise ConfigError(f"tenants.name: {tenant.name} appears twice")


@dataclass(frozen=True, slots=True)
class Salts:
    """Secrets of tenants and trust groups; never logged, never sent.

    Attributes:
        tenants: name → 16 to 64 bytes.
        groups: name → 16 to 64 bytes.
    """

    tenants: Mapping[str, bytes]
    groups: Mapping[str, bytes]

    def __repr__(self) -> str:
        return f"Salts({len(self.tenants)} tenants, {len(self.groups)} groups)"

    @staticmethod
    def load(config: Config) -> Salts:
        """Read `daemon.secrets_file`, or mint random salts when there is none.

        The file holds `[tenants]` and `[groups]` tables of name = "hex"; it must not be readable by others.

        Raises:
            ConfigError: unreadable, too open, not hex, wrong length, or a tenant or group without a salt.
        """
        names, groups = [t.name for t in config.tenants], config.groups()
        if not config.daemon.secrets_file:
            return Salts({n: os.urandom(32) for n in names}, {g: os.urandom(32) for g in groups})
        path = Path(config.daemon.secrets_file)
        if not path.is_file():
            raise ConfigError(
                f"daemon.secrets_file: {path} is not there; write it, mode 0600, or unset the key"
            )
        if path.exists() and path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise ConfigError(f"daemon.secrets_file: {path} is open to others; run chmod 600 {path}")
        data = _read_file(path)
        shared = [t.group for t in config.tenants if t.reuse is Reuse.GROUP]
        salts = Salts(_salts(data, "tenants", names, path), _salts(data, "groups", shared, path))
        # Equal salts are equal roots: one name would read the other's blocks.
        values = [*salts.tenants.values(), *salts.groups.values()]
        if len(set(values)) < len(values):
            raise ConfigError(f"{path}: two names have the same salt; every tenant and group needs its own")
        return salts


def _salts(data: Mapping[str, Any], table: str, needed: Sequence[str], path: Path) -> dict[str, bytes]:
    entries = data.get(table, {})
    out = {}
    for name in needed:
        text = entries.get(name) if isinstance(entries, dict) else None
        if not isinstance(text, str):
            raise ConfigError(f'{path}: [{table}] has no salt for {name}; add {name} = "64 hex digits"')
        try:
            salt = bytes.fromhex(text)
        except ValueError:
            raise ConfigError(f"{path}: [{table}] {name}: not hexadecimal") from None
        if not SALT_BYTES_MIN <= len(salt) <= SALT_BYTES_MAX:
            raise ConfigError(f"{path}: [{table}] {name}: need 16 to 64 bytes, got {len(salt)}")
        out[name] = salt
    return out
