"""What systemd does with FDSTORE and FDSTOREREMOVE (sd_notify(3)), and with LISTEN_FDS at the next start."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

__all__ = ["SystemdEnd", "take_places"]

WAIT_S = 60.0


class SystemdEnd:
    """Listens at `path` (NOTIFY_SOCKET) and keeps what it is given.

    Attributes:
        said: every message, in order.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.said: list[str] = []
        self._stored: list[tuple[str, int]] = []
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._sock.bind(str(path))
        self._heard = threading.Condition()
        self._thread = threading.Thread(target=self._listen, name="service-systemd", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Let go of everything."""
        self._tell("END=1")
        self._thread.join(WAIT_S)
        self._sock.close()
        for _, fd in self._stored:
            os.close(fd)

    def names(self) -> list[str]:
        """Of what it holds now, every message that was sent before included."""
        self._tell(f"X_NUMBER={len(self.said)}")
        return sorted(name for name, _ in self._stored)

    def fds(self) -> list[int]:
        """The descriptors, in the order of LISTEN_FDNAMES."""
        self.names()
        return [fd for _, fd in self._stored]

    def environ(self) -> dict[str, str]:
        """For the next start; the process itself adds LISTEN_FDS and LISTEN_PID (`take_places`)."""
        names = ":".join(name for name, _ in self._stored)
        return {"NOTIFY_SOCKET": str(self.path), "FDSTORE": "512", "LISTEN_FDNAMES": names}

    def wait_for(self, word: str) -> None:
        """Until a service has said it."""
        with self._heard:
            assert self._heard.wait_for(lambda: word in self.said, WAIT_S), f"nobody said {word}: {self.said}"

    def _tell(self, word: str) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.sendto(word.encode(), str(self.path))
        self.wait_for(word)

    def _listen(self) -> None:
        ended = False
        while not ended:
            data, fds, _, _ = socket.recv_fds(self._sock, 4096, 8)
            lines = dict(line.partition("=")[::2] for line in data.decode().split("\n"))
            with self._heard:
                self._obey(lines, fds)
                self.said.append(data.decode())
                self._heard.notify_all()
            ended = "END" in lines

    def _obey(self, lines: dict[str, str], fds: list[int]) -> None:
        name = lines.get("FDNAME", "stored")
        if "FDSTORE" in lines and lines.get("FDPOLL") == "0":
            self._stored += [(name, fd) for fd in fds]
        elif "FDSTOREREMOVE" in lines:
            for _, fd in [one for one in self._stored if one[0] == name]:
                os.close(fd)
            self._stored = [one for one in self._stored if one[0] != name]


def take_places(passed: list[int]) -> None:
    """In the service's process: its descriptors are those from 3 upwards, and meant for it."""
    spare = [os.dup(fd) for fd in passed]
    for number, fd in enumerate(spare, 3):
        os.dup2(fd, number)  # never one of those to come: the lowest free numbers ascend
        os.set_inheritable(number, True)
    os.environ["LISTEN_FDS"], os.environ["LISTEN_PID"] = str(len(passed)), str(os.getpid())


if __name__ == "__main__":
    import sys

    count = int(sys.argv[1])
    take_places([int(word) for word in sys.argv[2 : 2 + count]])
    os.execv(sys.executable, [sys.executable, *sys.argv[2 + count :]])
