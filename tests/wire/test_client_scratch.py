"""The scratch block of a layout proof, where several clients of a process have the same memory."""

from __future__ import annotations

import threading

from client_daemon import ScriptedDaemon, failed
from client_kit import Maker
from client_memory import WAIT_S

from kvstore.errors import LayoutRefused
from kvstore.rpc import messages as m


def test_a_proof_waits_while_somebody_else_has_the_scratch_block(daemon: ScriptedDaemon, make: Maker) -> None:
    scratch = threading.Lock()
    scratch.acquire()
    client = make(scratch_lock=scratch)
    assert not client.wait_attached(0.2)
    scratch.release()
    assert client.wait_attached(WAIT_S)
    assert not scratch.locked()
    second = make(scratch_lock=scratch)
    assert second.wait_attached(WAIT_S)


def test_a_proof_that_fails_gives_the_scratch_block_back(daemon: ScriptedDaemon, make: Maker) -> None:
    scratch = threading.Lock()
    daemon.handlers[m.ProvedStore] = lambda conn, body: failed(LayoutRefused("layout: no"))
    client = make(scratch_lock=scratch)
    assert not client.wait_attached(WAIT_S)
    assert isinstance(client.refusal, LayoutRefused)
    assert not scratch.locked()
