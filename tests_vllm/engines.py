"""Engines for tests: what bench uses, with small settings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.vllm_engine import Engine
from bench.vllm_processes import EngineFailed, EngineProcess
from bench.vllm_server import ApiServer
from bench.vllm_settings import Answer, Settings, connector_config

__all__ = [
    "Answer",
    "ApiServer",
    "Engine",
    "EngineFailed",
    "EngineProcess",
    "Settings",
    "connector_config",
    "settings_of",
]

StartEngine = Callable[..., Engine]
StartProcess = Callable[..., EngineProcess]
StartServer = Callable[..., ApiServer]


def settings_of(model: Path, socket: Path | None = None, **more: Any) -> Settings:
    """Settings of an engine with our connector, or without when there is no socket."""
    if socket is not None:
        more.setdefault("connector", connector_config(socket))
    return Settings(str(model), **more)
