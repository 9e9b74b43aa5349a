"""What the daemon says of calls: each has a line at debug; one that holds the loop is told and counted."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from endpoint import Endpoint, eventually, random_blocks
from structlog.testing import capture_logs

from kvstore.rpc.api.call_log import Steps
from kvstore.rpc.request_log import SLOW_S
from kvstore.testing import SimClock
from kvstore.v1 import store_pb2 as pb


def told(lines: Any) -> list[dict[str, Any]]:
    return [line for line in lines if str(line.get("message", "")).startswith("grpc.")]


async def test_every_call_has_a_line_at_debug(endpoint: Endpoint) -> None:
    endpoint.service.requests.every = True
    chain = endpoint.chain(range(16))
    with capture_logs() as lines:
        await endpoint.save(chain, random_blocks(1, 4))
        lease = (await endpoint.look_up(chain)).lease
        await endpoint.fetch(pb.FetchRequest(lease=lease))
        await endpoint.store.Renew(pb.RenewRequest(leases=[lease]))
        await endpoint.release(lease)
        with pytest.raises(grpc.aio.AioRpcError):
            await endpoint.release(lease)
        await endpoint.admin.Check(pb.CheckRequest())
        await eventually(lambda: len(told(lines)) == 7)
    short = lease.hex()[:8]
    seen = [(line["message"], line["lease"], line["answer"]) for line in told(lines)]
    assert seen == [
        ("grpc.save", "", "saveresponse"),
        ("grpc.lookup", short, "lookupresponse"),
        ("grpc.fetch", short, "stream"),
        ("grpc.renew", short, "renewresponse"),
        ("grpc.release", short, "releaseresponse"),
        ("grpc.release", short, "failed"),
        ("grpc.check", "", "checkresponse"),
    ]
    assert {line["peer"] for line in told(lines)} == {"unix:"}
    assert told(lines)[1]["tenant"] == "default"
    assert told(lines)[5]["status"] == "NOT_FOUND"
    assert lease.hex() not in str(lines)


async def test_a_call_that_holds_the_loop_is_told_and_counted(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, requests = endpoint.driver.clock, endpoint.service.requests
    grant = endpoint.service.holdings.grant

    def slow(asked: Any, *rest: Any) -> Any:
        clock.advance(2 * SLOW_S)
        return grant(asked, *rest)

    with capture_logs() as lines:
        await endpoint.look_up(endpoint.chain(range(8)))
        assert not told(lines)
        monkeypatch.setattr(endpoint.service.holdings, "grant", slow)
        await endpoint.look_up(endpoint.chain(range(8)))
    (line,) = told(lines)
    assert (line["event"], line["message"], line["ms"]) == ("slow message", "grpc.lookup", 10.0)
    assert requests.slow == {"grpc.lookup": 1}


async def test_waiting_is_not_holding() -> None:
    clock, gate = SimClock(), asyncio.Event()

    async def work() -> str:
        clock.advance(0.002)
        await gate.wait()
        clock.advance(0.003)
        return "done"

    steps = Steps(work(), clock)

    async def waits() -> str:
        return await steps

    waiting = asyncio.create_task(waits())
    await asyncio.sleep(0)
    clock.advance(60.0)
    gate.set()
    assert await waiting == "done"
    assert steps.longest_s == pytest.approx(0.003)


async def test_a_cancellation_reaches_the_work() -> None:
    ended = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append("cleaned up")

    async def waits() -> None:
        await Steps(work(), SimClock())

    waiting = asyncio.create_task(waits())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert ended == ["cleaned up"]
