"""The doors of the gRPC API as the configuration wants them: who is let in, and what the wire is wrapped in.

unix:/path    its mode lets in; a token is looked at if one is shown, needed with grpc.tokens_on_unix
host:port     TLS with grpc.tls_certificate; callers need a certificate (grpc.tls_clients), a token
              (grpc.tokens_file), or both
plaintext     only with grpc.insecure_tcp
"""

from __future__ import annotations

import stat
from pathlib import Path

import grpc
import structlog

from kvstore.config import GrpcConfig
from kvstore.config.tokens import Tokens
from kvstore.errors import ConfigError
from kvstore.rpc.api.access import Access, OpenAccess, TokenAccess

__all__ = ["access_of", "credentials_of"]

log = structlog.get_logger()

_PEM_BYTES_MAX = 1 << 20


def access_of(config: GrpcConfig) -> Access:
    """Who may do what.

    Raises:
        ConfigError: `grpc.tokens_file` cannot be used.
    """
    if not config.tokens_file:
        return OpenAccess()
    return TokenAccess(Tokens.load(Path(config.tokens_file)), unix_needs=config.tokens_on_unix)


def credentials_of(config: GrpcConfig) -> grpc.ServerCredentials | None:
    """For host:port; None = plaintext. Files that are replaced are used from the next connection on.

    Raises:
        ConfigError: names the key whose file cannot be used.
    """
    if not config.tls_certificate:
        return None
    files = _Files(config)
    return grpc.dynamic_ssl_server_credentials(
        files.made, files.renewed, require_client_authentication=bool(config.tls_clients)
    )


class _Files:
    """Certificate, key and authorities of clients, as they were read last."""

    def __init__(self, config: GrpcConfig) -> None:
        self._config = config
        self._seen = self._versions()
        self.made = self._read()

    def renewed(self) -> grpc.ServerCertificateConfiguration | None:
        """Called for each connection, on a thread of gRPC's: the new ones where files have changed."""
        try:
            seen = self._versions()
            if seen == self._seen:
                return None
            self.made, self._seen = self._read(), seen
        except (OSError, ConfigError) as error:
            log.warning("certificates not renewed; the old ones go on", reason=str(error))
            return None
        log.info("certificates renewed", certificate=self._config.tls_certificate)
        return self.made

    def _versions(self) -> list[tuple[int, int]]:
        names = (self._config.tls_certificate, self._config.tls_key, self._config.tls_clients)
        found = []
        for name in filter(None, names):
            try:
                facts = Path(name).stat()
            except OSError:
                facts = None
            found.append((facts.st_mtime_ns, facts.st_ino) if facts is not None else (0, 0))
        return found

    def _read(self) -> grpc.ServerCertificateConfiguration:
        config = self._config
        certificate = _pem("grpc.tls_certificate", config.tls_certificate, b"CERTIFICATE")
        key = _pem("grpc.tls_key", config.tls_key, b"PRIVATE KEY", secret=True)
        clients = _pem("grpc.tls_clients", config.tls_clients, b"CERTIFICATE") if config.tls_clients else None
        return grpc.ssl_server_certificate_configuration([(key, certificate)], root_certificates=clients)


def _pem(key: str, name: str, holds: bytes, *, secret: bool = False) -> bytes:
    path = Path(name)
    try:
        if secret and path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise ConfigError(f"{key}: {path} is open to others; run chmod 600 {path}")
        with path.open("rb") as file:
            data = file.read(_PEM_BYTES_MAX)
    except OSError as error:
        raise ConfigError(f"{key}: {path} cannot be read: {error.strerror}") from None
    if b"-----BEGIN " not in data or holds not in data:
        raise ConfigError(f"{key}: {path} holds no {holds.decode().lower()} in PEM")
    return data
