"""Encoding what was encoded before only once: a conversation's next turn repeats all of its earlier ones.

A tokenizer cuts a text at its special tokens before it does anything else, and what lies between two of them
is encoded by itself. So the ids of a text are those of its segments, one after the other, and a segment may
be remembered. That holds where no step of the tokenizer looks at where in the text a segment stands, and
where no added token takes in the blanks around it: `cuts_of` finds out. Elsewhere a text is encoded whole.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Segments", "cuts_of"]

# Shorter ones (roles between two marks) cost less to encode than to look up.
_CHARS_MIN = 64
_INDEPENDENT = frozenset(
    ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "Sequence", "Split", "Digits")
) | {"Punctuation", "Whitespace", "WhitespaceSplit", "ByteLevel"}

Encode = Callable[[str], NDArray[np.uint32]]


def cuts_of(tokenizer: Mapping[str, Any]) -> re.Pattern[str] | None:
    """Where texts may be cut: behind every added token, as the tokenizer finds them; None = nowhere.

    Args:
        tokenizer: content of tokenizer.json.
    """
    steps = [*_steps(tokenizer.get("normalizer")), *_steps(tokenizer.get("pre_tokenizer"))]
    if any(step.get("type") not in _INDEPENDENT or step.get("add_prefix_space") for step in steps):
        return None
    # Those that are looked for in the normalized text are looked for within a segment.
    first = [token for token in tokenizer.get("added_tokens") or () if not token.get("normalized")]
    if any(token.get(rule) for token in first for rule in ("lstrip", "rstrip", "single_word")):
        return None
    # Leftmost, then longest, as the tokenizer's own search does.
    words = sorted((str(token["content"]) for token in first if token.get("content")), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, words))) if words else None


def _steps(step: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(step, Mapping):
        yield step
        for name in ("normalizers", "pretokenizers"):
            for inner in step.get(name) or ():
                yield from _steps(inner)


class Segments:
    """Encodes texts, and remembers segments up to a number of characters. For several threads.

    Args:
        encode: one text, without special tokens around it.
        cuts: of `cuts_of`.
        chars_max: remembered at most; ids take about as many bytes again.
    """

    def __init__(self, encode: Encode, cuts: re.Pattern[str] | None, chars_max: int) -> None:
        self._encode = encode
        self._cuts = cuts
        self._chars_max = chars_max
        self._known: OrderedDict[str, NDArray[np.uint32]] = OrderedDict()
        self._chars = 0
        # Held for a look-up or an entry, never while something is encoded.
        self._lock = threading.Lock()

    def __call__(self, text: str) -> NDArray[np.uint32]:
        """(n,) ids, the same as of the whole text."""
        if self._cuts is None:
            return self._segment(text)
        parts, at = [], 0
        for found in self._cuts.finditer(text):
            if found.end() - at >= _CHARS_MIN:
                parts.append(self._segment(text[at : found.end()]))
                at = found.end()
        parts.append(self._segment(text[at:]))
        return np.concatenate(parts)

    def _segment(self, text: str) -> NDArray[np.uint32]:
        if len(text) < _CHARS_MIN:
            return self._encode(text)
        with self._lock:
            known = self._known.get(text)
            if known is not None:
                self._known.move_to_end(text)
                return known
        ids = self._encode(text)
        if len(text) <= self._chars_max // 4:
            with self._lock:
                self._keep(text, ids)
        return ids

    def _keep(self, text: str, ids: NDArray[np.uint32]) -> None:
        if text not in self._known:
            self._known[text] = ids
            self._chars += len(text)
        while self._chars > self._chars_max:
            self._chars -= len(self._known.popitem(last=False)[0])
