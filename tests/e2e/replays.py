"""What a client has sent, to the byte, and how to send it once more from somewhere else."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from fake_engine import SMALL
from raw_session import RawSession
from real_daemon import WAIT_S

from kvstore.rpc import messages as m

__all__ = ["Conversation", "Tap", "frames_of", "message_of", "sent_again", "sent_again_elsewhere"]

_PROGRAM = Path(__file__).with_name("replay_program.py")
_decode = msgspec.msgpack.Decoder(m.RequestFrame).decode
Answers = list[tuple[str, str]]
"""Of one conversation, in order: the name of each reply's type and, where it is a Failed, its status."""


class Tap:
    """Lies between a client and the daemon: passes everything on, descriptors too, and keeps what is sent.

    Args:
        path: where the client finds it.
        daemon: the daemon's socket.

    Attributes:
        sent: by the client, a connection each.
    """

    def __init__(self, path: Path, daemon: Path) -> None:
        self.path = path
        self.sent: list[bytearray] = []
        self._daemon = daemon
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen()
        self._stop, self._stopped = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._thread = threading.Thread(target=self._run, name="tap")
        self._thread.start()

    def close(self) -> None:
        """Hang up on both ends of every connection."""
        self._stop.close()
        self._thread.join(WAIT_S)
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()

    def _run(self) -> None:
        self._selector.register(self._stopped, selectors.EVENT_READ)
        self._selector.register(self._listener, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._stopped:
                    return
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    self._move(key.fileobj, *key.data)

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        daemon = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        daemon.connect(str(self._daemon))
        self.sent.append(bytearray())
        self._selector.register(client, selectors.EVENT_READ, (daemon, self.sent[-1]))
        self._selector.register(daemon, selectors.EVENT_READ, (client, bytearray()))

    def _move(self, source: Any, target: socket.socket, kept: bytearray) -> None:
        if source.fileno() < 0:
            return  # its other end was closed in this round
        try:
            data, fds, _, _ = socket.recv_fds(source, 1 << 18, 4)
            kept += data
            if fds:
                socket.send_fds(target, [data], fds)
            elif data:
                target.sendall(data)
        except OSError:
            data, fds = b"", []
        for fd in fds:
            os.close(fd)
        if not data:
            for one in (source, target):
                self._selector.unregister(one)
                one.close()


def frames_of(data: bytes) -> list[bytes]:
    """Whole frames, each with its length."""
    found, at = [], 0
    while at < len(data):
        end = at + 4 + int.from_bytes(data[at : at + 4], "little")
        assert end <= len(data), "it ends in the middle of a frame"
        found.append(bytes(data[at:end]))
        at = end
    return found


def message_of(frame: bytes) -> Any:
    """What a frame says."""
    return _decode(frame[4:]).body


# ---- again ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Conversation:
    """What one connection sends.

    Attributes:
        frames: one after the other, without a look at any answer.
        honest: only after an attach and a layout proof of its own.
    """

    frames: Sequence[bytes]
    honest: bool = False


def sent_again(path: Path, model: str, conversations: Sequence[Conversation]) -> list[Answers]:
    """Each conversation on a fresh connection of this process, to its end; what the daemon answered."""
    return [_one(path, model, conversation) for conversation in conversations]


def _one(path: Path, model: str, conversation: Conversation) -> Answers:
    answers: Answers = []
    with RawSession(path) as raw:
        if conversation.honest:
            raw.engine(SMALL, model=model)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            raw.sock.sendall(b"".join(conversation.frames))
        while len(answers) < len(conversation.frames) and (got := raw.receive()) is not None:
            if got.id or isinstance(got.body, m.Failed):  # and not a notice
                answers.append((type(got.body).__name__, getattr(got.body, "status", "")))
    return answers


def sent_again_elsewhere(path: Path, model: str, conversations: Sequence[Conversation]) -> list[Answers]:
    """The same from another process, which is gone afterwards."""
    rows = [[one.honest, [frame.hex() for frame in one.frames]] for one in conversations]
    done = subprocess.run(
        [sys.executable, str(_PROGRAM), str(path), model],
        input=json.dumps(rows),
        stdout=subprocess.PIPE,
        text=True,
        timeout=WAIT_S,
        check=True,  # and nothing between fork and exec: gRPC's threads may be running here
    )
    return [[(name, status) for name, status in answers] for answers in json.loads(done.stdout)]
