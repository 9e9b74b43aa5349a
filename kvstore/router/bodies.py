"""A caller's body: freed of what would let one tenant reach another's prefixes, and written anew.

A replica only ever parses what was inspected here: of a key that is there twice, only the one that we saw.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from kvstore.errors import BadRequest

__all__ = ["CHAT", "COMPLETIONS", "Body", "read_body", "session_of", "upstream_body"]

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"

# Of vLLM 0.32's requests: which salt its keys have, and where KV comes from or goes to. The latter two end up
# among the engine's extra arguments, which `vllm_xargs` sets, too: so they are looked for in there as well.
_KV_FIELDS = ("cache_salt", "kv_transfer_params", "ec_transfer_params")
# A caller-chosen id of a picture stands for its content in the engine's keys: two tenants could agree on one.
_MEDIA_FIELDS = ("mm_processor_kwargs", "multi_modal_uuids", "multi_modal_data", "mm_uuids")
_SESSION_CHARS_MAX = 128
_MODEL_CHARS_MAX = 256


@dataclass(frozen=True, slots=True)
class Body:
    """What a caller asks.

    Attributes:
        path: CHAT or COMPLETIONS.
        fields: the JSON object, freed of what is not the caller's to say.
        model: as named there; "" = not.
        stream: whether the answer comes in events.
        wants_usage: whether the caller itself asked for the usage of its stream.
        removed: names of what was taken out, for the caller to know.
        size_bytes: as it came.
    """

    path: str
    fields: dict[str, Any]
    model: str
    stream: bool
    wants_usage: bool
    removed: tuple[str, ...]
    size_bytes: int


def read_body(path: str, data: bytes) -> Body:
    """Parse and clean.

    Only what must be known here is checked; everything else is for the replica to refuse, in its own words.

    Raises:
        BadRequest: no JSON object, nested too deeply, or a field that routing needs is of a wrong type.
    """
    try:
        fields = msgspec.json.decode(data)
    except RecursionError:
        raise BadRequest("body: nested too deeply") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BadRequest(f"body: no JSON ({error})") from None
    if not isinstance(fields, dict):
        raise BadRequest("body: need a JSON object")
    model = fields.get("model") or ""
    if not isinstance(model, str) or len(model) > _MODEL_CHARS_MAX:
        raise BadRequest(f"model: need a name of at most {_MODEL_CHARS_MAX} characters")
    stream = fields.get("stream") or False
    if not isinstance(stream, bool):
        raise BadRequest("stream: need true or false")
    options = fields.get("stream_options") or {}
    if not isinstance(options, dict):
        raise BadRequest("stream_options: need an object")
    removed = _clean(fields)
    wants_usage = stream and options.get("include_usage") is True
    return Body(path, fields, model, stream, wants_usage, removed, len(data))


def upstream_body(body: Body, salt: str, *, ask_usage: bool) -> bytes:
    """The body for a replica: with the tenant's salt, and asking for the usage of a stream.

    Args:
        body: of the caller.
        salt: of the tenant, "" = none.
        ask_usage: also where the caller did not ask.

    Raises:
        BadRequest: it cannot be written as JSON again.
    """
    fields = body.fields
    if salt:
        fields = {**fields, "cache_salt": salt}
    if ask_usage and body.stream and not body.wants_usage:
        # Without include_usage an engine ignores continuous_usage_stats; it must not heed it because of ours.
        options = {**(fields.get("stream_options") or {}), "include_usage": True}
        options.pop("continuous_usage_stats", None)
        fields = {**fields, "stream_options": options}
    try:
        return msgspec.json.encode(fields)
    except (RecursionError, ValueError) as error:
        raise BadRequest(f"body: cannot be passed on ({error})") from None


def _clean(fields: dict[str, Any]) -> tuple[str, ...]:
    removed = [name for name in (*_KV_FIELDS, *_MEDIA_FIELDS) if fields.pop(name, None) is not None]
    extra = fields.get("vllm_xargs")
    if isinstance(extra, dict):
        removed += [f"vllm_xargs.{name}" for name in _KV_FIELDS if extra.pop(name, None) is not None]
    messages = fields.get("messages")
    counts = [_clean_message(message) for message in messages] if isinstance(messages, list) else []
    if any(counts):
        removed.append("messages.content.uuid")
    return tuple(removed)


def _clean_message(message: object) -> int:
    """How many ids of media were taken out: they stand beside a part's type, or one level below."""
    content = message.get("content") if isinstance(message, dict) else None
    parts = [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []
    inner = [value for part in parts for value in part.values() if isinstance(value, dict)]
    return len([holder for holder in (*parts, *inner) if holder.pop("uuid", None) is not None])


# ---- conversations ----------------------------------------------------------------------------------------


def session_of(body: Body, named: str, tenant: str) -> str:
    """What is the same for all requests of one conversation.

    By what the caller says of it (header, then the field `session_id`, then `user`); else by how it begins:
    up to and with the first message of its user, or the first 256 characters of a prompt.

    Args:
        body: of the caller.
        named: value of the session header, "" = it was not there.
        tenant: two tenants' conversations are never the same.
    """
    fields = body.fields
    for value in (named, fields.get("session_id"), fields.get("user")):
        if isinstance(value, str) and value:
            return value if len(value) <= _SESSION_CHARS_MAX and not tenant else _digest([tenant, value])
    if body.path == CHAT:
        return _digest([tenant, _opening(fields.get("messages"))])
    prompt = fields.get("prompt")
    return _digest([tenant, prompt[:256] if isinstance(prompt, str | list) else None])


def _opening(messages: object) -> list[Any]:
    if not isinstance(messages, list):
        return []
    users = (i for i, m in enumerate(messages) if isinstance(m, Mapping) and m.get("role") == "user")
    return messages[: next(users, 0) + 1]


def _digest(value: object) -> str:
    return hashlib.blake2b(msgspec.json.encode(value), digest_size=16).hexdigest()
