"""Every message of the session protocol.

A frame is `u32le length ‖ msgpack [id, message]`; a message is an array whose first element is its tag. A
reply carries the id of its request; id 0 is a notice that nobody asked for. Arrays of numbers travel as
little-endian bytes (uint32 unless said otherwise), keys as 32 bytes each. Block bytes never travel here.

    client                                   daemon
    Attach ───────────────────────────────▶  Attached + [data memfd, control memfd]
    Prove → store pattern ─────────────────▶ reads the canonical slot, writes another pattern
    Proved ← loads it, compares              the session may now look up and save
    Pool                                     an engine's device pool, owned or borrowed
    Lookup, Extend, Fetch, Enough,           reading
    Report, Release
    Reserve, Publish, Abort                  writing
    Acquire, Commit, Adopt, Observe          the device pool
    Flush                                    the disk
    Heartbeat, Timings, Quiesced, Status, Check, Explain, Stop
"""

from __future__ import annotations

from msgspec import Struct

from kvstore.rpc.messages.attach import (
    Attach,
    Attached,
    Layout,
    Pool,
    Prove,
    Proved,
    ProvedStore,
    ProveLoad,
    ProveSlot,
    pattern,
)
from kvstore.rpc.messages.blocks import (
    NO_INTENT,
    Abort,
    Demote,
    Enough,
    Extend,
    Fetch,
    Fetched,
    Found,
    IntentRow,
    Lookup,
    Progress,
    Publish,
    Published,
    Release,
    Released,
    Report,
    Reserve,
    Reserved,
)
from kvstore.rpc.messages.device import (
    Acquire,
    Acquired,
    Adopt,
    Commit,
    Committed,
    Observe,
)
from kvstore.rpc.messages.disk import Flush, Flushed
from kvstore.rpc.messages.explain import Explain, Explained
from kvstore.rpc.messages.life import (
    Check,
    Done,
    Failed,
    Heartbeat,
    Quiesced,
    Quieted,
    Status,
    StatusReport,
    Stop,
)
from kvstore.rpc.messages.timings import TIMINGS_MAX, StepRow, Timings

__all__ = [
    "FRAME_BYTES_MAX",
    "NO_INTENT",
    "NUMBERS_MAX",
    "PROTOCOL_VERSION",
    "TIMINGS_MAX",
    "Abort",
    "Acquire",
    "Acquired",
    "Adopt",
    "Attach",
    "Attached",
    "Check",
    "Commit",
    "Committed",
    "Demote",
    "Done",
    "Enough",
    "Explain",
    "Explained",
    "Extend",
    "Failed",
    "Fetch",
    "Fetched",
    "Flush",
    "Flushed",
    "Found",
    "Heartbeat",
    "IntentRow",
    "Layout",
    "Lookup",
    "Notice",
    "Observe",
    "Pool",
    "Progress",
    "Prove",
    "ProveLoad",
    "ProveSlot",
    "Proved",
    "ProvedStore",
    "Publish",
    "Published",
    "Quiesced",
    "Quieted",
    "Release",
    "Released",
    "Reply",
    "ReplyFrame",
    "Report",
    "Request",
    "RequestFrame",
    "Reserve",
    "Reserved",
    "Status",
    "StatusReport",
    "StepRow",
    "Stop",
    "Timings",
    "pattern",
]

PROTOCOL_VERSION = 4
# The largest honest frame is a Reserve of 8,192 keys (256 KiB); four times that leaves room to grow.
FRAME_BYTES_MAX = 1 << 20
# Positions, tables: the table of a 1 M-token sequence at 16 tokens a block is 65,536 long.
NUMBERS_MAX = 1 << 16

Request = (
    Attach
    | Prove
    | ProvedStore
    | Proved
    | Pool
    | Lookup
    | Extend
    | Fetch
    | Enough
    | Report
    | Release
    | Reserve
    | Publish
    | Abort
    | Acquire
    | Commit
    | Adopt
    | Observe
    | Heartbeat
    | Timings
    | Quiesced
    | Status
    | Check
    | Explain
    | Flush
    | Stop
)
Reply = (
    Attached
    | ProveSlot
    | ProveLoad
    | Found
    | Fetched
    | Released
    | Reserved
    | Published
    | Acquired
    | Committed
    | StatusReport
    | Explained
    | Flushed
    | Quieted
    | Done
    | Failed
)
Notice = Progress


class RequestFrame(Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """What a client sends."""

    id: int
    body: Request


class ReplyFrame(Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """What the daemon sends."""

    id: int
    body: Reply | Notice
