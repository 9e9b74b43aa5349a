"""What is known of the cost of bytes, as lines of `kvstore status`: to load them, and to compute them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.text import Text

from kvstore.cli.units import count_text, size_text
from kvstore.explaining import about

__all__ = ["prices"]

# In `top` there is little room, and a daemon may know many models.
CURVES_SHOWN_MAX = 4


def prices(pricing: Mapping[str, Any] | None) -> Text | None:
    """Of one trust group; None where nothing was learnt yet.

    Args:
        pricing: that part of a report; None = an older daemon, which has none.
    """
    lines = [_source(name, facts) for name, facts in (pricing or {}).get("sources", {}).items()]
    curves = [facts for facts in (pricing or {}).get("curves", {}).values() if facts["steps"]]
    lines += [_curve(facts) for facts in curves[:CURVES_SHOWN_MAX]]
    if len(curves) > CURVES_SHOWN_MAX:
        lines.append(f"and the speed of {len(curves) - CURVES_SHOWN_MAX} more models")
    return Text("\n".join(lines)) if lines else None


def _source(name: str, facts: Mapping[str, Any]) -> str:
    speed = f"{size_text(facts['bytes_per_s'])}/s after {about(facts['latency_s'])}"
    seen = f"{count_text(facts['samples'])} loads seen" if facts["samples"] else "a guess"
    text = f"{name} loads {speed} ({seen})"
    trust = facts["trust"]
    doubted = trust is not None and trust["state"] == "doubted"
    return f"{text}, not waited for: {trust['reason']}" if doubted else text


def _curve(facts: Mapping[str, Any]) -> str:
    model = facts["model"]
    name = model.rpartition("/")[2][:20] if model else "a model that is not attached"
    known = {tokens: seconds for tokens, seconds in facts["seconds"].items() if seconds is not None}
    parts = [f"{count_text(int(tokens))} tokens in {about(seconds)}" for tokens, seconds in known.items()]
    return f"{name} computes {', '.join(parts) or 'at a speed not known yet'}"
