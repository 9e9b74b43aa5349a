"""Hostile handshakes at every door of a daemon: each costs it nothing, and costs nobody else anything."""

from __future__ import annotations

import contextlib
import datetime
import random
import socket
import ssl
import warnings
from collections.abc import Callable

import grpc
import hypothesis
import pytest
import trustme
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID
from hypothesis import strategies as st
from raw_session import RawSession

from . import h2
from .doors import HONEST_S, PLAN, Doors, Papers, doors, guarded, heard, plan_code, said_to, wrapped
from .hostile import damaged
from .openings import (
    ATTACH_FIELDS,
    WRONG_ATTACHES,
    WRONG_VALUES,
    attach_of,
    client_hello,
    strange,
    tls_strange,
)
from .talk import framed

__all__ = ["doors", "guarded"]
CODE = grpc.StatusCode
STRANGE, TLS_STRANGE, STREAMS = strange(), tls_strange(), h2.hostile_streams(PLAN)
REPEATABLE = hypothesis.settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)


# ---- other protocols ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("opening", STRANGE)
@pytest.mark.parametrize("door", ["session", "unix"])
def test_another_protocol(doors: Doors, door: str, opening: str) -> None:
    with doors.unhurt():
        said_to(doors, door, STRANGE[opening])


@pytest.mark.parametrize("opening", TLS_STRANGE)
def test_what_is_no_tls_client(doors: Doors, opening: str) -> None:
    with doors.unhurt():
        said_to(doors, "tls", TLS_STRANGE[opening])


@pytest.mark.parametrize("door", ["session", "unix", "tls"])
def test_all_of_them_at_once(doors: Doors, door: str) -> None:
    """Nobody who is honest waits for those who have begun, and do not go on."""
    with doors.unhurt(), contextlib.ExitStack() as stack:
        for data in (TLS_STRANGE | STREAMS).values():
            for cut in (len(data), len(data) // 2, 7):
                sock = stack.enter_context(doors.knock(door))
                with contextlib.suppress(ConnectionError):
                    sock.sendall(data[:cut])
        doors.honest()


def test_who_says_nothing_at_the_session_socket_is_shown_out(doors: Doors) -> None:
    with doors.unhurt(), contextlib.ExitStack() as stack:
        silent = [stack.enter_context(doors.knock("session")) for _ in range(50)]
        for number, sock in enumerate(silent):
            sock.sendall(b"\x10\0\0\0\x92\x01"[: number % 7])
        doors.honest()
        assert all(heard(sock, HONEST_S)[1] for sock in silent)


@REPEATABLE
@hypothesis.given(seed=st.integers(0, (1 << 64) - 1))
def test_a_damaged_client_hello(doors: Doors, seed: int) -> None:
    chance = random.Random(seed)
    with doors.knock("tls") as sock:
        with contextlib.suppress(ConnectionError):
            sock.sendall(damaged(chance, client_hello()))
            sock.shutdown(socket.SHUT_WR)
        assert heard(sock, HONEST_S)[1], "neither an answer nor an end"


def test_nothing_is_left_of_the_damaged_ones(doors: Doors) -> None:
    with doors.unhurt():
        pass


# ---- a session's attach ------------------------------------------------------------------------------------

REFUSALS = {"INVALID_ARGUMENT", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED"}


def refusal(doors: Doors, data: bytes) -> str:
    """Of an opening that must be refused: the reason that is given, "" for none; then it is over."""
    with RawSession(doors.daemon.socket, HONEST_S) as raw:
        with contextlib.suppress(ConnectionError):
            raw.sock.sendall(data)
        got = raw.receive()
        if got is None:
            return ""
        status = getattr(got.body, "status", type(got.body).__name__)
        assert raw.receive() is None, f"{status}, and the connection is still open"
        return str(status)


@pytest.mark.parametrize("field", ATTACH_FIELDS)
def test_an_attach_with_a_wrong_field(doors: Doors, field: str) -> None:
    with doors.unhurt():
        for name, value in WRONG_VALUES.items():
            assert refusal(doors, attach_of({field: value})) in REFUSALS, name


@pytest.mark.parametrize("name", WRONG_ATTACHES)
def test_an_attach_that_means_nothing_good(doors: Doors, name: str) -> None:
    with doors.unhurt():
        assert refusal(doors, WRONG_ATTACHES[name]) in REFUSALS


@pytest.mark.parametrize("name", WRONG_VALUES)
def test_a_value_instead_of_a_message(doors: Doors, name: str) -> None:
    with doors.unhurt():
        value = WRONG_VALUES[name]
        for payload in (value, b"\x92\x01" + value, b"\x92" + value + b"\x91\xa6status", b"\x91" + value):
            assert refusal(doors, framed(payload)) in REFUSALS


@REPEATABLE
@hypothesis.given(
    changes=st.dictionaries(
        st.sampled_from(ATTACH_FIELDS), st.sampled_from(sorted(WRONG_VALUES.values())), max_size=4
    ),
    seed=st.integers(0, (1 << 32) - 1),
    broken=st.booleans(),
    part=st.floats(0.0, 1.0),
)
def test_any_mixture(doors: Doors, changes: dict[str, bytes], seed: int, broken: bool, part: float) -> None:
    data = attach_of(changes)
    payload = damaged(random.Random(seed), data[4:]) if broken else data[4:]
    with RawSession(doors.daemon.socket, HONEST_S) as raw:
        with contextlib.suppress(ConnectionError):
            raw.sock.sendall(framed(payload)[: 4 + int(part * len(payload))])
            raw.sock.shutdown(socket.SHUT_WR)
        while (got := raw.receive()) is not None:
            assert getattr(got.body, "status", "") != "INTERNAL", got.body


def test_nothing_is_left_of_the_mixtures(doors: Doors) -> None:
    with doors.unhurt():
        pass


# ---- TLS ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1])
def test_old_versions_are_not_spoken(doors: Doors, version: ssl.TLSVersion) -> None:
    context = doors.papers.context()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        context.minimum_version = context.maximum_version = version
    context.set_ciphers("ALL:@SECLEVEL=0")
    with doors.unhurt(), pytest.raises((ssl.SSLError, ConnectionError)):
        wrapped(doors, context, h2.PREFACE)


@pytest.mark.parametrize("alpn", [[], ["http/1.1"], ["h3", "acme-tls/1"]])
def test_another_protocol_within_tls(doors: Doors, alpn: list[str]) -> None:
    context = doors.papers.context()
    context.set_alpn_protocols(alpn)
    with doors.unhurt():
        for data in (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", h2.PREFACE, b""):
            with contextlib.suppress(ssl.SSLError, ConnectionError):
                wrapped(doors, context, data)


@pytest.mark.parametrize("name", ["nobody.invalid", "localhost", "x" * 63 + ".invalid"])
def test_another_name(doors: Doors, name: str) -> None:
    context = doors.papers.context()
    context.check_hostname = False
    with doors.unhurt():
        wrapped(doors, context, h2.call(PLAN, []), name)


@pytest.mark.parametrize("opening", [*STRANGE, *STREAMS])
def test_hostile_frames_after_a_good_handshake(doors: Doors, opening: str) -> None:
    data = STREAMS.get(opening, STRANGE.get(opening, b""))
    with doors.unhurt():
        wrapped(doors, doors.papers.context(), data)


@pytest.mark.parametrize("opening", STREAMS)
def test_hostile_frames_at_the_unix_socket(doors: Doors, opening: str) -> None:
    with doors.unhurt():
        said_to(doors, "unix", STREAMS[opening])


# ---- certificates of callers -------------------------------------------------------------------------------


# The authority of `grpc.tls_clients` has signed them, for callers, and they are of today.
LET_IN = ("another one's", "the server's own")
SHUT_OUT = ("nobody's", "a stranger's", "expired", "not valid yet", "of a server alone")


@pytest.mark.parametrize("whose", [*LET_IN, *SHUT_OUT])
def test_whose_certificate_it_is(guarded: Doors, whose: str) -> None:
    certificate = _certificate(guarded.papers, whose)
    with guarded.unhurt():
        assert _goes_on(guarded, certificate) is (whose in LET_IN)
        with grpc.secure_channel(guarded.tls, guarded.papers.caller(certificate)) as channel:
            code = plan_code(channel, ())
        assert code is (CODE.OK if whose in LET_IN else CODE.UNAVAILABLE)


def _goes_on(doors: Doors, certificate: trustme.LeafCert | None) -> bool:
    """Whether frames are answered; else the connection ends. TimeoutError: neither."""
    with doors.knock("tls") as plain:
        try:
            context = doors.papers.context(certificate)
            with context.wrap_socket(plain, server_hostname="127.0.0.1") as sock:
                # In TLS 1.3 the client's half is done first, and the refusal comes after it.
                sock.sendall(h2.call(PLAN, []))
                return sock.recv(1) != b""
        except (ssl.SSLError, ConnectionError):
            return False


def _certificate(papers: Papers, whose: str) -> trustme.LeafCert | None:
    day, now = datetime.timedelta(days=1), datetime.datetime.now(datetime.UTC)
    authority = papers.authority
    made: dict[str, Callable[[], trustme.LeafCert | None]] = {
        "nobody's": lambda: None,
        "another one's": lambda: authority.issue_cert("another@example.org"),
        "the server's own": lambda: trustme.LeafCert(
            (papers.folder / "key.pem").read_bytes(), (papers.folder / "cert.pem").read_bytes(), []
        ),
        "of a server alone": lambda: _of_a_server(authority),
        "a stranger's": lambda: trustme.CA().issue_cert("stranger@example.org"),
        "expired": lambda: authority.issue_cert(
            "late@example.org", not_before=now - 2 * day, not_after=now - day
        ),
        "not valid yet": lambda: authority.issue_cert(
            "early@example.org", not_before=now + day, not_after=now + 2 * day
        ),
    }
    return made[whose]()


def _of_a_server(authority: trustme.CA) -> trustme.LeafCert:
    """A certificate that the same authority has signed, and not for callers."""
    issued = authority.issue_cert("server.example.org")
    like = x509.load_pem_x509_certificate(issued.cert_chain_pems[0].bytes())
    key = load_pem_private_key(authority.private_key_pem.bytes(), None)
    assert isinstance(key, EllipticCurvePrivateKey)
    builder = x509.CertificateBuilder(
        like.issuer, like.subject, like.public_key(), x509.random_serial_number()
    )
    builder = builder.not_valid_before(like.not_valid_before_utc).not_valid_after(like.not_valid_after_utc)
    for extension in like.extensions:
        if extension.oid != x509.ExtendedKeyUsage.oid:
            builder = builder.add_extension(extension.value, extension.critical)
    purposes = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
    signed = builder.add_extension(purposes, critical=False).sign(key, SHA256())
    return trustme.LeafCert(issued.private_key_pem.bytes(), signed.public_bytes(Encoding.PEM), [])


@pytest.mark.parametrize("opening", TLS_STRANGE)
def test_what_is_no_tls_client_where_certificates_are_needed(guarded: Doors, opening: str) -> None:
    with guarded.unhurt():
        said_to(guarded, "tls", TLS_STRANGE[opening])


# ---- the tests themselves ----------------------------------------------------------------------------------

# A daemon with two bugs: what `unhurt` must notice.
BROKEN = """
import os
import sys
import kvstore.rpc.session as session

check_hello = session.check_hello

def broken(ask):
    if len(ask.tenants) > 1000:
        raise IndexError("planted")
    if ask.version == 0:
        os.dup(0)
    check_hello(ask)

session.check_hello = broken
from kvstore.cli import main
main(sys.argv[1:])
"""


def test_planted_bugs_are_noticed(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("d")
    program = folder / "broken.py"
    program.write_text(BROKEN)
    doors = Doors(folder, program=[str(program)])
    try:
        with pytest.raises(AssertionError, match="planted"), doors.unhurt():
            refusal(doors, WRONG_ATTACHES["thousands of names"])
        with pytest.raises(AssertionError, match="descriptors are closed"), doors.unhurt(settle_s=0.5):
            refusal(doors, WRONG_ATTACHES["version 0"])
        with doors.unhurt():
            refusal(doors, WRONG_ATTACHES["version 1"])
    finally:
        doors.close()
