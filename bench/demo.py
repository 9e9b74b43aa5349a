"""Time to first token with and without reuse, on a real model: runs `kvstore demo` and keeps what it says.

python -m bench.demo --save     writes bench/results/demo.json and bench/results/demo.png
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.machine import RESULTS, where

__all__ = ["main"]


def main() -> int:
    """Returns the exit status of the demo."""
    parser = argparse.ArgumentParser(prog="python -m bench.demo", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the JSON object only")
    parser.add_argument("--save", action="store_true", help="write bench/results/demo.{json,png}")
    options = parser.parse_args()
    run = subprocess.run(
        [sys.executable, "-m", "kvstore", "demo"], capture_output=True, text=True, check=False
    )
    lines = run.stdout.strip().splitlines()
    if run.returncode or not lines:
        sys.stderr.write(run.stdout + run.stderr)
        return run.returncode or 1
    if not options.json:
        print("\n".join(lines[:-1]))
    result = {**json.loads(lines[-1]), "command": "python -m bench.demo --save", "where": where()}
    if options.save:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "demo.json").write_text(json.dumps(result, indent=1) + "\n")
        picture(result, RESULTS / "demo.png")
    print(json.dumps(result))
    return 0


def picture(result: dict[str, Any], file: Path) -> None:
    """Bars: time to first token of the same question, cold and from each tier."""
    from matplotlib.figure import Figure

    names = {
        "cold": "cold\n(computed)",
        "L2": "L2\n(idle device blocks)",
        "HOST": "HOST\n(new engine process)",
        "NVME": "NVME\n(new daemon, too)",
    }
    seconds = [result["ttft_s"][name] for name in names]
    figure = Figure(figsize=(6.4, 3.0), layout="constrained")
    axes = figure.subplots()
    bars = axes.barh(list(names.values()), seconds, color=["#b0b7c3", "#2f6fde", "#3aa17e", "#d9a441"])
    axes.bar_label(bars, [f"{value:.2f} s" for value in seconds], padding=4)
    axes.invert_yaxis()
    axes.set_xlim(0, max(seconds) * 1.15)
    axes.set_xlabel(
        f"time to first token, prompt of {result['prompt_tokens']} tokens, SmolLM2-135M in float32"
    )
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=150)


if __name__ == "__main__":
    raise SystemExit(main())
