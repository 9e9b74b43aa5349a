"""The salts as they lie in their file: read to compare and to search for them, never made, never shown."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvstore.config import Config
from kvstore.config.sources import read_file
from kvstore.config.tables import SECRETS_NAME
from kvstore.errors import ConfigError

__all__ = ["SaltFile", "read_salts", "salt_file"]


@dataclass(frozen=True, slots=True)
class SaltFile:
    """What was read.

    Attributes:
        salts: tenant name, or "group:" and a group's → salt.
        unread: why nothing was, "" = it was.
    """

    salts: dict[str, bytes] = field(default_factory=dict)
    unread: str = ""

    def __repr__(self) -> str:
        return f"SaltFile({len(self.salts)} salts)"


def salt_file(config: Config) -> Path | None:
    """Where the daemon's salts are; None = they are random, and in no file."""
    if config.daemon.secrets_file:
        return Path(config.daemon.secrets_file)
    return Path(config.nvme.directory) / SECRETS_NAME if config.nvme.directory else None


def read_salts(config: Config) -> SaltFile:
    """Read them; whatever is in the way is a value, because an audit goes on without them."""
    path = salt_file(config)
    if path is None:
        return SaltFile(unread="the salts are in no file (daemon.secrets_file, nvme.directory)")
    try:
        tables: dict[str, Any] = read_file(path, path.read_text())
        salts = _salts(tables.get("tenants", {}), "")
        shared = _salts(tables.get("groups", {}), "group:")
    except OSError as error:
        return SaltFile(unread=f"{path}: {(error.strerror or str(error)).lower()}; run as the daemon's user")
    except (ConfigError, TypeError, ValueError):
        # Not what the parser says: its message may quote what it read.
        return SaltFile(unread=f"{path}: not a file of salts")
    return SaltFile(salts | shared)


def _salts(table: dict[str, str], prefix: str) -> dict[str, bytes]:
    """Raises TypeError or ValueError for what is no such table."""
    return {f"{prefix}{name}": bytes.fromhex(text) for name, text in dict(table).items()}
