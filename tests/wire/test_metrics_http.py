"""The metrics page over HTTP: answers curl and Prometheus, and nobody can keep it busy."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from kvstore.config import MetricsConfig
from kvstore.errors import ConfigError
from kvstore.rpc.metrics import LoopLag, MetricsServer, Sources, StoreCollector, http
from kvstore.rpc.request_log import RequestLog
from kvstore.testing import StoreDriver


@pytest.fixture
async def collector(driver: StoreDriver) -> AsyncIterator[StoreCollector]:
    lag = LoopLag(asyncio.get_running_loop())
    yield StoreCollector(Sources(driver.store, RequestLog(driver.clock, every=False), lag, 0.0))
    lag.close()


@pytest.fixture
async def server(collector: StoreCollector) -> AsyncIterator[MetricsServer]:
    server = MetricsServer(MetricsConfig(listen="127.0.0.1:0"), collector)
    await server.open()
    yield server
    await server.close()


async def connect(server: MetricsServer) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if server.address.startswith("unix:"):
        return await asyncio.open_unix_connection(server.address.removeprefix("unix:"))
    host, _, port = server.address.rpartition(":")
    return await asyncio.open_connection(host.strip("[]"), int(port))


async def ask(server: MetricsServer, request: bytes) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of one exchange; the server closes."""
    reader, writer = await connect(server)
    writer.write(request)
    async with asyncio.timeout(20.0):
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    lines = head.decode().split("\r\n")
    headers = {name.lower(): text for name, _, text in (line.partition(": ") for line in lines[1:])}
    return int(lines[0].split()[1]), headers, body


async def connections(server: MetricsServer, count: int) -> None:
    """Until the server has that many."""
    async with asyncio.timeout(20.0):
        while True:
            if len(server._tasks) >= count:
                return
            await asyncio.sleep(0)


async def none_left(server: MetricsServer) -> None:
    async with asyncio.timeout(20.0):
        while server._tasks:
            await asyncio.wait(list(server._tasks))


def mode_of(path: Path) -> int | None:
    """Permission bits, None if it is not there."""
    return path.stat().st_mode & 0o777 if path.exists() else None


async def test_get_metrics_and_healthz(server: MetricsServer) -> None:
    status, headers, body = await ask(server, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (status, headers["connection"]) == (200, "close")
    assert headers["content-type"].startswith("text/plain; version=0.0.4")
    assert int(headers["content-length"]) == len(body)
    assert b'kvstore_lookup_tokens_total{tenant="default"} 0.0\n' in body
    wanted = b"GET /metrics?x=1 HTTP/1.1\r\naccept: application/openmetrics-text;version=1.0.0\r\n\r\n"
    status, headers, body = await ask(server, wanted)
    assert status == 200 and "openmetrics" in headers["content-type"] and body.endswith(b"# EOF\n")
    assert (await ask(server, b"GET /healthz HTTP/1.0\r\n\r\n"))[::2] == (200, b"ok\n")


async def test_head_says_how_long_it_would_be(server: MetricsServer) -> None:
    status, headers, body = await ask(server, b"HEAD /metrics HTTP/1.1\r\n\r\n")
    assert (status, body) == (200, b"") and int(headers["content-length"]) > 1000


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"POST /metrics HTTP/1.1\r\n\r\n", 405),
        (b"GET / HTTP/1.1\r\n\r\n", 404),
        (b"GET /../etc/passwd HTTP/1.1\r\n\r\n", 404),
        (b"GET /metrics\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\r\n\r\n", 400),
        (b"GET /metrics HTTP/2\r\n\r\n", 400),
        (b"GET /metrics HTTP/1.1\r\nX: " + b"x" * http.HEAD_BYTES_MAX, 431),
        (b"GET /" + b"y" * (1 << 20), 431),
    ],
)
async def test_what_is_no_good_request_gets_an_answer(
    server: MetricsServer, request_: bytes, status: int
) -> None:
    assert (await ask(server, request_))[0] == status
    assert (await ask(server, b"GET /healthz HTTP/1.1\r\n\r\n"))[0] == 200


async def test_who_says_nothing_is_let_go(server: MetricsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "REQUEST_S", 0.05)
    assert (await ask(server, b"GET /metr"))[0] == 408
    reader, writer = await connect(server)
    writer.close()
    assert await reader.read() == b""
    assert (await ask(server, b"GET /healthz HTTP/1.1\r\n\r\n"))[0] == 200


async def test_who_does_not_read_is_let_go(server: MetricsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "REQUEST_S", 0.05)

    async def long(*_: object) -> http._Answer:
        return http._Answer(200, bytes(32 << 20))

    monkeypatch.setitem(http._PATHS, "/metrics", long)
    _, writer = await connect(server)
    writer.write(b"GET /metrics HTTP/1.1\r\n\r\n")
    await connections(server, 1)
    await none_left(server)
    writer.transport.abort()


async def test_connections_are_bounded(server: MetricsServer) -> None:
    held = [await connect(server) for _ in range(http.CONNECTIONS_MAX)]
    await connections(server, http.CONNECTIONS_MAX)
    assert (await ask(server, b"GET /healthz HTTP/1.1\r\n\r\n"))[0] == 503
    for _, writer in held:
        writer.transport.abort()
    await none_left(server)
    assert (await ask(server, b"GET /healthz HTTP/1.1\r\n\r\n"))[0] == 200


async def test_pages_are_bounded_by_rate(server: MetricsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "PAGES_PER_S", 0.0)  # as if no time passed
    burst = int(http.PAGES_BURST)
    answers = [(await server._metrics("")).status for _ in range(burst + 3)]
    assert answers == [200] * burst + [429] * 3
    assert (await ask(server, b"GET /healthz HTTP/1.1\r\n\r\n"))[0] == 200


async def test_a_long_page_lets_others_have_their_turn(
    server: MetricsServer, driver: StoreDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "TURN_S", -1.0)  # as on a machine where each piece takes longer than a turn
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(others())
    answer = await server._metrics("")
    task.cancel()
    assert answer.status == 200
    assert turns > 30, "once after every family"


async def test_a_unix_socket_has_the_mode_of_the_daemons(
    collector: StoreCollector, socket_path: Path
) -> None:
    server = MetricsServer(MetricsConfig(listen=f"unix:{socket_path}"), collector, 0o640)
    await server.open()
    assert mode_of(socket_path) == 0o640
    assert (await ask(server, b"GET /healthz HTTP/1.1\r\n\r\n"))[0] == 200
    other = MetricsServer(MetricsConfig(listen=f"unix:{socket_path}"), collector)
    with pytest.raises(ConfigError, match=r"metrics\.listen: another daemon listens"):
        await other.open()
    await server.close()
    assert mode_of(socket_path) is None


async def test_an_address_in_use_names_the_key(server: MetricsServer, collector: StoreCollector) -> None:
    other = MetricsServer(MetricsConfig(listen=server.address), collector)
    with pytest.raises(ConfigError, match=r"metrics\.listen: cannot bind 127\.0\.0\.1"):
        await other.open()


async def test_listening_to_the_world_is_said_aloud(collector: StoreCollector) -> None:
    server = MetricsServer(MetricsConfig(listen="0.0.0.0:0"), collector)
    with capture_logs() as lines:
        await server.open()
    await server.close()
    assert [line["log_level"] for line in lines] == ["warning", "info"]


async def test_nothing_is_served_unless_asked_for(collector: StoreCollector) -> None:
    server = MetricsServer(MetricsConfig(), collector)
    await server.open()
    assert server.address == ""
    await server.close()
