"""Fetches: blocks become ready by notices, and what has come is kept whatever happens next."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from client_daemon import ScriptedDaemon
from client_kit import Maker, chain_of
from client_memory import LIMITS, WAIT_S

from kvstore.rpc import messages as m


def u32(*values: int) -> bytes:
    return np.array(values, "<u4").tobytes()


def fetching(daemon: ScriptedDaemon, client: Any, chain: Any, first: m.Fetched, *rest: m.Progress) -> Any:
    daemon.handlers[m.Lookup] = lambda *_: m.Found(5, 6, 0, 6, 6, chain.digest(6), (0, 0), b"", [], "test")

    def answer(conn: Any, _: m.Fetch) -> None:
        conn.send(len(conn.requests), first)
        for notice in rest:
            conn.send(0, notice)

    daemon.handlers[m.Fetch] = answer
    return client.lookup(chain)


def test_a_fetch_follows_its_notices(daemon: ScriptedDaemon, make: Maker) -> None:
    client = make.attached()
    chain = chain_of(client, 6)
    foreign = m.Progress(99, 6, 6, b"")
    rest = [foreign, m.Progress(5, 3, 6, u32(8)), m.Progress(5, 6, 6, u32(20, 21, 40))]
    hit = fetching(daemon, client, chain, m.Fetched(2, u32(1)), *rest)
    fetch = client.fetch(hit, 1, 6)
    result = fetch.wait(WAIT_S)
    assert (result.ready, result.reason) == (6, "")
    assert result.slots.tolist() == [1, 8, 20, 21, 40]
    assert fetch.ready == 6


def test_a_fetch_that_stalls_keeps_what_came(daemon: ScriptedDaemon, make: Maker) -> None:
    client = make.attached(limits=dataclasses.replace(LIMITS, fetch_s=0.05))
    hit = fetching(daemon, client, chain_of(client, 6), m.Fetched(2, u32(1, 2)))
    result = client.fetch(hit, 0, 6).wait(WAIT_S)
    assert (result.ready, result.slots.tolist()) == (2, [1, 2])
    assert "in time" in result.reason
    assert client.heartbeat()  # a slow fetch is not a dead connection


@pytest.mark.parametrize(
    "notice",
    [
        m.Progress(5, 1, 6, b""),
        m.Progress(5, 7, 6, b""),
        m.Progress(5, 4, 3, b""),
        m.Progress(5, 7, 7, b""),
        m.Progress(5, 4, 6, b"x"),
    ],
)
def test_a_fetch_that_makes_no_sense(daemon: ScriptedDaemon, make: Maker, notice: m.Progress) -> None:
    client = make.attached()
    hit = fetching(daemon, client, chain_of(client, 6), m.Fetched(2, u32(1, 2)), notice)
    result = client.fetch(hit, 0, 6).wait(WAIT_S)
    assert result.ready == 2
    assert "malformed" in result.reason


def test_a_fetch_whose_end_is_lowered(daemon: ScriptedDaemon, make: Maker) -> None:
    client = make.attached()
    notices = [m.Progress(5, 3, 5, u32(8)), m.Progress(5, 4, 4, u32(9))]
    hit = fetching(daemon, client, chain_of(client, 6), m.Fetched(2, u32(1, 2)), *notices)
    result = client.fetch(hit, 0, 6).wait(WAIT_S)
    assert (result.ready, result.slots.tolist()) == (4, [1, 2, 8, 9])
    assert "no more than 4" in result.reason
    assert client.heartbeat()
