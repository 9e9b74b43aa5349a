"""A status report as text: what `status` prints once and `top` again and again.

Everything fits 60 columns: the long lines fold, the tables are narrow, nothing depends on colour.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvstore.cli.price_pane import prices
from kvstore.cli.quota_pane import quotas
from kvstore.cli.units import (
    count_text,
    duration_text,
    per_second_text,
    percent_text,
    size_text,
)

__all__ = ["pane"]

_BAR_COLUMNS = 10
# In `top` the busiest engines are what one looks for; the rest is a number.
ENGINES_SHOWN_MAX = 16

# Labels of a device block; what else a pool counts are events.
_DEVICE_STATES = ("free", "mapped", "idle", "draining")

_SEGMENT_STATES = ("creating", "free", "opening", "filling", "sealing", "sealed", "evacuating", "broken")

Report = Mapping[str, Any]


def pane(report: Report, place: str) -> RenderableType:
    """The whole report (with alarms and rates, see `reading.with_rates`), alarms first.

    Args:
        place: the socket that was asked.
    """
    parts: list[RenderableType] = [Text(f"ALARM {text}", style="bold red") for text in report["alarms"]]
    parts.append(
        Text(
            f"kvstore {report['version']} · pid {report['pid']} · up {duration_text(report['uptime_s'])} · "
            f"epoch {report['epoch'][:8]} · {place}",
            style="dim",
        )
    )
    for name, group in report["groups"].items():
        parts += [Text(""), Text(f"trust group {name}", style="bold")]
        parts += [_tiers(group), _engines(group), _holders(group)]
        parts += [_disk(group["nvme"])] if group.get("nvme") else []
        known = prices(group.get("pricing"))
        parts += [known] if known is not None else []
        bound = quotas(group.get("quotas"))
        parts += [bound] if bound is not None else []
        parts.append(_rates(group))
    return Group(*parts)


def _table(*columns: str) -> Table:
    """Borderless; all but the first column to the right."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for number, column in enumerate(columns):
        name = number == 0 or column == "model"
        table.add_column(
            column, justify="left" if name else "right", overflow="fold", no_wrap=column != "model"
        )
    return table


def _tiers(group: Report) -> RenderableType:
    host = group["host"]
    table = _table("tier", "", "full", "used", "of")
    share = host["used_bytes"] / host["capacity_bytes"]
    table.add_row(
        "HOST",
        _bar(share),
        percent_text(share),
        size_text(host["used_bytes"]),
        size_text(host["capacity_bytes"]),
    )
    nvme = group.get("nvme")  # an older daemon has none
    if nvme is not None:
        share = nvme["live_bytes"] / nvme["capacity_bytes"]
        live, capacity = size_text(nvme["live_bytes"]), size_text(nvme["capacity_bytes"])
        table.add_row("NVME", _bar(share), percent_text(share), live, capacity)
    mapped = sum(facts["device"]["mapped"] for facts in group["engines"].values())
    idle = sum(facts["device"]["idle"] for facts in group["engines"].values())
    total = sum(facts["device"][state] for facts in group["engines"].values() for state in _DEVICE_STATES)
    for tier, blocks in (("GPU L1", mapped), ("GPU L2", idle)):
        if total:
            share = blocks / total
            of = f"{count_text(total)} blocks"
            table.add_row(tier, _bar(share), percent_text(share), count_text(blocks), of)
    return table


def _bar(share: float) -> str:
    """As full as `share`, but never empty for a little or full for not quite all."""
    full = round(share * _BAR_COLUMNS)
    if 0 < share < 1:
        full = min(max(full, 1), _BAR_COLUMNS - 1)
    return "█" * full + "░" * (_BAR_COLUMNS - full)


def _engines(group: Report) -> RenderableType:
    if not group["engine_count"]:
        return Text("no engine is attached", style="dim")
    table = _table("engine", "pool", "L1", "L2", "free", "sessions", "model")
    by_use = sorted(group["engines"].items(), key=lambda entry: -entry[1]["device"]["mapped"])
    for engine, facts in by_use[:ENGINES_SHOWN_MAX]:
        device = facts["device"]
        table.add_row(
            engine[:8],
            facts["pool"],
            *(count_text(device[state]) for state in ("mapped", "idle", "free")),
            str(facts["sessions"]),
            facts["model"].rpartition("/")[2][:20],
        )
    more = group["engine_count"] - min(len(by_use), ENGINES_SHOWN_MAX)
    return Group(table, Text(f"and {more} more engines", style="dim")) if more else table


def _holders(group: Report) -> RenderableType:
    """Who holds what, and what was lost."""
    host, index = group["host"], group["index"]
    filling = f"fillings {count_text(group['fillings'])} ({count_text(host['filling'])} slots, "
    filling += f"{count_text(group['quarantined'])} quarantined)"
    nodes = f"index {count_text(index['nodes'])} of {count_text(index['nodes_max'])} nodes"
    free = f"free {count_text(host['free'])} slots + {count_text(host['free_slabs'])} slabs"
    lost = [f"corrupt {count_text(host['corrupt_blocks'])}"]
    lost += [f"{reason} {count_text(count)}" for reason, count in host["dropped"].items()]
    huge = "huge pages" if host["huge_pages"] else "4 KiB pages"
    return Text(
        f"leases {count_text(group['leases'])} · {filling} · draining {count_text(host['draining'])}\n"
        f"{count_text(host['ready'])} blocks on HOST, {free} · {nodes} · {huge}\n"
        f"dropped: {' · '.join(lost)}"
    )


def _disk(nvme: Report) -> RenderableType:
    """What the disk holds, what is on its way, what it lost or was not given."""
    states = [f"{state} {count_text(nvme[state])}" for state in _SEGMENT_STATES if nvme[state]]
    lost = [f"corrupt {count_text(nvme['corrupt'])}"]
    lost += [f"{what.replace('_', ' ')} {count_text(nvme[what])}" for what in ("write_failed", "read_failed")]
    lost += [
        f"{reason} {count_text(nvme['dropped'].get(reason, 0))}" for reason in ("evicted", "over_budget")
    ]
    refused = nvme["admission"]["refused"]
    text = (
        f"{count_text(nvme['records'])} blocks on NVME ({nvme['io']}), "
        f"{size_text(nvme['queued_bytes'])} to write, "
        f"{count_text(nvme['promotions'])} fetches\nsegments: {' · '.join(states) or 'none'}\n"
        f"NVME lost: {' · '.join(lost)} · not written: "
        + " · ".join(f"{reason} {count_text(count)}" for reason, count in refused.items())
    )
    return Text(f"NVME rests: {nvme['trouble']}\n{text}" if nvme["trouble"] else text)


def _rates(group: Report) -> RenderableType:
    now, since = group["rates"]["now"], group["rates"]["since_start"]
    table = _table("", "lookups/s", "hit rate", "loaded/s", "saved/s")
    rows = [("since start", since)] if now is None else [(f"last {now['interval_s']:.1f} s", now)]
    if now is not None:
        rows.append(("since start", since))
    for label, rate in rows:
        table.add_row(
            label,
            per_second_text(rate["lookups_per_s"]),
            percent_text(rate["hit_rate"]),
            size_text(rate["loaded_bytes_per_s"]),
            size_text(rate["saved_bytes_per_s"]),
        )
    return table
