"""Connections to replicas: when one is used again, where an answer ends, and events of any length."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
from route_scene import Peer, answers, event, replica, usage_event

from kvstore.router.usage import EVENT_BYTES_MAX, BodyTap, EventTap
from kvstore.router.wire import Answer, Broken, Connections, Unreachable
from kvstore.testing import SimClock


async def read(answer: Answer) -> bytes:
    data = b""
    while (chunk := await answer.chunk()) is not None:
        data += chunk
    return data


async def connections_used(
    act: Callable[[Peer], Awaitable[None]], *, whole: bool = True, wait_s: float = 0
) -> int:
    """By two requests, one after the other."""
    peers = set()
    clock = SimClock()

    async def noted(peer: Peer) -> None:
        peers.add(peer.writer)
        await act(peer)

    async with replica("a", noted) as a, Connections(5.0, clock) as connections:
        for _ in range(2):
            answer = await connections.ask("POST", a.url + "/x", [], b"{}")
            if whole:
                await read(answer)
            answer.close()
            clock.advance(wait_s)
        assert [asked.raw for asked in a.asked] == [b"{}", b"{}"]
    return len(peers)


async def says_more_than_its_answer(peer: Peer) -> None:
    await peer.raw(
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nokHTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\nforged"
    )


async def test_a_connection_is_used_again_while_it_is_young_and_clean() -> None:
    assert await connections_used(answers) == 1
    assert await connections_used(answers, wait_s=1.9) == 1
    assert await connections_used(answers, wait_s=2.1) == 2
    assert await connections_used(answers, whole=False) == 2
    assert await connections_used(says_more_than_its_answer) == 2


async def test_an_answer_may_end_with_its_connection() -> None:
    async def act(peer: Peer) -> None:
        await peer.raw(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nconnection: close\r\n\r\nall of it")
        peer.writer.close()

    async with replica("a", act) as a, Connections(5.0, SimClock()) as connections:
        answer = await connections.ask("GET", a.url + "/deep/x", [(b"x-a", b"b")])
        assert answer.status == 200 and await read(answer) == b"all of it"
        answer.close()
    (asked,) = a.asked
    assert asked.path == "/deep/x" and asked.headers["host"] in a.url and asked.headers["x-a"] == "b"


async def test_what_is_cut_short_is_broken() -> None:
    async def act(peer: Peer) -> None:
        await peer.raw(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nhalf")
        peer.writer.close()

    async with replica("a", act) as a, Connections(5.0, SimClock()) as connections:
        answer = await connections.ask("GET", a.url, [])
        with pytest.raises(Broken):
            await read(answer)
        answer.close()


@pytest.mark.parametrize(
    "url", ["ftp://x/", "nothing", "http://", "http://h:99999999/", "http://127.0.0.1:1/"]
)
async def test_no_address_no_connection(url: str) -> None:
    async with Connections(5.0, SimClock()) as connections:
        with pytest.raises(Unreachable):
            await connections.ask("GET", url, [])


@pytest.mark.parametrize("ends", [b"\n\n", b"\r\n\r\n"])
@pytest.mark.parametrize("size", [1, 3, 4096, 1 << 20])
def test_an_event_too_long_to_look_at_passes_as_it_is(size: int, ends: bytes) -> None:
    text = b"x" * (2 * EVENT_BYTES_MAX)
    long = b'data: {"usage": {"prompt_tokens": 1}, "choices": [1], "x": "' + text + b'"}\n\n'
    stream = (event("a") + long + usage_event() + event("b")).replace(b"\n\n", ends)
    if size < 4096:  # byte by byte only around the ends
        stream = (event("a") + usage_event() + event("b")).replace(b"\n\n", ends)
    tap = EventTap(hide_usage=True)
    passed = b"".join(tap.feed(stream[at : at + size]) for at in range(0, len(stream), size)) + tap.end()
    assert passed == stream.replace(usage_event().replace(b"\n\n", ends), b"")
    assert tap.usage.cached_tokens == 32


@pytest.mark.parametrize(
    "usage", [b"7", b'{"prompt_tokens": -1}', b'{"prompt_tokens": true}', b'{"prompt_tokens": 1e9}']
)
def test_nonsense_is_no_usage(usage: bytes) -> None:
    tap = BodyTap()
    data = b'{"usage": ' + usage + b"}"
    assert tap.feed(data) == data and tap.end() == b""
    assert tap.usage.prompt_tokens is None
