"""Every call of both services, end to end over TLS: who shows which token, and what becomes of it."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import trustme
from fake_engine import SMALL
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
EVERYTHING = '"read", "write", "admin"'
# token → tenants, verbs, the rest of its entry
TOKENS = {
    "owners": ('"*"', EVERYTHING, ""),
    "expired": ('"*"', EVERYTHING, "expires = 2020-01-01\n"),
    "bobs": ('"bob"', EVERYTHING, ""),
    "readers": ('"alice"', '"read"', ""),
}
TENANTS = '[[tenants]]\nname = "alice"\n\n[[tenants]]\nname = "bob"\n'
BLOCKS = 4
STREAMS_MAX = 4
BYTES = np.random.default_rng(1).bytes(BLOCKS * SMALL.block_bytes)
UNKNOWN = ("", "expired", "nobodys")


def expected(token: str, method: str) -> grpc.StatusCode:
    """How a call in alice's name ends."""
    if token in UNKNOWN:
        return CODE.UNAUTHENTICATED
    if token == "readers" and method == "Subscribe":
        return CODE.PERMISSION_DENIED  # events tell of the whole trust group, and bob is in it
    if token == "bobs" or (token == "readers" and NEEDS[method] != "read"):
        return CODE.PERMISSION_DENIED
    return CODE.OK


class Place:
    """A daemon with blocks of alice, and callers over TLS."""

    def __init__(self, folder: Path, channel: grpc.Channel, daemon: RealDaemon) -> None:
        self.folder = folder
        self.daemon = daemon
        self.channel = channel
        self.store = rpc.StoreStub(channel)
        self.admin = rpc.AdminStub(channel)

    def lease(self) -> bytes:
        """One of alice's."""
        request = pb.LookupRequest(chain=chain())
        found = self.store.Lookup(request, metadata=bearer("owners"), timeout=WAIT_S)
        assert found.blocks == BLOCKS
        return bytes(found.lease)

    def held(self) -> dict[str, int]:
        """Leases, streams and subscribers that the API has."""
        report = self.admin.Status(pb.StatusRequest(), metadata=bearer("owners"), timeout=WAIT_S).report
        return {name: int(report["grpc"][name]) for name in ("leases", "streams", "subscribers")}

    def code(self, path: str, messages: list[bytes], token: str) -> grpc.StatusCode:
        """How a call ends; of one that never ends by itself the first answer is enough. It keeps no lease."""
        metadata = bearer(token) if token else ()
        call = self.channel.stream_stream(path)(iter(messages), metadata=metadata, timeout=WAIT_S)
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


def chain(tenant: str = "alice") -> pb.Chain:
    fields: dict[str, Any] = namespace_of(SMALL, "model")
    fields["block_tokens"] = int(fields["block_tokens"])
    layout = pb.Layout(
        layers=SMALL.layers,
        kv_heads=SMALL.kv_heads,
        head_dim=SMALL.head_dim,
        dtype=SMALL.dtype,
        block_tokens=SMALL.block_tokens,
    )
    tokens = pb.Tokens(ids=range(BLOCKS * SMALL.block_tokens))
    return pb.Chain(tenant=tenant, namespace=pb.Namespace(**fields), layout=layout, tokens=tokens)


def messages(method: str, lease: bytes) -> list[bytes]:
    """A call in alice's name that would succeed."""
    other = namespace_of(SMALL, "another model")
    fields: dict[str, Any] = {**other, "block_tokens": int(other["block_tokens"])}
    requests: dict[str, list[Any]] = {
        "Lookup": [pb.LookupRequest(chain=chain())],
        "Plan": [pb.PlanRequest(chain=chain())],
        "Fetch": [pb.FetchRequest(lease=lease)],
        "Save": [
            pb.SaveRequest(header=pb.SaveHeader(chain=chain())),
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
        f"tenants = [{tenants}]\nverbs = [{verbs}]\n{more}"
        for token, (tenants, verbs, more) in TOKENS.items()
    ]
    (folder / "tokens.toml").write_text("\n".join(entries))
    settings = {
        "grpc.listen": '"127.0.0.1:0"',
        "grpc.tls_certificate": f'"{folder / "cert.pem"}"',
        "grpc.tls_key": f'"{folder / "key.pem"}"',
        "grpc.tokens_file": f'"{folder / "tokens.toml"}"',
        "grpc.streams_max": str(STREAMS_MAX),
    }
    daemon = RealDaemon(folder, settings, TENANTS)
    try:
        daemon.start()

        def serves() -> list[str]:
            return [line for line in daemon.log.read_text().splitlines() if '"kvstore serves"' in line]

        (said,) = eventually(serves, "it says where it listens")
        (address,) = json.loads(said)["grpc"]
        credentials = grpc.ssl_channel_credentials(authority.cert_pem.bytes())
        with grpc.secure_channel(address, credentials) as channel:
            place = Place(folder, channel, daemon)
            assert place.code("/kvstore.v1.Store/Save", messages("Save", b""), "owners") is CODE.OK
            yield place
        daemon.assert_quiet()
        assert daemon.end() == 0, daemon.said()
    finally:
        daemon.close()


def test_no_call_is_forgotten() -> None:
    assert NEEDS.keys() == {method.name for method in METHODS.values()}
    assert set(NEEDS.values()) == {"read", "write", "admin"}


@pytest.mark.parametrize("token", [*UNKNOWN, *(token for token in TOKENS if token not in UNKNOWN)])
@pytest.mark.parametrize("path", METHODS)
def test_each_token_at_each_call(place: Place, path: str, token: str) -> None:
    """Case 33: expired, wrong-tenant, read-only, missing and unknown tokens each get the right status."""
    lease, method = place.lease(), METHODS[path].name
    before = place.held()
    wanted = expected(token, method)
    assert place.code(path, messages(method, lease), token) is wanted
    if wanted is not CODE.OK:
        assert place.held() == before, "a call that is refused holds and ends nothing"
    if wanted is not CODE.OK or method != "Release":
        place.release(lease)
    eventually(lambda: not any(place.held().values()), "nothing is held")


@pytest.mark.parametrize("token", UNKNOWN)
@pytest.mark.parametrize("path", METHODS)
def test_who_is_not_known_learns_nothing_of_leases_and_limits(place: Place, path: str, token: str) -> None:
    """Not what is wrong with a request, not whether there is such a lease, not how long one lives."""
    for asked in ([b""], messages(METHODS[path].name, bytes(16))):
        assert place.code(path, asked, token) is CODE.UNAUTHENTICATED, asked


@pytest.mark.parametrize("token", UNKNOWN)
@pytest.mark.parametrize("path", METHODS)
def test_nothing_is_parsed_for_who_is_not_known(place: Place, path: str, token: str) -> None:
    """Reading a message costs the loop up to 15 ns a byte."""
    for message in (b"\xff\xff\xff", b"\x7a\x80\x80\x08" + bytes(1 << 17)):
        assert place.code(path, [message], token) is CODE.UNAUTHENTICATED


def test_who_is_not_known_takes_no_stream_from_others(place: Place) -> None:
    """Calls that never come to the point, as many as there may be streams, and a few more."""
    method = place.channel.stream_stream("/kvstore.v1.Store/Save")
    with contextlib.ExitStack() as stack:
        for token in (*UNKNOWN, "") * STREAMS_MAX:
            metadata = bearer(token) if token else ()
            call = method(Silence(stack), metadata=metadata, timeout=WAIT_S)
            stack.callback(call.cancel)
        for _ in range(5):
            code = place.code("/kvstore.v1.Store/Save", messages("Save", b""), "owners")
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
