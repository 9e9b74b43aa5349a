"""Tokens that are none, in headers that libraries send and in headers that none would: no door opens."""

from __future__ import annotations

import grpc
import pytest
from real_daemon import eventually

from kvstore.v1 import store_pb2 as pb

from . import h2
from .doors import PLAN, TOKEN, Doors, doors, plan_code, plan_request, said_to, wrapped

__all__ = ["doors"]
CODE = grpc.StatusCode


MALFORMED: dict[str, list[tuple[str, str | bytes]]] = {
    "none": [],
    "empty": [("authorization", "")],
    "the scheme alone": [("authorization", "Bearer")],
    "an empty token": [("authorization", "Bearer ")],
    "spaces": [("authorization", "Bearer      ")],
    "another scheme": [("authorization", f"Basic {TOKEN}")],
    "no scheme": [("authorization", TOKEN)],
    "no space": [("authorization", f"Bearer{TOKEN}")],
    "a word behind it": [("authorization", f"Bearer {TOKEN} x")],
    "a comma": [("authorization", f"Bearer {TOKEN}, Bearer {TOKEN}")],
    "twice the same": [("authorization", f"Bearer {TOKEN}")] * 2,
    "a wrong one first": [("authorization", "Bearer x"), ("authorization", f"Bearer {TOKEN}")],
    "a wrong one last": [("authorization", f"Bearer {TOKEN}"), ("authorization", "Bearer x")],
    "two hundred times": [("authorization", f"Bearer {TOKEN}")] * 200,
    "its digits changed": [("authorization", f"Bearer {TOKEN.upper()}")],
    "its beginning": [("authorization", f"Bearer {TOKEN[:-1]}")],
    "more than a token has": [("authorization", f"Bearer {TOKEN * 12}")],
    "10,000 letters": [("authorization", "Bearer " + "x" * 10_000)],
    "in another header": [("x-authorization", f"Bearer {TOKEN}"), ("token", TOKEN)],
    "in a binary header": [("authorization-bin", f"Bearer {TOKEN}".encode())],
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_token_is_no_token(doors: Doors, name: str) -> None:
    with doors.unhurt(), grpc.secure_channel(doors.tls, doors.papers.caller(None)) as channel:
        assert plan_code(channel, MALFORMED[name]) is CODE.UNAUTHENTICATED


@pytest.mark.parametrize("size", [20_000, 1 << 20])
def test_a_token_larger_than_all_headers_may_be(doors: Doors, size: int) -> None:
    with doors.unhurt(), grpc.secure_channel(doors.tls, doors.papers.caller(None)) as channel:
        huge = [("authorization", "Bearer " + "x" * size)]
        assert plan_code(channel, huge) in (CODE.RESOURCE_EXHAUSTED, CODE.UNAVAILABLE, CODE.INTERNAL)


RAW: dict[str, list[tuple[bytes, bytes]]] = {
    "no ASCII": [(b"authorization", "Bearer tökén".encode())],
    "no UTF-8": [(b"authorization", b"Bearer \xff\xfe\xfd")],
    "half a character": [(b"authorization", b"Bearer \xed\xa0\x80")],
    "control characters": [(b"authorization", b"Bearer \x01\x02\x7f")],
    "a zero": [(b"authorization", b"Bearer \0" + TOKEN.encode())],
    "lines": [(b"authorization", f"Bearer {TOKEN}\r\nx: y".encode())],
    "capitals": [(b"Authorization", f"Bearer {TOKEN}".encode())],
    "no name": [(b"", f"Bearer {TOKEN}".encode())],
    "a name of bytes": [(b"\xff\xfe", b"x")],
    "a binary header that is none": [(b"authorization-bin", b"\xff" * 40)],
    "a megabyte": [(b"authorization", b"Bearer " + b"x" * (1 << 20))],
    "a thousand headers": [(b"x-%d" % number, b"y") for number in range(1000)],
    "a hundred tokens": [(b"authorization", f"Bearer {TOKEN}".encode())] * 100,
}


def by_hand(doors: Doors, door: str, headers: list[tuple[bytes, bytes]]) -> list[bytes]:
    """A question with these headers; the messages of the answer."""
    data = h2.call(PLAN, headers, plan_request().SerializeToString())
    if door == "tls":
        return h2.answers(wrapped(doors, doors.papers.context(), data))
    return h2.answers(said_to(doors, door, data))


@pytest.mark.parametrize("name", RAW)
@pytest.mark.parametrize("door", ["tls", "unix"])
def test_headers_that_no_library_sends(doors: Doors, door: str, name: str) -> None:
    with doors.unhurt():
        answers = by_hand(doors, door, RAW[name])
        assert not answers or door == "unix"


@pytest.mark.parametrize("door", ["tls", "unix"])
def test_headers_that_a_library_would_send(doors: Doors, door: str) -> None:
    """Positive control of those above: calls by hand are calls."""

    def answered() -> bool:
        answers = by_hand(doors, door, [(b"authorization", f"Bearer {TOKEN}".encode())])
        return [pb.PlanResponse.FromString(answer).asked_blocks for answer in answers] == [2]

    with doors.unhurt():
        eventually(answered, "an answer within GLANCE_S")
