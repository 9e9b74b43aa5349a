"""The other end of the daemon's event sockets: a blocking subscriber, as a tool in any language would be."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import zmq
from real_daemon import eventually

from kvstore.router.kv_schema import Batch, decode_batch

__all__ = ["END", "WAIT_MS", "Message", "Subscriber"]

END = b"\xff" * 8
WAIT_MS = 60_000


@dataclass(frozen=True)
class Message:
    """One batch as it came."""

    topic: bytes
    sequence: int
    payload: bytes

    @property
    def batch(self) -> Batch:
        return decode_batch(self.payload)


class Subscriber:
    """A SUB and a DEALER socket."""

    def __init__(self, publish: str = "", replay: str = "", topic: bytes = b"") -> None:
        self._context = zmq.Context()
        self.sub: Any = self._open(zmq.SUB, publish, topic)
        self.dealer: Any = self._open(zmq.DEALER, replay, b"")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Leave; nothing is waited for."""
        self._context.destroy(linger=0)

    def _open(self, kind: int, endpoint: str, topic: bytes) -> Any:
        socket = self._context.socket(kind)
        socket.set(zmq.RCVTIMEO, WAIT_MS)
        if kind == zmq.SUB:
            socket.set(zmq.SUBSCRIBE, topic)
        if endpoint:
            socket.connect(endpoint)
        return socket

    def heard(self) -> Message:
        """The next message that is published."""
        topic, sequence, payload = self.sub.recv_multipart()
        return Message(topic, int.from_bytes(sequence, "big"), payload)

    def joined(self, act: Any) -> Message:
        """The first message that arrives, of those that `act` causes again and again."""

        def arrived() -> bool:
            act()
            return bool(self.sub.poll(20))

        eventually(arrived, "a subscriber hears something")
        return self.heard()

    def ask(self, request: bytes) -> None:
        """Ask the replay socket."""
        self.dealer.send_multipart((b"", request))

    def answer(self) -> list[list[bytes]]:
        """Everything up to the end: [topic, sequence, payload] each."""
        found = []
        while True:
            blank, *frames = self.dealer.recv_multipart()
            assert blank == b""
            if frames[1] == END:
                assert frames == [b"", END, b""]
                return found
            found.append(frames)

    def replay(self, start: int) -> list[Message]:
        """Batches from `start` on."""
        self.ask(start.to_bytes(8, "big"))
        return [Message(topic, int.from_bytes(seq, "big"), payload) for topic, seq, payload in self.answer()]

    def snapshot(self) -> tuple[list[Message], int, bytes]:
        """Batches of everything readable, the sequence from which on events complete it, and the epoch."""
        self.ask(b"snapshot")
        *parts, (topic, upcoming, epoch) = self.answer()
        assert topic == b""
        assert {part[1] for part in parts} <= {upcoming}
        number = int.from_bytes(upcoming, "big")
        return [Message(part[0], number, part[2]) for part in parts], number, epoch
