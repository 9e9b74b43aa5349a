"""Saves of one chain become readable in its order, whichever handle is asked for first."""

from __future__ import annotations

import numpy as np
from client_daemon import ScriptedDaemon
from client_kit import Maker, chain_of
from client_memory import WAIT_S, Memory

from kvstore.rpc import messages as m

LONG = 1800  # copied for longer than it takes to begin the next save


def test_a_later_save_is_not_published_before_its_parents(daemon: ScriptedDaemon, make: Maker) -> None:
    client = make.attached(Memory(LONG + 6))
    chain = chain_of(client, LONG + 4)
    saves = [
        client.save(chain, start, stop, np.arange(1 + start, 1 + stop, dtype=np.uint32))
        for start, stop in ((0, LONG), (LONG, LONG + 2), (LONG + 2, LONG + 4))
    ]
    assert [save.wait(WAIT_S).ready for save in reversed(saves)] == [2, 2, LONG]
    assert [message.token for message in daemon.seen(m.Publish)] == [1, 2, 3]
