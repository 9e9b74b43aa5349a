"""Messages about a device pool: block tables (owned), reports (borrowed)."""

from __future__ import annotations

from kvstore.rpc.messages.base import Message
from kvstore.rpc.messages.blocks import Demote

__all__ = ["Acquire", "Acquired", "Adopt", "Commit", "Committed", "Observe"]


class Acquire(Message, tag="acquire", frozen=True):
    """Make the block table of a lease `blocks` long. Reply: Acquired.

    Attributes:
        lease: from Found, or 0 for a table without reuse (a lease is made).
        blocks: wanted length of the table in blocks.
    """

    lease: int
    blocks: int


class Acquired(Message, tag="acquired", frozen=True):
    """The table.

    Attributes:
        lease: id.
        table: u32 device blocks that were added, in order; empty when busy or when `demote` comes first.
        device: leading blocks of the whole table that hold valid bytes already.
        load: [start, stop) of the table to fill from `runs`.
        runs: their slots, packed (`_native.pack_slots`); empty where HOST is limited: they follow with Fetch.
        demote: copy these down first, publish, ask again.
        busy: no room, for this reason.
    """

    lease: int
    table: bytes
    device: int
    load: tuple[int, int]
    runs: bytes
    demote: list[Demote]
    busy: str = ""


class Commit(Message, tag="commit", frozen=True):
    """Blocks [start, start + k) of a lease's table hold the bytes of these k keys. Reply: Committed."""

    lease: int
    root: bytes
    start: int
    parent: bytes
    keys: bytes


class Committed(Message, tag="committed", frozen=True):
    """How many of them are indexed under this table's blocks (others were there before)."""

    indexed: int


class Adopt(Message, tag="adopt", frozen=True):
    """After a daemon restart: this table is in use. Reply: Acquired with a lease for it."""

    table: bytes
    root: bytes
    keys: bytes


class Observe(Message, tag="observe", frozen=True):
    """State of a borrowed pool: keys stored and removed since the last message, and its counts."""

    mapped: int
    idle: int
    free: int
    stored: bytes
    removed: bytes
