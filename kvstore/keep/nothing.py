"""A keeper that keeps nothing: every start is cold."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping

__all__ = ["KeepNothing"]


class KeepNothing:
    """See `Keeper`."""

    def take(self) -> dict[str, int]:
        return {}

    def put(self, fds: Mapping[str, int]) -> None:
        """Nothing."""

    def drop(self, names: Iterable[str]) -> None:
        """Nothing."""

    def serve(self, loop: asyncio.AbstractEventLoop) -> None:
        """Nothing."""

    def leave(self) -> None:
        """Nothing."""

    def end(self) -> None:
        """Nothing."""
