"""kvstore: keeps LLM KV-cache blocks in tiers, and gives them back instead of having them computed again."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

__all__ = ["__version__"]

try:
    __version__ = version("kvstored")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0.0.0"
