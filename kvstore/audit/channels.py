"""Where the gRPC API of a daemon is reached from its own machine, and the channel to it."""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from kvstore.audit.session import ANSWER_S
from kvstore.config import Config
from kvstore.rpc.endpoints import Endpoint

__all__ = ["Reach", "opened", "plaintext", "reach_of", "shown_out"]

# Listening on every address of the machine, a daemon is at this one, too.
_ANY = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]", "*": "127.0.0.1"}
_PEM_BYTES_MAX = 1 << 20
# So that the daemon's log says who asks what it refuses.
_AGENT = ("grpc.primary_user_agent", "kvstore-audit-isolation")


@dataclass(frozen=True, slots=True)
class Reach:
    """How to get to one address.

    Attributes:
        target: as a channel takes it, "" = not known.
        tls: what the certificate is checked against, None = no TLS.
        name: that the certificate has, "" = the target's.
        why_not: it cannot be reached; "" = it can be tried.
    """

    target: str = ""
    tls: bytes | None = None
    name: str = ""
    why_not: str = ""


def reach_of(config: Config, endpoint: Endpoint, tls_root: Path | None) -> Reach:
    """How to get to an address of `grpc.listen`. For TLS one handshake, to learn the certificate's name.

    Args:
        tls_root: PEM file of what the certificate is checked against; None = the certificate itself.
    """
    if endpoint.path is not None:
        return Reach(endpoint.address)
    host, _, port = endpoint.address.rpartition(":")
    host = _ANY.get(host, host)
    if port == "0":
        return Reach(why_not="port 0: the kernel chose one; audit with a configuration that names it")
    if not config.grpc.tls_certificate:
        return Reach(f"{host}:{port}")
    path, target = tls_root or Path(config.grpc.tls_certificate), f"{host}:{port}"
    try:
        with path.open("rb") as file:
            roots = file.read(_PEM_BYTES_MAX)
        return Reach(target, roots, _served_name(host.strip("[]"), int(port), roots.decode()))
    except ssl.SSLError as error:
        why = f"TLS: {error.reason or error}; --tls-root names the authority of its certificate"
    except ValueError:
        why = f"{path}: not a PEM file"
    except OSError as error:
        why = f"{endpoint.address}, {path}: {(error.strerror or str(error)).lower()}"
    return Reach(target, why_not=why)


def _served_name(host: str, port: int, roots: str) -> str:
    """A name of the certificate that answers there, the host's own if it has that.

    Raises:
        ssl.SSLError: it is not one of these, nor signed by one.
        OSError: nobody answers.
        ValueError: `roots` is no PEM.
    """
    with _shaken(host, port, roots) as wrapped:
        names: Any = (wrapped.getpeercert() or {}).get("subjectAltName", ())
    found = [str(value) for _, value in names]
    if not found or host in found:
        return host
    return found[0].replace("*.", "audit.", 1)


@contextlib.contextmanager
def _shaken(host: str, port: int, roots: str) -> Iterator[ssl.SSLSocket]:
    """A connection after its handshake, without a certificate of ours; raises as `_served_name`."""
    context = ssl.create_default_context(cadata=roots)
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # the certificate itself may be what is trusted
    context.check_hostname = False
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection((host, port), timeout=ANSWER_S) as plain,
        context.wrap_socket(plain, server_hostname=host) as wrapped,
    ):
        yield wrapped


def shown_out(reach: Reach) -> str:
    """Whether who has no certificate of his own is shown out after his handshake.

    In TLS 1.3 a client is done first, and is told then; who lets in sends its settings instead.

    Returns:
        How, in a word or two; "" = it goes on, or is silent.
    """
    host, _, port = reach.target.rpartition(":")
    with contextlib.ExitStack() as stack:
        try:
            wrapped = stack.enter_context(_shaken(host.strip("[]"), int(port), (reach.tls or b"").decode()))
        except OSError:
            return ""
        wrapped.settimeout(ANSWER_S)
        try:
            return "" if wrapped.recv(1 << 12) else "hung up"
        except ssl.SSLError as error:
            return error.reason or "an alert"
        except ConnectionError:
            return "hung up"
        except OSError:  # nothing came
            return ""


@contextlib.contextmanager
def opened(reach: Reach) -> Iterator[Any]:
    """The channel; nothing is sent on it yet."""
    if reach.tls is None:
        with plaintext(reach.target) as channel:
            yield channel
        return
    credentials = grpc.ssl_channel_credentials(reach.tls)
    options = (_AGENT, *((("grpc.ssl_target_name_override", reach.name),) if reach.name else ()))
    with grpc.secure_channel(reach.target, credentials, options) as channel:
        yield channel


def plaintext(target: str) -> Any:
    """A channel without TLS; a context manager."""
    return grpc.insecure_channel(target, (_AGENT,))
