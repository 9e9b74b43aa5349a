"""Where KV events are published over ZMQ: what `events.zmq` and `events.zmq_replay` mean, what is refused.

Both hold endpoints, `tcp://host:port` or `ipc:///path`, separated by commas. A trust group's events tell its
keys, so every group has endpoints of its own: with several groups each endpoint begins with the group's name,
`red=tcp://127.0.0.1:5557`. A group that is not named publishes nothing.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvstore.config.tables import EventsConfig
from kvstore.errors import ConfigError

__all__ = ["FORMS", "Outlet", "ipc_path", "outlets"]

FORMS = ("array", "map")
_NAMED = re.compile(r"([A-Za-z0-9_.-]{1,64})=(.*)", re.DOTALL)
_PATH_BYTES_MAX = 107  # sockaddr_un
_TOPIC_BYTES_MAX = 64


@dataclass(frozen=True, slots=True)
class Outlet:
    """Where one trust group's events go.

    Attributes:
        group: its name.
        publish: endpoint of the PUB socket, "" = none.
        replay: endpoint of the ROUTER socket, "" = none.
    """

    group: str
    publish: str
    replay: str


def outlets(config: EventsConfig, groups: Sequence[str]) -> list[Outlet]:
    """One for each group that publishes, in the order of `groups`.

    Raises:
        ConfigError: names the key and the fix: an endpoint is malformed, named twice, of no known group, or
            others than this machine reach it and `events.zmq_insecure` does not accept that.
    """
    if config.zmq_form not in FORMS:
        raise ConfigError(f"events.zmq_form: need {' or '.join(FORMS)}, got {config.zmq_form!r:.40}")
    if len(config.zmq_topic.encode()) > _TOPIC_BYTES_MAX:
        raise ConfigError(f"events.zmq_topic: need at most {_TOPIC_BYTES_MAX} bytes")
    publish = _by_group("events.zmq", config.zmq, groups, config.zmq_insecure)
    replay = _by_group("events.zmq_replay", config.zmq_replay, groups, config.zmq_insecure)
    used = [*publish.values(), *replay.values()]
    for endpoint in used:
        if used.count(endpoint) > 1 and not endpoint.endswith(":0"):
            raise ConfigError(f"events.zmq: {endpoint} is named twice; every socket needs its own")
    return [
        Outlet(group, publish.get(group, ""), replay.get(group, ""))
        for group in groups
        if group in publish or group in replay
    ]


def ipc_path(endpoint: str) -> Path | None:
    """Path of the Unix socket, None for TCP and for no endpoint."""
    return Path(endpoint.removeprefix("ipc://")) if endpoint.startswith("ipc://") else None


def _by_group(key: str, value: str, groups: Sequence[str], insecure: bool) -> dict[str, str]:
    """Group → endpoint."""
    found: dict[str, str] = {}
    for text in (text.strip() for text in value.split(",") if text.strip()):
        named = _NAMED.fullmatch(text)
        if named is None and len(groups) > 1:
            raise ConfigError(
                f"{key}: {text!r:.120} names no trust group, and there are {len(groups)}; write "
                f"{groups[0]}={text:.120}"
            )
        group, endpoint = (named[1], named[2]) if named is not None else (groups[0], text)
        if group not in groups:
            raise ConfigError(f"{key}: no tenant is in {group!r}; name one of {', '.join(groups):.200}")
        if group in found:
            raise ConfigError(f"{key}: trust group {group} has two endpoints; it needs one")
        _check(key, endpoint, insecure)
        found[group] = endpoint
    return found


def _check(key: str, endpoint: str, insecure: bool) -> None:
    path = ipc_path(endpoint)
    if path is not None:
        if not path.is_absolute() or len(str(path).encode()) > _PATH_BYTES_MAX:
            raise ConfigError(
                f"{key}: {endpoint!r:.160} needs an absolute path of at most {_PATH_BYTES_MAX} bytes (the "
                "kernel's limit), ipc:///run/kvstore-events.sock"
            )
        return
    host, colon, port = endpoint.removeprefix("tcp://").rpartition(":")
    known = endpoint.startswith("tcp://") and colon and port.isascii() and port.isdigit()
    if not known or not host or int(port) > 65_535:
        raise ConfigError(f"{key}: {endpoint!r:.160} is neither tcp://host:port nor ipc:///path")
    if not insecure and not _is_loopback(host):
        raise ConfigError(
            f"{key}: {endpoint} is plaintext that other machines reach: whoever does is told every key of "
            "the trust group; use tcp://127.0.0.1:PORT or ipc:///path, or accept that with "
            "--set events.zmq_insecure=true"
        )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:  # a name, an interface, *: who answers to it is not known here
        return False
