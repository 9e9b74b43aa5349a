"""What status pages show: plain values, no key, no salt, no token id."""

from __future__ import annotations

from dataclasses import asdict

from kvstore.group import Engine, Group
from kvstore.store import Store

__all__ = ["quarantined", "status"]


def status(store: Store) -> dict[str, object]:
    """State of a store by trust group; JSON-ready."""
    return {
        "epoch": store.epoch.hex(),
        "groups": {name: _group(group) for name, group in store.groups.items()},
    }


def _group(group: Group) -> dict[str, object]:
    return {
        "host": {
            **group.host.counts(),
            "capacity_bytes": group.arena.capacity_bytes,
            "huge_pages": group.huge,
            "corrupt_blocks": group.host.corrupt_blocks,
            "dropped": dict(group.host.dropped),
        },
        "index": {"nodes": len(group.index), "nodes_max": group.index.nodes_max},
        "alarm": group.checked.broken if group.checked and group.checked.broken else group.alarm,
        "checked": _checked(group),
        "leases": len(group.leases),
        "fillings": len(group.fillings),
        "quarantined": quarantined(group),
        "events": group.events.sequence,
        "engines": {engine.id.hex(): _engine(engine) for engine in group.engines.values()},
        "counters": asdict(group.counters),
        "tokens": {
            name: {"lookup": tokens.lookup, "hit": dict(tokens.hit), "saved": tokens.saved}
            for name, tokens in group.meters.tenants.items()
        },
        "transfers": {kind: asdict(moved) for kind, moved in group.meters.moved.items()},
        "prefill_tokens_per_s": group.meters.prefill_tokens_per_s,
    }


def _checked(group: Group) -> dict[str, object] | None:
    """The last check that ended, whoever asked for it; None before the first."""
    last = group.checked
    if last is None:
        return None
    age_s = round(group.clock.now() - last.at_s, 3)
    return {"ok": not last.broken, "broken": last.broken, "complete": last.complete, "age_s": age_s}


def quarantined(group: Group) -> int:
    """Slots that wait for processes whose engine has no connection any more."""
    return sum(len(f.slots) for f in group.fillings if not _open(group, f.engine))


def _open(group: Group, engine: bytes) -> bool:
    """Whether an engine still has a connection; slots of one that has not wait for its processes."""
    known = group.engines.get(engine)
    return known is not None and bool(known.sessions)


def _engine(engine: Engine) -> dict[str, object]:
    return {
        "sessions": len(engine.sessions),
        "writers": len(engine.writers),
        "pool": engine.device.kind,
        "device": engine.device.counts(),
    }
