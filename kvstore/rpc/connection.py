"""One Unix-socket connection on the event loop: frames in, frames and fds out, all of it bounded.

No streams and no tasks: the loop calls `_readable`, whole frames go to one callback, answers are written at
once. A round trip is one wake-up of each side.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence

from kvstore.rpc.messages import FRAME_BYTES_MAX

__all__ = ["HEADER_BYTES", "RECEIVED_BYTES", "Connection", "framed"]

HEADER_BYTES = 4
RECEIVED_BYTES = 256 << 10
# Frames answered before other connections get their turn.
_FRAMES_PER_TURN = 16
# Replies a client has not read; beyond this it is not reading at all.
_UNSENT_BYTES_MAX = 8 << 20
# Answers that wait for their time.
_HELD_MAX = 4096


class Connection:
    """A framed connection.

    Args:
        sock: connected socket; made non-blocking, owned from now on.
        received: what one receive fills; the connections of a loop share it. Frames are taken from it at
            once, only what is left of a frame that has not arrived whole is copied.
        on_frame: called with the payload of each frame; valid during the call only.
        on_closed: called exactly once, with the reason, after the socket is closed.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        received: memoryview,
        on_frame: Callable[[memoryview], None],
        on_closed: Callable[[str], None],
    ) -> None:
        sock.setblocking(False)
        self._loop = loop
        self._sock = sock
        self._received = received
        self._on_frame = on_frame
        self._on_closed = on_closed
        self._in = bytearray()
        self._out = bytearray()
        self._held: dict[int, asyncio.TimerHandle] = {}
        self._last_held = 0
        self._turn_pending = False
        self._last_words = False
        self.closed = False
        loop.add_reader(sock.fileno(), self._readable)

    def send(self, frame: bytes | bytearray, fds: Sequence[int] = ()) -> None:
        """Send one whole frame, with file descriptors if any (then nothing may be waiting to be sent)."""
        if self.closed:
            return
        try:
            if fds:
                sent = socket.send_fds(self._sock, [frame], list(fds))
            else:
                sent = 0 if self._out else self._sock.send(frame)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            self.close(f"send failed: {error}")
            return
        if sent < len(frame):
            if not self._out:
                self._loop.add_writer(self._sock.fileno(), self._writable)
            self._out += frame[sent:]
            if len(self._out) > _UNSENT_BYTES_MAX:
                self.close(f"client does not read: {len(self._out)} bytes wait")

    def later(self, after_s: float, act: Callable[[], None]) -> None:
        """Do something on the loop after a while, if the connection is still there then."""
        if len(self._held) >= _HELD_MAX:
            self.close(f"client does not wait: {_HELD_MAX} answers are held back for it")
            return
        self._last_held += 1
        self._held[self._last_held] = self._loop.call_later(after_s, self._act, self._last_held, act)

    def _act(self, number: int, act: Callable[[], None]) -> None:
        del self._held[number]
        act()

    def close(self, reason: str, *, after_sending: bool = False) -> None:
        """Close now, or as soon as what waits has been sent."""
        if self.closed:
            return
        if after_sending and self._out:
            self._last_words = True
            self._loop.remove_reader(self._sock.fileno())
            return
        self.closed = True
        fd = self._sock.fileno()
        self._loop.remove_reader(fd)
        self._loop.remove_writer(fd)
        self._sock.close()
        for timer in self._held.values():
            timer.cancel()
        self._held.clear()
        self._on_closed(reason)

    def _readable(self) -> None:
        try:
            size = self._sock.recv_into(self._received)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self.close(f"receive failed: {error}")
            return
        if not size:
            self.close("closed by the client")
        elif self._in:
            self._in += self._received[:size]
            self._take_kept()
        else:
            taken = self._take_frames(self._received[:size])
            self._in += self._received[taken:size]

    def _take_kept(self) -> None:
        with memoryview(self._in) as view:
            taken = self._take_frames(view)
        del self._in[:taken]

    def _take_frames(self, view: memoryview) -> int:
        """Hand whole frames on; how many bytes they were."""
        start, frames = 0, 0
        while not self.closed and not self._last_words and frames < _FRAMES_PER_TURN:
            if len(view) - start < HEADER_BYTES:
                break
            length = int.from_bytes(view[start : start + HEADER_BYTES], "little")
            if length > FRAME_BYTES_MAX:
                self.close(f"frame of {length} bytes is over frame_bytes_max = {FRAME_BYTES_MAX}")
                break
            if len(view) - start - HEADER_BYTES < length:
                break
            start += HEADER_BYTES + length
            frames += 1
            with view[start - length : start] as payload:
                self._on_frame(payload)
        if frames == _FRAMES_PER_TURN and not self.closed:
            # A client that sends faster than it is answered waits in its socket buffer, not in our memory.
            self._turn_pending = True
            self._loop.remove_reader(self._sock.fileno())
            self._loop.call_soon(self._next_turn)
        return start

    def _next_turn(self) -> None:
        self._turn_pending = False
        if self.closed:
            return
        self._take_kept()
        if not self.closed and not self._turn_pending and not self._last_words:
            self._loop.add_reader(self._sock.fileno(), self._readable)

    def _writable(self) -> None:
        try:
            sent = self._sock.send(self._out)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self.close(f"send failed: {error}")
            return
        del self._out[:sent]
        if not self._out:
            self._loop.remove_writer(self._sock.fileno())
            if self._last_words:
                self.close("refused")


def framed(encode_into: Callable[[object, bytearray, int], None], message: object, frame: bytearray) -> None:
    """Make `frame` the whole frame of a message: `u32le length ‖ payload`."""
    encode_into(message, frame, HEADER_BYTES)
    frame[:HEADER_BYTES] = (len(frame) - HEADER_BYTES).to_bytes(HEADER_BYTES, "little")
