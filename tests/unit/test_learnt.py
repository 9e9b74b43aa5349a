"""What is kept across restarts: whole, bounded, and tolerant of files that are something else."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
from structlog.testing import capture_logs

from kvstore.errors import ConfigError
from kvstore.learnt import StateDir, news, restore, written
from kvstore.meters import PREFILL_STEPS_MAX, Meters, PrefillStep
from kvstore.policy.prefill import CURVES_MAX, STEPS_MAX
from kvstore.policy.rates import SOURCES_MAX
from kvstore.pricing import Pricing, Source, Step, Transfer
from kvstore.small_files import FILE_BYTES_MAX
from kvstore.testing import SimClock
from kvstore.types import Tier

DISK = Source(Tier.NVME)


@dataclass
class Group:
    """A trust group, as far as it learns."""

    clock: SimClock = field(default_factory=SimClock)
    meters: Meters = field(default_factory=Meters)

    def __post_init__(self) -> None:
        self.pricing = Pricing(self.clock)

    def learn(self, steps: int = 3, curves: int = 0, curve_steps: int = 8) -> Group:
        """Steps of engines, and curves of namespaces, the first of them heard first."""
        for number in range(steps):
            self.meters.observe_prefill(100 + number, 0.5)
        for curve in range(curves):
            for number in range(curve_steps):
                self.clock.advance(0.1)
                tokens = (256, 512)[number % 2]
                step = Step(tokens, tokens * tokens / 2, 0, 0, 0.01 + tokens / (1000.0 + curve))
                self.pricing.observe_step(f"{curve:064}", step)
                self.pricing.observe_step(f"{curve:064}", Step(0, 0.0, 8, 4000 + number, 1 / 70))
        return self


def test_what_was_learnt_survives_and_counters_start_again() -> None:
    before = {"red": Group().learn(curves=2), "gone": Group().learn()}
    before["red"].pricing.observe_transfer(DISK, Transfer(1 << 20, 0, 0.25))
    after = {"red": Group(SimClock(77.0)), "new": Group()}
    with capture_logs() as lines:
        restore(written(before), after)
    assert not lines
    meters = after["red"].meters
    assert list(meters.prefill_steps) == [PrefillStep(100 + n, 0.5) for n in range(3)]
    assert meters.prefill_tokens_per_s == before["red"].meters.prefill_tokens_per_s > 0
    assert meters.prefill_tokens == 0
    pricing, known = after["red"].pricing, before["red"].pricing
    assert pricing.namespaces() == known.namespaces() == [f"{1:064}", f"{0:064}"]
    for name in known.namespaces():
        assert pricing.curves[name].seconds(0, 4000) == pytest.approx(known.curves[name].seconds(0, 4000))
    assert pricing.rates.speed(DISK, 1 << 20) == known.rates.speed(DISK, 1 << 20)
    assert pricing.rates.speed(DISK, 1 << 20).known
    assert not after["new"].meters.prefill_steps and not after["new"].pricing.namespaces()


def test_time_is_no_news_and_all_that_is_learnt_is() -> None:
    group = Group().learn()
    groups = {"red": group}
    said = [news(groups)]
    group.clock.advance(60.0)
    assert news(groups) == said[0]
    group.learn(steps=1)
    said.append(news(groups))
    group.learn(steps=0, curves=1)
    said.append(news(groups))
    group.pricing.observe_transfer(DISK, Transfer(1 << 20, 0, 0.25))
    said.append(news(groups))
    assert all(said.count(one) == 1 for one in said)


def test_the_file_is_bounded() -> None:
    data = written({"x" * 64: Group().learn(10 * PREFILL_STEPS_MAX)})
    assert len(data) < FILE_BYTES_MAX // 16


def test_very_many_groups_leave_out_their_oldest_steps() -> None:
    groups = {f"{number:064}": Group() for number in range(200)}
    for of in groups.values():
        for number in range(PREFILL_STEPS_MAX):
            of.meters.observe_prefill((1 << 31) - number, 1 / 3)
    with capture_logs() as lines:
        data = written(groups)
    assert FILE_BYTES_MAX // 4 < len(data) <= FILE_BYTES_MAX
    assert [line["event"] for line in lines] == ["learnt state cut to what was learnt last"]
    after = {name: Group() for name in groups}
    restore(data, after)
    for name, of in after.items():
        kept = len(of.meters.prefill_steps)
        assert kept == lines[0]["steps_of_each_group"] > 0
        assert list(of.meters.prefill_steps) == list(groups[name].meters.prefill_steps)[-kept:]


def test_of_too_many_curves_the_latest_of_each_group_are_kept() -> None:
    one = Group().learn(curves=CURVES_MAX, curve_steps=STEPS_MAX + 8)
    groups = {"large": one, "small": Group().learn(curves=1)}
    with capture_logs() as lines:
        data = written(groups)
    assert FILE_BYTES_MAX * 3 // 4 < len(data) <= FILE_BYTES_MAX
    after = {name: Group() for name in groups}
    restore(data, after)
    kept = after["large"].pricing.namespaces()
    assert 0 < len(kept) < CURVES_MAX
    assert kept == one.pricing.namespaces()[: len(kept)]
    assert after["small"].pricing.namespaces() == groups["small"].pricing.namespaces() != []
    assert lines[0]["curves_left_out"] == CURVES_MAX - len(kept)
    assert lines[0]["steps_of_each_group"] == PREFILL_STEPS_MAX


def test_very_many_sources_cost_rates_of_a_group_and_nothing_else() -> None:
    groups = {name: Group().learn(curves=1) for name in ("red", "large", "blue")}
    for number in range(SOURCES_MAX * 40):
        source = Source(Tier.PEER, f"{number % SOURCES_MAX} {'x' * 200}")
        groups["large"].clock.advance(1e-3 / 3)
        groups["large"].pricing.observe_transfer(source, Transfer(1 << 20, 0, 1 / 3, 1 / 7))
    for name in ("red", "blue"):
        groups[name].pricing.observe_transfer(DISK, Transfer(1 << 20, 0, 0.25))
    with capture_logs() as lines:
        data = written(groups)
    assert len(data) <= FILE_BYTES_MAX
    assert [line["groups_without_rates"] for line in lines] == [1]
    after = {name: Group() for name in groups}
    restore(data, after)
    assert {name: len(of.pricing.rates) for name, of in after.items()} == {"red": 1, "large": 0, "blue": 1}
    assert all(of.pricing.namespaces() and of.meters.prefill_steps for of in after.values())


def test_a_torn_file_is_refused_wherever_it_is_torn() -> None:
    data, after = written({"red": Group().learn(curves=1)}), {"red": Group()}
    for cut in range(len(data) - 1):
        with pytest.raises(ValueError, match="kvstore-learnt"):
            restore(data[:cut], after)
    assert not after["red"].meters.prefill_steps and not after["red"].pricing.namespaces()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 3}, "version 3"),
        ({"format": "something else"}, "something else"),
        ({"groups": {"red": {"prefill_steps": [[1, 0.5]] * (PREFILL_STEPS_MAX + 1)}}}, "length"),
        ({"groups": {"red": {"prefill_steps": [[-1, 0.5]]}}}, ">= 0"),
        ({"groups": {"red": {"prefill_steps": [[1, -0.5]]}}}, ">= 0"),
        ({"groups": 7}, "object"),
    ],
)
def test_a_foreign_file_changes_nothing(change: dict[str, object], words: str) -> None:
    file = {**msgspec.json.decode(written({"red": Group().learn()})), **change}
    after = {"red": Group()}
    with pytest.raises(ValueError, match=words):
        restore(msgspec.json.encode(file), after)
    assert not after["red"].meters.prefill_steps


def test_of_the_first_version_the_steps_are_taken() -> None:
    data = b'{"format":"kvstore-learnt","version":1,"groups":{"red":{"prefill_steps":[[100,0.5],[7,0.25]]}}}'
    after = {"red": Group()}
    with capture_logs() as lines:
        restore(data, after)
    assert list(after["red"].meters.prefill_steps) == [PrefillStep(100, 0.5), PrefillStep(7, 0.25)]
    assert not after["red"].pricing.namespaces()
    (told,) = lines
    assert (told["log_level"], told["version"]) == ("info", 1) and "start cold" in told["reason"]


@pytest.mark.parametrize(
    ("part", "bad", "names"),
    [
        ("curves", {f"{0:064}": {"format": "kvstore-prefill", "version": 9, "steps": []}}, "curves.00"),
        ("curves", {f"{0:064}": 7}, "curves.00"),
        ("curves", {f"{0:064}": {"steps": [[-1.0, 1, 0.5, 0, 0, 0.5]]}}, "curves.00"),
        ("curves", {"x" * 65: {}}, "pricing"),
        ("curves", {str(number): {} for number in range(CURVES_MAX + 1)}, "pricing"),
        ("curves", [], "pricing"),
        ("rates", {"format": "kvstore-rates", "version": 9, "sources": []}, "rates: "),
        ("rates", [], "rates: "),
    ],
)
def test_a_bad_part_starts_cold_and_costs_no_other(part: str, bad: object, names: str) -> None:
    group = Group().learn(curves=2)
    group.pricing.observe_transfer(DISK, Transfer(1 << 20, 0, 0.25))
    file = msgspec.json.decode(written({"red": group}))
    pricing = file["groups"]["red"]["pricing"]
    if names.startswith("curves"):
        pricing["curves"] |= bad
    else:
        pricing[part] = bad
    after = {"red": Group()}
    with capture_logs() as lines:
        restore(msgspec.json.encode(file), after)
    (told,) = lines
    assert (told["log_level"], told["group"]) == ("warning", "red") and names in told["reason"]
    assert len(after["red"].meters.prefill_steps) == 3
    known = after["red"].pricing
    curves = {"curves.00": [f"{1:064}"], "rates: ": [f"{1:064}", f"{0:064}"], "pricing": []}
    assert known.namespaces() == curves[names]
    assert known.rates.speed(DISK, 1).known == (names == "curves.00")


def test_one_daemon_at_a_time_uses_a_state_directory(tmp_path: Path) -> None:
    first = StateDir(tmp_path / "state")
    with pytest.raises(ConfigError, match=r"daemon\.state_dir: another daemon uses"):
        StateDir(tmp_path / "state")
    first.close()
    StateDir(tmp_path / "state").close()


def test_a_state_directory_that_cannot_be_made_names_the_key(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"daemon\.state_dir: cannot use .*unset the key"):
        StateDir(tmp_path / "file" / "state")
