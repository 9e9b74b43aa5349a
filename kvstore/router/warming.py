"""Warm-up of a replica: it is asked for one token behind each of the hottest prefixes, in turn."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from kvstore.router.heads import Head

__all__ = ["Warmed", "warm"]

_REQUEST_S = 600.0
_CONNECT_S = 5.0


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


async def warm(url: str, key: str, model: str, heads: Sequence[Head]) -> AsyncIterator[Warmed]:
    """Compute them there. A prefix that fails is told of, and the next one is tried.

    Args:
        url: of the replica's OpenAI-compatible server.
        key: bearer token that it wants, "" = none.
        model: where a head names none.
    """
    headers = {"authorization": f"Bearer {key}"} if key else {}
    timeout = httpx.Timeout(_REQUEST_S, connect=_CONNECT_S)
    async with httpx.AsyncClient(timeout=timeout, trust_env=False, headers=headers) as client:
        for head in heads:
            yield await _one(client, url, model, head)


async def _one(client: httpx.AsyncClient, url: str, model: str, head: Head) -> Warmed:
    body: dict[str, Any] = {
        "model": head.model or model,
        "prompt": head.tokens.tolist(),
        "max_tokens": 1,
        "temperature": 0,
    }
    if head.salt:
        body["cache_salt"] = head.salt
    began_s, tokens = time.monotonic(), head.tokens.size
    try:
        answer = await client.post(f"{url}/v1/completions", json=body)
        seconds = time.monotonic() - began_s
        if answer.status_code != 200:
            return Warmed(tokens, 0, seconds, f"{answer.status_code} {answer.text[:200]}")
        details = (answer.json().get("usage") or {}).get("prompt_tokens_details") or {}
        return Warmed(tokens, int(details.get("cached_tokens") or 0), seconds)
    except (httpx.HTTPError, ValueError, AttributeError, TypeError, asyncio.IncompleteReadError) as error:
        return Warmed(tokens, 0, time.monotonic() - began_s, f"{type(error).__name__}: {error}"[:200])
