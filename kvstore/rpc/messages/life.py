"""Messages about the session itself."""

from __future__ import annotations

from kvstore.rpc.messages.base import Message

__all__ = ["Check", "Done", "Failed", "Heartbeat", "Quiesced", "Status", "StatusReport"]


class Heartbeat(Message, tag="heartbeat"):
    """I am alive. Reply: Done."""


class Quiesced(Message, tag="quiesced"):
    """Every copy of this process is joined: it writes to no slot. Its fillings are aborted. Reply: Done."""


class Status(Message, tag="status"):
    """Reply: StatusReport."""


class StatusReport(Message, tag="status_report"):
    """JSON text: tiers, engines, leases, counters."""

    json: str


class Check(Message, tag="check"):
    """Check every conservation law now. Reply: StatusReport, {"ok": true} or {"ok": false, "broken": …}."""


class Done(Message, tag="done"):
    """Nothing more to say."""


class Failed(Message, tag="failed"):
    """The request changed nothing. `status` is a gRPC status name (errors.STATUS)."""

    status: str
    message: str
