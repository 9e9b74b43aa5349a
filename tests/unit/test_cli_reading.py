"""What `kvstore status` makes of a report: rates, alarms, and numbers as people read them."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from rich.console import Console

from kvstore.cli.panes import pane
from kvstore.cli.reading import alarms, rates, with_rates
from kvstore.cli.units import duration_text, per_second_text, percent_text, size_text
from kvstore.status import ENGINES_LISTED_MAX, status
from kvstore.testing import StoreDriver


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (768, "768 B"), (1536, "1.5 KiB"), (64 << 20, "64 MiB"), (5 << 50, "5120 TiB")],
)
def test_sizes(size: int, text: str) -> None:
    assert size_text(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59, "59 s"), (61, "1 min 1 s"), (3600, "1 h"), (90061, "1 d 1 h")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


def test_rates_and_shares_as_text() -> None:
    assert [per_second_text(v) for v in (0, 0.25, 12.54, 3400.7)] == ["0", "0.25", "12.5", "3,401"]
    assert [percent_text(v) for v in (None, 0.0, 0.974, 1.0)] == ["–", "0 %", "97 %", "100 %"]


def counters(**changed: int) -> dict[str, Any]:
    names = ("lookups", "lookup_blocks", "hit_blocks", "saved_bytes", "loaded_bytes")
    return {"counters": {**dict.fromkeys(names, 0), **changed}}


def test_rates_are_differences() -> None:
    before = counters(lookups=10, lookup_blocks=100, hit_blocks=50, saved_bytes=1000, loaded_bytes=7)
    after = counters(lookups=30, lookup_blocks=300, hit_blocks=200, saved_bytes=5000, loaded_bytes=7)
    found = rates(before, after, 2.0)
    assert (found.lookups_per_s, found.hit_rate) == (10.0, 0.75)
    assert (found.saved_bytes_per_s, found.loaded_bytes_per_s) == (2000.0, 0.0)
    assert rates(None, after, 10.0).lookups_per_s == 3.0
    assert rates(after, after, 1.0).hit_rate is None
    # A lease that began before the interval ends in it.
    late = counters(lookup_blocks=310, hit_blocks=260)
    assert rates(after, late, 1.0).hit_rate == 1.0


def a_report() -> dict[str, Any]:
    """Of a real store with one engine."""
    with StoreDriver() as driver:
        driver.attach()
        return json.loads(json.dumps(status(driver.store)))


def test_totals_of_another_daemon_are_not_subtracted() -> None:
    before, after = a_report(), a_report()
    assert before["epoch"] != after["epoch"]
    assert with_rates(before, after)["groups"]["default"]["rates"]["now"] is None
    later = {**after, "uptime_s": after["uptime_s"] + 2}
    assert with_rates(after, later)["groups"]["default"]["rates"]["now"]["interval_s"] == 2


def test_nothing_is_wrong_with_a_new_store() -> None:
    assert alarms(a_report()) == []


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("host", "corrupt_blocks"), 3, "corrupt blocks dropped: 3"),
        (("alarm",), "no hits at all", "no hits at all"),
        (("quarantined",), 5, "slots quarantined: 5"),
        (("index", "nodes"), 1 << 30, "raise index.nodes_max"),
    ],
)
def test_what_is_wrong_is_an_alarm_and_comes_first(path: tuple[str, ...], value: object, said: str) -> None:
    report = a_report()
    place = report["groups"]["default"]
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    (alarm,) = alarms(report)
    assert alarm.startswith("default: ")
    assert said in alarm
    assert shown(report).startswith("ALARM default: ")


def test_a_silent_engine_is_an_alarm() -> None:
    report = a_report()
    (engine,) = report["groups"]["default"]["engines"].values()
    engine["silent_s"] = 125.0
    (alarm,) = alarms(report)
    assert "silent for 2 min 5 s" in alarm


def shown(report: dict[str, Any], columns: int = 60) -> str:
    screen = Console(file=io.StringIO(), width=columns, highlight=False, markup=False)
    screen.print(pane(with_rates(None, report), "/run/kvstore.sock"))
    assert isinstance(screen.file, io.StringIO)
    return screen.file.getvalue()


def test_it_fits_a_narrow_terminal() -> None:
    report = a_report()
    (engine,) = report["groups"]["default"]["engines"].values()
    engine["model"] = "org/" + "a-very-long-model-name" * 3
    engine["device"] = {"free": 100_000, "mapped": 200_000, "idle": 300_000, "draining": 0, "events_lost": 9}
    text = shown(report)
    assert max(len(line) for line in text.splitlines()) <= 60
    assert "200,000" in text
    assert "600,000 blocks" in text
    assert "\x1b" not in text


def test_what_is_known_of_the_cost_of_bytes_is_shown() -> None:
    report = a_report()
    group = report["groups"]["default"]
    trusted = {"state": "trusted", "reason": "", "losses": 0, "probes": 3}
    doubted = {**trusted, "state": "doubted", "reason": "a load took 3 s instead of 0.1 s"}
    source = {"latency_s": 0.0012, "bytes_per_s": 3 << 30, "samples": 0, "trust": None}
    group["pricing"]["sources"] = {
        "HOST": source,
        "NVME": {**source, "bytes_per_s": 5 << 20, "samples": 1234, "trust": doubted},
        "PEER:b": {**source, "trust": trusted},
    }
    curve = {"model": "org/Some-1B", "steps": 9, "seconds": {"1000": 0.25, "8000": None}}
    group["pricing"]["curves"] = {str(number): curve for number in range(6)}
    text = shown(report, 200)
    assert "HOST loads 3 GiB/s after 1.2 ms (a guess)\n" in text
    assert "NVME loads 5 MiB/s after 1.2 ms (1,234 loads seen), not waited for: a load took 3 s" in text
    assert "PEER:b loads 3 GiB/s after 1.2 ms (a guess)\n" in text
    assert "Some-1B computes 1,000 tokens in 250 ms\n" in text
    assert "and the speed of 2 more models" in text
    assert max(len(line) for line in shown(report).splitlines()) <= 60
    del group["pricing"]  # of an older daemon
    assert "loads" not in shown(report)


def test_a_report_of_many_engines_is_bounded_and_quick(driver: StoreDriver) -> None:
    for _ in range(ENGINES_LISTED_MAX + 5):
        driver.attach()
    report = status(driver.store)
    group = report["groups"]["default"]  # type: ignore[index]
    assert group["engine_count"] == ENGINES_LISTED_MAX + 5
    assert len(group["engines"]) == ENGINES_LISTED_MAX
    assert len(json.dumps(report)) < 1 << 18
    assert f"and {ENGINES_LISTED_MAX + 5 - 16} more engines" in shown(json.loads(json.dumps(report)))


def test_bytes_are_counted_where_they_move(driver: StoreDriver) -> None:
    session = driver.attach()
    chain = session.chain(range(40))
    assert session.save(chain).ready == 10
    counted, length = driver.group().counters, session.caller.shape.length
    assert (counted.saved_bytes, counted.loaded_bytes) == (10 * length, 0)
    session.release(session.lookup(chain).lease)
    assert counted.loaded_bytes == 10 * length
