"""TLS, client certificates and bearer tokens at a real server: who gets in, and with which status not."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from endpoint import Endpoint, configured, failure, opened, random_blocks, save_messages

from kvstore.config import TenantConfig
from kvstore.config.tokens import Tokens, digest_of
from kvstore.errors import ConfigError
from kvstore.rpc.api.doors import credentials_of
from kvstore.v1 import store_pb2 as pb
from kvstore.v1 import store_pb2_grpc as rpc

CODE = grpc.StatusCode
TENANTS = (TenantConfig(name="alice"), TenantConfig(name="bob"))


def entry(token: str, tenants: str, verbs: str, more: str = "") -> str:
    return (
        f'[[tokens]]\nname = "{token}"\nsha256 = "{digest_of(token)}"\n'
        f"tenants = [{tenants}]\nverbs = [{verbs}]\n{more}\n"
    )


TOKENS = (
    entry("reader", '"alice"', '"read"')
    + entry("writer", '"alice"', '"read", "write"')
    + entry("ops", '"*"', '"admin"')
    + entry("old", '"*"', '"read", "write", "admin"', "expires = 2020-01-01")
)


@dataclass
class Papers:
    """An authority, the server's files, and what its callers need."""

    folder: Path
    authority: trustme.CA

    def issue(self) -> None:
        """A certificate for the server, in place of the one before."""
        made = self.authority.issue_cert("127.0.0.1", "localhost")
        for name, data in (
            ("cert.pem", b"".join(blob.bytes() for blob in made.cert_chain_pems)),
            ("key.pem", made.private_key_pem.bytes()),
            ("ca.pem", self.authority.cert_pem.bytes()),
        ):
            fresh = self.folder / f"{name}.new"
            fresh.touch(mode=0o600)
            fresh.write_bytes(data)
            fresh.replace(self.folder / name)

    def config(self, **more: Any) -> dict[str, Any]:
        """Of grpc."""
        return {
            "listen": "auto,127.0.0.1:0",
            "tls_certificate": str(self.folder / "cert.pem"),
            "tls_key": str(self.folder / "key.pem"),
            **more,
        }

    def tokens(self, text: str = TOKENS) -> str:
        """The file's name."""
        path = self.folder / "tokens.toml"
        path.touch(mode=0o600)
        path.write_text(text)
        return str(path)

    def caller(self, authority: trustme.CA | None = None) -> grpc.ChannelCredentials:
        """Credentials of a caller, with a certificate of an authority."""
        if authority is None:
            return grpc.ssl_channel_credentials(self.authority.cert_pem.bytes())
        made = authority.issue_cert("caller@example.org")
        return grpc.ssl_channel_credentials(
            self.authority.cert_pem.bytes(), made.private_key_pem.bytes(), made.cert_chain_pems[0].bytes()
        )


@pytest.fixture
def papers(tmp_path: Path) -> Papers:
    made = Papers(tmp_path, trustme.CA())
    made.issue()
    return made


@contextlib.asynccontextmanager
async def calling(
    endpoint: Endpoint, credentials: grpc.ChannelCredentials | None
) -> AsyncIterator[grpc.aio.Channel]:
    address = endpoint.server.addresses[1]
    channel = (
        grpc.aio.insecure_channel(address)
        if credentials is None
        else grpc.aio.secure_channel(address, credentials)
    )
    async with channel:
        yield channel


async def code_of(call: Callable[[], Any]) -> grpc.StatusCode:
    try:
        await call()
    except grpc.aio.AioRpcError as error:
        return error.code()
    return CODE.OK


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


async def test_each_token_opens_what_it_says(socket_path: Path, papers: Papers) -> None:
    """Case 33: expired, wrong-tenant, read-only and missing tokens each get the right status."""
    config = configured(socket_path.parent, TENANTS, **papers.config(tokens_file=papers.tokens()))
    async with opened(config) as endpoint, calling(endpoint, papers.caller()) as channel:
        store, admin, chain = (
            rpc.StoreStub(channel),
            rpc.AdminStub(channel),
            endpoint.chain(range(8), tenant="alice"),
        )
        other = endpoint.chain(range(8), tenant="bob")
        data = random_blocks(1, 2)

        async def asks(token: str | None, call: Callable[..., Any]) -> grpc.StatusCode:
            metadata = None if token is None else bearer(token)
            return await code_of(lambda: call(metadata=metadata, timeout=20))

        def plan(whose: pb.Chain) -> Callable[..., Any]:
            return lambda **more: store.Plan(pb.PlanRequest(chain=whose), **more)

        def save(whose: pb.Chain) -> Callable[..., Any]:
            return lambda **more: store.Save(save_messages(whose, data), **more)

        def status(**more: Any) -> Any:
            return admin.Status(pb.StatusRequest(), **more)

        def drop(tenant: str) -> Callable[..., Any]:
            request = pb.DropNamespaceRequest(digest=endpoint.digest(), tenant=tenant)
            return lambda **more: admin.DropNamespace(request, **more)

        for token, call, code in (
            (None, plan(chain), CODE.UNAUTHENTICATED),
            (None, status, CODE.UNAUTHENTICATED),
            ("nobody", plan(chain), CODE.UNAUTHENTICATED),
            ("old", plan(chain), CODE.UNAUTHENTICATED),
            ("reader", save(chain), CODE.PERMISSION_DENIED),
            ("reader", plan(other), CODE.PERMISSION_DENIED),
            ("reader", status, CODE.PERMISSION_DENIED),
            ("writer", save(other), CODE.PERMISSION_DENIED),
            ("writer", drop("alice"), CODE.PERMISSION_DENIED),
            ("ops", plan(chain), CODE.PERMISSION_DENIED),
            ("writer", save(chain), CODE.OK),
            ("reader", plan(chain), CODE.OK),
            ("ops", status, CODE.OK),
            ("ops", drop("alice"), CODE.OK),
        ):
            assert await asks(token, call) is code, (token, code)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await store.Plan(pb.PlanRequest(chain=chain), metadata=bearer("old"))
        assert "has expired" in failure(caught.value).message
        # The Unix socket is a door of its own.
        assert (await endpoint.store.Plan(pb.PlanRequest(chain=other))).blocks == 0


async def test_a_stream_that_was_let_in_does_not_open_others(socket_path: Path, papers: Papers) -> None:
    """A lease is its tenant's: whoever has another tenant's token cannot fetch or end it."""
    two = TOKENS + entry("bobs", '"bob"', '"read", "write"')
    config = configured(socket_path.parent, TENANTS, **papers.config(tokens_file=papers.tokens(two)))
    async with opened(config) as endpoint, calling(endpoint, papers.caller()) as channel:
        store, chain = rpc.StoreStub(channel), endpoint.chain(range(8), tenant="alice")
        await store.Save(save_messages(chain, random_blocks(1, 2)), metadata=bearer("writer"))
        found = await store.Lookup(pb.LookupRequest(chain=chain), metadata=bearer("reader"))
        for call in (
            lambda: store.Release(pb.ReleaseRequest(lease=found.lease), metadata=bearer("bobs")),
            lambda: store.Renew(pb.RenewRequest(leases=[found.lease]), metadata=bearer("bobs")),
            lambda: store.Fetch(pb.FetchRequest(lease=found.lease), metadata=bearer("bobs")).read(),
        ):
            assert await code_of(call) is CODE.PERMISSION_DENIED
        await store.Release(pb.ReleaseRequest(lease=found.lease), metadata=bearer("reader"))
        assert endpoint.quiet()


async def test_tokens_that_are_taken_away_and_given(socket_path: Path, papers: Papers) -> None:
    config = configured(socket_path.parent, TENANTS, **papers.config(tokens_file=papers.tokens()))
    async with opened(config) as endpoint, calling(endpoint, papers.caller()) as channel:
        request = pb.PlanRequest(chain=endpoint.chain(range(8), tenant="alice"))

        async def codes() -> list[grpc.StatusCode]:
            store = rpc.StoreStub(channel)
            return [
                await code_of(lambda token=token: store.Plan(request, metadata=bearer(token)))  # type: ignore[misc]
                for token in ("reader", "newer")
            ]

        assert await codes() == [CODE.OK, CODE.UNAUTHENTICATED]
        name = papers.tokens(entry("newer", '"alice"', '"read"'))
        endpoint.server.take_tokens(Tokens.load(Path(name)))
        assert await codes() == [CODE.UNAUTHENTICATED, CODE.OK]


async def test_a_unix_socket_may_need_tokens_too(socket_path: Path, papers: Papers) -> None:
    config = configured(socket_path.parent, TENANTS, tokens_file=papers.tokens(), tokens_on_unix=True)
    async with opened(config) as endpoint:
        plan = pb.PlanRequest(chain=endpoint.chain(range(8), tenant="alice"))
        assert await code_of(lambda: endpoint.store.Plan(plan)) is CODE.UNAUTHENTICATED
        assert await code_of(lambda: endpoint.store.Plan(plan, metadata=bearer("reader"))) is CODE.OK


async def test_callers_need_a_certificate_of_the_right_authority(socket_path: Path, papers: Papers) -> None:
    config = configured(
        socket_path.parent, TENANTS, **papers.config(tls_clients=str(papers.folder / "ca.pem"))
    )
    stranger = trustme.CA()
    async with opened(config) as endpoint:
        plan = pb.PlanRequest(chain=endpoint.chain(range(8), tenant="alice"))
        for credentials, code in (
            (papers.caller(papers.authority), CODE.OK),
            (papers.caller(stranger), CODE.UNAVAILABLE),
            (papers.caller(), CODE.UNAVAILABLE),
            (None, CODE.UNAVAILABLE),
        ):
            async with calling(endpoint, credentials) as channel:
                call = rpc.StoreStub(channel).Plan
                assert await code_of(lambda call=call: call(plan, timeout=10)) is code  # type: ignore[misc]
        async with calling(
            endpoint, papers.caller(papers.authority)
        ) as channel:  # it is not an administrator
            assert await code_of(lambda: rpc.AdminStub(channel).Status(pb.StatusRequest())) is (
                CODE.PERMISSION_DENIED
            )


async def test_certificates_are_renewed_without_a_restart(socket_path: Path, papers: Papers) -> None:
    config = configured(socket_path.parent, TENANTS, **papers.config(tokens_file=papers.tokens()))
    async with opened(config) as endpoint:

        def serial() -> int:
            """Of the certificate that a new connection gets; asked from another thread."""
            context = ssl.create_default_context(cadata=papers.authority.cert_pem.bytes().decode())
            context.set_alpn_protocols(["h2"])
            host, _, port = endpoint.server.addresses[1].rpartition(":")
            with (
                socket.create_connection((host, int(port)), timeout=10) as plain,
                context.wrap_socket(plain, server_hostname="127.0.0.1") as wrapped,
            ):
                found = wrapped.getpeercert()
                assert found is not None
                return int(str(found["serialNumber"]), 16)

        before = await asyncio.to_thread(serial)
        assert await asyncio.to_thread(serial) == before
        papers.issue()
        after = await asyncio.to_thread(serial)
        assert after != before
        (papers.folder / "cert.pem").write_text("no certificate")
        assert await asyncio.to_thread(serial) == after, "the old one goes on"


def test_files_that_cannot_be_used_name_their_key(socket_path: Path, papers: Papers) -> None:
    def made(**more: Any) -> None:
        credentials_of(configured(socket_path.parent, **papers.config(**more)).grpc)

    made()
    for key, name, why in (
        ("tls_certificate", "none.pem", "cannot be read"),
        ("tls_key", "cert.pem", "holds no private key"),
        ("tls_clients", "key.pem", "holds no certificate"),
    ):
        with pytest.raises(ConfigError, match=rf"grpc\.{key}: .*{why}"):
            made(**{key: str(papers.folder / name)})
    (papers.folder / "key.pem").chmod(0o644)
    with pytest.raises(ConfigError, match=r"grpc\.tls_key: .*chmod 600"):
        made()


async def test_garbage_at_the_handshake_costs_nothing(socket_path: Path, papers: Papers) -> None:
    """Plaintext HTTP/2, random bytes, half a hello and silence at a TLS port; then an honest caller."""
    config = configured(socket_path.parent, TENANTS, **papers.config(tokens_file=papers.tokens()))
    async with opened(config) as endpoint:
        host, _, port = endpoint.server.addresses[1].rpartition(":")
        corpus = [
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9),
            b"GET / HTTP/1.1\r\n\r\n",
            bytes.fromhex("1603010200010001fc0303"),
            bytes.fromhex("16030300ff") + os.urandom(255),
            b"",
            *(os.urandom(1 << power) for power in range(0, 17, 4)),
        ]
        held = []
        for data in corpus * 4:
            one = socket.create_connection((host, int(port)), timeout=10)
            with contextlib.suppress(OSError):
                one.sendall(data)
            held.append(one)
        began_s = time.monotonic()
        async with calling(endpoint, papers.caller()) as channel:
            plan = pb.PlanRequest(chain=endpoint.chain(range(8), tenant="alice"))
            call = rpc.StoreStub(channel).Plan
            assert await code_of(lambda: call(plan, metadata=bearer("reader"), timeout=20)) is CODE.OK
        assert time.monotonic() - began_s < 20
        for one in held:
            one.close()
