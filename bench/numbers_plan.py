"""README's figures about reload or recompute, as text; `bench.numbers` puts them there."""

from __future__ import annotations

from typing import Any

__all__ = ["breakeven_text", "surprises_text"]

_HEADS = {"load": "always load"}


def breakeven_text(result: dict[str, Any], name: str) -> str:
    """The picture, a row for each cell of an idle engine, and what holds over all cells."""
    ways = result["arms"]
    heads = " | ".join(_HEADS.get(way, way) for way in ways)
    rows = [
        f"![load over recompute, the planner's choice, and what it cost](bench/results/{name}.png)\n",
        f"| limit of the disk | prompt | {heads} | it chose |",
        "|---" * (3 + len(ways)) + "|",
    ]
    for cell in result["cells"]:
        if cell["load"] != "idle":
            continue
        times = " | ".join(f"{cell['ttft_s'][way]:.2f} s" for way in ways)
        chose = ", ".join(f"{choice} {count}" for choice, count in cell["planner_chose"].items())
        limit = f"{cell['mb_per_s']} MB/s" if cell["mb_per_s"] else "none"
        rows.append(f"| {limit} | {cell['tokens']:,} tokens | {times} | {chose} |")
    split = result["split_over_best_pure_median"]
    facts = [
        f"\nTime to first token, medians of {result['grid']['turns']}; SmolLM2-135M in float32, 45 KiB of",
        f"KV a token. Over all {len(result['cells'])} cells, engines that decode",
        f"{result['model']['busy_sequences']} other sequences included: the planner takes",
        f"{result['planner_over_best_p95']:.2f} × the fastest way at p95 (median",
        f"{result['planner_over_best_median']:.2f} ×) and {result['planner_over_recompute_max']:.2f} ×",
        "recompute at most, where a store that always loads takes up to",
        f"{result['always_load_over_recompute_max']:.1f} ×.",
    ]
    if split is not None:
        facts.append(
            f"Where load and recompute are within a factor of two, its splits take {split:.2f} × the better."
        )
    facts.append(
        f"Recompute against itself is off by {result['aa_p95']:.1%} at p95. Answers identical: "
        f"{'yes' if result['outputs_identical'] else 'NO'}."
    )
    return "\n".join(rows) + "\n" + " ".join(facts)


def surprises_text(result: dict[str, Any]) -> str:
    """What a surprise cost at most, how soon it was noticed, and what was told of the worst."""
    rows = result["rows"]
    worst = max(rows, key=lambda row: row["over_recompute"])
    facts = [
        f"{result['surprised']} times the disk was slowed down in the middle of a load, to 5 MB/s or to a",
        "stall, half of them with an engine that cannot split. These requests took",
        f"{result['surprise_over_recompute_max']:.2f} × recompute at most (the median of one limit and",
        f"engine), the worst single one {result['surprise_over_recompute_worst']:.2f} ×, the median of all",
        f"{result['surprise_over_recompute_median']:.2f} ×. While the disk stayed slow, request",
        f"{result['requests_until_doubted_max']} at the latest did not wait for it any more; once it was",
        f"fast again, request {result['requests_until_loaded_max']} at the latest was loaded again.",
        f"Recompute against itself is off by {result['aa_p95']:.1%} at p95.",
    ]
    told = [
        f"What `kvstore explain` says of the worst ({worst['limit']}):",
        "",
        "```",
        worst["explained"],
        "```",
    ]
    return " ".join(facts) + "\n\n" + "\n".join(told) + "\n\n"
