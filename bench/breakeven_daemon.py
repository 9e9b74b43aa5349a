"""What the stages of bench.breakeven have in common, and a daemon whose disk can be slowed down."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from kvstore.connectors.embedded.processes import DaemonProcess

__all__ = ["Answer", "LimitedDaemon", "Place"]

_RELOAD_S = 10.0


@dataclass(frozen=True, slots=True)
class Answer:
    """One measured request.

    Attributes:
        ttft_s: to its first token.
        tokens: its answer.
        choice: what was done with its match, as the daemon remembers it; "" = nobody was asked.
        loaded_tokens: of the prompt.
        plan: all that the daemon remembers.
    """

    ttft_s: float
    tokens: tuple[int, ...]
    choice: str
    loaded_tokens: int
    plan: dict[str, Any]


class Place(Protocol):
    """An engine, its daemon, and prompts that only the daemon's disk has.

    Attributes:
        arms: the ways that can be asked for.
        facts: of the model and the engine, for the result.
        daemon: its disk can be limited.
    """

    arms: Sequence[str]
    facts: Mapping[str, object]
    daemon: LimitedDaemon

    def ask(self, arm: str, length: int, new_tokens: int = 1) -> Answer:
        """One request for the prompt of that length, in one of the ways."""

    def busy(self, sequences: int) -> AbstractContextManager[None]:
        """So many sequences decode in every step meanwhile."""


class LimitedDaemon(DaemonProcess):  # type: ignore[misc]  # connectors are checked apart
    """`kvstore serve` with its settings in a file, which is read again.

    Until the first `set_limit` it writes whatever it is given; from then on nothing more gets onto the disk.

    Args:
        folder: for the socket, the log and the file.
        settings: table.key → value.
    """

    def __init__(self, folder: Path, settings: Mapping[str, object]) -> None:
        self._settings = settings
        self._file = folder / "kvstore.toml"
        self._reloads = 0
        self._write(0, budget=0)
        super().__init__(folder, {}, self._file)

    def set_limit(self, bytes_per_s: int, latency_s: float = 0.0) -> None:
        """How fast the disk may be from now on; 0 = as it is. Returns when the daemon has read that."""
        self.slow_down(bytes_per_s, latency_s)
        self.wait_logged("configuration reloaded", self._reloads, _RELOAD_S)

    def slow_down(self, bytes_per_s: int, latency_s: float = 0.0) -> None:
        """As `set_limit`, without waiting: for the middle of a load."""
        self._reloads += 1
        self._write(bytes_per_s, budget=1, latency_s=latency_s)
        self.process.send_signal(signal.SIGHUP)

    def _write(self, limit: int, *, budget: int, latency_s: float = 0.0) -> None:
        values = {
            **self._settings,
            "nvme.write_budget_bytes_per_day": budget,
            "nvme.limit_bytes_per_s": limit,
            "nvme.added_latency_s": latency_s,
        }
        tables: dict[str, list[str]] = {}
        for key, value in values.items():
            table, _, name = key.partition(".")
            bare = isinstance(value, int | float) or str(value) in ("true", "false")
            tables.setdefault(table, []).append(f"{name} = {value if bare else repr(str(value))}")
        text = "".join(f"[{table}]\n" + "\n".join(lines) + "\n" for table, lines in tables.items())
        fresh = self._file.with_suffix(".new")
        fresh.write_text(text)
        fresh.rename(self._file)
