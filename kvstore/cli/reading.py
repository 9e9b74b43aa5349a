"""What a status report means: rates from two of them, and what is wrong. Values only, no text layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvstore.cli.units import count_text, duration_text

__all__ = ["Rates", "alarms", "rates", "with_rates"]

# An index this full evicts history that a lookup may still want.
_INDEX_FULL = 0.95
# Clients speak every heartbeat, 1 s unless configured otherwise; this is well past any hiccup.
_SILENT_S = 10.0

Report = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Rates:
    """What one trust group did within an interval.

    Attributes:
        interval_s: its length.
        lookups_per_s: lookups.
        hit_rate: blocks hit of blocks asked, None when none were asked. A hit counts when its lease ends, so
            over a short interval this is an estimate; it is capped at 1.
        saved_bytes_per_s: bytes that became readable on HOST.
        loaded_bytes_per_s: bytes of HOST hits that engines copied.
    """

    interval_s: float
    lookups_per_s: float
    hit_rate: float | None
    saved_bytes_per_s: float
    loaded_bytes_per_s: float

    def json(self) -> dict[str, float | None]:
        """JSON-ready."""
        return {name: _rounded(getattr(self, name)) for name in self.__slots__}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def rates(before: Report | None, after: Report, interval_s: float) -> Rates:
    """Rates of a group between two reports of its counters; `before` None = since the daemon started."""
    then, now = (before or {}).get("counters", {}), after["counters"]
    length_s = max(interval_s, 1e-3)

    def grown(name: str) -> int:
        return int(now[name]) - int(then.get(name, 0))

    asked = grown("lookup_blocks")
    return Rates(
        interval_s,
        grown("lookups") / length_s,
        min(1.0, grown("hit_blocks") / asked) if asked else None,
        grown("saved_bytes") / length_s,
        grown("loaded_bytes") / length_s,
    )


def with_rates(before: Report | None, after: Report) -> dict[str, Any]:
    """A report with its alarms, and in every group `rates`: "now" (since `before`) and "since_start".

    "now" is None without an earlier report of the same daemon: totals of another one mean nothing.
    """
    same = before is not None and before["epoch"] == after["epoch"]
    groups = {}
    for name, group in after["groups"].items():
        now = None
        if before is not None and same:
            interval_s = after["uptime_s"] - before["uptime_s"]
            now = rates(before["groups"].get(name), group, interval_s).json()
        since = rates(None, group, after["uptime_s"]).json()
        groups[name] = {**group, "rates": {"now": now, "since_start": since}}
    return {**after, "alarms": alarms(after), "groups": groups}


def alarms(report: Report) -> list[str]:
    """What an operator should look at, worst first; empty when nothing is wrong."""
    return [f"{name}: {text}" for name, group in report["groups"].items() for text in _of_group(group)]


def _of_group(group: Report) -> list[str]:
    host, index, found = group["host"], group["index"], []
    if host["corrupt_blocks"]:
        found.append(
            f"corrupt blocks dropped: {count_text(host['corrupt_blocks'])}; suspect memory or an engine that "
            "writes where it should not"
        )
    if group["alarm"]:
        found.append(group["alarm"])
    nvme = group.get("nvme") or {}
    if nvme.get("trouble"):
        found.append(f"the disk refuses ({nvme['trouble']}): make room on it, or look at the kernel's log")
    if nvme.get("corrupt"):
        found.append(f"rotten blocks on the disk: {count_text(nvme['corrupt'])}; they were computed again")
    if group["quarantined"]:
        found.append(
            f"slots quarantined: {count_text(group['quarantined'])}; their engine hung up and its process "
            "still runs (or, before Linux 6.5, cannot be watched)"
        )
    if index["nodes"] >= _INDEX_FULL * index["nodes_max"]:
        found.append(f"the index is full ({count_text(index['nodes'])} nodes): raise index.nodes_max")
    found += [
        f"engine {engine[:8]} has been silent for {duration_text(facts['silent_s'])}: its pins are taken "
        "when memory is needed"
        for engine, facts in group["engines"].items()
        if facts["silent_s"] > _SILENT_S
    ]
    return found
