"""`kvstore config`: the configuration that counts, and where each value comes from."""

from __future__ import annotations

import inspect
import json
import os
import re
import tomllib
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter

from kvstore.cli.answers import say_json, say_text
from kvstore.cli.options import AsJson, ConfigFile, SetFlags, load
from kvstore.config import Config, SharedConfig, TenantConfig

__all__ = ["config_command"]

# Tables of which there are several, and the key that tells them apart.
_NAMED_BY = {"tenants": "name", "shared": "group"}


def config_command(
    *,
    config: ConfigFile = None,
    overrides: SetFlags = None,
    default: Annotated[bool, Parameter(negative=())] = False,
    as_json: AsJson = False,
) -> None:
    """Print the configuration a daemon started with these options would use, and the origin of each value.

    Salts are no part of it: only the path of the file that holds them.

    Args:
        default: print the defaults as a TOML file to start from, every key explained.

    Examples:
        kvstore config
        kvstore config --config /etc/kvstore.toml --json | jq '."host.capacity_bytes"'
        kvstore config --default > kvstore.toml
    """
    if default:
        say_text(_default_file())
        return
    settings = load(config, overrides)
    origins = _origins(config, overrides or [])
    values = {f"{table}.{key}": value for table, key, value in _entries(settings)}
    if as_json:
        say_json(
            {key: {"value": value, "from": origins.get(key, "default")} for key, value in values.items()}
        )
        return
    lines = [(f"{key} = {_toml(key, value)}", origins.get(key, "default")) for key, value in values.items()]
    width = max(len(line) for line, _ in lines)
    say_text("\n".join(f"{line:<{width}}  # {origin}" for line, origin in lines))


def _entries(settings: Config) -> list[tuple[str, str, Any]]:
    """(table, key, plain value) in the order of the configuration; tenants by their names."""
    entries: list[tuple[str, str, Any]] = []
    for field in msgspec.structs.fields(settings):
        table = getattr(settings, field.name)
        if isinstance(table, msgspec.Struct):
            values = msgspec.to_builtins(table)
            entries += [(field.name, key, value) for key, value in values.items()]
        else:
            for entry in table:
                values = msgspec.to_builtins(entry)
                entries.append((field.name, values.pop(_NAMED_BY[field.name]), values))
    return entries


def _origins(file: Path | None, overrides: list[str]) -> dict[str, str]:
    """ "table.key" → file, variable or flag that decided it. The later of them wins, as in `Config.load`."""
    found: dict[str, str] = {}
    if file is not None:
        for table, keys in tomllib.loads(file.read_text()).items():
            called = _NAMED_BY.get(table, "")
            names = keys if isinstance(keys, dict) else [entry.get(called, "default") for entry in keys]
            found |= {f"{table}.{name}": str(file) for name in names}
    for variable in os.environ:
        if variable.startswith("KVSTORE_") and "__" in variable:
            found[variable.removeprefix("KVSTORE_").lower().replace("__", ".")] = variable
    return found | {flag.partition("=")[0]: "--set" for flag in overrides}


def _toml(key: str, value: Any) -> str:
    """A value as it would be written in the file."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{name} = {_toml(name, inner)}" for name, inner in value.items()) + " }"
    if key.endswith(("_bytes", "_bytes_per_day")) and isinstance(value, int):
        for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
            if value and value % size == 0:
                return f'"{value // size}{unit}"'
    if key.endswith("socket_mode"):
        return f"0o{value:03o}"
    return json.dumps(value, ensure_ascii=False)


def _default_file() -> str:
    """The defaults as TOML, every value commented out, with the words of the classes' docstrings."""
    lines = ["# kvstore.toml: every key with its default. Flags and environment win over this file."]
    for table in dict.fromkeys(table for table, _, _ in _entries(Config())):
        values = [(key, value) for name, key, value in _entries(Config()) if name == table]
        if table in _NAMED_BY:
            continue
        lines += ["", f"[{table}]", *_explained(type(getattr(Config(), table)), table, dict(values))]
    tenant, shared = TenantConfig(name="default"), SharedConfig()
    lines += ["", "# [[tenants]]", *_explained(TenantConfig, "tenants", msgspec.to_builtins(tenant))]
    # Indented: by default there is none.
    said = _explained(SharedConfig, "shared", msgspec.to_builtins(shared))
    lines += ["", "#   [[shared]]", *(line.replace("# ", "#   ", 1) for line in said)]
    return "\n".join(lines)


def _explained(kind: type, table: str, values: dict[str, Any]) -> list[str]:
    said = {name: text for base in reversed(kind.__mro__) for name, text in _explanations(base).items()}
    lines = []
    for key, value in values.items():
        lines += [f"# {said.get(key, '')}".rstrip(), f"# {key} = {_toml(f'{table}.{key}', value)}"]
    return lines


def _explanations(table: type) -> dict[str, str]:
    """key → what its class's Attributes section says of it, on one line."""
    _, _, text = (inspect.getdoc(table) or "").partition("Attributes:\n")
    found = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", text, re.MULTILINE)
    return {name: " ".join(said.split()) for name, said in found}
