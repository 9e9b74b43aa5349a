"""Fingerprints of what vLLM loads: the model's weights, and adapters.

A fingerprint says that bytes are equal, wherever they lie and whatever they are called: two engines that load
the same weights from two folders share blocks, and weights that were changed under one path do not. Files are
hashed whole, once: their sums are remembered by path, size, times and inode, so that a restart, and the other
ranks of one engine, need not read 100 GB again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from .layout import Unsupported

__all__ = [
    "adapter_files",
    "changed_at",
    "file_clock",
    "fingerprint",
    "local_folder",
    "stamp_of",
    "weight_files",
]

_SET_WEIGHTS = "set kv_connector_extra_config.weights to a name of these exact weights, equal in every engine"
_SAFETENSORS, _CONSOLIDATED = "model.safetensors.index.json", "consolidated.safetensors.index.json"
# What DefaultModelLoader looks for, in its order: the first pattern with a file wins. Other formats
# (tensorizer, streamers, sharded states) have loaders of their own.
_PATTERNS: Mapping[str, Sequence[str]] = {
    "hf": ("*.safetensors", "*.bin", "*.pt", "*.pth"),
    "safetensors": ("*.safetensors",),
    "fastsafetensors": ("*.safetensors",),
    "instanttensor": ("*.safetensors",),
    "mistral": ("consolidated*.safetensors",),
    "pt": ("*.pt",),
    "npcache": ("*.bin", "*.pt"),
}
_TRAINING = ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt")
_ADAPTER = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")

_SUM = re.compile(r"[0-9a-f]{64}")
_HASH_THREADS_MAX = 4
_SUMS_MAX = 4096  # remembered: some 1 MB of JSON
_LOCKS = 16
# A file that changed this shortly before it was read may change again with the same times: they are coarse.
_SETTLED_NS = 2_000_000_000
_log = logging.getLogger("vllm.kvstore")


# ---- which files ------------------------------------------------------------------------------------------


def weight_files(
    model: str, revision: str | None, load_format: str = "auto", cache_dir: str | None = None
) -> list[Path]:
    """The files that vLLM loads.

    Args:
        model: a folder, a *.gguf, or the id of a Hugging Face repository that has been downloaded.
        revision: of the repository.
        load_format: vLLM's `--load-format`.
        cache_dir: vLLM's `--download-dir`.

    Raises:
        Unsupported: there are none, or not all of them, or this format is not one of plain files.
    """
    path = Path(model)
    if path.is_file() and path.suffix == ".gguf":
        return [path]
    if load_format != "auto" and load_format not in _PATTERNS:
        raise Unsupported(f"weights of load_format {load_format!r} have no fingerprint; {_SET_WEIGHTS}")
    folder = local_folder(model, revision, cache_dir)
    if folder is None:
        raise Unsupported(f"{model!r} is neither a folder nor a downloaded repository; {_SET_WEIGHTS}")
    if load_format == "auto":
        load_format = "mistral" if any(folder.glob(_PATTERNS["mistral"][0])) else "hf"
    for pattern in _PATTERNS[load_format]:
        files = sorted(file for file in folder.glob(pattern) if file.is_file())
        if pattern.endswith(".safetensors"):
            files = _named(folder, files, _CONSOLIDATED if load_format == "mistral" else _SAFETENSORS)
        else:
            files = [file for file in files if not file.name.endswith(_TRAINING)]
        if files:
            return files
    raise Unsupported(f"{folder} has no weights that vLLM loads; {_SET_WEIGHTS}")


def local_folder(model: str, revision: str | None, cache_dir: str | None = None) -> Path | None:
    """A model's folder: itself, or that of its repository in the local cache; None = there is neither."""
    if Path(model).is_dir():
        return Path(model)
    if os.environ.get("VLLM_USE_MODELSCOPE", "").lower() in ("1", "true"):
        return None  # another hub with a cache of its own: the same id may mean other bytes there
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, revision=revision, cache_dir=cache_dir, local_files_only=True))
    except (OSError, ValueError):  # not in the cache; not an id
        return None


def _named(folder: Path, files: list[Path], index: str) -> list[Path]:
    """Those of `files` that the index names; all of them without an index."""
    try:
        names = set(json.loads((folder / index).read_text())["weight_map"].values())
    except FileNotFoundError:
        return files
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise Unsupported(f"{folder / index} cannot be read ({error!r}); {_SET_WEIGHTS}") from None
    absent = names - {file.name for file in files}
    if absent:
        raise Unsupported(f"{folder} lacks {min(absent)!r}, which {index} names; {_SET_WEIGHTS}")
    return [file for file in files if file.name in names]


def adapter_files(path: str) -> list[Path]:
    """Files of a LoRA adapter as vLLM loads it; [] = they cannot be told.

    Args:
        path: as a request names it: a folder, or the id of a downloaded repository.
    """
    at = Path(path).expanduser()
    folder = at if at.exists() or at.is_absolute() else local_folder(path, None)
    if folder is None:
        return []
    weights = [file for file in map(folder.joinpath, _ADAPTER) if file.is_file()][:1]
    config = folder / "adapter_config.json"
    if not weights or not config.is_file():
        return []
    return [config, *weights, *sorted(folder.glob("new_embeddings.*"))]


# ---- what is in them --------------------------------------------------------------------------------------


def fingerprint(files: Sequence[Path]) -> str:
    """Hex BLAKE2b-256 over the files' SHA-256, in order of name; the names themselves do not count.

    Raises:
        OSError: a file cannot be read.
    """
    state = hashlib.blake2b(digest_size=32, person=b"kvstore-vw-v1")
    sums = _sums(files)
    for file in sorted(files, key=lambda file: file.name):
        state.update(bytes.fromhex(sums[file]))
    return state.hexdigest()


def stamp_of(file: Path) -> str:
    """Names one state of one file: another text means that its content may be another.

    Raises:
        OSError: there is no such file.
    """
    real = file.resolve()
    found = real.stat()
    return f"{found.st_size} {found.st_mtime_ns} {found.st_ctime_ns} {found.st_ino} {real}"


def changed_at(files: Sequence[Path]) -> int:
    """When one of `files`, its folder, or a link on the way to it last changed, on `file_clock`.

    By ctime, which nobody sets back: a copy may keep an old mtime.

    Raises:
        OSError: one of them is gone.
    """
    ways = {way for file in files for way in (file, *file.absolute().parents) if way.is_symlink()}
    times = [way.lstat().st_ctime_ns for way in ways]
    times += [found.stat().st_ctime_ns for file in files for found in (file, file.parent)]
    return max(times)


def file_clock() -> int:
    """Now, in nanoseconds, as the kernel would stamp a file that changes."""
    file = os.memfd_create("kvstore-clock")
    try:
        return os.fstat(file).st_ctime_ns
    finally:
        os.close(file)


def _sums(files: Sequence[Path]) -> dict[Path, str]:
    """SHA-256 of each file."""
    sums = {file: _blob_name(file) for file in files}
    known = _remembered()
    unknown: list[Path] = []
    for file in files:
        sums[file] = sums[file] or known.get(stamp_of(file), "")
        if not sums[file]:
            unknown.append(file)
    if unknown:
        # The ranks of one engine come together: one hashes, the others wait, then read what it wrote. Engines
        # of other models mostly wait for another lock.
        which = hashlib.sha256(str(unknown[0].resolve()).encode(errors="surrogateescape")).digest()[0]
        with _locked(f"hashing-{which % _LOCKS:x}.lock"):
            sums.update(_hashed(unknown, _remembered()))
    return sums


def _blob_name(file: Path) -> str:
    """The Hugging Face cache calls large files by their SHA-256; "" for any other file."""
    real = file.resolve()
    return real.name if real.parent.name == "blobs" and _SUM.fullmatch(real.name) else ""


def _hashed(files: Sequence[Path], known: Mapping[str, str]) -> dict[Path, str]:
    sums = {file: known.get(stamp_of(file), "") for file in files}
    unknown = [file for file in files if not sums[file]]
    if not unknown:
        return sums
    _log.info("kvstore: reading %d files of weights for their fingerprint", len(unknown))
    with ThreadPoolExecutor(min(_HASH_THREADS_MAX, len(unknown)), "kvstore-hash") as threads:
        fresh = dict(zip(unknown, threads.map(_hash, unknown), strict=True))
    sums.update({file: digest for file, (digest, _) in fresh.items()})
    _remember({stamp: digest for digest, stamp in fresh.values() if stamp})
    return sums


def _hash(file: Path) -> tuple[str, str]:
    """SHA-256 of a file, and its stamp: "" if it changed meanwhile, or may have."""
    before = stamp_of(file)
    with file.open("rb", buffering=0) as source:
        digest = hashlib.file_digest(source, "sha256").hexdigest()
    settled = file.stat().st_ctime_ns < file_clock() - _SETTLED_NS
    return digest, before if settled and stamp_of(file) == before else ""


# ---- sums that were computed before -----------------------------------------------------------------------


def _folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "kvstore"


def _remembered() -> dict[str, str]:
    """Stamp → SHA-256, oldest first. Empty if there is nothing that can be read."""
    try:
        sums = json.loads((_folder() / "fingerprints.json").read_text())["sha256"]
        return {stamp: digest for stamp, digest in sums.items() if _SUM.fullmatch(digest)}
    except FileNotFoundError:
        return {}
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
        _log.debug("kvstore: remembered fingerprints cannot be read: %r", error)
        return {}


def _remember(fresh: Mapping[str, str]) -> None:
    """Add sums; without a folder to write to they are computed again next time."""
    if not fresh:
        return
    with _locked("fingerprints.lock"):
        kept = {stamp: digest for stamp, digest in _remembered().items() if stamp not in fresh}
        entries = [*kept.items(), *fresh.items()][-_SUMS_MAX:]
        try:
            # Under the lock nobody else of this process's number writes, and a reader sees old or new.
            draft = _folder() / f".fingerprints.{os.getpid()}"
            draft.write_text(json.dumps({"version": 1, "sha256": dict(entries)}, indent=0))
            draft.replace(_folder() / "fingerprints.json")
        except (OSError, RuntimeError, ValueError) as error:
            _log.warning("kvstore: fingerprints are not kept, every start hashes the weights: %s", error)


@contextmanager
def _locked(name: str) -> Iterator[None]:
    """Hold a lock among processes; where that cannot be done, go on without."""
    lock = -1
    with suppress(OSError, RuntimeError):  # no home, read-only, or a file system without locks
        _folder().mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = os.open(_folder() / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        yield
    finally:
        if lock >= 0:
            os.close(lock)
