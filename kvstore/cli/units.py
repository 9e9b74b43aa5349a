"""Numbers as people read them."""

from __future__ import annotations

__all__ = ["count_text", "duration_text", "per_second_text", "percent_text", "size_text"]

_SIZES = ("B", "KiB", "MiB", "GiB", "TiB")
_SECONDS = (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1))


def size_text(size_bytes: float) -> str:
    """768 B, 1.5 MiB, 64 GiB."""
    value = float(size_bytes)
    for unit in _SIZES:
        if abs(value) < 1024 or unit == _SIZES[-1]:
            return f"{value:.0f} {unit}" if value == int(value) or value >= 100 else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError("the last unit takes everything")


def count_text(count: int) -> str:
    """1,234,567."""
    return f"{count:,}"


def duration_text(seconds: float) -> str:
    """The two largest units: 3 d 4 h, 12 min 5 s, 7 s."""
    left = int(seconds)
    parts = []
    for unit, length_s in _SECONDS:
        if left >= length_s:
            parts.append(f"{left // length_s} {unit}")
            left %= length_s
    return " ".join(parts[:2]) or "0 s"


def per_second_text(value: float) -> str:
    """0, 0.25, 12.5, 3,400 (a second)."""
    if value >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def percent_text(share: float | None) -> str:
    """97 %, or – where there is nothing to divide by."""
    return "–" if share is None else f"{100 * share:.0f} %"
