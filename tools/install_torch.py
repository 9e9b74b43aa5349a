"""Install torch without ever downloading CUDA libraries onto a machine that has no GPU.

pip is asked first what it would install. A CPU build, or any build on a machine with an NVIDIA driver, is
taken as it is; otherwise the CPU index of the PyTorch project is used.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PINNED = "torch==2.13.0"  # what the suite is run with; any torch >= 2.5 works


def main() -> int:
    """Returns the exit status."""
    if importlib.util.find_spec("torch") is not None:
        return 0
    has_gpu = Path("/proc/driver/nvidia/version").exists()
    for requirement in (PINNED, "torch>=2.5"):
        plan = _plan(requirement)
        if plan and (has_gpu or not any(name.startswith("nvidia-") for name in plan)):
            return _pip("install", "--quiet", requirement)
    print(f"installing torch from the CPU index ({CPU_INDEX})")
    status = _pip("install", "--quiet", "torch>=2.5", "--index-url", CPU_INDEX)
    if status:
        print(f"torch could not be installed; do it by hand: pip install torch --index-url {CPU_INDEX}")
    return status


def _plan(requirement: str) -> list[str]:
    """Names that pip would install for `requirement`; empty when it finds none."""
    command = ["install", "--dry-run", "--quiet", "--report", "-", requirement]
    run = subprocess.run([sys.executable, "-m", "pip", *command], capture_output=True, text=True, check=False)
    if run.returncode:
        return []
    return [item["metadata"]["name"] for item in json.loads(run.stdout)["install"]]


def _pip(*arguments: str) -> int:
    return subprocess.run([sys.executable, "-m", "pip", *arguments], check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main())
