"""What a daemon learns and keeps across restarts: the latest prefill steps of each trust group.

They are what a prefill curve starts from, and until the first step after a restart nothing else tells how
fast this node computes. Counters are not kept: Prometheus knows how to treat one that starts again.

    {"format": "kvstore-learnt", "version": 1, "groups": {NAME: {"prefill_steps": [[tokens, seconds], …]}}}
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Annotated

import msgspec
import structlog

from kvstore.errors import ConfigError
from kvstore.meters import PREFILL_STEPS_MAX, Meters, PrefillStep
from kvstore.small_files import FILE_BYTES_MAX

__all__ = ["FILE_NAME", "StateDir", "restore", "written"]

log = structlog.get_logger()

FILE_NAME = "learnt.json"
_FORMAT, _VERSION = "kvstore-learnt", 1

_Tokens = Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]
_Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=86_400.0)]


class _Group(msgspec.Struct):
    prefill_steps: Annotated[list[tuple[_Tokens, _Seconds]], msgspec.Meta(max_length=PREFILL_STEPS_MAX)] = (
        msgspec.field(default_factory=list)
    )


class _File(msgspec.Struct):
    format: str
    version: int
    groups: dict[str, _Group]


def written(meters: Mapping[str, Meters]) -> bytes:
    """The file for these groups, at most FILE_BYTES_MAX: of very many, only the latest steps of each."""
    most = PREFILL_STEPS_MAX
    while len(data := _written(meters, most)) > FILE_BYTES_MAX:
        most //= 2  # with 0 there is no group left either
    if most < PREFILL_STEPS_MAX:
        log.warning("learnt state cut to its latest steps", steps_of_each_group=most, groups=len(meters))
    return data


def _written(meters: Mapping[str, Meters], most: int) -> bytes:
    groups = {}
    for name, of in meters.items():
        latest = islice(of.prefill_steps, max(0, len(of.prefill_steps) - most), None)
        steps = [(step.tokens, step.seconds) for step in latest]
        if steps:
            groups[name] = _Group(steps)
    return msgspec.json.encode(_File(_FORMAT, _VERSION, groups))


def restore(data: bytes, meters: Mapping[str, Meters]) -> None:
    """Take up what a file says about groups that still exist.

    Raises:
        ValueError: not such a file, torn, or of another version; nothing was changed.
    """
    try:
        file = msgspec.json.decode(data, type=_File)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not a whole {_FORMAT} file: {error}") from None
    if (file.format, file.version) != (_FORMAT, _VERSION):
        raise ValueError(f"need {_FORMAT} version {_VERSION}, got {file.format:.40} version {file.version}")
    for name, group in file.groups.items():
        if name in meters:
            meters[name].prefill_steps.extend(PrefillStep(*step) for step in group.prefill_steps)


class StateDir:
    """`daemon.state_dir`, held by one daemon at a time.

    Raises:
        ConfigError: it cannot be used, or another daemon uses it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(
                f"daemon.state_dir: cannot use {path}: {error.strerror}; make it writable or unset the key"
            ) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise ConfigError(
                f"daemon.state_dir: another daemon uses {path}; give each daemon its own directory"
            ) from None

    @property
    def file(self) -> Path:
        """Where the learnt state lies."""
        return self.path / FILE_NAME

    def close(self) -> None:
        """Others may use it now."""
        os.close(self._lock)
