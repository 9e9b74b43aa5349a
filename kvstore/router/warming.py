"""Warm-up of a replica: it is asked for one token behind each of the hottest prefixes, in turn."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from kvstore.clock import Clock
from kvstore.router.heads import Head
from kvstore.router.usage import usage_in
from kvstore.router.wire import Connections, WireError

__all__ = ["Warmed", "warm"]

_REQUEST_S = 600.0
_CONNECT_S = 5.0
_ANSWER_BYTES_MAX = 1 << 20


@dataclass(frozen=True, slots=True)
class Warmed:
    """One prefix.

    Attributes:
        prompt_tokens: sent.
        cached_tokens: that the replica had already, 0 where it does not say.
        seconds: it took.
        error: "" = none.
    """

    prompt_tokens: int
    cached_tokens: int
    seconds: float
    error: str = ""


async def warm(clock: Clock, url: str, key: str, model: str, heads: Sequence[Head]) -> AsyncIterator[Warmed]:
    """Compute them there. A prefix that fails is told of, and the next one is tried.

    Args:
        clock: monotonic.
        url: of the replica's OpenAI-compatible server.
        key: bearer token that it wants, "" = none.
        model: where a head names none.
    """
    headers = [(b"content-type", b"application/json")]
    headers += [(b"authorization", f"Bearer {key}".encode("latin-1"))] if key else []
    async with Connections(_CONNECT_S, clock) as connections:
        for head in heads:
            began_s = clock.now()
            try:
                async with asyncio.timeout(_REQUEST_S):
                    status, said = await _asked(connections, url, headers, _body(head, model))
            except (TimeoutError, WireError) as error:
                status, said = 0, (str(error) or f"no answer in {_REQUEST_S:g} s").encode()
            seconds, tokens = clock.now() - began_s, head.tokens.size
            if status == 200:
                yield Warmed(tokens, usage_in(said).cached_tokens or 0, seconds)
            else:
                yield Warmed(tokens, 0, seconds, f"{status} {said[:200].decode(errors='replace')}".strip())


async def _asked(
    connections: Connections, url: str, headers: Sequence[tuple[bytes, bytes]], body: bytes
) -> tuple[int, bytes]:
    """Status and body."""
    answer = await connections.ask("POST", f"{url}/v1/completions", headers, body)
    said = bytearray()
    try:
        while (chunk := await answer.chunk()) is not None and len(said) < _ANSWER_BYTES_MAX:
            said += chunk
    finally:
        answer.close()
    return answer.status, bytes(said)


def _body(head: Head, model: str) -> bytes:
    asked: dict[str, Any] = {
        "model": head.model or model,
        "prompt": head.tokens.tolist(),
        "max_tokens": 1,
        "temperature": 0,
    }
    return msgspec.json.encode(asked | ({"cache_salt": head.salt} if head.salt else {}))
