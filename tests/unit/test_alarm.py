"""Saves without a single hit are said aloud: nothing else shows that two engines hash differently."""

from __future__ import annotations

from kvstore.group import ALARM_LOOKUPS, ALARM_SAVED_BLOCKS
from kvstore.status import status
from kvstore.testing import StoreDriver


def alarm(driver: StoreDriver) -> str:
    groups = status(driver.store)["groups"]
    assert isinstance(groups, dict)
    return str(groups["default"]["alarm"])


def test_saves_that_nobody_ever_finds_raise_the_alarm_and_a_hit_ends_it(driver: StoreDriver) -> None:
    writer, reader = driver.attach(model="one"), driver.attach(model="other")
    saved = 0
    while driver.group().counters.saved_blocks < ALARM_SAVED_BLOCKS:
        chain = writer.chain(range(saved, saved + 160))
        writer.save(chain, 0, len(chain))
        saved += 160
    for start in range(ALARM_LOOKUPS - 1):
        assert reader.lookup(reader.chain(range(start, start + 160))).blocks == 0
    assert alarm(driver) == ""
    assert reader.lookup(reader.chain(range(160))).blocks == 0
    assert "do the engines agree" in alarm(driver)
    for _ in range(ALARM_LOOKUPS):
        found = writer.lookup(writer.chain(range(saved - 160, saved)))
        assert found.blocks > 0
    assert alarm(driver) == ""


def test_a_store_that_is_only_young_raises_none(driver: StoreDriver) -> None:
    session = driver.attach()
    chain = session.chain(range(160))
    session.save(chain, 0, len(chain))
    for start in range(1000, 1000 + 2 * ALARM_LOOKUPS):
        assert session.lookup(session.chain(range(start, start + 32))).blocks == 0
    assert alarm(driver) == ""
