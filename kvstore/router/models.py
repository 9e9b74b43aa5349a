"""`GET /v1/models`: what all replicas serve, as one list."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import msgspec

from kvstore.router.front import Front
from kvstore.router.placing import Replica
from kvstore.router.proxy_options import ProxyOptions
from kvstore.router.replies import Failure
from kvstore.router.wire import Connections, WireError

__all__ = ["ModelList"]

_BYTES_MAX = 1 << 20
_MODELS_MAX = 10_000


@dataclass(frozen=True, slots=True)
class _Known:
    since_s: float
    authorization: str
    page: bytes


class ModelList:
    """Asks the replicas, and believes their answers for `models_s`.

    Args:
        connections: to replicas.
        front: its core knows the replicas.
        options: limits.
    """

    def __init__(self, connections: Connections, front: Front, options: ProxyOptions) -> None:
        self._connections = connections
        self._front = front
        self._options = options
        self._known: _Known | None = None

    async def merged(self, authorization: str) -> bytes | Failure:
        """{"object": "list", "data": […]}: each model once, as the first replica that has it says.

        Args:
            authorization: for replicas without a key of their own, "" = none.
        """
        now_s, known = self._front.clock.now(), self._known
        fresh = known is not None and now_s - known.since_s < self._options.models_s
        if known is not None and fresh and known.authorization == authorization:
            return known.page
        up = [replica for replica in self._front.picker.replicas() if replica.up]
        answers = await asyncio.gather(*(self._models_of(replica, authorization) for replica in up))
        heard = [models for models in answers if models is not None]
        if not heard:
            return Failure(503, "no_replica", f"none of {len(up)} replicas that are up tells its models")
        by_id = {str(model["id"]): model for models in reversed(heard) for model in models}
        page = msgspec.json.encode({"object": "list", "data": [by_id[name] for name in sorted(by_id)]})
        self._known = _Known(now_s, authorization, page)
        return page

    async def _models_of(self, replica: Replica, authorization: str) -> list[dict[str, Any]] | None:
        key = self._front.keys.get(replica.name, "")
        shown = f"Bearer {key}" if key else authorization
        headers = [(b"authorization", shown.encode("latin-1"))] if shown else []
        try:
            async with asyncio.timeout(self._options.models_s):
                return await self._asked(replica.url.rstrip("/") + "/v1/models", headers)
        except (TimeoutError, WireError):
            return None

    async def _asked(self, url: str, headers: list[tuple[bytes, bytes]]) -> list[dict[str, Any]] | None:
        answer = await self._connections.ask("GET", url, headers)
        data = bytearray()
        try:
            while (chunk := await answer.chunk()) is not None:
                data += chunk
                if len(data) > _BYTES_MAX:
                    return None
        finally:
            answer.close()
        return _models_in(bytes(data)) if answer.status == 200 else None


def _models_in(data: bytes) -> list[dict[str, Any]] | None:
    try:
        found = msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    listed = found.get("data") if isinstance(found, dict) else None
    if not isinstance(listed, list):
        return None
    return [model for model in listed[:_MODELS_MAX] if isinstance(model, dict) and model.get("id")]
