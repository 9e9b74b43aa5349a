"""Tables of runs as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvstore.simulate.golden import Check

__all__ = ["columns", "family_lines", "golden_lines", "trace_lines"]


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Aligned: the first column to the left, numbers to the right. The first row is the heading."""
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if at == 0 else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def family_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """One table; see `FamilyRun` for the words."""
    head = (
        "policy",
        "capacity",
        "reused",
        "reuse",
        "steady",
        "skew",
        "skew max",
        "evictions",
        "penalty s",
        "assigned",
    )
    body = [
        (
            row["label"],
            f"{row['capacity']:,}",
            f"{row['reused_tokens']:,}",
            _share(row["reuse"]),
            _share(row["reuse_without_warm_up"]),
            f"{row['skew']:,}",
            f"{row['skew_max']:,}",
            f"{row['evictions']:,}",
            f"{row['queue_penalty_s']:,.4g}",
            "[" + ",".join(map(str, row["assigned"])) + "]",
        )
        for row in rows
    ]
    return columns([head, *body])


def trace_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Three tables: everything, warm-up beside steady state, and the second half over round-robin."""
    head = ["policy", "capacity", "reuse", "TTFT p50 s", "p99 s", "mean s"]
    counts = [[f"{row['skew_max']:,}", f"{row['evictions']:,}"] for row in rows]
    body = [[*_figures(row, "all"), *more] for row, more in zip(rows, counts, strict=True)]
    lines = ["all requests", *columns([[*head, "skew max", "evictions"], *body])]
    for part, title in (("warm_up", "warm-up"), ("steady", "steady state")):
        some = next((row[part] for row in rows if row[part] is not None), None)
        if some is None:
            lines += ["", f"{title}: no request; the trace never fills this fleet"]
            continue
        lines += ["", f"{title}, {some['requests']:,} requests at capacity {rows[0]['capacity']:,}"]
        lines += columns([head, *(_figures(row, part) for row in rows)])
    compared = [row for row in rows if row["over_round_robin"] is not None]
    if compared:
        table = [
            [
                *_figures(row, "second_half")[:3],
                f"{row['over_round_robin']['ttft_p50']:.3f}",
                f"{row['over_round_robin']['ttft_p99']:.3f}",
            ]
            for row in compared
        ]
        lines += ["", "second half, over round-robin"]
        lines += columns([[*head[:3], "TTFT p50 ×", "p99 ×"], *table])
    return lines


def golden_lines(checks: Sequence[Check]) -> list[str]:
    """Every number, and whether it is right."""
    head = ("number", "expected", "found", "")
    body = [(c.what, str(c.expected), str(c.found), "PASS" if c.ok else "FAIL") for c in checks]
    wrong = sum(not check.ok for check in checks)
    verdict = f"{len(checks)} numbers, {wrong} differ" if wrong else f"{len(checks)} numbers, all as expected"
    return [*columns([head, *body]), "", verdict]


def _figures(row: dict[str, Any], part: str) -> list[str]:
    """Policy, capacity, reuse, and seconds to first token: median, 99th percentile, mean."""
    name, found = [row["label"], f"{row['capacity']:,}"], row[part]
    if found is None:
        return [*name, *"––––"]
    seconds = [f"{found[key]:,.3g}" for key in ("ttft_p50_s", "ttft_p99_s", "ttft_mean_s")]
    return [*name, _share(found["reuse"]), *seconds]


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
