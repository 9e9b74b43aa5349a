"""systemd as keeper: its descriptor store, and the two words every service tells it.

A unit with `FileDescriptorStoreMax=` larger than two per arena and one per engine process gets its
descriptors back at the next start (`LISTEN_FDS`, `LISTEN_FDNAMES`). systemd lets go of all of them when the
unit stops for good. Protocol: sd_notify(3), sd_pid_notify_with_fds(3), sd_listen_fds(3).
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterable, Mapping, MutableMapping

import structlog

from kvstore.keep.datagrams import Datagrams, notify_address
from kvstore.keep.wire import is_name

__all__ = ["SystemdStore", "notify", "offers_store"]

log = structlog.get_logger()

_FIRST_FD = 3
_FDS_MAX = 1 << 18


def offers_store(environ: Mapping[str, str]) -> bool:
    """Whether the service manager keeps descriptors for us (systemd 254 says so, older ones by deed)."""
    stored = environ.get("FDSTORE", "0").isdigit() and int(environ.get("FDSTORE", "0")) > 0
    return "NOTIFY_SOCKET" in environ and (stored or "LISTEN_FDNAMES" in environ)


def notify(state: str) -> bool:
    """Tell the service manager; False when there is none or it cannot hear. Never raises for that.

    Waits for a second at most: for a service's first and last word.
    """
    address = notify_address(os.environ.get("NOTIFY_SOCKET", ""))
    if not address:
        return False
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.settimeout(1.0)
            sock.connect(address)
            sock.send(state.encode(), socket.MSG_NOSIGNAL)
    except OSError as error:
        log.warning("the service manager does not hear us", reason=str(error))
        return False
    return True


class SystemdStore:
    """See `Keeper`.

    Args:
        environ: the process's environment; what concerns descriptors is taken out of it.
    """

    def __init__(self, environ: MutableMapping[str, str]) -> None:
        self._environ = environ
        self._names: set[str] = set()
        self._words = Datagrams(notify_address(environ.get("NOTIFY_SOCKET", "")))

    def take(self) -> dict[str, int]:
        names = self._environ.pop("LISTEN_FDNAMES", "").split(":")
        count = self._environ.pop("LISTEN_FDS", "0")
        if self._environ.pop("LISTEN_PID", "") != str(os.getpid()) or not count.isdigit():
            return {}
        found: dict[str, int] = {}
        for fd in range(_FIRST_FD, _FIRST_FD + min(int(count), _FDS_MAX)):
            os.set_inheritable(fd, False)
            name = names[fd - _FIRST_FD] if fd - _FIRST_FD < len(names) else ""
            if not is_name(name) or name in found:
                os.close(fd)  # not one of ours
            else:
                found[name] = fd
        self._names |= found.keys()
        return found

    def put(self, fds: Mapping[str, int]) -> None:
        for name, fd in fds.items():
            if name in self._names:
                self.drop([name])
            self._names.add(name)
            # FDPOLL=0: the pidfd of a process that ended must stay until we have seen it.
            self._words.send(f"FDSTORE=1\nFDNAME={name}\nFDPOLL=0", [fd])

    def drop(self, names: Iterable[str]) -> None:
        for name in names:
            self._names.discard(name)
            self._words.send(f"FDSTOREREMOVE=1\nFDNAME={name}")

    def serve(self, loop: asyncio.AbstractEventLoop) -> None:
        self._words.serve(loop)

    def leave(self) -> None:
        self._words.close()

    def end(self) -> None:
        self._words.leave()
        self.drop(sorted(self._names))
        self._words.close()
