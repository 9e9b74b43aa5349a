"""Hostile first words for every door of a daemon: other protocols, halves, lies about sizes, wrong fields.

All of it is made here from honest bytes and seeds, so that a new field of Attach is covered without a line.
"""

from __future__ import annotations

import contextlib
import random
import ssl
from collections.abc import Sequence
from typing import Any

import msgspec
from raw_session import frame, hello

from kvstore.rpc import messages as m

from .talk import LAYOUT, encode, framed

__all__ = [
    "ATTACH_FIELDS",
    "WRONG_ATTACHES",
    "WRONG_VALUES",
    "attach_of",
    "client_hello",
    "strange",
    "tls_strange",
]

_SEED = 20261130
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_MANY = 5000


def client_hello(alpn: Sequence[str] = ("h2",), name: str = "localhost") -> bytes:
    """What a TLS client says first."""
    context = ssl.SSLContext(
        ssl.PROTOCOL_TLS_CLIENT
    )  # without the system's authorities, which take long to read
    context.set_alpn_protocols(list(alpn))
    outgoing = ssl.MemoryBIO()
    session = context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname=name)
    with contextlib.suppress(ssl.SSLWantReadError):
        session.do_handshake()
    return outgoing.read()


def strange() -> dict[str, bytes]:
    """Protocols that are spoken at no door, or at another one; and sizes that are lies."""
    greeting, chance = client_hello(), random.Random(_SEED)
    return {
        "nothing": b"",
        "a TLS client": greeting,
        "HTTP/1.1": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        "HTTP/1.1 with a long header": b"GET / HTTP/1.1\r\nA: " + b"a" * 200_000,
        "HTTP/2": _PREFACE + b"\0\0\0\4\0\0\0\0\0",
        "a session's attach": frame(1, hello(LAYOUT)),
        "a line": b"PING\r\n",
        "SSH": b"SSH-2.0-OpenSSH_9.6\r\n",
        "Redis": b"*1\r\n$4\r\nPING\r\n",
        "PROXY": b"PROXY TCP4 10.0.0.1 10.0.0.2 56324 443\r\n" + greeting,
        "PROXY v2": b"\r\n\r\n\0\r\nQUIT\n\x21\x11\0\x0c" + bytes(12) + greeting,
        "zeros": bytes(70_000),
        "ones": b"\xff" * 70_000,
        "a frame of 4 GiB": b"\xff\xff\xff\xff" + b"x" * 100,
        "a frame one byte too long": (m.FRAME_BYTES_MAX + 1).to_bytes(4, "little") + b"x" * 100,
        "a frame that never comes": m.FRAME_BYTES_MAX.to_bytes(4, "little") + b"\x92\x01",
        "an empty frame": bytes(4),
        "half a length": b"\x10\0",
        **{f"noise {size}": chance.randbytes(size) for size in (1, 3, 64, 4096, 100_000)},
    }


def tls_strange() -> dict[str, bytes]:
    """For a door that expects a TLS client: half of one, and what only looks like one."""
    greeting = client_hello()
    cuts = (1, 4, 5, 6, 43, len(greeting) // 2, len(greeting) - 1)
    return {
        **strange(),
        **{f"{cut} bytes of a hello": greeting[:cut] for cut in cuts},
        "a hello twice": greeting * 2,
        "a hello and noise": greeting + random.Random(_SEED).randbytes(5000),
        "a hello of 2^24 bytes": b"\x16\x03\x01\x40\0\x01\xff\xff\xff" + bytes(16_000),
        "a hello in a record of no length": b"\x16\x03\x01\0\0" * 2000 + greeting,
        "a hello in records of one byte": b"".join(
            b"\x16\x03\x01\0\1" + bytes([byte]) for byte in greeting[5:]
        ),
        "an SSL 2 hello": b"\x80\x2e\1\0\2\0\x15\0\0\0\x10" + bytes(37),
        "an SSL 3 hello": greeting[:1] + b"\3\0" + greeting[3:9] + b"\3\0" + greeting[11:],
        "a TLS 1.0 hello without extensions": _old_hello(b"\3\1"),
        "a TLS 1.1 hello without extensions": _old_hello(b"\3\2"),
        "an alert": b"\x15\x03\x03\0\2\2\x28",
        "data before any key": b"\x17\x03\x03\0\x20" + bytes(32),
        "a change of cipher": b"\x14\x03\x03\0\1\1" * 50,
        "a heartbeat that asks for more than it sends": b"\x18\x03\x02\0\3\1\x40\0",
        "another name": client_hello(name="nobody.invalid"),
        "another protocol within TLS": client_hello(alpn=["http/1.1", "acme-tls/1"]),
    }


def _in_records_of_one(inner: bytes) -> bytes:
    return b"".join(b"\x16\x03\x01\0\1" + bytes([byte]) for byte in inner)


def _old_hello(version: bytes) -> bytes:
    """As clients sent it before there were extensions: 32 bytes of chance, no session, one cipher."""
    body = version + bytes(range(32)) + b"\0" + b"\0\2\0\x2f" + b"\1\0"
    inner = b"\1" + len(body).to_bytes(3, "big") + body
    return b"\x16\x03\x01" + len(inner).to_bytes(2, "big") + inner


# ---- a session's attach -----------------------------------------------------------------------------------

ATTACH_FIELDS = ("tag", *m.Attach.__struct_fields__)
WRONG_VALUES: dict[str, bytes] = {
    "nil": b"\xc0",
    "true": b"\xc3",
    "-1": encode(-1),
    "2^63 - 1": encode((1 << 63) - 1),
    "2^64 - 1": encode((1 << 64) - 1),
    "a float": encode(1e308),
    "not a number": encode(float("nan")),
    "a text": encode("x"),
    "a long text": encode("x" * 300_000),
    "a text that is no UTF-8": b"\xa4\xff\xfe\xc0\x80",
    "half a character": b"\xa2\xed\xa0",
    "long bytes": encode(bytes(300_000)),
    "an empty list": b"\x90",
    "an empty map": b"\x80",
    "thousands of texts": encode([f"tenant{number}" for number in range(_MANY)]),
    "one text thousands of times": encode(["default"] * _MANY),
    "a map of thousands": encode({f"field{number}": "x" for number in range(_MANY)}),
    "a key twice": b"\x82\xa5model\xa1x\xa5model\xa1y",
    "a key that is no text": b"\x81\xc0\xa1x",
    "lists in lists": b"\x91" * 200_000 + b"\xc0",
    "maps in maps": b"\x81\xa1x" * 100_000 + b"\xc0",
    "an extension": b"\xc7\x05\x2a" + bytes(5),
    "a time": b"\xd6\xff" + bytes(4),
    "a text of 4 GiB": b"\xdb\xff\xff\xff\xff",
    "bytes of 4 GiB": b"\xc6\xff\xff\xff\xff",
    "a list of 2^32": b"\xdd\xff\xff\xff\xff",
    "a map of 2^32": b"\xdf\xff\xff\xff\xff",
    "an extension of 4 GiB": b"\xc9\xff\xff\xff\xff\x01",
    "a code that never was": b"\xc1",
}


def attach_of(changes: dict[str, bytes]) -> bytes:
    """An honest Attach as a frame, with some of its fields as these bytes."""
    fields = msgspec.to_builtins(hello(LAYOUT), builtin_types=(bytes,))
    given = zip(ATTACH_FIELDS, fields, strict=True)
    parts = [changes.get(name, b"") or encode(value) for name, value in given]
    return framed(b"\x92\x01" + bytes([0x90 + len(parts)]) + b"".join(parts))


def _namespace_twice() -> bytes:
    """Every field twice, the second time with another value."""
    honest = hello(LAYOUT).namespace
    pairs = [pair for key, value in honest.items() for pair in ((key, value), (key, value + "2"))]
    return b"\xde" + len(pairs).to_bytes(2, "big") + b"".join(encode(key) + encode(v) for key, v in pairs)


def _hello(**changes: Any) -> m.Attach:
    return msgspec.structs.replace(hello(LAYOUT), **changes)


def _wrong() -> dict[str, bytes]:
    honest = _hello()
    layout = honest.layout
    assert layout is not None
    huge, many = (1 << 63) - 1, [f"t{number}" for number in range(_MANY)]
    versions = (0, 1, m.PROTOCOL_VERSION - 1, m.PROTOCOL_VERSION + 1, huge, -huge)
    changed: dict[str, m.Attach] = {
        **{f"version {number}": _hello(version=number) for number in versions},
        "another hash": _hello(vector=bytes(len(honest.vector))),
        "no hash": _hello(vector=b""),
        "a hash of 900 KiB": _hello(vector=bytes(900 << 10)),
        "nobody's name": _hello(tenants=["nobody"]),
        "an empty name": _hello(tenants=[""]),
        "no name": _hello(tenants=[]),
        "a path for a name": _hello(tenants=["../../etc/passwd"]),
        "a name of 900 KiB": _hello(tenants=["x" * (900 << 10)]),
        "thousands of names": _hello(tenants=many),
        "thousands of names and one's own": _hello(tenants=["default", *many]),
        "one's own name thousands of times": _hello(tenants=["default"] * _MANY),
        "an engine of 15 bytes": _hello(engine=bytes(15)),
        "an engine of 900 KiB": _hello(engine=bytes(900 << 10)),
        "a namespace of thousands": _hello(namespace={**honest.namespace, **dict.fromkeys(many, "x")}),
        "a namespace of 900 KiB": _hello(namespace={**honest.namespace, "model": "x" * (900 << 10)}),
        "a namespace of nothing": _hello(namespace={}),
        "no layout": _hello(layout=None),
        "a part that is not there": _hello(part=(huge, huge, huge, huge)),
        "a part less than nothing": _hello(part=(-1, -1, -1, -1)),
    }
    numbers = [name for name in m.Layout.__struct_fields__ if isinstance(getattr(layout, name), int)]
    for name in numbers:
        for value in (-1, huge) if name == "kernel_block_tokens" else (0, -1, huge):
            wrong = msgspec.structs.replace(layout, **{name: value})
            changed[f"layout.{name} {value}"] = _hello(layout=wrong)
    made = {name: frame(1, body) for name, body in changed.items()}
    return {**made, "a namespace with every field twice": attach_of({"namespace": _namespace_twice()})}


WRONG_ATTACHES = _wrong()
