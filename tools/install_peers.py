"""Make .venv-peers/NAME for everything that a benchmark compares with. Idempotent.

Stores are for `python -m bench.local --peers`, routers (dynamo, sglang) for `python -m bench.routing_index`
and what compares whole routers. What is pinned is what the results were measured with. A peer that cannot be
installed is named, the others are installed all the same, and the exit status is 1.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

__all__ = ["PEERS", "Peer", "main"]

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / ".venv-peers"


@dataclass(frozen=True, slots=True)
class Peer:
    """One store or router.

    Attributes:
        package: with its version.
        proof: what must import afterwards.
        without: requirements that need a GPU; then the package comes with --no-deps after the others.
        torch: lend it ours (200 MB) instead of a copy.
    """

    package: str
    proof: str
    without: tuple[str, ...] = ()
    torch: bool = False


PEERS = {
    "lmcache": Peer(
        "lmcache==0.5.6",
        "lmcache.v1.multiprocess.transfer_context",
        without=("torch", "cupy-cuda13x", "cuda-python", "cufile-python", "nvtx"),
        torch=True,
    ),
    "openlake": Peer("openlake-vllm==0.8.1", "openlake_client"),
    "redhare": Peer("redhare==0.6.0", "redhare"),
    "dynamo": Peer("ai-dynamo-runtime==1.6.1", "dynamo.llm"),
    "sglang": Peer("sglang-router==0.3.2", "sglang_router"),
}

# Names of a wheel's requirements that hold here; run by the peer's own Python, so that markers are its own.
_REQUIREMENTS = """
import pathlib, sys, zipfile
from email.parser import HeaderParser
from pip._vendor.packaging.requirements import Requirement
wheel = next(pathlib.Path(sys.argv[1]).glob("*.whl"))
with zipfile.ZipFile(wheel) as files:
    name = next(n for n in files.namelist() if n.endswith(".dist-info/METADATA"))
    meta = HeaderParser().parsestr(files.read(name).decode())
for text in meta.get_all("Requires-Dist", []):
    one = Requirement(text)
    if one.name not in sys.argv[2:] and (one.marker is None or one.marker.evaluate({"extra": ""})):
        print(f"{one.name}{'[' + ','.join(one.extras) + ']' if one.extras else ''}{one.specifier}")
"""


def main() -> int:
    """Returns the exit status."""
    failed = []
    for name, peer in PEERS.items():
        home = FOLDER / name
        done = home / ".installed"
        if done.exists() and done.read_text() == repr(peer):
            continue
        print(f"{name}: installing {peer.package} into {home.relative_to(ROOT)}", flush=True)
        shutil.rmtree(home, ignore_errors=True)
        try:
            _install(home, peer)
        except (OSError, subprocess.SubprocessError, RuntimeError) as error:
            print(f"{name}: {error}", file=sys.stderr)
            failed.append(name)
            continue
        done.write_text(repr(peer))
    if failed:
        print(f"not installed: {', '.join(failed)}; the benchmarks say so in their results", file=sys.stderr)
    return 1 if failed else 0


def _install(home: Path, peer: Peer) -> None:
    venv.create(home, with_pip=True, symlinks=True)
    python = home / "bin" / "python"
    if peer.without:
        wheels = home / "wheels"
        _run(python, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(wheels), peer.package)
        needed = _run(python, "-c", _REQUIREMENTS, str(wheels), *peer.without).split("\n")
        _run(python, "-m", "pip", "install", "--quiet", *filter(None, needed))
        _run(python, "-m", "pip", "install", "--quiet", "--no-deps", *map(str, wheels.glob("*.whl")))
        shutil.rmtree(wheels)
    else:
        _run(python, "-m", "pip", "install", "--quiet", peer.package)
    if peer.torch:
        _lend_torch(python)
    _run(python, "-c", f"import {peer.proof}")


def _lend_torch(python: Path) -> None:
    """Behind the peer's own packages on its path, so that only what it lacks comes from ours."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise RuntimeError("no torch to lend: make build")
    site = _run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    (Path(site) / "torch-of-kvstore.pth").write_text(f"{Path(spec.origin).parent.parent}\n")


def _run(*command: object) -> str:
    run = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    if run.returncode:
        words = (run.stderr or run.stdout).strip().splitlines()
        raise RuntimeError(
            f"{Path(str(command[0])).name} {command[1]} … failed: {words[-1] if words else '?'}"
        )
    return run.stdout


if __name__ == "__main__":
    raise SystemExit(main())
