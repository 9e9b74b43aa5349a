"""Every call of every service, over TLS and over a Unix socket that asks for tokens, too: who shows which
token, and what becomes of it."""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import grpc
import numpy as np
import pytest
import trustme
from fake_engine import SMALL
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from real_daemon import WAIT_S, RealDaemon, eventually

from kvstore.config.tokens import digest_of
from kvstore.testing.driver import namespace_of
from kvstore.v1 import store_pb2 as pb
from kvstore.v1 import store_pb2_grpc as rpc

CODE = grpc.StatusCode
METHODS = {
    f"/{service.full_name}/{method.name}": method
    for service in pb.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
# What a token must allow. A call that is not here fails `test_no_call_is_forgotten`.
NEEDS = dict.fromkeys(("Lookup", "Plan", "Fetch", "Renew", "Release", "Observe", "Subscribe"), "read")
NEEDS |= {"Save": "write"} | dict.fromkeys(("Status", "Check", "Flush", "DropNamespace"), "admin")
# What tells whoever reaches an address how the daemon is, and which calls there are; of tenants nothing.
STANDARD = {
    f"/{service.full_name}/{method.name}": method
    for file in (health_pb2, reflection_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
EVERYTHING = ("read", "write", "admin")
# token → tenant, verbs, the rest of its entry
TOKENS: dict[str, tuple[str, tuple[str, ...], str]] = {
    "owners": ("*", EVERYTHING, ""),
    "expired": ("*", EVERYTHING, "expires = 2020-01-01\n"),
    "bobs": ("bob", EVERYTHING, ""),
    "readers": ("alice", ("read",), ""),
    "alices": ("alice", EVERYTHING, ""),
    # For any tenant, so that nothing but the verb is in the way.
    "listeners": ("*", ("read",), ""),
    "writers": ("*", ("write",), ""),
    "admins": ("*", ("admin",), ""),
}
TENANTS = '[[tenants]]\nname = "alice"\n\n[[tenants]]\nname = "bob"\n'
BLOCKS = 4
STREAMS_MAX = 4
BYTES = np.random.default_rng(1).bytes(BLOCKS * SMALL.block_bytes)
UNKNOWN = ("", "expired", "nobodys")
DOORS = ("tls", "unix")


def expected(token: str, method: str) -> grpc.StatusCode:
    """How a call in alice's name ends."""
    if token in UNKNOWN:
        return CODE.UNAUTHENTICATED
    tenant, verbs, _ = TOKENS[token]
    if tenant == "alice" and method in ("Subscribe", "Status", "Check", "Flush"):
        return CODE.PERMISSION_DENIED  # they tell of the whole trust group, or the daemon; bob is in it
    return CODE.OK if tenant in ("alice", "*") and NEEDS[method] in verbs else CODE.PERMISSION_DENIED


class Place:
    """A daemon with blocks of alice, and callers at each of its doors."""

    def __init__(self, channels: Mapping[str, grpc.Channel], daemon: RealDaemon) -> None:
        self.daemon = daemon
        self.channels = channels
        self.store = rpc.StoreStub(channels["tls"])
        self.admin = rpc.AdminStub(channels["tls"])

    def lease(self) -> bytes:
        """One of alice's."""
        request = pb.LookupRequest(chain=chain())
        found = self.store.Lookup(request, metadata=bearer("owners"), timeout=WAIT_S)
        assert found.blocks == BLOCKS
        return bytes(found.lease)

    def held(self) -> dict[str, int]:
        """Leases, streams and subscribers that the API has, and slots that are being filled."""
        report = self.admin.Status(pb.StatusRequest(), metadata=bearer("owners"), timeout=WAIT_S).report
        counts = {name: int(report["grpc"][name]) for name in ("leases", "streams", "subscribers")}
        return counts | {"filling": int(self.daemon.group()["host"]["filling"])}

    def ready(self) -> int:
        """Blocks that can be found, of whatever tenant."""
        return int(self.daemon.group()["host"]["ready"])

    def answer(self, path: str, message: bytes, token: str, door: str) -> tuple[grpc.StatusCode, bytes]:
        """How a call goes: its first answer is enough."""
        method = self.channels[door].stream_stream(path)
        call = method(iter([message]), metadata=shown(token), timeout=WAIT_S)
        try:
            first: bytes = next(call)
        except grpc.RpcError as error:
            return error.code(), b""
        call.cancel()
        return CODE.OK, first

    def code(self, path: str, messages: list[bytes], token: str, door: str = "tls") -> grpc.StatusCode:
        """How a call ends; of one that never ends by itself the first answer is enough. It keeps no lease."""
        method = self.channels[door].stream_stream(path)
        call = method(iter(messages), metadata=shown(token), timeout=WAIT_S)
        try:
            for reply in call:
                if path.endswith("/Lookup"):
                    self.release(pb.LookupResponse.FromString(reply).lease)
                if path.endswith("/Subscribe"):
                    call.cancel()
                    return CODE.OK
        except grpc.RpcError as error:
            found: grpc.StatusCode = error.code()
            return found
        ended: grpc.StatusCode = call.code()
        return ended

    def release(self, lease: bytes) -> None:
        """By its owner."""
        self.store.Release(pb.ReleaseRequest(lease=lease), metadata=bearer("owners"), timeout=WAIT_S)


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


def shown(token: str) -> tuple[tuple[str, str], ...]:
    return bearer(token) if token else ()


def chain(first_token: int = 0) -> pb.Chain:
    """A prompt of alice's; each `first_token` is another one."""
    fields: dict[str, Any] = namespace_of(SMALL, "model")
    fields["block_tokens"] = int(fields["block_tokens"])
    layout = pb.Layout(
        layers=SMALL.layers,
        kv_heads=SMALL.kv_heads,
        head_dim=SMALL.head_dim,
        dtype=SMALL.dtype,
        block_tokens=SMALL.block_tokens,
    )
    tokens = pb.Tokens(ids=range(first_token, first_token + BLOCKS * SMALL.block_tokens))
    return pb.Chain(tenant="alice", namespace=pb.Namespace(**fields), layout=layout, tokens=tokens)


FRESH = itertools.count(1_000_000, 1_000)


def messages(method: str, lease: bytes) -> list[bytes]:
    """A call in alice's name that would succeed; a Save is of blocks that nobody has saved."""
    other = namespace_of(SMALL, "another model")
    fields: dict[str, Any] = {**other, "block_tokens": int(other["block_tokens"])}
    requests: dict[str, list[Any]] = {
        "Lookup": [pb.LookupRequest(chain=chain())],
        "Plan": [pb.PlanRequest(chain=chain())],
        "Fetch": [pb.FetchRequest(lease=lease)],
        "Save": [
            pb.SaveRequest(header=pb.SaveHeader(chain=chain(next(FRESH)))),
            pb.SaveRequest(data=pb.SaveData(data=BYTES)),
        ],
        "Renew": [pb.RenewRequest(leases=[lease])],
        "Release": [pb.ReleaseRequest(lease=lease)],
        "Observe": [pb.ObserveRequest(tenant="alice")],
        "Subscribe": [pb.SubscribeRequest(tenant="alice")],
        "DropNamespace": [pb.DropNamespaceRequest(namespace=pb.Namespace(**fields), tenant="alice")],
    }
    return [request.SerializeToString() for request in requests.get(method, [pb.StatusRequest()])]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("t")
    authority = trustme.CA()
    made = authority.issue_cert("127.0.0.1")
    for name in ("key.pem", "tokens.toml"):
        (folder / name).touch(mode=0o600)
    made.private_key_pem.write_to_path(folder / "key.pem")
    made.cert_chain_pems[0].write_to_path(folder / "cert.pem")
    entries = [
        f'[[tokens]]\nname = "{token}"\nsha256 = "{digest_of(token)}"\n'
        f'tenants = ["{tenant}"]\nverbs = {json.dumps(verbs)}\n{more}'
        for token, (tenant, verbs, more) in TOKENS.items()
    ]
    (folder / "tokens.toml").write_text("\n".join(entries))
    settings = {
        "grpc.listen": '"auto,127.0.0.1:0"',
        "grpc.tls_certificate": f'"{folder / "cert.pem"}"',
        "grpc.tls_key": f'"{folder / "key.pem"}"',
        "grpc.tokens_file": f'"{folder / "tokens.toml"}"',
        "grpc.tokens_on_unix": "true",
        "grpc.streams_max": str(STREAMS_MAX),
    }
    daemon = RealDaemon(folder, settings, TENANTS)
    try:
        daemon.start()

        def serves() -> list[str]:
            return [line for line in daemon.log.read_text().splitlines() if '"kvstore serves"' in line]

        (said,) = eventually(serves, "it says where it listens")
        unix, tls = json.loads(said)["grpc"]
        credentials = grpc.ssl_channel_credentials(authority.cert_pem.bytes())
        with grpc.secure_channel(tls, credentials) as wrapped, grpc.insecure_channel(unix) as plain:
            place = Place({"tls": wrapped, "unix": plain}, daemon)
            header = pb.SaveRequest(header=pb.SaveHeader(chain=chain()))
            asked = (header, pb.SaveRequest(data=pb.SaveData(data=BYTES)))
            saved = place.store.Save(iter(asked), metadata=bearer("owners"), timeout=WAIT_S)
            assert saved.ready == BLOCKS
            yield place
        daemon.assert_quiet()
        assert daemon.end() == 0, daemon.said()
    finally:
        daemon.close()


ALL_TOKENS = [*UNKNOWN, *(token for token in TOKENS if token not in UNKNOWN)]


def test_no_call_is_forgotten(place: Place) -> None:
    """Neither of ours, nor of a service that the server has besides."""
    assert NEEDS.keys() == {method.name for method in METHODS.values()}
    assert set(NEEDS.values()) == {"read", "write", "admin"}
    assert {verbs for _, verbs, _ in TOKENS.values()} >= {("read",), ("write",), ("admin",), EVERYTHING}
    services = {path.split("/")[1] for path in (*METHODS, *STANDARD)}
    stub = reflection_pb2_grpc.ServerReflectionStub(place.channels["tls"])
    asked = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
    (reply,) = stub.ServerReflectionInfo(asked, timeout=WAIT_S)
    assert {service.name for service in reply.list_services_response.service} == services


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("token", ALL_TOKENS)
@pytest.mark.parametrize("path", METHODS)
def test_each_token_at_each_call(place: Place, path: str, token: str, door: str) -> None:
    """Case 33: expired, wrong-tenant, one-verb, missing and unknown tokens each get the right status."""
    lease, method = place.lease(), METHODS[path].name
    before, ready = place.held(), place.ready()
    wanted = expected(token, method)
    assert place.code(path, messages(method, lease), token, door) is wanted
    if wanted is not CODE.OK:
        assert place.held() == before, "a call that is refused holds and ends nothing"
    if wanted is not CODE.OK or method != "Release":
        place.release(lease)
    eventually(lambda: not any(place.held().values()), "nothing is held")
    saved = BLOCKS if wanted is CODE.OK and method == "Save" else 0
    assert place.ready() == ready + saved, "blocks become readable by saves that are let in, and by no others"


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("token", ["", "nobodys", "bobs", "owners"])
def test_standard_services_tell_everybody_the_same(place: Place, token: str, door: str) -> None:
    """How the daemon is and which services it has: who needs no token for that learns no tenant by it."""
    asked = {"ServerReflectionInfo": reflection_pb2.ServerReflectionRequest(list_services="")}
    for path, method in STANDARD.items():
        request = asked.get(method.name, health_pb2.HealthCheckRequest()).SerializeToString()
        told = place.answer(path, request, token, door)
        assert told == place.answer(path, request, "owners", "tls"), path
        # What a later version of the health service has is not answered by an earlier one.
        assert told[0] is CODE.OK or (method.name, told[0]) == ("List", CODE.UNIMPLEMENTED), path
        assert b"alice" not in told[1] and b"bob" not in told[1], path


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("token", UNKNOWN)
@pytest.mark.parametrize("path", METHODS)
def test_who_is_not_known_learns_nothing_of_leases_and_limits(
    place: Place, path: str, token: str, door: str
) -> None:
    """Not what is wrong with a request, not whether there is such a lease, not how long one lives."""
    for asked in ([b""], messages(METHODS[path].name, bytes(16))):
        assert place.code(path, asked, token, door) is CODE.UNAUTHENTICATED, asked


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("token", UNKNOWN)
@pytest.mark.parametrize("path", METHODS)
def test_nothing_is_parsed_for_who_is_not_known(place: Place, path: str, token: str, door: str) -> None:
    """Reading a message costs the loop up to 15 ns a byte."""
    for message in (b"\xff\xff\xff", b"\x7a\x80\x80\x08" + bytes(1 << 17)):
        assert place.code(path, [message], token, door) is CODE.UNAUTHENTICATED


@pytest.mark.parametrize("door", DOORS)
def test_who_is_not_known_takes_no_stream_from_others(place: Place, door: str) -> None:
    """Calls that never come to the point, as many as there may be streams, and a few more."""
    method = place.channels[door].stream_stream("/kvstore.v1.Store/Save")
    with contextlib.ExitStack() as stack:
        for token in (*UNKNOWN, "") * STREAMS_MAX:
            call = method(Silence(stack), metadata=shown(token), timeout=WAIT_S)
            stack.callback(call.cancel)
        for _ in range(5):
            code = place.code("/kvstore.v1.Store/Save", messages("Save", b""), "owners", door)
            assert code is CODE.OK, "a known caller saves meanwhile"
    eventually(lambda: not any(place.held().values()), "nothing is held")


class Silence:
    """Requests that never come, until the stack is left."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._over = threading.Event()
        stack.callback(self._over.set)

    def __iter__(self) -> Silence:
        return self

    def __next__(self) -> bytes:
        self._over.wait(WAIT_S)
        raise StopIteration
