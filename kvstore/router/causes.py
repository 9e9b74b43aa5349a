"""What makes two prompts differ where they do, as far as a simple exact check can tell."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Cause", "Difference", "cause_of", "fix_of"]

_MONTH = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*\.?"
_CLOCK = r"\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d+)?)?(?: ?[AaPp]\.?[Mm]\b)?"
_ZONE = r"(?: ?(?:Z\b|UTC|GMT|[+-]\d{2}:?\d{2}))?"
_DATES = (
    rf"\d{{4}}-\d{{2}}-\d{{2}}(?:[T ]{_CLOCK}{_ZONE})?",
    r"\b\d{1,4}[/.]\d{1,2}[/.]\d{1,4}\b",
    rf"(?:\d{{1,2}}(?:st|nd|rd|th)? )?{_MONTH} \d{{1,4}}(?:st|nd|rd|th)?\b(?:,? \d{{4}})?",
    r"\b(?:Mon|Tues?|Wed(?:nes)?|Thu(?:rs)?|Fri|Sat(?:ur)?|Sun)(?:day)?\b",
    rf"\b{_CLOCK}{_ZONE}",
    r"\b1[5-9]\d{8}(?:\d{3}|\d{6}|\d{9})?\b",  # seconds to nanoseconds since 1970, of 2017 to 2033
)
_DATE = f"(?:{'|'.join(_DATES)})"
_TIMESTAMP = re.compile(rf"{_DATE}(?:,? (?:at )?{_DATE})*")
_UUID = re.compile(r"\b[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}\b")
# A word of 8 and more that mixes letters and digits, or is hexadecimal: req_8f14e45f, chatcmpl-9bK2…
_ID = re.compile(r"(?=[\w-]*\d)(?=[\w-]*[A-Za-z])[\w-]{8,}|\b[0-9a-fA-F]{8,}\b")
_NUMBER = re.compile(r"[+-]?\d[\d.,_]*")
# Of a date in words around what differs: "Wednesday, September 30, 2026 at 10:15:00 PM UTC".
_NEAR_CHARS = 48


# At the end of a word they belong to the sentence.
_MARKS = ".:/"


class Cause(StrEnum):
    """What varies."""

    TOOL_ORDER = "the order of tools"
    WHITESPACE = "blanks"
    UUID = "a UUID"
    TIMESTAMP = "a date or time"
    ID = "an id"
    NUMBER = "a number"
    TEXT = "a text"


_FIXES = {
    Cause.TOOL_ORDER: "send tools in one order, such as by name, and their schemas with one order of keys",
    Cause.WHITESPACE: "write these blanks in one way, or strip them before they are sent",
    Cause.UUID: "leave it out (a header can carry it), or put it behind everything that is the same",
    Cause.TIMESTAMP: "put it into the last message, or round it so that many prompts share it",
    Cause.ID: "leave it out (a header can carry it), or put it behind everything that is the same",
    Cause.NUMBER: "put it behind everything that is the same, or leave it out if it only counts",
    Cause.TEXT: "put it behind everything that is the same in these prompts",
}


@dataclass(frozen=True, slots=True)
class Difference:
    """Where one text differs from another: they are the same before `start`, and for a while behind `stop`.

    Attributes:
        text: one of the two.
        start: character where they part.
        stop: character where they meet again; `start` = nothing of this one is in between.
    """

    text: str
    start: int
    stop: int

    @property
    def span(self) -> str:
        """What is only in this one, often a part of a word."""
        return self.text[self.start : self.stop]

    def widened(self) -> Difference:
        """With the rest of the words that it begins and ends in; blanks stay blanks."""
        start, stop = self.start, self.stop
        if not self.span.strip():
            return self
        while start > 0 and _in_word(self.text[start - 1]):
            start -= 1
        while stop < len(self.text) and _in_word(self.text[stop]):
            stop += 1
        while stop > self.stop and self.text[stop - 1] in _MARKS:
            stop -= 1
        return Difference(self.text, start, stop)

    def within(self, pattern: re.Pattern[str]) -> Difference | None:
        """The whole of something of this form that what differs lies in; None = it does not."""
        begin = max(0, self.start - _NEAR_CHARS)
        near = self.text[begin : self.stop + _NEAR_CHARS]
        start, stop = self.start - begin, self.stop - begin
        for found in pattern.finditer(near):
            if found.start() <= start < found.end() and stop <= found.end():
                return Difference(self.text, begin + found.start(), begin + found.end())
        return None

    def whole(self, cause: Cause) -> Difference:
        """The thing that varies, as people would name it."""
        pattern = _FORMS.get(cause)
        found = self.within(pattern) if pattern is not None else None
        return found or self.widened()


_FORMS = {Cause.UUID: _UUID, Cause.TIMESTAMP: _TIMESTAMP}


def cause_of(one: Difference, other: Difference) -> Cause:
    """The likely cause: every check must hold for both texts."""
    both = (one, other)
    if all(not found.span.strip() for found in both):
        return Cause.WHITESPACE
    if all(found.within(_UUID) for found in both):
        return Cause.UUID
    if all(found.within(_TIMESTAMP) for found in both):
        return Cause.TIMESTAMP
    words = [found.widened().span for found in both]
    if all(_NUMBER.fullmatch(word) for word in words):
        return Cause.NUMBER
    if all(_ID.fullmatch(word) for word in words):
        return Cause.ID
    return Cause.TEXT


def fix_of(cause: Cause) -> str:
    """What to do about it."""
    return _FIXES[cause]


def _in_word(char: str) -> bool:
    return char.isalnum() or char in "_-+:./"
