"""Reading an answer's usage while it passes, and taking out a usage event that only we asked for.

Nothing waits here but the beginning of an event whose end has not come: no client could have used it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

__all__ = ["BodyTap", "EventTap", "NoTap", "Tap", "Usage", "usage_in"]

# The longest event that is looked at: one with log-probabilities of 20 candidates has some kilobytes.
EVENT_BYTES_MAX = 256 << 10
# Of an answer that comes in one piece; a longer one passes, and its usage stays unknown.
BODY_BYTES_MAX = 4 << 20
_TOKENS_MAX = 1 << 32
_END = re.compile(rb"\n\n|\r\n\r\n|\r\r")


@dataclass(frozen=True, slots=True)
class Usage:
    """What an engine says it took; None = it did not say, or nonsense."""

    cached_tokens: int | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None


class Tap(Protocol):
    """Stands between a replica and a caller."""

    usage: Usage

    def feed(self, chunk: bytes) -> bytes:
        """What of it to pass on now."""
        ...

    def end(self) -> bytes:
        """What is still to be passed on when the answer is complete."""
        ...


class NoTap:
    """Passes everything on, for answers that cannot be read."""

    def __init__(self) -> None:
        self.usage = Usage()

    def feed(self, chunk: bytes) -> bytes:
        """All of it."""
        return chunk

    def end(self) -> bytes:
        """Nothing is left."""
        return b""


class BodyTap:
    """Of one JSON object: everything passes at once, a copy is read at the end."""

    def __init__(self) -> None:
        self.usage = Usage()
        self._copy = bytearray()
        self._too_long = False

    def feed(self, chunk: bytes) -> bytes:
        """All of it."""
        self._too_long = self._too_long or len(self._copy) + len(chunk) > BODY_BYTES_MAX
        if self._too_long:
            self._copy.clear()
        else:
            self._copy += chunk
        return chunk

    def end(self) -> bytes:
        """Nothing is left."""
        if not self._too_long:
            self.usage = usage_in(bytes(self._copy))
        return b""


class EventTap:
    """Of server-sent events.

    Args:
        hide_usage: take out the event that holds nothing but the usage.
    """

    def __init__(self, *, hide_usage: bool) -> None:
        self.usage = Usage()
        self._hide_usage = hide_usage
        self._begun = b""
        self._too_long = False

    def feed(self, chunk: bytes) -> bytes:
        """Its whole events, and those begun earlier that end in it."""
        data, passed, at = self._begun + chunk, [], 0
        # An end that was cut in two begins at most three bytes before the new ones.
        search = max(0, len(self._begun) - 3)
        while found := _END.search(data, search):
            event = data[at : found.end()]
            if self._too_long or self._passes(event):
                passed.append(event)
            self._too_long = False
            at = search = found.end()
        self._begun = data[at:]
        if self._too_long or len(self._begun) > EVENT_BYTES_MAX:
            # The last bytes stay: they may be half of the event's end.
            self._too_long = True
            passed.append(self._begun[:-3])
            self._begun = self._begun[-3:]
        return b"".join(passed)

    def end(self) -> bytes:
        """An event that nothing ended."""
        left, self._begun = self._begun, b""
        return left if not left or self._passes(left) else b""

    def _passes(self, event: bytes) -> bool:
        if b'"usage"' not in event:
            return True
        data = b"\n".join(line[5:] for line in event.splitlines() if line.startswith(b"data:"))
        found = _decoded(data)
        usage = _usage_of(found)
        if usage is None:
            return True
        self.usage = usage
        return not (self._hide_usage and found.get("choices") == [])


def usage_in(body: bytes) -> Usage:
    """What one whole answer says."""
    return _usage_of(_decoded(body)) or Usage()


def _decoded(data: bytes) -> dict[str, Any]:
    """An object; what is none is an empty one."""
    try:
        found = msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _usage_of(found: dict[str, Any]) -> Usage | None:
    usage = found.get("usage")
    if not isinstance(usage, dict):
        return None
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return Usage(_count(cached), _count(usage.get("prompt_tokens")), _count(usage.get("completion_tokens")))


def _count(value: object) -> int | None:
    return value if type(value) is int and 0 <= value < _TOKENS_MAX else None
