"""The daemon of the main suite (tests/e2e), with room for a model's blocks."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

from real_daemon import RealDaemon, eventually

__all__ = ["Daemon", "eventually"]


_DEFAULTS = {"host.capacity_bytes": '"256MiB"', "plan.mode": '"load"'}


class Daemon(RealDaemon):
    """`kvstore serve` on a socket in `folder`: an arena of 256 MiB unless `settings` say otherwise.

    It loads all that it knows: for models as small as those of these tests that is hardly ever worth it, and
    what is tested is mostly what a load does. test_plans.py is about the decision.

    Args:
        program: see RealDaemon.
    """

    def __init__(
        self,
        folder: Path,
        settings: Mapping[str, str] | None = None,
        program: Sequence[str] = ("-m", "kvstore"),
    ) -> None:
        super().__init__(folder, {**_DEFAULTS, **(settings or {})}, program=program)

    def kill(self) -> None:
        """kill -9."""
        self.end(signal.SIGKILL)

    def ready(self, name: str = "default") -> int:
        """Blocks that can be loaded from HOST."""
        return int(self.group(name)["host"]["ready"])
