"""A connection knows at once that its other end is gone, before anybody has read from it."""

from __future__ import annotations

import asyncio
import socket

import pytest

from kvstore.client.alink import LoopLink
from kvstore.client.link import ThreadLink
from kvstore.clock import MonotonicClock


@pytest.mark.parametrize("kind", ["threads", "loop"])
async def test_a_hang_up_is_seen_before_it_is_read(kind: str) -> None:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    clock = MonotonicClock()
    link = ThreadLink(ours, clock) if kind == "threads" else LoopLink(ours, clock, asyncio.Event())
    try:
        assert not link.hung_up()
        theirs.send(b"\0")  # bytes that wait are no hang-up
        assert not link.hung_up()
        theirs.close()
        assert link.hung_up()
        assert not link.dead
        link.fail("over")
        assert link.hung_up()
    finally:
        link.close()
    assert link.hung_up()
