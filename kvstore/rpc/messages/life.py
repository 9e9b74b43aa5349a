"""Messages about the session itself."""

from __future__ import annotations

from kvstore.rpc.messages.base import Message

__all__ = ["Check", "Done", "Failed", "Heartbeat", "Quiesced", "Quieted", "Status", "StatusReport", "Stop"]


class Heartbeat(Message, tag="heartbeat", frozen=True):
    """I am alive. Reply: Done."""


class Quiesced(Message, tag="quiesced", frozen=True):
    """Every copy of this process is joined: it writes to no slot reserved until now. Reply: Quieted."""


class Quieted(Message, tag="quieted", frozen=True):
    """This process's part of every filling up to `token` is given up: it must not write them any more."""

    token: int


class Status(Message, tag="status", frozen=True):
    """Reply: StatusReport."""


class StatusReport(Message, tag="status_report", frozen=True):
    """JSON text: tiers, engines, leases, counters."""

    json: str


class Check(Message, tag="check", frozen=True):
    """Check every conservation law, from now on. Reply, when that is done: StatusReport, {"ok": true}, with
    "partial" if the store changed all the while and counts were left out, or {"ok": false, "broken": …}."""


class Stop(Message, tag="stop", frozen=True):
    """End the daemon; tools of its own user (or root) only. Reply: Done, then the connection closes.

    Attributes:
        keep: leave the arenas to the next daemon; only where it runs with `daemon.keep_arena`.
    """

    keep: bool


class Done(Message, tag="done", frozen=True):
    """Nothing more to say."""


class Failed(Message, tag="failed", frozen=True):
    """The request changed nothing. `status` is a gRPC status name (errors.STATUS)."""

    status: str
    message: str
