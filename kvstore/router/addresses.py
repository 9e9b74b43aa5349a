"""Addresses that the router listens on."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from kvstore.errors import ConfigError

__all__ = ["HttpAddress", "http_address", "reaches_others"]


@dataclass(frozen=True, slots=True)
class HttpAddress:
    """host and port, 0 = any free one."""

    host: str
    port: int


def http_address(text: str, key: str) -> HttpAddress:
    """Of host:port, or [::1]:port.

    Raises:
        ConfigError: it is neither; names the key.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not host or not (port.isascii() and port.isdigit()) or int(port) > 65_535:
        raise ConfigError(f"{key}: need host:port, e.g. 127.0.0.1:8080, got {text!r:.120}")
    return HttpAddress(host.removeprefix("[").removesuffix("]"), int(port))


def reaches_others(text: str, key: str) -> bool:
    """Whether other machines could connect.

    Raises:
        ConfigError: neither unix:/path nor host:port.
    """
    if text.startswith("unix:"):
        return False
    host = http_address(text, key).host
    if host == "localhost":
        return False
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return True  # a name may lead anywhere
