"""Text to token ids and back, by the model's own tokenizer (HF directory or GGUF)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .spec import resolve_model

__all__ = ["CHATML", "Message", "Tokenizer"]

Message = Mapping[str, str]
"""{"role": "system" | "user" | "assistant", "content": text}."""

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Template for models that bring none."""


class Tokenizer:
    """The tokenizer of the model at `path`. Loading takes seconds; nothing is fetched from a network.

    Raises:
        FileNotFoundError: no model at this path.
        ImportError: transformers is not installed.
    """

    def __init__(self, path: str | Path) -> None:
        from transformers import AutoTokenizer

        path = resolve_model(path)
        folder, options = (path.parent, {"gguf_file": path.name}) if path.is_file() else (path, {})
        self._inner: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, **options)

    @property
    def eos_id(self) -> int | None:
        """The id that ends a sequence, if the tokenizer names one."""
        eos = self._inner.eos_token_id
        return None if eos is None else int(eos)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, with the tokenizer's own begin-of-sequence rule."""
        return [int(token) for token in self._inner.encode(text)]

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of `tokens`, special tokens left out."""
        return str(self._inner.decode(list(tokens), skip_special_tokens=True))

    def chat(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation, up to where the assistant is to speak."""
        return self._encode_rendered(self._render(messages))

    def next_turn(self, text: str) -> list[int]:
        """Token ids that go behind what the assistant said (without its end token): `text` by the user.

        A conversation continued this way keeps its earlier tokens, so all of its KV stays reusable; rendered
        anew, what the assistant said might be cut into other tokens.
        """
        said = "…said…"
        turns = [("user", "…asked…"), ("assistant", said), ("user", text)]
        rendered = self._render([{"role": role, "content": content} for role, content in turns])
        return self._encode_rendered(rendered.partition(said)[2])

    def _render(self, messages: Sequence[Message]) -> str:
        return str(
            self._inner.apply_chat_template(
                [dict(message) for message in messages],
                chat_template=None if self._inner.chat_template else CHATML,
                add_generation_prompt=True,
                tokenize=False,
            )
        )

    def _encode_rendered(self, text: str) -> list[int]:
        # The template writes the special tokens itself; adding them again would double the first one.
        return [int(token) for token in self._inner.encode(text, add_special_tokens=False)]
