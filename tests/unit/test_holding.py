"""How soon a holder that died is replaced."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
from turns import HandLoop

from kvstore.keep.holding import Holding


class Loop(HandLoop):
    """Nothing ever becomes readable."""

    def time(self) -> float:
        return self.now_s

    def add_reader(self, *_: Any) -> None:
        """Nothing."""

    def remove_reader(self, *_: Any) -> None:
        """Nothing."""

    def remove_writer(self, *_: Any) -> None:
        """Nothing."""


class Short(Holding):
    """Its holders are no processes."""

    def _start(self) -> None:
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        theirs.close()


def test_holders_that_die_young_are_replaced_ever_more_slowly_until_one_lives(tmp_path: Path) -> None:
    loop, holding = Loop(), Short(tmp_path / "h", 600.0)
    holding.take()
    holding.serve(loop.loop)

    def pause_s(lived_s: float) -> float:
        """After the death of one that lived for so long."""
        loop.now_s += lived_s
        lost_s = loop.now_s
        holding._readable()  # the end of the connection
        assert loop.turn()
        return loop.now_s - lost_s

    assert [pause_s(1.0) for _ in range(9)] == pytest.approx([0.5, 1, 2, 4, 8, 16, 32, 60, 60])
    assert [pause_s(lived_s) for lived_s in (59.0, 60.0, 1.0)] == pytest.approx([60, 0.5, 1])
    holding.leave()
