"""Checks in slices: answers, alarms, and what a busy store can and cannot be told."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from turns import HandLoop

from kvstore.checks import CHECKS_MAX, CheckReport, Checks, in_slices
from kvstore.config import Config, DaemonConfig
from kvstore.errors import LimitExceeded
from kvstore.status import status
from kvstore.testing import SessionDriver, StoreDriver, small_config


def make(self_check_s: float = 0.0) -> StoreDriver:
    small = small_config(capacity_bytes=8 << 20)
    daemon = DaemonConfig(self_check_s=self_check_s)
    return StoreDriver(Config(daemon=daemon, host=small.host, index=small.index, tenants=small.tenants))


@pytest.fixture
def store() -> Iterator[StoreDriver]:
    with make() as driver:
        yield driver


@pytest.fixture
def session(store: StoreDriver) -> SessionDriver:
    session = store.attach()
    session.own_pool(6000, 6000)
    session.save(session.chain(range(80)))
    return session


def asked(checks: Checks) -> list[CheckReport]:
    answers: list[CheckReport] = []
    checks.ask(answers.append)
    return answers


def test_a_check_is_answered_later_and_is_complete_when_nothing_changes(
    store: StoreDriver, session: SessionDriver
) -> None:
    loop = HandLoop()
    checks = Checks(store.store, loop.loop)
    answers = asked(checks)
    assert not answers
    assert loop.turn()
    assert not answers, "one turn is one slice"
    assert loop.run() > 1
    assert answers == [CheckReport("", complete=True)]
    assert answers[0].answer() == {"ok": True}
    assert session.caller.group.checked is not None
    assert session.caller.group.checked.complete


def test_a_store_that_changes_all_the_time_is_checked_but_not_counted(
    store: StoreDriver, session: SessionDriver
) -> None:
    loop = HandLoop()
    answers = asked(Checks(store.store, loop.loop))
    number = 0
    while loop.turn():
        number += 1
        session.save(session.chain(range(number, number + 8)))
    assert [answer.complete for answer in answers] == [False]
    assert answers[0].answer()["ok"] is True
    assert "changed" in str(answers[0].answer()["partial"])


def test_a_question_during_a_run_is_answered_by_the_next_one(
    store: StoreDriver, session: SessionDriver
) -> None:
    loop = HandLoop()
    checks = Checks(store.store, loop.loop)
    first = asked(checks)
    loop.turn()
    session.caller.group.leases._pins += 1  # broken after the first run began
    second, third = asked(checks), asked(checks)
    loop.run()
    assert len(first) == len(second) == len(third) == 1
    assert "held by leases" in second[0].broken
    assert second == third
    session.caller.group.leases._pins -= 1


def test_questions_have_a_limit(store: StoreDriver) -> None:
    loop = HandLoop()
    checks = Checks(store.store, loop.loop)
    answers = [asked(checks) for _ in range(CHECKS_MAX)]
    with pytest.raises(LimitExceeded, match="check"):
        asked(checks)
    loop.run()
    assert all(answer == [CheckReport("", complete=True)] for answer in answers)
    assert not asked(checks)


def test_a_broken_law_is_named_and_raises_an_alarm_until_it_holds_again(
    store: StoreDriver, session: SessionDriver
) -> None:
    loop = HandLoop()
    checks = Checks(store.store, loop.loop)
    group = session.caller.group
    group.fillings._slots += 1
    answers = asked(checks)
    loop.run()
    assert answers[0].answer()["ok"] is False
    assert "group default" in answers[0].broken and "FILLING" in answers[0].broken
    assert "FILLING" in str(_shown(store)["alarm"])
    assert _shown(store)["checked"]["ok"] is False
    group.fillings._slots -= 1
    asked(checks)
    loop.run()
    assert _shown(store)["alarm"] == ""
    assert _shown(store)["checked"]["ok"] is True


def test_a_check_that_trips_over_what_it_finds_ends_the_run_and_says_so(
    store: StoreDriver, session: SessionDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = HandLoop()
    checks = Checks(store.store, loop.loop)
    with monkeypatch.context() as patch:
        patch.setattr(session.caller.group, "check_counters", lambda: {}["gone"])
        answers = asked(checks)
        loop.run()
        assert len(answers) == 1
        assert "the check failed: KeyError('gone')" in answers[0].broken
        assert "KeyError" in str(_shown(store)["alarm"])
    again = asked(checks)
    loop.run()
    assert again == [CheckReport("", complete=True)], "the next run is not held up by it"


def _shown(store: StoreDriver) -> dict:
    return status(store.store)["groups"]["default"]  # type: ignore[index]


def test_the_daemon_checks_itself_from_time_to_time() -> None:
    with make(self_check_s=30) as driver:
        loop = HandLoop()
        checks = Checks(driver.store, loop.loop)
        assert _shown(driver)["checked"] is None
        checks.open()
        while driver.group().checked is None:
            assert loop.turn()
        assert 30 <= loop.now_s < 60
        first = driver.group().checked
        while driver.group().checked is first:
            assert loop.turn()
        assert 60 <= loop.now_s < 90
        answers = asked(checks)  # a question does not wait for the pauses of the daemon's own run
        at_s = loop.now_s
        while not answers:
            loop.turn()
        assert loop.now_s == at_s
        checks.close()
        assert not loop.turn()


def test_no_self_check_is_a_choice(store: StoreDriver) -> None:
    loop = HandLoop()
    Checks(store.store, loop.loop).open()
    assert not loop.turn()


def test_slices_may_be_left_in_the_middle(store: StoreDriver, session: SessionDriver) -> None:
    slices = in_slices([store.group()])
    next(slices)
    slices.close()
    session.disconnect()
    store.store.check()
