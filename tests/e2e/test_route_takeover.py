"""Replicas that fail, callers that leave: who is asked again, who is not, and that every ticket ends once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
from route_scene import (
    CHAT,
    DONE,
    Peer,
    RouteScene,
    answers,
    chat,
    error_of,
    event,
    replica,
    route,
    usage_event,
)

from kvstore.router.placing import Replica
from kvstore.router.proxy_options import ProxyOptions

# ---- another replica is asked -----------------------------------------------------------------------------


async def hangs_up(peer: Peer) -> None:
    peer.reset()
    await peer.gone()


async def hangs_up_after_its_head(peer: Peer) -> None:
    await peer.head()
    await hangs_up(peer)


async def is_busy(peer: Peer) -> None:
    await peer.whole(503, b'{"error": {"message": "loading the model"}}')


async def is_a_bad_gateway(peer: Peer) -> None:
    await peer.whole(502, b"x" * 200_000, "text/html")


async def talks_nonsense(peer: Peer) -> None:
    await peer.raw(b"HELO there\r\n\r\n" * 10)
    await hangs_up(peer)


async def has_endless_headers(peer: Peer) -> None:
    await peer.raw(b"HTTP/1.1 200 OK\r\n" + b"x-more: yes\r\n" * 50_000)
    await peer.gone()


async def says_nothing(peer: Peer) -> None:
    await peer.gone()


FAILING: list[Callable[[Peer], Awaitable[None]]] = [
    hangs_up,
    hangs_up_after_its_head,
    is_busy,
    is_a_bad_gateway,
    talks_nonsense,
    has_endless_headers,
    says_nothing,
]


@pytest.mark.parametrize("act", FAILING)
@pytest.mark.parametrize("stream", [False, True])
async def test_before_the_first_byte_another_replica_takes_over(
    act: Callable[[Peer], Awaitable[None]], stream: bool
) -> None:
    options = ProxyOptions(first_byte_s=0.3)
    async with (
        replica("a", act) as a,
        replica("b", answers) as b,
        route(a.known(), b.known(), options=options) as s,
    ):
        answer = await s.post(chat(stream=stream))
        assert answer.status_code == 200 and answer.headers["x-kvstore-replica"] == "b"
        tickets = await s.picker.settled(2)
    assert [(t.replica, t.ok) for t in tickets] == [("a", False), ("b", True)]
    assert tickets[0].said == ["sent", "finished"]
    assert len(a.asked) == len(b.asked) == 1 and a.asked[0].raw == b.asked[0].raw


async def test_a_replica_that_is_not_there_costs_one_attempt() -> None:
    async with replica("b", answers) as b, route(Replica("a", "http://127.0.0.1:1", True), b.known()) as s:
        assert (await s.post(chat())).status_code == 200
        assert [t.ok for t in await s.picker.settled(2)] == [False, True]


async def test_when_all_fail_the_caller_hears_what_tells_most() -> None:
    async with replica("a", hangs_up) as a, replica("b", is_busy) as b:
        for known in ((a.known(), b.known()), (b.known(), a.known())):
            async with route(*known) as s:
                busy = await s.post(chat())
                assert busy.status_code == 503 and error_of_upstream(busy) == "loading the model"
                assert not any(t.ok for t in await s.picker.settled(3))
        async with route(a.known()) as s:
            gone = await s.post(chat())
            assert gone.status_code == 502 and error_of(gone)["code"] == "upstream_unreachable"
        async with route(b.known(), a.known(), options=ProxyOptions(attempts_max=1)) as s:
            assert (await s.post(chat())).status_code == 503
            assert len(await s.picker.settled(1)) == 1
        async with route(Replica("c", a.url, False)) as s:
            none = await s.post(chat())
            assert none.status_code == 503 and error_of(none)["code"] == "no_replica"
            assert none.headers["retry-after"] == "1" and not s.picker.tickets


def error_of_upstream(answer: httpx.Response) -> str:
    return str(answer.json()["error"]["message"])


async def test_the_only_replica_gets_a_second_chance_on_a_new_connection() -> None:
    """It was about to close an idle connection when the request came."""
    count = 0

    async def act(peer: Peer) -> None:
        nonlocal count
        count += 1
        await (hangs_up(peer) if count in (1, 3, 4) else answers(peer))

    async with replica("a", act) as a, route(a.known()) as s:
        assert (await s.post(chat())).status_code == 200
        assert [t.ok for t in await s.picker.settled(2)] == [False, True]
        assert (await s.post(chat())).status_code == 502  # but no third one
        assert [t.ok for t in await s.picker.settled(4)] == [False, True, False, False]


@pytest.mark.parametrize("status", [400, 404, 422, 429, 500])
async def test_other_errors_are_the_replicas_answer(status: int) -> None:
    async def act(peer: Peer) -> None:
        await peer.whole(status, b'{"error": {"message": "no"}}')

    async with replica("a", act) as a, replica("b", answers) as b, route(a.known(), b.known()) as s:
        answer = await s.post(chat())
        assert answer.status_code == status and error_of_upstream(answer) == "no"
        assert [t.ok for t in await s.picker.settled(1)] == [status < 500]
    assert not b.asked


# ---- nobody else is asked ---------------------------------------------------------------------------------


async def dies_in_the_middle(peer: Peer) -> None:
    await peer.head()
    await peer.chunk(event("a") + b'data: {"cut')
    await hangs_up(peer)


async def falls_silent(peer: Peer) -> None:
    await peer.head()
    await peer.chunk(event("a"))
    await peer.gone()


async def breaks_its_chunks(peer: Peer) -> None:
    await peer.head()
    await peer.chunk(event("a"))
    await peer.raw(b"zzzz\r\n")
    await peer.gone()


@pytest.mark.parametrize("act", [dies_in_the_middle, falls_silent, breaks_its_chunks])
async def test_after_the_first_byte_a_stream_ends_with_an_error(
    act: Callable[[Peer], Awaitable[None]],
) -> None:
    async with (
        replica("a", act) as a,
        replica("b", answers) as b,
        route(a.known(), b.known(), options=ProxyOptions(idle_s=0.3)) as s,
    ):
        answer = await s.post(chat(stream=True))
        events = [e for e in answer.content.split(b"\n\n") if e]
        assert events[0] + b"\n\n" == event("a")
        assert json.loads(events[-1].removeprefix(b"data: "))["error"]["code"] == "broken_off"
        assert len(events) == 2 and DONE not in answer.content
        (ticket,) = await s.picker.settled(1)
        assert ticket.ok is False and ticket.said == ["sent", "first_byte", "finished"]
    assert not b.asked


async def test_half_a_json_is_not_taken_for_a_whole() -> None:
    async def act(peer: Peer) -> None:
        await peer.head(kind="application/json")
        await peer.chunk(b'{"choices": [')
        await hangs_up(peer)

    async with replica("a", act) as a, replica("b", answers) as b, route(a.known(), b.known()) as s:
        with pytest.raises(httpx.RemoteProtocolError):
            await s.post(chat())
        assert [t.ok for t in await s.picker.settled(1)] == [False]
    assert not b.asked


# ---- callers that leave -----------------------------------------------------------------------------------


async def leaves(s: RouteScene, body: dict[str, Any], when: Awaitable[Any]) -> None:
    """Ask, wait, hang up."""
    data = json.dumps(body).encode()
    _, writer = await asyncio.open_connection(s.client.base_url.host, s.client.base_url.port)
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    async with asyncio.timeout(10):
        await when
    writer.transport.abort()


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_when_a_caller_leaves_its_replica_is_let_go(begun: bool, stream: bool) -> None:
    ready, gone = asyncio.Event(), asyncio.Event()

    async def act(peer: Peer) -> None:
        if begun:
            await peer.head(kind="text/event-stream" if stream else "application/json")
            await peer.chunk(event("a"))
        ready.set()
        await peer.gone()
        gone.set()

    async with replica("a", act) as a, replica("b", answers) as b, route(a.known(), b.known()) as s:
        await leaves(s, chat(stream=stream), ready.wait())
        async with asyncio.timeout(10):
            await gone.wait()
        (ticket,) = await s.picker.settled(1)
        assert ticket.ok  # the replica is not to blame
    assert not b.asked


async def test_a_caller_that_leaves_while_its_replica_is_called() -> None:
    async with replica("a", answers) as a, route(a.known()) as s:
        for _ in range(20):
            await leaves(s, chat(), s.picker.picked.wait())
            s.picker.picked.clear()
        tickets = await s.picker.settled(20)
        assert all(t.ok for t in tickets)


async def test_a_caller_that_leaves_while_it_sends_reaches_nobody() -> None:
    async with replica("a", answers) as a, route(a.known()) as s:
        _, writer = await asyncio.open_connection(s.client.base_url.host, s.client.base_url.port)
        writer.write(f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{{".encode())
        await writer.drain()
        writer.transport.abort()
        assert (await s.post(chat())).status_code == 200
    assert len(a.asked) == len(s.picker.tickets) == 1


async def test_a_caller_that_reads_nothing_slows_its_replica_and_is_let_go() -> None:
    piece, passed, gone = b"data: " + b"x" * (1 << 16) + b"\n\n", 0, asyncio.Event()

    async def act(peer: Peer) -> None:
        nonlocal passed
        await peer.head()
        try:
            while True:
                await peer.chunk(piece)
                passed += len(piece)
        except ConnectionError:
            gone.set()

    async with (
        replica("a", act) as a,
        route(a.known(), options=ProxyOptions(client_stall_s=0.3)) as s,
        s.client.stream("POST", CHAT, json=chat(stream=True)) as answer,
    ):
        assert answer.status_code == 200
        (ticket,) = await s.picker.settled(1)
        await gone.wait()
    assert ticket.ok and ticket.said == ["sent", "first_byte", "finished"]
    assert passed < 32 << 20  # what sockets hold; without a bound it would have been gigabytes


async def test_64_at_once_each_with_an_answer_of_its_own() -> None:
    everybody = asyncio.Barrier(64)

    async def act(peer: Peer) -> None:
        await everybody.wait()  # nobody is answered before all have been asked
        text = peer.asked.body["messages"][0]["content"]
        await peer.head()
        for _ in range(20):
            await peer.chunk(event(text))
        await peer.chunk(usage_event(cached=int(text)) + DONE)
        await peer.end()

    async with replica("a", act) as a, route(a.known()) as s:
        asked = [s.post(chat(str(n), stream=True)) for n in range(64)]
        got = await asyncio.gather(*asked)
        for number, answer in enumerate(got):
            assert answer.content == event(str(number)) * 20 + DONE
        tickets = await s.picker.settled(64)
        assert s.picker.in_flight_max == 64
        assert sorted(t.cached_tokens or 0 for t in tickets) == list(range(64)) and all(t.ok for t in tickets)
