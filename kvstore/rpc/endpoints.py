"""Addresses of the gRPC API: what `grpc.listen` means, and what is refused before memory is made (there, and
of `events.zmq`)."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from kvstore.config import Config
from kvstore.config.publishing import ipc_path, outlets
from kvstore.errors import ConfigError
from kvstore.rpc.server import free_path

__all__ = ["Endpoint", "endpoints", "free_endpoints"]

ENDPOINTS_MAX = 16
PATH_BYTES_MAX = 107  # sockaddr_un


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One place to listen.

    Attributes:
        address: as gRPC takes it: unix:/path or host:port.
        path: of the Unix socket, None for TCP.
    """

    address: str
    path: Path | None


def endpoints(config: Config) -> list[Endpoint]:
    """Where to listen, in order.

    Raises:
        ConfigError: an address is malformed, or plaintext TCP that was not asked for.
    """
    texts = [text.strip() for text in config.grpc.listen.split(",") if text.strip()]
    if len(texts) > ENDPOINTS_MAX:
        raise ConfigError(f"grpc.listen: {len(texts)} addresses are more than {ENDPOINTS_MAX}")
    if len(set(texts)) < len(texts):
        raise ConfigError("grpc.listen: an address is named twice")
    return [_endpoint(config, text) for text in texts]


def _endpoint(config: Config, text: str) -> Endpoint:
    if text == "auto":
        session = Path(config.daemon.socket).absolute()
        return _unix(session.with_name(f"{session.stem}-grpc.sock"))
    if text.startswith("unix:"):
        return _unix(Path(text.removeprefix("unix:").removeprefix("//")))  # unix:/path, or unix:///path
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65_535:
        raise ConfigError(f"grpc.listen: {text!r:.120} is neither unix:/path nor host:port")
    limits = config.grpc
    if not limits.insecure_tcp and not limits.tls_certificate:
        raise ConfigError(
            f"grpc.listen: {text} is plaintext TCP, where whoever reaches the port may act as any tenant of "
            "this daemon; use unix:/path, or TLS (grpc.tls_certificate, grpc.tls_key), or accept that with "
            "--set grpc.insecure_tcp=true"
        )
    if not limits.insecure_tcp and not limits.tls_clients and not limits.tokens_file:
        raise ConfigError(
            f"grpc.listen: {text} is encrypted, but whoever reaches the port may act as any tenant of this "
            "daemon; set grpc.tokens_file or grpc.tls_clients, or accept that with "
            "--set grpc.insecure_tcp=true"
        )
    return Endpoint(text, None)


def _unix(path: Path) -> Endpoint:
    if not path.is_absolute() or not 1 <= len(str(path).encode()) <= PATH_BYTES_MAX:
        raise ConfigError(
            f"grpc.listen: {path} must be absolute and of at most {PATH_BYTES_MAX} bytes (the kernel's limit)"
        )
    return Endpoint(f"unix:{path}", path)


def free_endpoints(config: Config) -> None:
    """Remove sockets that dead daemons left behind.

    Raises:
        ConfigError: as `endpoints`; or a daemon listens on one, or it is no socket; or events are to be
            published and there is no pyzmq.
    """
    _need_folder(Path(config.daemon.socket), "daemon.socket")
    for endpoint in endpoints(config):
        if endpoint.path is not None:
            _need_folder(endpoint.path, "grpc.listen")
            free_path(endpoint.path, "grpc.listen")
    published = outlets(config.events, config.groups())
    if published and importlib.util.find_spec("zmq") is None:
        raise ConfigError(
            "events.zmq: needs pyzmq, which is not installed; run pip install 'kvstored[router]'"
        )
    for outlet in published:
        for key, text in (("events.zmq", outlet.publish), ("events.zmq_replay", outlet.replay)):
            if (path := ipc_path(text)) is not None:
                _need_folder(path, key)
                free_path(path, key)


def _need_folder(path: Path, key: str) -> None:
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"{key}: cannot bind {path}: there is no folder {path.parent}")
