"""A running router: its HTTP front, its gRPC service and the tasks that follow its replicas, on one loop."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from random import SystemRandom
from typing import Any

import grpc
import structlog
import uvicorn

from kvstore.clock import MonotonicClock
from kvstore.errors import ConfigError
from kvstore.router.addresses import http_address
from kvstore.router.assembly import Parts, assemble
from kvstore.router.exposition import RouteCollector, page
from kvstore.router.front import Front
from kvstore.router.proxy import build_app
from kvstore.router.service import RoutingService
from kvstore.router.settings import RouteConfig, Settings
from kvstore.v1 import routing_pb2_grpc

__all__ = ["route"]

log = structlog.get_logger()

_ALARM_S = 10.0
_BACKLOG = 2048
# Answers that are under way when it is told to stop.
_GRACE_S = 30
# 2^20 tokens of a prompt are 5 MB.
_MESSAGE_BYTES_MAX = 8 << 20


async def route(settings: Settings, ready: Callable[[str, str], None] | None = None) -> None:
    """Serve until SIGTERM or SIGINT; requests under way are answered first, for 30 s at most.

    Args:
        settings: checked.
        ready: called with the addresses of the HTTP front and of gRPC ("" = not served) once both listen.

    Raises:
        ConfigError: an address cannot be bound, a file cannot be read.
    """
    clock = MonotonicClock()
    parts = assemble(settings, clock, SystemRandom())
    collector = RouteCollector(parts.deployments)
    made_of = Front(
        parts.deployments, parts.tokenizers, parts.door, clock, parts.keys, lambda: page(collector)
    )
    app = build_app(made_of, settings.proxy)
    sock = _bound(settings.route)
    service = RoutingService(made_of, parts.deployments, settings.route.report_s)
    server, grpc_address = await _grpc(settings.route, service)
    front = _Front(
        uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=_GRACE_S,
            ssl_certfile=settings.route.tls_certificate or None,
            ssl_keyfile=settings.route.tls_key or None,
        )
    )
    host, port = sock.getsockname()[:2]
    tasks = [asyncio.create_task(each) for each in (*parts.follow, service.sweep(), _alarms(parts))]
    for task in tasks:
        task.add_done_callback(lambda ended: _ended(ended, front))
    try:
        log.info("routing", http=f"{host}:{port}", grpc=grpc_address, policy=settings.route.policy)
        if ready is not None:
            ready(f"{host}:{port}", grpc_address)
        await front.serve(sockets=[sock])
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if server is not None:
            await server.stop(1.0)
        sock.close()


class _Front(uvicorn.Server):
    """A server that a signal ends in good order: uvicorn itself would raise it again at the end."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """See uvicorn. A second signal does not wait for answers that are under way."""
        loop = asyncio.get_running_loop()
        caught = (signal.SIGTERM, signal.SIGINT)
        for each in caught:
            loop.add_signal_handler(each, self._stop)
        try:
            yield
        finally:
            for each in caught:
                loop.remove_signal_handler(each)

    def _stop(self) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True


def _ended(task: asyncio.Task[None], front: uvicorn.Server) -> None:
    """A follower that fails is a bug: without it answers would be routed by what was once true."""
    if not task.cancelled() and task.exception() is not None:
        log.error("a task of the router failed", error=repr(task.exception()))
        front.should_exit = True


def _bound(config: RouteConfig) -> socket.socket:
    address = http_address(config.listen, "route.listen")
    try:
        family = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0][0]
        # With the protocol named asyncio turns Nagle's delay off: a small answer takes 1 ms instead of 44.
        sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((address.host, address.port))
        sock.listen(_BACKLOG)  # whoever connects from now on waits for a moment instead of being refused
    except OSError as error:
        raise ConfigError(f"route.listen: cannot listen on {config.listen}: {error.strerror}") from None
    return sock


async def _grpc(config: RouteConfig, service: RoutingService) -> tuple[Any, str]:
    """(server, address), or (None, "") when it is not wanted."""
    if not config.grpc:
        return None, ""
    credentials = _credentials(config)
    server = grpc.aio.server(
        options=[("grpc.max_receive_message_length", _MESSAGE_BYTES_MAX), ("grpc.so_reuseport", 0)]
    )
    routing_pb2_grpc.add_RoutingServicer_to_server(service, server)
    try:
        if credentials is not None:
            port = server.add_secure_port(config.grpc, credentials)
        else:
            port = server.add_insecure_port(config.grpc)
    except (RuntimeError, OSError) as error:
        raise ConfigError(f"route.grpc: cannot listen on {config.grpc}: {error}") from None
    await server.start()
    where = config.grpc if config.grpc.startswith("unix:") else f"{config.grpc.rpartition(':')[0]}:{port}"
    return server, where


def _credentials(config: RouteConfig) -> Any:
    if not config.tls_certificate or config.grpc.startswith("unix:"):
        return None
    try:
        pair = (Path(config.tls_key).read_bytes(), Path(config.tls_certificate).read_bytes())
    except OSError as error:
        raise ConfigError(f"route.tls_certificate, route.tls_key: {error}") from None
    return grpc.ssl_server_credentials([pair])


async def _alarms(parts: Parts) -> None:
    """Say once what is wrong, and once that it is over."""
    told: dict[tuple[str, str], str] = {}
    while True:
        await asyncio.sleep(_ALARM_S)
        for each in parts.deployments.all:
            for place, member in enumerate(each.router.members):
                now = {
                    "alarm": each.router.figures.alarm(place),
                    "blocks in doubt": each.router.holdings[place].doubt,
                }
                for what, why in now.items():
                    if bool(why) != bool(told.get((member.name, what))):
                        log.warning(what if why else f"{what}: over", replica=member.name, reason=why)
                    told[member.name, what] = why
