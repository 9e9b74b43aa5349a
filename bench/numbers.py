"""Write README's figures from bench/results: between `<!-- numbers:NAME -->` and `<!-- /numbers -->`.

python -m bench.numbers          rewrite README.md
python -m bench.numbers --check  exit 1 when README.md is not what the results say
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from bench.machine import RESULTS

__all__ = ["main", "rendered"]

README = Path(__file__).parent.parent / "README.md"
_BLOCK = re.compile(r"<!-- numbers:(\w+) -->\n.*?<!-- /numbers -->", re.DOTALL)


def rendered(text: str) -> str:
    """README with every block of figures made anew."""
    return _BLOCK.sub(
        lambda match: f"<!-- numbers:{match[1]} -->\n{_BLOCKS[match[1]]()}<!-- /numbers -->", text
    )


def _demo() -> str:
    result: dict[str, Any] = json.loads((RESULTS / "demo.json").read_text())
    where = result["where"]
    rows = [
        "![time to first token, cold and from each tier](bench/results/demo.png)\n",
        "| what | time to first token | against cold |",
        "|---|---|---|",
    ]
    cold = result["ttft_s"]["cold"]
    for name, text in (
        ("cold", "computed"),
        ("L2", "idle device blocks"),
        ("HOST", "arena, new engine process"),
    ):
        seconds = result["ttft_s"][name]
        rows.append(f"| {name} ({text}) | {1000 * seconds:.0f} ms | {cold / seconds:.1f} × |")
    same = "yes" if result["answers_identical"] else "NO"
    noticed = "yes" if result["negative_control_detected"] else "NO"
    machine = f"{where['cores']} cores of {where['cpu']}"
    tokens, new, speed = result["prompt_tokens"], result["new_tokens"], result["prefill_over_transformers"]
    sentences = (
        f"\nPrompt of {tokens} tokens, medians of three. {new} greedy tokens of every answer identical to",
        f"the uncached run: {same}. One inverted cell noticed: {noticed}. Cold prefill runs at {speed:.2f} ×",
        "the speed of HF transformers, so no slow engine flatters the cache.",
        f"`{result['command']}`, commit {where['commit']}, {machine}, {where['date']}.\n",
    )
    rows.append(" ".join(sentences))
    return "\n".join(rows)


def _aiofiles() -> str:
    result: dict[str, Any] = json.loads((RESULTS / "aiofiles_cost.json").read_text())
    us, where = result["us_per_block"], result["where"]
    rows = [
        "| µs per block | aiofiles | `preadv`/`pwritev` on a thread | the same call alone |",
        "|---|---|---|---|",
    ]
    for verb in ("read", "write"):
        for name, size in (("64k", "64 KiB"), ("256k", "256 KiB"), ("2m", "2 MiB")):
            cells = [f"{us[f'{verb}_{way}_{name}']:.0f}" for way in ("aiofiles", "pool", "direct")]
            rows.append(f"| {verb} {size} | {' | '.join(cells)} |")
    rows.append(
        f"\nOne hop to a thread and back: {result['hop_us']:.0f} µs. Medians of {result['repeats']}, "
        f"page cache. `{result['command']}`, commit {where['commit']}, {where['cores']} cores of "
        f"{where['cpu']}, {where['date']}.\n"
    )
    return "\n".join(rows)


_BLOCKS = {"demo": _demo, "aiofiles": _aiofiles}


def main() -> int:
    """Returns the exit status."""
    before = README.read_text()
    after = rendered(before)
    if "--check" in sys.argv[1:]:
        if before != after:
            print("README.md does not show what bench/results say: run python -m bench.numbers")
        return int(before != after)
    README.write_text(after)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
