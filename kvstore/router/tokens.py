"""Prompts as token ids: by the model's own tokenizer and chat template, or approximated from bytes.

exact           the ids that the engine computes with; they meet the engines' KV events
approximation   4 bytes of a canonical text are one pseudo-token: equal where texts are equal, and about as
                many as real ones (English has 4 bytes a token); they only meet their own kind
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvstore.errors import BadRequest, ConfigError
from kvstore.router.bodies import CHAT, Body
from kvstore.router.chat_template import Chat, load_templates
from kvstore.router.segments import Segments, cuts_of

__all__ = ["PSEUDO_TOKEN_BYTES", "ByteChunks", "Encoded", "ModelTokens", "PromptTokens", "Tokenizers"]

PSEUDO_TOKEN_BYTES = 4
# Up to here the loop encodes by itself (1 to 2 ms); a thread's turn costs 0.1 ms and lets others run.
_INLINE_BYTES = 2 << 10
# Remembered segments of one tokenizer: some hundred long conversations.
_SEGMENT_CHARS_MAX = 16 << 20
_FILE_BYTES_MAX = 256 << 20
_IDS_MAX = 1 << 24


@dataclass(frozen=True, slots=True)
class Encoded:
    """A prompt.

    Attributes:
        text: as the model sees it (exact) or canonical; "" = it came as ids.
        tokens: (n,) uint32.
        exact: the engine's own ids.
    """

    text: str
    tokens: NDArray[np.uint32]
    exact: bool


class PromptTokens(Protocol):
    """Turns bodies into ids. For several threads."""

    def encode(self, body: Body) -> Encoded:
        """Never fails: what cannot be encoded exactly is approximated, and the engine judges the request."""
        ...


class ByteChunks:
    """The approximation."""

    def encode(self, body: Body) -> Encoded:
        """Pseudo-tokens of the canonical text; a rest of less than 4 bytes has none."""
        prompt = body.fields.get("prompt")
        if body.path != CHAT:
            ids = _ids(prompt)
            if ids is not None:
                return Encoded("", ids, True)
        text = _canonical_chat(body.fields) if body.path == CHAT else _first_text(prompt)
        data = text.encode("utf-8", "replace")
        whole = len(data) // PSEUDO_TOKEN_BYTES * PSEUDO_TOKEN_BYTES
        return Encoded(text, np.frombuffer(data[:whole], "<u4").astype(np.uint32, copy=False), False)


class ModelTokens:
    """A model's own tokenizer and chat template.

    Args:
        folder: with tokenizer.json, and tokenizer_config.json or chat_template.jinja.

    Raises:
        ConfigError: a file is absent or malformed, or `tokenizers` is not installed.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        if not path.is_file() or path.stat().st_size > _FILE_BYTES_MAX:
            raise ConfigError(
                f"tokenizer: {path} is not there; name a model's directory that holds this file"
            )
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise ConfigError("tokenizer: needs `pip install kvstored[router]`") from None
        try:
            text = path.read_text()
            inner: Any = Tokenizer.from_str(text)
            cuts = cuts_of(json.loads(text))
        except Exception as error:  # noqa: BLE001 the library raises nothing narrower
            raise ConfigError(f"tokenizer: {path} cannot be read ({error})") from None
        inner.no_truncation()
        inner.no_padding()
        self._inner = inner
        self._batch = getattr(inner, "encode_batch_fast", inner.encode_batch)  # from 0.20.1 on
        self._segments = Segments(self._plain, cuts, _SEGMENT_CHARS_MAX)
        self._templates = load_templates(folder)
        self._approximate = ByteChunks()

    def encode(self, body: Body) -> Encoded:
        """As the engine does; cost: about 1 µs a character that is new."""
        try:
            return self.exact(body)
        except BadRequest:
            return self._approximate.encode(body)

    def render(self, chat: Chat) -> str:
        """The prompt of a chat.

        Raises:
            BadRequest: the model has no template, or it refuses the messages.
        """
        template = self._templates.get("tool_use") if chat.tools else None
        template = template or self._templates.get("default")
        if template is None:
            raise BadRequest("messages: the model has no chat template")
        return template.render(chat)

    def ids(self, text: str, *, add_special_tokens: bool) -> NDArray[np.uint32]:
        """(n,) ids of a text."""
        if not add_special_tokens:
            return self._segments(text)
        return np.asarray(self._inner.encode(text).ids, np.uint32)

    def starts(self, text: str) -> NDArray[np.int64]:
        """(n,) character at which each token of a text begins."""
        offsets = self._inner.encode(text, add_special_tokens=False).offsets
        return np.asarray([start for start, _ in offsets], np.int64)

    def _plain(self, text: str) -> NDArray[np.uint32]:
        if len(text) <= _INLINE_BYTES:
            return np.asarray(self._inner.encode(text, add_special_tokens=False).ids, np.uint32)
        # Of the library's calls those for batches let other threads run; this one computes no offsets either.
        return np.asarray(self._batch([text], add_special_tokens=False)[0].ids, np.uint32)

    def exact(self, body: Body) -> Encoded:
        """The same, without a way out.

        Raises:
            BadRequest: the engine's ids cannot be known; why.
        """
        fields = body.fields
        if fields.get("truncate_prompt_tokens") is not None:
            raise BadRequest("truncate_prompt_tokens: the engine drops tokens")
        if body.path != CHAT:
            ids = _ids(fields.get("prompt"))
            if ids is not None:
                return Encoded("", ids, True)
            text, special = (
                _first_text(fields.get("prompt")),
                _flag(fields, "add_special_tokens", default=True),
            )
            return Encoded(text, self.ids(text, add_special_tokens=special), bool(text))
        text = self.render(_chat_of(fields))
        special = _flag(fields, "add_special_tokens", default=False)
        return Encoded(text, self.ids(text, add_special_tokens=special), True)


class Tokenizers:
    """Of all models that a router serves, with the threads that long prompts are encoded in.

    Args:
        by_model: name as callers say it → its tokens.
        other: of models that are not named there; None = approximated.
        threads: how many encode at once.
    """

    def __init__(
        self,
        by_model: Mapping[str, PromptTokens] | None = None,
        other: PromptTokens | None = None,
        threads: int = 2,
    ) -> None:
        self._by_model = dict(by_model or {})
        self._other = other or ByteChunks()
        self._threads = threads
        self._pool: ThreadPoolExecutor | None = None

    async def __aenter__(self) -> Tokenizers:
        self._pool = ThreadPoolExecutor(self._threads, "tokens")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        assert self._pool is not None
        self._pool.shutdown(wait=True, cancel_futures=True)

    async def encode(self, body: Body) -> Encoded:
        """Off the loop, where it takes long."""
        tokens = self._by_model.get(body.model, self._other)
        if body.size_bytes <= _INLINE_BYTES:
            return tokens.encode(body)
        call: Callable[[Body], Encoded] = tokens.encode
        return await asyncio.get_running_loop().run_in_executor(self._pool, call, body)


# ---- fields -----------------------------------------------------------------------------------------------


def _flag(fields: Mapping[str, Any], name: str, *, default: bool) -> bool:
    value = fields.get(name)
    return value if isinstance(value, bool) else default


def _chat_of(fields: Mapping[str, Any]) -> Chat:
    messages, tools = fields.get("messages"), fields.get("tools")
    if not isinstance(messages, list):
        raise BadRequest("messages: need a list")
    if fields.get("chat_template") is not None:
        raise BadRequest("chat_template: a caller's template is for the engine to render")
    more = fields.get("chat_template_kwargs")
    more = dict(more) if isinstance(more, dict) else {}
    if fields.get("reasoning_effort") is not None:
        more.setdefault("reasoning_effort", fields["reasoning_effort"])
    documents = fields.get("documents")
    return Chat(
        messages,
        tools if isinstance(tools, list) else (),
        documents if isinstance(documents, list) else None,
        _flag(fields, "add_generation_prompt", default=True),
        _flag(fields, "continue_final_message", default=False),
        more,
    )


def _ids(prompt: object) -> NDArray[np.uint32] | None:
    """Of a prompt that came as ids; of several the first."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], list):
        prompt = prompt[0]
    if not isinstance(prompt, list) or not prompt or len(prompt) > _IDS_MAX:
        return None
    if not all(type(token) is int and 0 <= token < 1 << 32 for token in prompt):
        return None
    return np.asarray(prompt, np.uint32)


def _first_text(prompt: object) -> str:
    if isinstance(prompt, list) and prompt:
        prompt = prompt[0]
    return prompt if isinstance(prompt, str) else ""


def _canonical_chat(fields: Mapping[str, Any]) -> str:
    """Tools, then message by message: what a template shows first stands first."""
    lines = [_written(tool) for tool in _list(fields.get("tools"))]
    for message in _list(fields.get("messages")):
        if not isinstance(message, Mapping):
            continue
        content = message.get("content")
        said = content if isinstance(content, str) else "\n".join(_part(part) for part in _list(content))
        calls = "".join(_written(call) for call in _list(message.get("tool_calls")))
        lines.append(f"<{message.get('role')}>\n{said}{calls}")
    return "\n".join(lines)


def _part(part: object) -> str:
    """A text as it is, a picture as the digest of what names it: data URLs have megabytes."""
    if isinstance(part, Mapping) and isinstance(part.get("text"), str):
        return str(part["text"])
    return hashlib.blake2b(msgspec.json.encode(part), digest_size=16).hexdigest()


def _written(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
