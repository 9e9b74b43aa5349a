"""What the daemon tells about itself, on its socket and on `metrics.listen`: counts and names, no secrets."""

from __future__ import annotations

import http.client
import json
import re
import socket
from collections.abc import Sequence

from kvstore.audit.as_configured import judge_configuration
from kvstore.audit.probe import Probe, Secret
from kvstore.audit.session import ANSWER_S, ToolSession
from kvstore.audit.verdicts import Door
from kvstore.config import MetricsConfig
from kvstore.config.doors import METRICS_KEYS
from kvstore.errors import KVStoreError

__all__ = ["metrics_door", "secrets_in", "status_door"]

# A page of 1,000 tenants has some 400 KiB.
PAGE_BYTES_MAX = 64 << 20
# check → how the secrets begin that it looks for.
_KINDS = {
    "no_salts": ("the salt",),
    "no_roots_or_keys": ("the root", "a key"),
    "no_tokens": ("a token id",),
    "no_bearer_tokens": ("a bearer token",),
}
_CORE = ("no_roots_or_keys", "no_tokens")
_UNKNOWN = {"no_bearer_tokens": "none was given (--token-file)"}
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_ANY = {"0.0.0.0": "127.0.0.1", "::": "::1", "*": "127.0.0.1"}


def status_door(probe: Probe) -> Door:
    """The report of `kvstore status`, which whoever may open the socket reads (`daemon.admins`)."""
    door = Door("status", f"unix:{probe.socket}")
    try:
        with ToolSession(probe) as session:
            report = session.status()
    except KVStoreError as error:
        door.skip("reached", str(error), control=True)
        return door
    _judge(door, probe, json.dumps(report).encode(), f'"{probe.pair.a.group}"'.encode())
    return door


def metrics_door(probe: Probe) -> Door:
    """The page of `metrics.listen`."""
    config = probe.config.metrics
    door = Door("metrics", config.listen)
    judge_configuration(door, probe, METRICS_KEYS)
    if not config.listen:
        door.skip("reached", "metrics.listen is not set: there is no such page")
        return door
    if not config.socket_path and config.host_port[1] == 0:
        door.skip("reached", "port 0: the kernel chose one; audit with a configuration that names it")
        return door
    try:
        page = _page(config)
    except (OSError, http.client.HTTPException) as error:
        door.skip("reached", f"no page: {error or type(error).__name__}", control=True)
        return door
    _judge(door, probe, page, b"kvstore_")
    names = sorted(name for name in probe.pair.names if f'"{name}"'.encode() in page)
    if names and not config.socket_path:
        beyond = "" if config.host_port[0] in _LOOPBACK else ", from other machines, too"
        told = f"whoever reaches {config.listen}{beyond} reads the names of tenants: {', '.join(names)}"
        door.skip("tenants_are_not_named", f"{told} (metrics.tenants = digests hides them)")
    return door


def secrets_in(page: bytes, secrets: Sequence[Secret]) -> list[str]:
    """Names of the secrets that a page holds in any form; a number only where it stands alone."""
    found = []
    for secret in secrets:
        for form in secret.forms:
            if form.isdigit() and len(form) <= 10:
                there = re.search(rb"(?<![0-9.])" + form + rb"(?![0-9])", page) is not None
            else:
                there = form in page
            if there:
                found.append(secret.what)
                break
    return list(dict.fromkeys(found))


def _judge(door: Door, probe: Probe, page: bytes, mark: bytes) -> None:
    """`mark`: what an honest page holds."""
    if not door.control("reached", mark in page, f"{len(page):,} bytes"):
        return
    door.core.update(_CORE)
    secrets = probe.secrets()
    for check, what in _KINDS.items():
        kind = [secret for secret in secrets if secret.what.startswith(what)]
        if not kind:
            door.skip(check, _UNKNOWN.get(check) or probe.no_room or probe.salts_unread or "none is known")
            continue
        found = secrets_in(page, kind)
        told = f"it holds {', '.join(found)}" if found else f"none of {len(kind)} in any of their forms"
        door.judge(check, not found, told)


# ---- HTTP -------------------------------------------------------------------------------------------------


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=ANSWER_S)
        self._path = path

    def connect(self) -> None:
        """Called by the base class when it needs a socket."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self.sock.settimeout(ANSWER_S)
        self.sock.connect(self._path)


def _page(config: MetricsConfig) -> bytes:
    """Raises OSError or HTTPException: nobody answers, or not with a page."""
    if config.socket_path:
        connection: http.client.HTTPConnection = _UnixConnection(config.socket_path)
    else:
        host, port = config.host_port
        connection = http.client.HTTPConnection(_ANY.get(host, host), port, timeout=ANSWER_S)
    try:
        connection.request("GET", "/metrics")
        answer = connection.getresponse()
        page = answer.read(PAGE_BYTES_MAX)
    finally:
        connection.close()
    if answer.status != http.client.OK:
        raise http.client.HTTPException(f"{answer.status} {answer.reason}")
    return page
