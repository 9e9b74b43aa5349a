"""Secrets of tenants and trust groups."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstore.config.sources import read_file
from kvstore.errors import ConfigError
from kvstore.types import Reuse

if TYPE_CHECKING:
    from kvstore.config import Config

__all__ = ["Salts"]

SALT_BYTES_MIN, SALT_BYTES_MAX = 16, 64


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
        data = read_file(path)
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
