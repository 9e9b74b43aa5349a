"""What every message is."""

from __future__ import annotations

from msgspec import Struct

__all__ = ["Message"]


class Message(Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Base of all messages: positional, immutable."""
