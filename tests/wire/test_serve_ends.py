"""How `serve` ends when something goes wrong on the way."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from kvstore.config import Config
from kvstore.daemon import serve
from kvstore.housekeeping import Housekeeping


@pytest.fixture(autouse=True)
def process_is_put_back() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGHUP)}
    yield
    gc.unfreeze()
    for number, handler in before.items():
        signal.signal(number, handler)


def on(path: Path, config: Config) -> Config:
    daemon = msgspec.structs.replace(config.daemon, socket=str(path))
    return msgspec.structs.replace(config, daemon=daemon)


def is_there(path: Path) -> bool:
    return path.exists()


async def test_a_part_that_cannot_be_closed_keeps_no_other_open(
    config: Config, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closing = Housekeeping.close

    async def close(house: Housekeeping) -> None:
        await closing(house)
        raise RuntimeError("no")

    monkeypatch.setattr(Housekeeping, "close", close)
    with pytest.raises(RuntimeError, match="no"):
        await serve(on(path, config), ready=lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert not is_there(path), "the daemon itself was closed all the same"
