"""The server: where it listens and where it refuses to, health, reflection, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import stat
from pathlib import Path

import grpc
import msgspec
import pytest
from endpoint import Endpoint, Opener, configured, failure, opened, random_blocks
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvstore.config import Config, DaemonConfig
from kvstore.daemon import Daemon
from kvstore.errors import ConfigError
from kvstore.rpc.api.admission import SMALL_BYTES_MAX
from kvstore.rpc.endpoints import endpoints, free_endpoints
from kvstore.v1 import store_pb2 as pb
from kvstore.v1 import store_pb2_grpc as rpc

SERVICES = ["kvstore.v1.Admin", "kvstore.v1.Store"]


def listening(*flags: str) -> Config:
    return Config.load(None, {}, [f"grpc.{flag}" for flag in flags])


# ---- where ------------------------------------------------------------------------------------------------


def test_it_listens_beside_the_session_socket_unless_told_otherwise() -> None:
    config = Config.load(None, {}, ["daemon.socket=/run/kv/kvstore.sock"])
    assert [e.address for e in endpoints(config)] == ["unix:/run/kv/kvstore-grpc.sock"]
    relative = Config.load(None, {}, ["daemon.socket=here.sock"])
    assert [e.path for e in endpoints(relative)] == [Path.cwd() / "here-grpc.sock"]
    assert endpoints(listening("listen=")) == []
    several = endpoints(listening("listen=unix:/run/a.sock, unix:///run/b.sock"))
    assert [e.address for e in several] == ["unix:/run/a.sock", "unix:/run/b.sock"]


@pytest.mark.parametrize(
    ("listen", "why"),
    [
        ("127.0.0.1:7070", "plaintext TCP.*--set grpc.insecure_tcp=true"),
        ("[::1]:7070", "plaintext TCP.*--set grpc.insecure_tcp=true"),
        ("unix:relative.sock", "must be absolute"),
        ("unix:/" + "x" * 120, "at most 107 bytes"),
        ("somewhere", "neither unix:/path nor host:port"),
        ("host:99999", "neither unix:/path nor host:port"),
        ("unix:/a,unix:/a", "named twice"),
        (",".join(f"unix:/{n}" for n in range(17)), "more than 16"),
    ],
)
def test_addresses_that_are_refused(listen: str, why: str) -> None:
    with pytest.raises(ConfigError, match=rf"grpc\.listen.*{why}"):
        endpoints(listening(f"listen={listen}"))


def test_tcp_that_was_asked_for() -> None:
    config = listening("listen=0.0.0.0:7070", "insecure_tcp=true")
    assert [(e.address, e.path) for e in endpoints(config)] == [("0.0.0.0:7070", None)]


async def test_several_addresses_and_a_port_of_the_kernels_choice(socket_path: Path) -> None:
    config = configured(
        socket_path.parent, listen=f"unix:{socket_path.parent}/a.sock,127.0.0.1:0", insecure_tcp=True
    )
    async with opened(config) as endpoint:
        first, second = endpoint.server.addresses
        assert first == f"unix:{socket_path.parent}/a.sock"
        assert int(second.rpartition(":")[2]) > 0
        for address in (first, second):
            async with grpc.aio.insecure_channel(address) as channel:
                request = pb.PlanRequest(chain=endpoint.chain(range(8)))
                assert (await rpc.StoreStub(channel).Plan(request)).asked_blocks == 2
        taken = configured(socket_path.parent, listen=second, insecure_tcp=True)
        with pytest.raises(ConfigError, match="cannot bind"):
            async with opened(taken):
                pass


async def test_the_socket_has_the_mode_of_the_session_socket(socket_path: Path) -> None:
    config = configured(socket_path.parent)
    config = msgspec.structs.replace(config, daemon=DaemonConfig(socket=str(socket_path), socket_mode=0o640))
    path = socket_path.with_name("kv-grpc.sock")
    async with opened(config):
        assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert not path.exists()


async def test_a_dead_daemons_socket_is_removed_and_a_living_ones_is_not(socket_path: Path) -> None:
    path = socket_path.with_name("kv-grpc.sock")
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    config = configured(socket_path.parent)
    async with opened(config) as endpoint:
        assert (await endpoint.admin.Check(pb.CheckRequest())).ok
        with pytest.raises(ConfigError, match=r"grpc\.listen: another daemon listens"):
            free_endpoints(config)
        with pytest.raises(ConfigError, match=r"grpc\.listen: another daemon listens"):
            async with opened(config):
                pass
        assert (await endpoint.admin.Check(pb.CheckRequest())).ok
    path.write_text("not a socket")
    with pytest.raises(ConfigError, match="is not a socket"):
        free_endpoints(config)


async def test_a_daemon_refuses_before_it_makes_memory(socket_path: Path) -> None:
    async with opened(configured(socket_path.parent)):
        daemon = Daemon(configured(socket_path.parent))
        with pytest.raises(ConfigError, match=r"grpc\.listen: another daemon listens"):
            daemon.open()
        assert not daemon.store.groups


async def test_a_daemon_opens_and_closes_it(socket_path: Path) -> None:
    for listen, there in (("auto", True), ("", False)):
        daemon = Daemon(configured(socket_path.parent, listen=listen))
        daemon.open()
        daemon.listen(asyncio.get_running_loop())
        await daemon.open_api()
        assert socket_path.with_name("kv-grpc.sock").exists() == there
        if daemon.api is not None:  # one level of logs and one metric for both doors
            assert daemon.api.service is not None
            assert daemon.api.service.requests is daemon.sessions.requests
        await daemon.close_api()
        daemon.close()
        assert not list(socket_path.parent.glob("*.sock"))


# ---- standard services ------------------------------------------------------------------------------------


async def test_health(endpoint: Endpoint) -> None:
    health = health_pb2_grpc.HealthStub(endpoint.channel)
    for name in ("", *SERVICES):
        reply = await health.Check(health_pb2.HealthCheckRequest(service=name))
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
    with pytest.raises(grpc.aio.AioRpcError):
        await health.Check(health_pb2.HealthCheckRequest(service="another"))
    watch = health.Watch(health_pb2.HealthCheckRequest(service=SERVICES[1]))
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
    closing = asyncio.create_task(endpoint.server.close())
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
    watch.cancel()
    await closing


async def test_reflection_describes_everything(endpoint: Endpoint) -> None:
    async def ask(request: reflection_pb2.ServerReflectionRequest) -> reflection_pb2.ServerReflectionResponse:
        stub = reflection_pb2_grpc.ServerReflectionStub(endpoint.channel)
        async for reply in stub.ServerReflectionInfo(iter([request])):
            return reply
        raise AssertionError("no answer")

    listed = await ask(reflection_pb2.ServerReflectionRequest(list_services=""))
    names = sorted(service.name for service in listed.list_services_response.service)
    assert names == ["grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection", *SERVICES]
    for service in SERVICES:
        found = await ask(reflection_pb2.ServerReflectionRequest(file_containing_symbol=service))
        raw = found.file_descriptor_response.file_descriptor_proto
        files = [descriptor_pb2.FileDescriptorProto.FromString(data) for data in raw]
        described = next(f for f in files if f.package == "kvstore.v1")
        assert described == descriptor_pb2.FileDescriptorProto.FromString(pb.DESCRIPTOR.serialized_pb)


METHODS = [
    (f"/{service.full_name}/{method.name}", method.client_streaming or method.server_streaming)
    for service in pb.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]


@pytest.mark.parametrize(("path", "streams"), METHODS, ids=[path for path, _ in METHODS])
async def test_bytes_that_are_no_message(endpoint: Endpoint, path: str, streams: bool) -> None:
    garbage = b"\xff\xff\xff"
    call = (
        endpoint.channel.stream_stream(path)(iter([garbage])).read()
        if streams
        else endpoint.channel.unary_unary(path)(garbage)
    )
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "request: not a message" in caught.value.details()
    await endpoint.settle()


GUESTS = ["/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"]
SMALL_ONES = [
    (path, streams)
    for path, streams in [
        *METHODS,
        *((path, path.endswith("Watch")) for path in GUESTS),
        ("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", True),
    ]
    if path.rpartition("/")[2] not in ("Lookup", "Plan", "Fetch", "Save")
]


@pytest.mark.parametrize(("path", "streams"), SMALL_ONES, ids=[path for path, _ in SMALL_ONES])
async def test_what_needs_little_takes_little(endpoint: Endpoint, path: str, streams: bool) -> None:
    """A field that nobody knows, as long as a message may be: valid, and not even parsed."""
    huge = b"\x7a" + b"\x80\x80\x04" + bytes(SMALL_BYTES_MAX)
    call = (
        endpoint.channel.stream_stream(path)(iter([huge])).read()
        if streams
        else endpoint.channel.unary_unary(path)(huge)
    )
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert f"takes at most {SMALL_BYTES_MAX}" in caught.value.details()
    await endpoint.settle()


async def test_standard_services_refuse_garbage_as_ours_do(endpoint: Endpoint) -> None:
    for path in GUESTS:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await endpoint.channel.unary_stream(path)(b"\xff\xff\xff").read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("path", [SMALL_ONES[-1][0], GUESTS[1]])
async def test_streams_of_standard_services_do_not_take_all_calls(opening: Opener, path: str) -> None:
    async with opening(calls_max=16) as endpoint:
        # To a reflection stream this lists the services, to a watch it is a name.
        request = reflection_pb2.ServerReflectionRequest(list_services="*").SerializeToString()
        open_ones = []
        for _ in range(2):
            call = endpoint.channel.stream_stream(path)()
            await call.write(request)
            assert await call.read()
            open_ones.append(call)
        for _ in range(20):
            one_more = endpoint.channel.stream_stream(path)(iter([request]))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await one_more.read()
            assert failure(caught.value).code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert f"2 of {path} are open" in failure(caught.value).message
        assert (await endpoint.plan(endpoint.chain(range(8)))).asked_blocks == 2
        open_ones.pop().cancel()
        assert await reopened(endpoint, path, request)
        for call in open_ones:
            call.cancel()


async def reopened(endpoint: Endpoint, path: str, request: bytes) -> bytes:
    """The first answer of a stream, once the daemon has noticed that another has ended."""
    async with asyncio.timeout(20):
        while True:
            call = endpoint.channel.stream_stream(path)(iter([request]))
            with contextlib.suppress(grpc.aio.AioRpcError):
                return bytes(await call.read())


# ---- the end ----------------------------------------------------------------------------------------------


async def test_a_stop_lets_calls_end_and_then_ends_them(opening: Opener) -> None:
    async with opening(stop_s=0.1, stall_s=600.0) as endpoint:
        chain = endpoint.chain(range(12_000))
        await endpoint.save(chain, random_blocks(1, 3000))
        await endpoint.look_up(chain)
        stalled = endpoint.store.Fetch(pb.FetchRequest(chain=chain))
        await stalled.read()
        service = endpoint.service
        assert service.streams == 1
        async with asyncio.timeout(20):
            await endpoint.server.close()
        assert (service.streams, len(service.holdings)) == (0, 0)
        assert not endpoint.driver.group().leases.pins()
        endpoint.sound()
        stalled.cancel()
