"""What is kept across restarts: whole, bounded, and tolerant of files that are something else."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from structlog.testing import capture_logs

from kvstore.errors import ConfigError
from kvstore.learnt import StateDir, restore, written
from kvstore.meters import PREFILL_STEPS_MAX, Meters, PrefillStep
from kvstore.small_files import FILE_BYTES_MAX


def learnt(steps: int = 3) -> Meters:
    meters = Meters()
    for number in range(steps):
        meters.observe_prefill(100 + number, 0.5)
    return meters


def test_steps_survive_and_counters_start_again() -> None:
    before, after = {"red": learnt(), "gone": learnt()}, {"red": Meters(), "new": Meters()}
    restore(written(before), after)
    assert list(after["red"].prefill_steps) == [PrefillStep(100 + n, 0.5) for n in range(3)]
    assert after["red"].prefill_tokens_per_s == before["red"].prefill_tokens_per_s > 0
    assert after["red"].prefill_tokens == 0
    assert not after["new"].prefill_steps


def test_the_file_is_bounded() -> None:
    data = written({"x" * 64: learnt(10 * PREFILL_STEPS_MAX)})
    assert len(data) < FILE_BYTES_MAX // 16


def test_very_many_groups_leave_out_their_oldest_steps() -> None:
    meters = {f"{number:064}": Meters() for number in range(200)}
    for of in meters.values():
        for number in range(PREFILL_STEPS_MAX):
            of.observe_prefill((1 << 31) - number, 1 / 3)
    with capture_logs() as lines:
        data = written(meters)
    assert FILE_BYTES_MAX // 4 < len(data) <= FILE_BYTES_MAX
    assert [line["event"] for line in lines] == ["learnt state cut to its latest steps"]
    after = {name: Meters() for name in meters}
    restore(data, after)
    for name, of in after.items():
        kept = len(of.prefill_steps)
        assert kept == lines[0]["steps_of_each_group"] > 0
        assert list(of.prefill_steps) == list(meters[name].prefill_steps)[-kept:]


def test_a_torn_file_is_refused_wherever_it_is_torn() -> None:
    data, meters = written({"red": learnt()}), {"red": Meters()}
    for cut in range(len(data) - 1):
        with pytest.raises(ValueError, match="kvstore-learnt"):
            restore(data[:cut], meters)
    assert not meters["red"].prefill_steps


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 2}, "version 2"),
        ({"format": "something else"}, "something else"),
        ({"groups": {"red": {"prefill_steps": [[1, 0.5]] * (PREFILL_STEPS_MAX + 1)}}}, "length"),
        ({"groups": {"red": {"prefill_steps": [[-1, 0.5]]}}}, ">= 0"),
        ({"groups": {"red": {"prefill_steps": [[1, -0.5]]}}}, ">= 0"),
        ({"groups": 7}, "object"),
    ],
)
def test_a_foreign_file_changes_nothing(change: dict[str, object], words: str) -> None:
    file = {**msgspec.json.decode(written({"red": learnt()})), **change}
    meters = {"red": Meters()}
    with pytest.raises(ValueError, match=words):
        restore(msgspec.json.encode(file), meters)
    assert not meters["red"].prefill_steps


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
