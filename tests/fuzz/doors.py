"""A daemon with all its doors open, honest callers at each, and what must hold around a hostile one."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from raw_session import RawSession, hello
from real_daemon import RealDaemon, eventually

from kvstore.config.tokens import digest_of
from kvstore.rpc import messages as m
from kvstore.testing.driver import namespace_of
from kvstore.v1 import store_pb2 as pb
from kvstore.v1 import store_pb2_grpc as rpc

from .talk import LAYOUT

__all__ = [
    "HONEST_S",
    "PLAN",
    "TOKEN",
    "Doors",
    "Papers",
    "doors",
    "guarded",
    "heard",
    "plan_code",
    "plan_request",
    "said_to",
    "wrapped",
]

TOKEN = "an-honest-callers-token"
PLAN = "/kvstore.v1.Store/Plan"
# Long enough for an answer that comes at once; those that wait for more say nothing anyway.
GLANCE_S = 0.05
# An honest caller is answered within this; it takes some milliseconds when nobody else is there.
HONEST_S = 10.0
# Its own connections, so that each honest caller goes through the door anew.
CODE = grpc.StatusCode
_ALONE = (("grpc.use_local_subchannel_pool", 1),)


@dataclass(frozen=True)
class Papers:
    """Certificates of a server and of its callers."""

    authority: trustme.CA
    folder: Path

    @staticmethod
    def made(folder: Path) -> Papers:
        """Files for the daemon's configuration, in `folder`."""
        authority = trustme.CA()
        server = authority.issue_cert("127.0.0.1", "localhost")
        tokens = f'[[tokens]]\nname = "honest"\nsha256 = "{digest_of(TOKEN)}"\ntenants = ["*"]\n'
        for name, data in (
            ("cert.pem", server.cert_chain_pems[0].bytes()),
            ("key.pem", server.private_key_pem.bytes()),
            ("ca.pem", authority.cert_pem.bytes()),
            ("tokens.toml", f'{tokens}verbs = ["read", "write", "admin"]\n'.encode()),
        ):
            (folder / name).touch(mode=0o600)
            (folder / name).write_bytes(data)
        return Papers(authority, folder)

    def caller(self, certificate: trustme.LeafCert | None) -> grpc.ChannelCredentials:
        """Credentials of a gRPC caller, with a certificate or without."""
        roots = self.authority.cert_pem.bytes()
        if certificate is None:
            return grpc.ssl_channel_credentials(roots)
        chain = b"".join(blob.bytes() for blob in certificate.cert_chain_pems)
        return grpc.ssl_channel_credentials(roots, certificate.private_key_pem.bytes(), chain)

    def context(self, certificate: trustme.LeafCert | None = None) -> ssl.SSLContext:
        """Of a TLS client that wants to speak HTTP/2."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self.authority.configure_trust(context)
        context.set_alpn_protocols(["h2"])
        if certificate is not None:
            certificate.configure_cert(context)
        return context


class Doors:
    """The daemon, listening on its session socket, on TLS, and on gRPC's Unix socket.

    Args:
        clients: callers of the TLS port need a certificate instead of a token.
        program: runs the daemon, see RealDaemon.
    """

    def __init__(
        self, folder: Path, *, clients: bool = False, program: Sequence[str] = ("-m", "kvstore")
    ) -> None:
        self.papers = Papers.made(folder)
        settings = {
            "daemon.attach_timeout_s": "1.0",
            "grpc.listen": '"auto,127.0.0.1:0"',
            "grpc.tls_certificate": f'"{folder / "cert.pem"}"',
            "grpc.tls_key": f'"{folder / "key.pem"}"',
        }
        if clients:
            settings["grpc.tls_clients"] = f'"{folder / "ca.pem"}"'
        else:
            settings["grpc.tokens_file"] = f'"{folder / "tokens.toml"}"'
        self.daemon = RealDaemon(folder, settings, program=program)
        self._certificate = self.papers.authority.issue_cert("honest@example.org") if clients else None
        try:
            self.daemon.start()
            (said,) = eventually(self._serves, "it says where it listens")
            self.unix, self.tls = json.loads(said)["grpc"]
            for _ in range(3):  # what is made once is made now
                self.honest()
            self._fds = self._fewest()
        except BaseException:  # whatever it was, the process must not stay
            self.daemon.close()
            raise

    def _serves(self) -> list[str]:
        return [line for line in self.said().splitlines() if '"kvstore serves"' in line]

    def close(self) -> None:
        """End it in order."""
        try:
            assert self.daemon.end() == 0, self.daemon.said()
        finally:
            self.daemon.close()

    # ---- honest ------------------------------------------------------------------------------------------

    def honest(self) -> None:
        """One honest caller at each door is served within HONEST_S."""
        began_s = time.monotonic()
        with RawSession(self.daemon.socket, HONEST_S) as raw:
            assert isinstance(raw.ask(hello(LAYOUT, role="scheduler", model="honest")), m.Attached)
            assert raw.ask(m.Heartbeat()) == m.Done()
        credentials = self.papers.caller(self._certificate)
        with grpc.secure_channel(self.tls, credentials, _ALONE) as channel:
            self._plans(channel, (("authorization", f"Bearer {TOKEN}"),))
        with grpc.insecure_channel(self.unix, _ALONE) as channel:
            self._plans(channel, ())
        assert time.monotonic() - began_s < HONEST_S

    def _plans(self, channel: grpc.Channel, metadata: tuple[tuple[str, str], ...]) -> None:
        reply = rpc.StoreStub(channel).Plan(plan_request(), metadata=metadata, timeout=HONEST_S)
        assert reply.asked_blocks == 2

    # ---- hostile -----------------------------------------------------------------------------------------

    def knock(self, door: str) -> socket.socket:
        """A connection to a door: session, unix or tls."""
        if door == "tls":
            host, _, port = self.tls.rpartition(":")
            return socket.create_connection((host, int(port)), timeout=HONEST_S)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(HONEST_S)
        sock.connect(str(self.daemon.socket) if door == "session" else self.unix.removeprefix("unix:"))
        return sock

    @contextlib.contextmanager
    def unhurt(self, settle_s: float = 20.0) -> Iterator[None]:
        """Around something hostile: others are served, and nothing stays of it after a while."""
        began, fds = len(self.said()), self._fds
        yield
        self.honest()
        try:
            eventually(lambda: self.fds() <= fds, "descriptors are closed", settle_s)
        except AssertionError:
            self._fds = self._fewest()  # said once, and not of all that comes later
            raise
        eventually(lambda: not any(self.left().values()), f"nothing is held: {self.left()}", settle_s)
        self.daemon.assert_sound()
        said = self.said()[began:]
        assert "Traceback" not in said and '"bug"' not in said, said[-4000:]

    def left(self) -> dict[str, int]:
        """What clients hold."""
        group = self.daemon.group()
        counts = {name: group[name] for name in ("leases", "fillings", "pins", "sessions", "engine_count")}
        return {**counts, "slots": group["host"]["filling"]}

    def fds(self) -> int:
        """Descriptors that the daemon has open."""
        return len(list(Path(f"/proc/{self.daemon.pid}/fd").iterdir()))

    def _fewest(self) -> int:
        """The same once honest callers' own are closed."""
        seen = [self.fds()]
        until_s = time.monotonic() + 0.3
        eventually(lambda: seen.append(self.fds()) or time.monotonic() > until_s, "time passes")
        return min(seen)

    def said(self) -> str:
        """All of its log."""
        return self.daemon.log.read_text(errors="replace")


def plan_request() -> pb.PlanRequest:
    """A question that any reader may ask."""
    fields: dict[str, Any] = namespace_of(LAYOUT, "honest")
    fields["block_tokens"] = int(fields["block_tokens"])
    layout = pb.Layout(
        layers=LAYOUT.layers,
        kv_heads=LAYOUT.kv_heads,
        head_dim=LAYOUT.head_dim,
        dtype=LAYOUT.dtype,
        block_tokens=LAYOUT.block_tokens,
    )
    tokens = pb.Tokens(ids=range(2 * LAYOUT.block_tokens))
    chain = pb.Chain(tenant="default", namespace=pb.Namespace(**fields), layout=layout, tokens=tokens)
    return pb.PlanRequest(chain=chain)


def said_to(doors: Doors, door: str, data: bytes) -> bytes:
    """Say it at a door that is not wrapped; what is answered."""
    with doors.knock(door) as sock:
        with contextlib.suppress(ConnectionError):
            sock.sendall(data)
        return heard(sock, GLANCE_S)[0]


def wrapped(doors: Doors, context: ssl.SSLContext, data: bytes, name: str = "127.0.0.1") -> bytes:
    """Shake hands, say something: what is answered. SSLError: no handshake."""
    with doors.knock("tls") as plain, context.wrap_socket(plain, server_hostname=name) as sock:
        with contextlib.suppress(ConnectionError, ssl.SSLEOFError):
            sock.sendall(data)
        return heard(sock, GLANCE_S)[0]


def plan_code(channel: grpc.Channel, metadata: Any) -> grpc.StatusCode:
    """How a question ends."""
    try:
        rpc.StoreStub(channel).Plan(plan_request(), metadata=metadata, timeout=HONEST_S)
    except grpc.RpcError as error:
        found: grpc.StatusCode = error.code()
        return found
    return CODE.OK


def heard(sock: socket.socket, patience_s: float) -> tuple[bytes, bool]:
    """What comes before the end or before it is silent for that long, and whether the end came."""
    sock.settimeout(patience_s)
    out = bytearray()
    with contextlib.suppress(TimeoutError, ssl.SSLWantReadError):
        while len(out) < 1 << 20:
            try:
                piece = sock.recv(1 << 16)
            except (ConnectionError, ssl.SSLError):
                piece = b""  # cut off, or an alert: an end as good as any
            if not piece:
                return bytes(out), True
            out += piece
    return bytes(out), False


# ---- fixtures ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def doors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Doors]:
    """With tokens."""
    made = Doors(tmp_path_factory.mktemp("d"))
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Doors]:
    """With certificates of callers."""
    made = Doors(tmp_path_factory.mktemp("d"), clients=True)
    try:
        yield made
    finally:
        made.close()
