"""The owned pool opens when on_attach has adopted every table, and not before."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
from client_daemon import ScriptedDaemon
from client_kit import Maker, chain_of
from client_memory import LAYOUT, LIMITS, NAMESPACE, WAIT_S

from kvstore.client import AsyncClient, PoolSpec, Table
from kvstore.rpc import messages as m
from kvstore.types import Busy


def test_the_pool_stays_closed_while_on_attach_is_not_finished(make: Maker, daemon: ScriptedDaemon) -> None:
    daemon.handlers[m.Acquire] = lambda *_: m.Acquired(9, b"\3\0\0\0", 0, (0, 0), b"", [])
    client = make(pool=PoolSpec("owned", 15, 4))
    answers = [True, False, False]
    calls: list[bool] = []

    def on_attach() -> bool:
        calls.append(answers.pop())
        return calls[-1]

    client.on_attach = on_attach
    assert client.wait_attached(WAIT_S)
    for _ in range(2):
        client.poll()
        assert isinstance(client.acquire(0, 1), Busy)
    assert daemon.seen(m.Acquire) == []
    client.poll()
    table = client.acquire(0, 1)
    assert isinstance(table, Table)
    assert table.generation == client.generation == 1
    client.poll()
    assert calls == [False, False, True]


def test_an_awaited_on_attach_may_ask_to_be_asked_again(daemon: ScriptedDaemon, path: Path) -> None:
    async def life() -> list[bool]:
        client = AsyncClient(path, NAMESPACE, role="scheduler", layout=LAYOUT, limits=LIMITS)
        calls: list[bool] = []

        async def on_attach() -> bool:
            await asyncio.sleep(0)
            calls.append(len(calls) > 0)
            return calls[-1]

        client.on_attach = on_attach
        assert await client.wait_attached(WAIT_S)
        for _ in range(4):
            await client.poll()
        await client.close()
        return calls

    assert asyncio.run(life()) == [False, True]


def test_keys_beyond_one_message_are_committed_after_the_adoption(make: Maker, path: Path) -> None:
    daemon = ScriptedDaemon(path, keys_max=3)
    daemon.handlers[m.Adopt] = lambda *_: m.Acquired(11, b"", 0, (0, 0), b"", [])
    daemon.handlers[m.Commit] = lambda conn, body: m.Committed(len(body.keys) // 32)
    client = make(pool=PoolSpec("owned", 15, 4))
    assert client.wait_attached(WAIT_S)
    chain = chain_of(client, 8)
    assert isinstance(client.adopt(np.arange(9, dtype=np.uint32), chain, 7), Table)
    (adopt,) = daemon.seen(m.Adopt)
    assert (len(adopt.table), adopt.keys) == (4 * 9, chain.keys[:3].tobytes())
    assert [(one.start, len(one.keys) // 32, one.parent) for one in daemon.seen(m.Commit)] == [
        (3, 3, chain.parent(3)),
        (6, 1, chain.parent(6)),
    ]
    client.close()
    daemon.stop()
