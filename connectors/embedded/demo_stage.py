"""What the demo runs on: its options, and a daemon with engines, each a process of its own."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from .demo_disk import disk_folder, disk_settings
from .processes import DaemonProcess, EngineProcess
from .smollm2 import find_smollm2

__all__ = ["Options", "Stage", "stage"]

NEW_TOKENS = 64
GOLDEN_INPUTS = (400, 700, 1000, 1400, 1700)
GOLDEN_OUTPUTS = (100, 100, 150, 100, 1)
# SmolLM2-135M in float32: 45 KiB a token, so 512 MiB hold about 11,900 tokens, five times what is needed.
ARENA = "512MiB"
DEVICE_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class Options:
    """Flags of the command.

    Attributes:
        model: GGUF file or directory; None = SmolLM2-135M-Instruct, downloaded once.
        block_tokens: tokens per block.
        cache: False runs everything without reuse.
        seed: of the random ids of --golden.
        as_json: only the result goes to stdout, what is shown to people goes to stderr.
        inputs, outputs: tokens of each turn of --golden.
    """

    model: Path | None = None
    block_tokens: int = 16
    cache: bool = True
    seed: int = 0
    as_json: bool = False
    inputs: Sequence[int] = GOLDEN_INPUTS
    outputs: Sequence[int] = GOLDEN_OUTPUTS


@dataclass(slots=True)
class Stage:
    """The running processes.

    Attributes:
        disk: settings of the daemon's NVME tier; kept when the daemon is restarted.
    """

    folder: Path
    disk: dict[str, object]
    model: Path
    options: Options
    console: Console
    daemon: DaemonProcess
    engines: list[EngineProcess] = field(default_factory=list)

    def start_engine(self) -> EngineProcess:
        """A fresh engine process, attached to the daemon."""
        config = {
            "model": str(self.model),
            "socket": str(self.daemon.socket),
            "blocks": DEVICE_TOKENS // self.options.block_tokens,
            "block_tokens": self.options.block_tokens,
        }
        with self.console.status("starting the engine (reads and dequantizes the weights)"):
            engine = EngineProcess(self.folder, config)
        self.engines.append(engine)
        if not engine.ready["ready"]:
            raise engine.failed("the daemon did not accept the engine")
        return engine

    def restart_daemon(self, arena_bytes: int) -> None:
        """Everything ends in order, what was saved is on the disk; then a daemon with such an arena."""
        with self.console.status("writing to the disk, restarting the daemon"):
            self.daemon.flush()
            for engine in self.engines:
                engine.end()
            self.engines.clear()
            self.daemon.end()
            self.daemon = DaemonProcess(self.folder, {"host.capacity_bytes": arena_bytes, **self.disk})
            self.daemon.wait_ready()

    def ask(
        self,
        engine: EngineProcess,
        what: str,
        prompt: Sequence[int],
        *,
        reuse: bool = True,
        new_tokens: int = NEW_TOKENS,
    ) -> dict[str, Any]:
        """One request; --no-cache turns reuse off."""
        kind = "own" if reuse and self.options.cache else "none"
        request = {"prompt": list(prompt), "reuse": kind, "max_new_tokens": new_tokens}
        with self.console.status(what):
            return engine.ask("generate", request)


@contextmanager
def stage(options: Options, console: Console) -> Iterator[Stage]:
    model = options.model or _find_model(console)
    with tempfile.TemporaryDirectory(prefix="kvstore-demo-") as name, disk_folder() as disk:
        folder, settings = Path(name), disk_settings(disk)
        daemon = DaemonProcess(folder, {"host.capacity_bytes": ARENA, **settings})
        made = Stage(folder, settings, model, options, console, daemon)
        try:
            with console.status("starting the daemon (prefaults its arena)"):
                daemon.wait_ready()
            yield made
        finally:
            for engine in made.engines:
                engine.end()
            made.daemon.end()


def _find_model(console: Console) -> Path:
    columns = (TextColumn("downloading SmolLM2-135M-Instruct"), BarColumn(), DownloadColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = None

        def report(done: int, total: int | None) -> None:
            nonlocal task
            if task is None:
                task = bar.add_task("", total=total)
            bar.update(task, completed=done, total=total)

        return find_smollm2(progress=report)
