"""HTTP/2 by hand: hostile streams of frames, and calls whose headers no library would send."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["PREFACE", "answers", "call", "hostile_streams"]

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST, SETTINGS, PUSH, PING, GOAWAY, WINDOW, CONTINUATION = range(10)
END_STREAM, END_HEADERS, ACK = 1, 4, 1
_PIECE = 16_384
_BEGIN = PREFACE + bytes(3) + bytes([SETTINGS]) + bytes(5)
Header = tuple[bytes, bytes]


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def _length(size: int) -> bytes:
    """Of a text that is not compressed: seven bits, then the rest seven bits at a time."""
    if size < 127:
        return bytes([size])
    out, size = bytearray([127]), size - 127
    while size >= 128:
        out.append(size % 128 + 128)
        size //= 128
    return bytes([*out, size])


def _block(headers: Sequence[Header]) -> bytes:
    """Headers, none of them compressed and none to be remembered."""
    return b"".join(b"\0" + _length(len(n)) + n + _length(len(v)) + v for n, v in headers)


def _headers(path: bytes, more: Sequence[Header]) -> bytes:
    first = [
        (b":method", b"POST"),
        (b":scheme", b"https"),
        (b":path", path),
        (b":authority", b"localhost"),
        (b"te", b"trailers"),
        (b"content-type", b"application/grpc"),
    ]
    return _block([*first, *more])


def _request(stream: int, block: bytes, message: bytes) -> bytes:
    """A call as a stream of frames; what does not fit in one frame goes on in others."""
    pieces = [block[at : at + _PIECE] for at in range(0, len(block), _PIECE)]
    out = b""
    for number, piece in enumerate(pieces):
        kind = CONTINUATION if number else HEADERS
        out += _frame(kind, END_HEADERS if piece is pieces[-1] else 0, stream, piece)
    return out + _frame(DATA, END_STREAM, stream, b"\0" + len(message).to_bytes(4, "big") + message)


def call(path: str, more: Sequence[Header], message: bytes = b"") -> bytes:
    """A whole connection with one call, whose headers may be anything."""
    return _BEGIN + _request(1, _headers(path.encode(), more), message)


def answers(data: bytes) -> list[bytes]:
    """Messages of the first call in what a server has sent; each in a frame of its own, or in several."""
    stream, at = b"", 0
    while len(data) - at >= 9:
        length = int.from_bytes(data[at : at + 3], "big")
        if (data[at + 3], data[at + 8]) == (DATA, 1):
            stream += data[at + 9 : at + 9 + length]
        at += 9 + length
    found = []
    while len(stream) >= 5:
        length = int.from_bytes(stream[1:5], "big")
        found.append(stream[5 : 5 + length])
        stream = stream[5 + length :]
    return found


def hostile_streams(path: str) -> dict[str, bytes]:
    """What a client may send that breaks the rules, or keeps them and is a flood."""
    block = _headers(path.encode(), [])
    opened = _frame(HEADERS, END_HEADERS, 1, block)
    return {
        "the beginning of a preface": PREFACE[:10],
        "a preface alone": PREFACE,
        "a preface and noise": PREFACE + bytes(range(256)) * 100,
        "headers before settings": PREFACE + opened,
        "settings of an odd size": PREFACE + _frame(SETTINGS, 0, 0, bytes(5)),
        "settings on a stream": PREFACE + _frame(SETTINGS, 0, 1),
        "settings out of range": PREFACE
        + _frame(SETTINGS, 0, 0, b"\0\5\xff\xff\xff\xff\0\4\xff\xff\xff\xff"),
        "an answer to settings with a payload": _BEGIN + _frame(SETTINGS, ACK, 0, bytes(6)),
        "a frame of 16 MiB": _BEGIN + b"\xff\xff\xff" + bytes([DATA]) + bytes(5) + bytes(1000),
        "headers of 16 MiB": _BEGIN + b"\xff\xff\xff" + bytes([HEADERS, 4, 0, 0, 0, 1]) + bytes(1000),
        "headers that nobody can read": _BEGIN + _frame(HEADERS, END_HEADERS, 1, b"\xff" * 200),
        "an endless number in headers": _BEGIN + _frame(HEADERS, END_HEADERS, 1, b"\0\x7f" + b"\xff" * 100),
        "headers without a path": _BEGIN + _request(1, _block([(b":method", b"POST")]), b""),
        "headers that never end": _BEGIN
        + _frame(HEADERS, 0, 1, block)
        + _frame(CONTINUATION, 0, 1, _block([(b"x", b"y" * 100)])) * 2000,
        "a header remembered and asked for a million times": _BEGIN
        + _frame(HEADERS, 0, 1, b"\x40\1x" + _length(3000) + b"y" * 3000)
        + _frame(CONTINUATION, 0, 1, b"\xbe" * _PIECE) * 60,
        "data for nobody": _BEGIN + _frame(DATA, 0, 0, b"x"),
        "data on a stream that is not open": _BEGIN + _frame(DATA, 0, 7, b"x" * 1000),
        "a stream of even number": _BEGIN + _frame(HEADERS, END_HEADERS, 2, block),
        "a stream that depends on itself": _BEGIN + opened + _frame(PRIORITY, 0, 1, b"\0\0\0\1\xff"),
        "a promise": _BEGIN + opened + _frame(PUSH, END_HEADERS, 1, b"\0\0\0\2" + block),
        "more than a window holds": _BEGIN + _frame(WINDOW, 0, 0, b"\x7f\xff\xff\xff") * 2,
        "a window of nothing": _BEGIN + _frame(WINDOW, 0, 0, bytes(4)),
        "farewell and then calls": _BEGIN + _frame(GOAWAY, 0, 0, bytes(8)) + _request(1, block, b""),
        "frames of a kind that never was": _BEGIN + _frame(200, 255, 9, bytes(100)) * 1000,
        "a flood of pings": _BEGIN + _frame(PING, 0, 0, bytes(8)) * 5000,
        "a flood of settings": _BEGIN + _frame(SETTINGS, 0, 0) * 5000,
        "calls that are taken back at once": _BEGIN
        + b"".join(
            _frame(HEADERS, END_HEADERS, stream, block) + _frame(RST, 0, stream, b"\0\0\0\x08")
            for stream in range(1, 4001, 2)
        ),
        "a message of 4 GiB": _BEGIN + opened + _frame(DATA, 0, 1, b"\0\xff\xff\xff\xff" + bytes(1000)),
        "a message that claims to be compressed": _BEGIN + opened + _frame(DATA, 1, 1, b"\1\0\0\0\1x"),
        "an unknown method": call("/kvstore.v1.Store/Nothing", []),
        "a path of 10,000 bytes": call("/" + "x" * 10_000, []),
        "a call without an end": _BEGIN + opened,
    }
