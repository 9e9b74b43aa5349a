"""Where values come from: files, environment and flags, and errors that name the key and its origin."""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from kvstore.errors import ConfigError

__all__ = ["anchor_paths", "assign", "explain", "parse_bytes", "parse_units", "read_file"]

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(B|KB|MB|GB|TB|KiB|MiB|GiB|TiB)?", re.IGNORECASE)
_SIZES = ("_bytes", "_bytes_max", "_bytes_per_day", "_bytes_per_s")
# key → what it may hold beside sizes.
_NO_SIZE: dict[str, tuple[object, ...]] = {"write_budget_bytes_per_day": (-1, "-1")}
_PATHS = (
    ("daemon", "secrets_file"),
    ("daemon", "state_dir"),
    ("grpc", "tls_certificate"),
    ("grpc", "tls_key"),
    ("grpc", "tls_clients"),
    ("grpc", "tokens_file"),
    ("nvme", "directory"),
)
_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12} | {
    f"{letter}ib": 1 << (10 * (power + 1)) for power, letter in enumerate("kmgt")
}


def parse_bytes(text: str | int, key: str) -> int:
    """Bytes from 4GiB, 512MiB, 1.5GB or a number.

    Raises:
        ConfigError: not a size.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        return text
    match = _SIZE.fullmatch(str(text).strip())
    size = float(match[1]) * _UNITS[(match[2] or "").lower()] if match is not None else math.inf
    if math.isinf(size):  # hundreds of digits are too
        raise ConfigError(f"{key}: {text!r:.80} is not a size; write e.g. 4GiB, 512MiB or a number of bytes")
    return int(size)


def read_file(file: Path, text: str | None = None) -> dict[str, Any]:
    """A TOML file's tables; of `text`, if somebody has read it already.

    Raises:
        ConfigError: absent, unreadable or not TOML.
    """
    try:
        return tomllib.loads(file.read_text() if text is None else text)
    except FileNotFoundError:
        raise ConfigError(f"{file}: no such configuration file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read ({error})") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, tables without end
        raise ConfigError(f"{file}: not valid TOML: {error}") from None


def anchor_paths(merged: dict[str, Any], file: Path) -> None:
    """Relative paths in the file are relative to the file, wherever the daemon is started."""
    for table, key in _PATHS:
        inner = merged.get(table)
        if isinstance(inner, dict) and isinstance(inner.get(key), str) and inner[key]:
            inner[key] = str(file.parent / inner[key])


def assign(merged: dict[str, Any], path: str, value: str, origin: str) -> None:
    """Set `table.key` from text.

    Raises:
        ConfigError: not of that form, or not settable from outside the file; starts with `origin`.
    """
    table, dot, key = path.partition(".")
    if not dot or "." in key:
        raise ConfigError(f"{origin}: need a key of the form table.key, got {path!r}")
    if table in ("tenants", "shared"):
        raise ConfigError(f"{origin}: {table} are set in the file only")
    inner = merged.setdefault(table, {})
    if not isinstance(inner, dict):
        raise ConfigError(f"{table}: must be a table")
    inner[key] = value


def parse_units(merged: dict[str, Any]) -> None:
    """Sizes and modes that are written as text become numbers, in place.

    Raises:
        ConfigError: one is neither.
    """
    for table, found in merged.items():
        for inner in found if isinstance(found, list) else [found]:
            for key, value in inner.items() if isinstance(inner, dict) else ():
                if key.endswith(_SIZES) and value not in _NO_SIZE.get(key, ()):
                    inner[key] = parse_bytes(value, f"{table}.{key}")
                elif key == "socket_mode" and isinstance(value, str):
                    inner[key] = _octal(value, f"{table}.{key}")


def _octal(text: str, key: str) -> int:
    try:
        return int(text, 8)
    except ValueError:
        raise ConfigError(f"{key}: {text!r} is not an octal mode such as 0600") from None


def explain(message: str, source: Mapping[str, str], tables: Mapping[str, type[msgspec.Struct]]) -> str:
    """msgspec says "… - at `$.host.capacity_bytes`": put the key first, name its origin, guess the typo."""
    text, _, at = message.partition(" - at `$")
    path = at.rstrip("`").lstrip(".")
    unknown = re.search(r"unknown field `([^`]+)`", text)
    if unknown:
        path = f"{path}.{unknown[1]}".lstrip(".")
        table = path.rpartition(".")[0].split("[")[0]
        near = difflib.get_close_matches(unknown[1], _known(tables, table), 1)
        text = "unknown key" + (
            f"; did you mean {near[0]}?" if near else f"; known: {', '.join(_known(tables, table))}"
        )
    origin = source.get(path) or source.get("", "defaults")
    return f"{path or 'configuration'}: {text} (from {origin})"


def _known(tables: Mapping[str, type[msgspec.Struct]], table: str) -> list[str]:
    return [field.name for field in msgspec.structs.fields(tables.get(table, tables[""]))]
