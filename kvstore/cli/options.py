"""Options that several commands share, and the configuration they lead to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from kvstore.config import Config
from kvstore.errors import BadRequest

__all__ = ["AsJson", "ConfigFile", "Interval", "SetFlags", "check_seconds", "load", "wants_json"]

SECONDS_MAX = 3600.0

SetFlags = Annotated[
    list[str] | None, Parameter(name="--set", negative=(), help="table.key=value, over environment and file")
]
ConfigFile = Annotated[Path | None, Parameter(name=["--config", "-c"], help="TOML file")]
AsJson = Annotated[bool, Parameter(name="--json", negative=(), help="one JSON object instead of text")]

Interval = Annotated[
    float, Parameter(name=["--interval", "-i"], help="seconds that the rates are taken over")
]


def load(config: Path | None, overrides: list[str] | None) -> Config:
    """The configuration that a command's options name.

    Raises:
        ConfigError: names the key, where it came from and the fix.
    """
    return Config.load(config, flags=overrides or [])


def wants_json(words: Sequence[str]) -> bool:
    """Whether a command line asks for JSON, even one that cannot be parsed."""
    return "--json" in words


def check_seconds(option: str, seconds: float, least_s: float) -> None:
    """Raises BadRequest, which names the option, for what is no such time."""
    if not least_s <= seconds <= SECONDS_MAX:
        raise BadRequest(f"{option}: need {least_s:g} to {SECONDS_MAX:g} seconds, got {seconds:g}")
