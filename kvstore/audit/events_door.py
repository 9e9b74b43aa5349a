"""KV events that are published over ZMQ: no audit asks there, and so says that it did not."""

from __future__ import annotations

from kvstore.audit.as_configured import judge_configuration
from kvstore.audit.probe import Probe
from kvstore.audit.verdicts import Door
from kvstore.config.doors import EVENT_KEYS

__all__ = ["events_doors"]


def events_doors(probe: Probe) -> list[Door]:
    """One where the daemon publishes, or the audit was told that it does; not probed."""
    config, listens = probe.config.events, probe.listens or {}
    ours = [text for text in (config.zmq, config.zmq_replay) if text]
    if not ours and not any(listens.get(key) for key in EVENT_KEYS):
        return []
    door = Door("events", ",".join(ours))
    judge_configuration(door, probe, EVENT_KEYS)
    told = (
        "whoever reaches it is told every key of the trust group (events.zmq), without a token: its address, "
        "or its file's mode, is the lock"
    )
    door.skip("foreign_events_are_not_told", told)
    return [door]
