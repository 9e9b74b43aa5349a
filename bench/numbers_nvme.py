"""README's figures about the NVMe tier, as text; `bench.numbers` puts them there."""

from __future__ import annotations

from typing import Any

__all__ = ["kill9_text", "nvme_text"]

_MOVES = {"read": "fetch, every sum checked twice", "write": "save, summed, until it is durable"}
_SECONDS = ("reopen_s_100k_blocks", "restart_to_first_hit_s", "restart_empty_s")
_BAD = {"flushed_lost": "flushed blocks lost", "corrupt": "corrupt", "phantom": "phantom"}
_SIZES = {"2m": "2 MiB", "256k": "256 KiB"}


def nvme_text(result: dict[str, Any]) -> str:
    """A table of speeds, and how long a restart takes."""
    rows = ["| through the daemon | block | speed, fio = 1 | quartiles | fio |", "|---|---|---|---|---|"]
    for verb, what in _MOVES.items():
        for size, text in _SIZES.items():
            ratio = result["spread"][f"{verb}_over_fio_{size}"]
            limit = result[f"{verb}_{size}"]["arms"]["fio"]["bytes_per_s"] / 1e9
            spread = f"{ratio['low']:.2f} … {ratio['high']:.2f}"
            rows.append(f"| {what} | {text} | {ratio['median']:.2f} × | {spread} | {limit:.2f} GB/s |")
    reopen = result["reopen"]
    lasting = {name: f"{result[name]:.2f} s" for name in _SECONDS}
    facts = (
        f"\nPayload bytes; {result['read_2m']['turns']} turns over {result['set_bytes'] >> 30} GiB, direct",
        "I/O, as many bytes under way as the daemon lets be; a save ends with the flush. After kill -9 and",
        f"with cold caches a daemon has its first hit {lasting['reopen_s_100k_blocks']} after it begins to",
        f"open a directory of {reopen['blocks_found']:,} blocks of 64 KiB, which is",
        f"{lasting['restart_to_first_hit_s']} after its own start; with an empty directory its first answer",
        f"comes after {lasting['restart_empty_s']}.",
    )
    return "\n".join(rows) + "\n" + " ".join(facts)


def kill9_text(result: dict[str, Any]) -> str:
    """One paragraph."""
    bad = [f"{result[name]} {what}" for name, what in _BAD.items()]
    facts = (
        f"{result['rounds']} daemons were killed while they were saving and flushing, each followed by one",
        f"that was asked for everything ever saved: {', '.join(bad)}; {result['blocks_verified']:,} blocks",
        f"were compared. In {result['kills_with_writes_in_flight']} kills writes were provably in flight,",
        f"{result['kills_while_opening']} more came while a directory was being opened, and where segments",
        f"are recycled {result['blocks_evicted']:,} blocks were evicted.",
    )
    return " ".join(facts)
