"""For the client's tests: the real daemon, on a loop of a thread of the test."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import msgspec
from client_kit import OnLoop
from client_memory import WAIT_S, Memory

from kvstore.config import Config, DaemonConfig, NvmeConfig, TenantConfig
from kvstore.daemon import Daemon
from kvstore.testing import small_config


class Running:
    """A daemon on a loop of its own thread, with a disk if `nvme` says so."""

    def __init__(self, path: Path, *tenants: TenantConfig, nvme: NvmeConfig | None = None) -> None:
        small = msgspec.structs.asdict(
            small_config(tenants=tenants or (TenantConfig(name="default"),), nvme=nvme)
        )
        small["daemon"] = DaemonConfig(socket=str(path), heartbeat_s=30.0, stale_after_s=120.0)
        self.daemon = Daemon(Config(**small))
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="daemon-loop", daemon=True)
        self._thread.start()
        self.call(self._open)

    def _open(self) -> None:
        self.daemon.open()
        self.daemon.listen(self.loop)

    def call(self, function: Any) -> Any:
        async def here() -> Any:
            return function()

        return asyncio.run_coroutine_threadsafe(here(), self.loop).result(WAIT_S)

    def group(self) -> Any:
        return self.daemon.store.groups["default"]

    def stop(self) -> None:
        self.call(self.daemon.close)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(WAIT_S)
        self.loop.close()


def fill(memory: Memory, blocks: int, name: bytes = b"block") -> list[bytes]:
    for block in range(1, 1 + blocks):
        memory.fill(block, name + b"%d" % block)
    return [memory.block(block) for block in range(1, 1 + blocks)]


def cut(client: Any) -> None:
    """End the connection from our side, as an expired deadline does."""
    link = client._core.attachment.link
    if isinstance(client, OnLoop):
        client._loop.call_soon_threadsafe(link.fail, "cut by the test")
    else:
        link.fail("cut by the test")
