"""Three kills by bench.kill9's own hand: nothing flushed is lost, nothing wrong is served."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.kill9 import Rounds


def knows_direct(folder: Path) -> bool:
    """Whether files there can be opened past the page cache."""
    try:
        os.close(os.open(folder / "direct", os.O_CREAT | os.O_RDWR | os.O_DIRECT))
    except OSError:
        return False
    return True


def test_three_kills_in_the_middle_of_writes_lose_nothing_that_was_flushed() -> None:
    with tempfile.TemporaryDirectory(prefix="kv") as home, tempfile.TemporaryDirectory(prefix="kv") as disk:
        rounds = Rounds(Path(home), Path(disk), rounds=3, seed=1, direct=knows_direct(Path(disk)))
        try:
            for _ in range(3):
                rounds.run()
            rounds.control()
        finally:
            rounds.close()
    report = rounds.report
    assert (report.flushed_lost, report.corrupt, report.phantom) == (0, 0, 0), report.why
    assert report.unsound == 0, report.why
    assert report.blocks_evicted_wrongly == 0
    assert report.tally.errors == ()
    assert report.tally.blocks_flushed > 0
    assert report.blocks_verified > 0
    assert report.damage_noticed
    assert report.drops_noticed
    assert report.kills_with_writes_in_flight >= 2, "a loaded machine may miss one"
