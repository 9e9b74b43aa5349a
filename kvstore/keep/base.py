"""A keeper holds file descriptors by name while there is no daemon to hold them.

Implementations: `holding.py` (a process of its own), `systemd.py` (the service manager), `nothing.py`. One
contract test runs over all of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Protocol

__all__ = ["Keeper"]


class Keeper(Protocol):
    """What is put stays held after this process ended in any way, until it is dropped.

    Names are printable ASCII without a colon, at most 128 characters. No method waits for long; none raises
    because a keeper is slow or gone: then what was put may be lost, and the next daemon starts cold.
    """

    def take(self) -> dict[str, int]:
        """Everything that an earlier daemon has left, and leave it held; the descriptors are the caller's.

        Raises:
            ConfigError: a daemon that still lives has it.
        """
        ...

    def put(self, fds: Mapping[str, int]) -> None:
        """Hold these too. A name that is held already now means the new one. The caller keeps its own."""
        ...

    def drop(self, names: Iterable[str]) -> None:
        """Hold these no longer."""
        ...

    def serve(self, loop: asyncio.AbstractEventLoop) -> None:
        """From now on work on this loop: nothing blocks any more, and a keeper that dies is replaced."""
        ...

    def leave(self) -> None:
        """This daemon ends, and what was put stays."""
        ...

    def end(self) -> None:
        """This daemon ends, and nothing stays. Returns once nothing is held any more."""
        ...
