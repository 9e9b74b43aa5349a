"""Frames of the session protocol as a state machine: bytes in, replies out. No socket here.

frame = u32le length ‖ msgpack [id, message]        0 < length <= FRAME_BYTES_MAX
"""

from __future__ import annotations

import struct

import msgspec

from kvstore.errors import BadRequest
from kvstore.rpc.messages import FRAME_BYTES_MAX, Failed, Notice, ReplyFrame, Request, RequestFrame

__all__ = ["Wire"]

_LENGTH = struct.Struct("<I")
# Ids are 31 bits and skip 0, which means "notice": 2**31 requests in flight cannot happen.
_ID_MASK = (1 << 31) - 1


class Wire:
    """One connection's framing, request ids and checks. One thread at a time."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ReplyFrame)
        self._buffer = bytearray()
        self._last_id = 0
        self._open: set[int] = set()

    def request(self, message: Request) -> tuple[int, bytes]:
        """Id and frame of a request; its reply is expected from now on.

        Raises:
            BadRequest: the frame would be longer than FRAME_BYTES_MAX.
        """
        ident = self._last_id % _ID_MASK + 1
        body = self._encoder.encode(RequestFrame(ident, message))
        if len(body) > FRAME_BYTES_MAX:
            raise BadRequest(
                f"{type(message).__name__}: frame of {len(body)} bytes is over frame_bytes_max = "
                f"{FRAME_BYTES_MAX}; send fewer keys at once"
            )
        self._last_id = ident
        self._open.add(ident)
        return ident, _LENGTH.pack(len(body)) + body

    def feed(self, data: bytes | memoryview) -> list[ReplyFrame]:
        """Whole frames that are complete now, in order.

        Raises:
            BadRequest: a frame is empty, too long, not a reply, or answers nothing that was asked. The
                connection must be closed.
        """
        if not self._buffer and len(data) > _LENGTH.size:
            (length,) = _LENGTH.unpack_from(data)
            if length == len(data) - _LENGTH.size <= FRAME_BYTES_MAX:  # one whole frame, as most are
                return [self._decode(memoryview(data)[_LENGTH.size :])]
        self._buffer += data
        frames: list[ReplyFrame] = []
        offset = 0
        while len(self._buffer) - offset >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, offset)
            if not 0 < length <= FRAME_BYTES_MAX:
                raise BadRequest(f"reply of {length} bytes: need 1 to {FRAME_BYTES_MAX}")
            stop = offset + _LENGTH.size + length
            if len(self._buffer) < stop:
                break
            frames.append(self._decode(bytes(self._buffer[offset + _LENGTH.size : stop])))
            offset = stop
        del self._buffer[:offset]
        return frames

    def _decode(self, body: bytes | memoryview) -> ReplyFrame:
        try:
            frame = self._decoder.decode(body)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise BadRequest(f"reply cannot be read: {error}") from None
        if isinstance(frame.body, Notice):
            if frame.id != 0:
                raise BadRequest(f"notice with id {frame.id}: need 0")
        elif frame.id == 0 and isinstance(frame.body, Failed):
            raise BadRequest(f"the daemon could not read a request: {frame.body.message}")
        elif frame.id not in self._open:
            raise BadRequest(f"reply to {frame.id}, which was not asked")
        else:
            self._open.remove(frame.id)
        return frame
