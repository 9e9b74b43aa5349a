"""Where benchmarks of the disk work: a folder on a real file system, and daemons with an NVME tier in it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.paged import BenchDaemon, PagedMemory, namespace_of
from kvstore.cli.tool import NoAnswer, Tool
from kvstore.client import Client, Limits
from kvstore.rpc.messages import Flushed

__all__ = ["PLACE", "DiskDaemon", "client_for", "disk_folder", "drop_caches", "file_system_of"]

PLACE = "KVSTORE_BENCH_DIR"
"""Environment variable: a folder on the disk to measure; without it the system's temporary directory."""
_IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")
_SPARE_BYTES = 2 << 30
_START_S, _ANSWER_S, _FLUSH_S, _SETTLE_S, _END_S = 120.0, 30.0, 600.0, 600.0, 60.0
_LOOK_S = 0.05
# In a status, segments that the disk is still busy with by itself, and records under way. (One that is
# OPENING may wait there to be the next.)
_BUSY = ("creating", "sealing", "evacuating", "writing")


# ---- the place --------------------------------------------------------------------------------------------


def file_system_of(path: Path) -> str:
    """Type of the file system that holds `path`, e.g. ext4; "?" if the kernel does not say."""
    whole = path.resolve()
    best, kind = -1, "?"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        place, _, more = line.partition(" - ")
        point = Path(place.split()[4].replace("\\040", " "))
        if whole.is_relative_to(point) and len(point.parts) >= best:  # a later mount hides an earlier one
            best, kind = len(point.parts), more.split()[0]
    return kind


@contextmanager
def disk_folder(need_bytes: int) -> Iterator[Path]:
    """A fresh folder on the disk; gone afterwards, whatever ended the block, also Ctrl-C and SIGTERM.

    Raises:
        SystemExit: the file system lives in memory, or has no room.
    """
    parent = Path(os.environ.get(PLACE) or tempfile.gettempdir())
    if not parent.is_dir():
        raise SystemExit(f"{PLACE}: {parent} is no directory")
    kind = file_system_of(parent)
    if kind in _IN_MEMORY:
        raise SystemExit(f"{parent} is {kind}, which is no disk: set {PLACE} to a folder on one")
    free, need = shutil.disk_usage(parent).free, need_bytes + _SPARE_BYTES
    if free < need:
        raise SystemExit(f"{parent}: {free >> 20} MiB are free, need {need >> 20}; set {PLACE}")
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with tempfile.TemporaryDirectory(prefix="kvstore-bench-disk-", dir=parent) as name:
            yield Path(name)
    finally:
        signal.signal(signal.SIGTERM, before)


def drop_caches(folder: Path) -> str:
    """Forget what the kernel has cached of the files in `folder`; how far that was possible."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3\n")
    except OSError:
        for path in folder.rglob("*"):
            if path.is_file():
                file = os.open(path, os.O_RDONLY)
                try:
                    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
                finally:
                    os.close(file)
        return "page cache of the store's files only: drop_caches is not allowed here"
    return "all dropped"


# ---- daemons ----------------------------------------------------------------------------------------------


class DiskDaemon(BenchDaemon):
    """`kvstore serve` with an NVME tier that lets everything in.

    Args:
        home: for the socket and the log; a short path.
        disk: `nvme.directory`.
        settings: table.key → value.
    """

    def __init__(self, home: Path, disk: Path, settings: Mapping[str, object]) -> None:
        self._log = home / "daemon.log"
        self._log_start = self._log.stat().st_size if self._log.exists() else 0
        self._tool: Tool | None = None
        ours = {
            "daemon.log_level": "info",
            "grpc.listen": "",
            "nvme.directory": disk,
            "nvme.write_budget_bytes_per_day": 0,
            "nvme.stall_s": 60,
            "plan.mode": "load",  # what is on the disk is asked for, whatever it takes
        }
        super().__init__(home, {**ours, **settings})

    def __enter__(self) -> DiskDaemon:
        return self

    def __exit__(self, *raised: Any) -> None:
        self._hang_up()
        super().__exit__(*raised)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self._process.kill()
        self._process.wait(_END_S)
        self._hang_up()

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    def _hang_up(self) -> None:
        tool, self._tool = self._tool, None
        if tool is not None:
            tool.close()

    # ---- questions -----------------------------------------------------------------------------------------

    def tool(self) -> Tool:
        """A session of the caller's own; waits until the daemon listens.

        Raises:
            NoAnswer: it has ended, or does not answer.
        """
        deadline = time.monotonic() + _START_S
        while True:
            try:
                return Tool(self.socket, _ANSWER_S)
            except NoAnswer as silence:
                self.check_alive()
                if silence.cause not in ("absent", "stale") or time.monotonic() > deadline:
                    raise
            time.sleep(_LOOK_S)

    def wait_attached(self, client: Client) -> None:
        """Wait until a client is attached.

        Raises:
            SystemExit: it is not wanted, or the daemon has ended.
        """
        deadline = time.monotonic() + _START_S
        while not client.wait_attached(1.0):
            self.check_alive()
            if client.refusal is not None or time.monotonic() > deadline:
                raise SystemExit(f"not attached to {self.socket}: {client.refusal}")

    def check_alive(self) -> None:
        """Raises SystemExit with its last words if it has ended by itself."""
        if not self.alive:
            words = self._log.read_text(errors="replace")[-1500:]
            raise SystemExit(f"the daemon has ended with {self._process.returncode}: {words}")

    def _ours(self) -> Tool:
        if self._tool is None:
            self._tool = self.tool()
        return self._tool

    def nvme(self) -> dict[str, Any]:
        """The disk's part of `kvstore status`."""
        found: dict[str, Any] = self._ours().ask("status")["groups"]["default"]["nvme"]
        return found

    def flush(self) -> Flushed:
        """`kvstore flush`.

        Raises:
            SystemExit: the disk refuses.
        """
        flushed = self._ours().flush(_FLUSH_S)
        if flushed.error:
            raise SystemExit(f"flush: {flushed.error}")
        return flushed

    def settle(self) -> dict[str, Any]:
        """Wait until the disk has nothing to do; its status then."""
        deadline = time.monotonic() + _SETTLE_S
        while True:
            found = self.nvme()
            busy = {name: found[name] for name in _BUSY if found[name]}
            if not busy and not found["queued_bytes"]:
                return found
            if time.monotonic() > deadline:
                raise SystemExit(f"the disk is still busy after {_SETTLE_S:.0f} s: {busy}")
            time.sleep(_LOOK_S)

    def said(self, event: str) -> dict[str, Any]:
        """The first line of its log with this event.

        Raises:
            SystemExit: there is none.
        """
        with self._log.open(encoding="utf-8", errors="replace") as log:
            log.seek(self._log_start)
            lines = log.read().splitlines()
        for line in lines:
            if line.startswith("{") and (found := json.loads(line)).get("event") == event:
                return dict(found)
        raise SystemExit(f"the daemon's log has no {event!r}: {lines[-5:]}")


def client_for(daemon: DiskDaemon, memory: PagedMemory) -> Client:
    """A client that is attached; waits until the daemon listens.

    Raises:
        SystemExit: the daemon does not want it, or has ended.
    """
    limits = Limits(call_s=30.0, attach_s=120.0, copy_s=120.0, fetch_s=120.0, retry_s=0.005, retry_max_s=0.02)
    client = Client(daemon.socket, namespace_of(memory.layout), memory, limits=limits)
    try:
        daemon.wait_attached(client)
    except SystemExit:
        client.close()
        raise
    return client
