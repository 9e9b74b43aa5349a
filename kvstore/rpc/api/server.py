"""The gRPC server: addresses, limits, health, reflection, and an orderly end."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import grpc
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection

from kvstore.checks import Checks
from kvstore.config.tokens import Tokens
from kvstore.errors import ConfigError
from kvstore.rpc.api.access import Access, TokenAccess
from kvstore.rpc.api.admin import AdminService
from kvstore.rpc.api.admission import BytesCheck, StandardServices
from kvstore.rpc.api.copies import Copies
from kvstore.rpc.api.doors import access_of, credentials_of
from kvstore.rpc.api.service import StoreService
from kvstore.rpc.endpoints import Endpoint, endpoints
from kvstore.rpc.request_log import RequestLog
from kvstore.rpc.server import free_path
from kvstore.store import Store
from kvstore.v1 import store_pb2, store_pb2_grpc

__all__ = ["GrpcServer"]

log = structlog.get_logger()

# A peer that vanished without a word is noticed within 40 s; one that pings more often is told to stop.
KEEPALIVE_MS, KEEPALIVE_TIMEOUT_MS, PING_INTERVAL_MS = 30_000, 10_000, 5_000
HANDSHAKE_MS = 10_000  # who begins TLS and stops is shown out then; gRPC's own 120 s keep many of them
METADATA_BYTES_MAX = 16 << 10
SERVICES = tuple(service.full_name for service in store_pb2.DESCRIPTOR.services_by_name.values())


class GrpcServer:
    """The public API of one store, on the running loop.

    Args:
        access: who may do what; None = as the configuration says.
        requests: takes a line for each call; None = one of its own.
        checks: of the store, shared with whoever owns them; None = its own.
    """

    def __init__(
        self,
        store: Store,
        access: Access | None = None,
        requests: RequestLog | None = None,
        checks: Checks | None = None,
    ) -> None:
        self._requests = requests or RequestLog(store.clock, every=store.config.daemon.log_level == "debug")
        self._store = store
        self._shared_checks = checks
        self._limits = store.config.grpc
        self._access = access or access_of(store.config.grpc)
        self._credentials = credentials_of(store.config.grpc)
        self._server: grpc.aio.Server | None = None
        self._copies: Copies | None = None
        self._checks: Checks | None = None
        self.service: StoreService | None = None
        self._health = health_aio.HealthServicer()
        self._inodes: dict[Path, int] = {}
        self.addresses: list[str] = []
        """Where it listens, with the port that the kernel chose for port 0."""

    async def open(self) -> None:
        """Bind every address and serve.

        Raises:
            ConfigError: an address is in use or cannot be bound; nothing is left open.
        """
        limits = self._limits
        self._copies = Copies(asyncio.get_running_loop(), limits.copy_threads, limits.buffer_bytes_max)
        self.service = StoreService(self._store, self._copies, self._access, self._requests)
        server = self._server = grpc.aio.server(
            interceptors=(BytesCheck(limits.message_bytes_max), StandardServices(limits.calls_max)),
            maximum_concurrent_rpcs=limits.calls_max,
            options=(
                ("grpc.max_receive_message_length", limits.message_bytes_max),
                ("grpc.max_concurrent_streams", limits.calls_max),
                ("grpc.max_metadata_size", METADATA_BYTES_MAX),
                ("grpc.so_reuseport", 0),  # a second daemon on the port is an error, not a coin toss
                ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
                ("grpc.keepalive_time_ms", KEEPALIVE_MS),
                ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
                ("grpc.http2.min_recv_ping_interval_without_data_ms", PING_INTERVAL_MS),
            ),
        )
        store_pb2_grpc.add_StoreServicer_to_server(self.service, server)
        self._checks = self._shared_checks or Checks(self._store, asyncio.get_running_loop())
        admin = AdminService(self._store, self.service, self._access, self._checks)
        store_pb2_grpc.add_AdminServicer_to_server(admin, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = (
            *SERVICES,
            health_pb2.DESCRIPTOR.services_by_name["Health"].full_name,
            reflection.SERVICE_NAME,
        )
        reflection.enable_server_reflection(names, server)
        try:
            for endpoint in endpoints(self._store.config):
                self._bind(server, endpoint)
            await server.start()
        except BaseException:  # whatever it was, no socket stays open
            await self.close()
            raise
        for name in ("", *SERVICES):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)

    def _bind(self, server: grpc.aio.Server, endpoint: Endpoint) -> None:
        mode = self._store.config.daemon.socket_mode
        if endpoint.path is not None:
            free_path(endpoint.path, "grpc.listen")
        previous = os.umask(0o777 & ~mode)
        try:
            port = self._add(server, endpoint)
        except RuntimeError as error:
            raise ConfigError(f"grpc.listen: cannot bind {endpoint.address}: {error}") from None
        finally:
            os.umask(previous)
        if endpoint.path is None:
            host = endpoint.address.rpartition(":")[0]
            self.addresses.append(f"{host}:{port}")
            self._warn(self.addresses[-1])
        else:
            self._inodes[endpoint.path] = endpoint.path.stat().st_ino
            self.addresses.append(endpoint.address)

    def _add(self, server: grpc.aio.Server, endpoint: Endpoint) -> int:
        if endpoint.path is None and self._credentials is not None:
            return int(server.add_secure_port(endpoint.address, self._credentials))
        return int(server.add_insecure_port(endpoint.address))

    def _warn(self, address: str) -> None:
        limits = self._limits
        if not limits.tokens_file and not limits.tls_clients:
            log.warning("TCP without a door: whoever reaches it may act as any tenant", address=address)
        elif self._credentials is None:
            log.warning("tokens over plaintext: whoever listens on the way has them", address=address)

    def take_tokens(self, tokens: Tokens | None) -> None:
        """The configuration was read again: from now on these tokens are known (None: as before).

        Calls under way go on, but for subscriptions, which have no end: those of callers who may not
        subscribe any more end.
        """
        if tokens is not None and isinstance(self._access, TokenAccess):
            self._access.tokens = tokens
        if self.service is not None:
            self.service.check_subscribers()

    async def close(self) -> None:
        """Tell health watchers, let calls end within `grpc.stop_s`, then cancel them; unpin everything."""
        await self._health.enter_graceful_shutdown()
        if self.service is not None:
            self.service.stop()
        if self._server is not None:
            await self._server.stop(self._limits.stop_s)
            self._server = None
        for path, inode in self._inodes.items():  # another daemon may have taken the path over
            if path.exists() and path.stat().st_ino == inode:
                path.unlink()
        self._inodes.clear()
        self.addresses.clear()
        if self._checks is not None and self._checks is not self._shared_checks:
            self._checks.close()
        self._checks = None
        if self.service is not None:
            await self.service.settle()
            self.service = None
        if self._copies is not None:
            await self._copies.close()
            self._copies = None
