"""What the tests of the NVME tier share: stores one after another on one disk, and chains on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore.config import Config, Salts
from kvstore.fetching import Fetching
from kvstore.keys import KeyChain
from kvstore.testing import SessionDriver, StoreDriver, small_config, small_disk

__all__ = ["MIB", "Reopen", "brought", "disk_config", "reopen", "saved", "tokens"]

MIB = 1 << 20
Reopen = Callable[..., StoreDriver]


def tokens(blocks: int, start: int = 0) -> range:
    return range(start, start + 4 * blocks)


@pytest.fixture
def disk_config(tmp_path: Path) -> Config:
    return small_config(nvme=small_disk(tmp_path / "disk"))


@pytest.fixture
def reopen(disk_config: Config) -> Iterator[Reopen]:
    """Stores one after another on the same disk, with the same salts; each ends the one before."""
    made: list[StoreDriver] = []
    salts = Salts.load(disk_config)

    def again(faults: str = "", config: Config = disk_config) -> StoreDriver:
        if made:
            made.pop().close()
        made.append(StoreDriver(config, salts, faults))
        return made[-1]

    yield again
    for driver in made:
        driver.store.check()
        driver.close()


def saved(driver: StoreDriver, blocks: int = 10, start: int = 0) -> tuple[SessionDriver, KeyChain]:
    """A session, and a chain that it saved and that is on the disk."""
    session = driver.attach()
    chain = session.chain(tokens(blocks, start))
    assert session.save(chain).ready == blocks
    driver.settle()
    return session, chain


def brought(driver: StoreDriver, session: SessionDriver, chain: KeyChain) -> Fetching:
    """Look a chain up and fetch all that is known of it."""
    found = session.lookup(chain)
    assert found.blocks, "nothing is known"
    fetching = session.fetch(found.lease)
    driver.pump(lambda: fetching.over)
    return fetching
