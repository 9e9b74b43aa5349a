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
    "patient",
    "settings_of",
]

StartEngine = Callable[..., Engine]
StartProcess = Callable[..., EngineProcess]
StartServer = Callable[..., ApiServer]


def patient(socket: Path, **more: float) -> dict[str, Any]:
    """A connector that waits for a loaded machine; what it waits for is there at once."""
    config = connector_config(socket)
    waits = {"lookup_s": 30.0, "fetch_s": 30.0, "call_s": 60.0, "attach_s": 60.0}
    config["kv_connector_extra_config"] |= {**waits, **more}
    return config


def settings_of(model: Path, socket: Path | None = None, **more: Any) -> Settings:
    """Settings of an engine with a patient connector of ours, or without when there is no socket."""
    if socket is not None:
        more.setdefault("connector", patient(socket))
    return Settings(str(model), **more)
