"""Who uses how much of what it may, as lines of `kvstore status`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.text import Text

from kvstore.cli.units import count_text, size_text

__all__ = ["quotas"]

# In `top` there is little room: those who were refused something come first, then the largest.
TENANTS_SHOWN_MAX = 8

_TIERS = (("HOST", "host_bytes"), ("NVME", "nvme_bytes"))


def quotas(used: Mapping[str, Any] | None) -> Text | None:
    """Of one trust group; None where nobody has a limit.

    Args:
        used: that part of a report; None = an older daemon, which has none.
    """
    bound = {name: facts for name, facts in (used or {}).items() if facts["limits"]}
    ranked = sorted(
        bound, key=lambda name: (-sum(bound[name]["refused"].values()), -bound[name]["host_bytes"])
    )
    lines = [_line(name, bound[name]) for name in ranked[:TENANTS_SHOWN_MAX]]
    if len(ranked) > TENANTS_SHOWN_MAX:
        lines.append(f"and {len(ranked) - TENANTS_SHOWN_MAX} more tenants with limits")
    return Text("\n".join(lines)) if lines else None


def _line(name: str, facts: Mapping[str, Any]) -> str:
    limits = facts["limits"]
    parts = [
        f"{tier} {size_text(facts[key])} of {size_text(limits[key])}" for tier, key in _TIERS if key in limits
    ]
    refused = [f"{limit} {count_text(count)}" for limit, count in facts["refused"].items()]
    parts += [f"refused: {', '.join(refused)}"] if refused else []
    return f"{name}: {' · '.join(parts) or 'within its limits'}"
