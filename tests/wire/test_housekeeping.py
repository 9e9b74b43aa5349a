"""What a daemon does beside answering, on its own loop: learnt state is saved, signals are heard."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import pytest
from structlog.testing import capture_logs

from kvstore import housekeeping, learnt
from kvstore.config import Config, Salts
from kvstore.housekeeping import Housekeeping
from kvstore.learnt import FILE_NAME, Learning, StateDir
from kvstore.pricing import Source, Transfer
from kvstore.reloading import Reloader
from kvstore.rpc.server import SessionServer
from kvstore.store import Store
from kvstore.testing import SimClock
from kvstore.types import Tier

DISK = Source(Tier.NVME)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(20.0):
        while True:
            if holds():
                return
            await asyncio.sleep(0.001)


class House:
    """A store with a session server and its housekeeping, in the test's loop."""

    def __init__(self, config: Config) -> None:
        salts = Salts.load(config)
        self.clock = SimClock()
        self.store = Store(config, salts, self.clock)
        self.store.open()
        self.sessions = SessionServer(self.store, asyncio.get_running_loop())
        self.sessions.open()
        self.house = Housekeeping(self.store, salts)

    async def __aenter__(self) -> House:
        await self.house.restore()
        await self.house.open(self.sessions)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.house.close()
        await self.house.close()
        self.sessions.close()
        self.store.close()

    def learn(self) -> None:
        self.store.groups["default"].meters.observe_prefill(100, 0.5)


@pytest.fixture
def kept(config: Config, tmp_path: Path) -> Config:
    return msgspec.structs.replace(
        config, daemon=msgspec.structs.replace(config.daemon, state_dir=str(tmp_path / "state"))
    )


async def test_what_is_learnt_is_saved_now_and_then(
    kept: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(housekeeping, "SAVE_PERIOD_S", 0.001)
    file = tmp_path / "state" / FILE_NAME
    async with House(kept) as house:
        house.learn()
        await until(lambda: file.exists() and b"100" in file.read_bytes())
        written = file.stat().st_ino
        await until(lambda: house.house._saved == learnt.news(house.store.groups))
        turns = 0

        def counted(groups: Mapping[str, Learning]) -> object:
            nonlocal turns
            turns += 1
            house.clock.advance(1.0)  # what is known grows older, which is no news
            return news(groups)

        news = learnt.news
        monkeypatch.setattr(learnt, "news", counted)
        await until(lambda: turns > 10)
        assert file.stat().st_ino == written, "nothing new, nothing written"
        house.store.groups["default"].pricing.observe_transfer(DISK, Transfer(4096, 0, 0.5))
        await until(lambda: file.stat().st_ino != written)
    async with House(kept) as house:
        assert house.store.groups["default"].pricing.rates.speed(DISK, 4096).samples == 1


async def test_a_state_directory_that_goes_away_is_a_warning(
    kept: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(housekeeping, "SAVE_PERIOD_S", 0.001)
    with capture_logs() as lines:
        async with House(kept) as house:
            shutil.rmtree(tmp_path / "state")
            house.learn()
            await until(lambda: any(line["event"] == "learnt state not saved" for line in lines))
            house.store.check()
    told = next(line for line in lines if line["event"] == "learnt state not saved")
    assert told["path"].endswith(FILE_NAME) and "daemon.state_dir" in told["fix"]


async def test_hang_up_reloads_and_ends_with_the_daemon(config: Config) -> None:
    with capture_logs() as lines:
        async with House(config):
            os.kill(os.getpid(), signal.SIGHUP)
            await until(lambda: any("not loaded from a file" in line.get("reason", "") for line in lines))
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL


async def test_a_reload_that_fails_in_any_way_is_not_the_last(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = 0

    async def reload(_: Reloader) -> None:
        nonlocal tries
        tries += 1
        raise OverflowError("a bug")

    monkeypatch.setattr(Reloader, "reload", reload)
    with capture_logs() as lines:
        async with House(config):
            for number in (1, 2):
                os.kill(os.getpid(), signal.SIGHUP)
                await until(lambda number=number: tries == number)
    assert [line["log_level"] for line in lines if "not reloaded" in line["event"]] == ["error"] * 2


async def test_the_lock_ends_with_the_daemon(kept: Config, tmp_path: Path) -> None:
    async with House(kept):
        pass
    StateDir(tmp_path / "state").close()
