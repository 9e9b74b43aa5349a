"""What both ends of our ZMQ sockets have: how a vanished machine is noticed, and the end of an answer."""

from __future__ import annotations

from typing import Any

import zmq

__all__ = ["END", "keep_alive"]

END = b"\xff" * 8
"""Sequence −1: nothing more comes."""

_IDLE_S, _EVERY_S, _PROBES = 10, 5, 3


def keep_alive(socket: Any) -> None:
    """Let TCP notice a machine that vanished without a word.

    ZMTP's own heartbeats with a receive limit can end the process (libzmq 4.3.5, issue 3937: "Assertion
    failed: _input_stopped" where a burst fills the queue), so no socket of ours has them.
    """
    socket.set(zmq.TCP_KEEPALIVE, 1)
    socket.set(zmq.TCP_KEEPALIVE_IDLE, _IDLE_S)
    socket.set(zmq.TCP_KEEPALIVE_INTVL, _EVERY_S)
    socket.set(zmq.TCP_KEEPALIVE_CNT, _PROBES)
