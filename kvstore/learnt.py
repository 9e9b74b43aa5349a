"""What a daemon learns and keeps across restarts, of each trust group.

    {"format": "kvstore-learnt", "version": 2, "groups": {NAME: {
        "prefill_steps": [[tokens, seconds], …],       the latest: how fast this node computes
        "pricing": {"rates": {…}, "curves": {…}}}}}    kvstore/pricing.py

Until the first steps and transfers after a restart nothing else tells what they take. A part that is no good
is left out. Of version 1, which had nothing but steps, these are taken: a curve needs their positions, too,
and starts cold. Counters are not kept: Prometheus knows how to treat one that starts again.
"""

from __future__ import annotations

import fcntl
import os
from collections import deque
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Annotated, Protocol

import msgspec
import structlog

from kvstore.errors import ConfigError
from kvstore.meters import PREFILL_STEPS_MAX, Meters, PrefillStep
from kvstore.pricing import Pricing
from kvstore.small_files import FILE_BYTES_MAX

__all__ = ["FILE_NAME", "Learning", "StateDir", "news", "restore", "written"]

log = structlog.get_logger()

FILE_NAME = "learnt.json"
_FORMAT, _VERSION, _STEPS_ONLY = "kvstore-learnt", 2, 1
# Around a curve in the file, beside its name: quotes, a colon, a comma.
_AROUND_BYTES = 4

_Tokens = Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]
_Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=86_400.0)]
_Steps = Annotated[list[tuple[_Tokens, _Seconds]], msgspec.Meta(max_length=PREFILL_STEPS_MAX)]


class Learning(Protocol):
    """A trust group, as far as it learns."""

    @property
    def meters(self) -> Meters:
        """How fast its engines compute."""
        ...

    @property
    def pricing(self) -> Pricing:
        """What its bytes cost."""
        ...


class _Pricing(msgspec.Struct):
    """As `Pricing.report`, encoded already; rates are None where there was no room."""

    rates: msgspec.Raw | None
    curves: dict[str, msgspec.Raw]


class _Group(msgspec.Struct):
    """`pricing`: read by `Pricing.restore`, which takes what is good of it."""

    prefill_steps: _Steps = msgspec.field(default_factory=list)
    pricing: object | None = None


class _File(msgspec.Struct):
    format: str
    version: int
    groups: dict[str, _Group]


def news(groups: Mapping[str, Learning]) -> object:
    """Equal to an earlier answer if nothing was learnt since. The file differs even so: it holds ages."""
    return [(name, of.meters.prefill_seconds, of.pricing.learnt) for name, of in groups.items()]


def written(groups: Mapping[str, Learning]) -> bytes:
    """The file for these groups, at most FILE_BYTES_MAX: of too much, what was learnt last.

    Some 0.3 ms for each curve in it.
    """
    rates = _rates(groups, FILE_BYTES_MAX // 2)
    most = PREFILL_STEPS_MAX
    while len(data := msgspec.json.encode(file := _without_curves(groups, rates, most))) > FILE_BYTES_MAX:
        most //= 2  # with 0 there is no group left either
    curves_left_out = _add_curves(file, groups, FILE_BYTES_MAX - len(data))
    if most < PREFILL_STEPS_MAX or curves_left_out or len(rates) < len(groups):
        log.warning(
            "learnt state cut to what was learnt last",
            groups=len(groups),
            steps_of_each_group=most,
            groups_without_rates=len(groups) - len(rates),
            curves_left_out=curves_left_out,
        )
    return msgspec.json.encode(file)


def _rates(groups: Mapping[str, Learning], left_bytes: int) -> dict[str, msgspec.Raw]:
    """Those of as many groups as there is room for."""
    rates = {}
    for name, of in groups.items():
        raw = msgspec.json.encode(of.pricing.report_rates())
        if len(raw) <= left_bytes:
            left_bytes -= len(raw)
            rates[name] = msgspec.Raw(raw)
    return rates


def _without_curves(groups: Mapping[str, Learning], rates: Mapping[str, msgspec.Raw], most: int) -> _File:
    file = _File(_FORMAT, _VERSION, {})
    for name, of in groups.items() if most else ():
        latest = islice(of.meters.prefill_steps, max(0, len(of.meters.prefill_steps) - most), None)
        steps = [(step.tokens, step.seconds) for step in latest]
        if steps or len(of.pricing.rates) or len(of.pricing.curves):
            file.groups[name] = _Group(steps, _Pricing(rates.get(name), {}))
    return file


def _add_curves(file: _File, groups: Mapping[str, Learning], left_bytes: int) -> int:
    """As many as there is room for, the latest of each group first; how many are left out."""
    added: dict[str, dict[str, msgspec.Raw]] = {name: {} for name in file.groups}
    waiting = deque((name, deque(groups[name].pricing.namespaces())) for name in file.groups)
    while waiting:
        name, namespaces = waiting.popleft()
        if not namespaces:
            continue
        raw = msgspec.json.encode(groups[name].pricing.report_curve(namespaces[0]))
        left_bytes -= len(raw) + len(namespaces[0]) + _AROUND_BYTES
        waiting.append((name, namespaces))
        if left_bytes < 0:
            break
        added[name][namespaces.popleft()] = msgspec.Raw(raw)
    for name, curves in added.items():
        kept = file.groups[name].pricing
        assert isinstance(kept, _Pricing)
        kept.curves = dict(reversed(curves.items()))  # the latest last, as they were heard
    return sum(len(namespaces) for _, namespaces in waiting)


def restore(data: bytes, groups: Mapping[str, Learning]) -> None:
    """Take up what a file says about groups that still exist.

    Raises:
        ValueError: not such a file, torn, or of another version; nothing was changed.
    """
    try:
        file = msgspec.json.decode(data, type=_File)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not a whole {_FORMAT} file: {error}") from None
    if file.format != _FORMAT or file.version not in (_VERSION, _STEPS_ONLY):
        raise ValueError(f"need {_FORMAT} version {_VERSION}, got {file.format:.40} version {file.version}")
    if file.version == _STEPS_ONLY:
        log.info(
            "learnt state of an earlier version",
            version=file.version,
            reason="its prefill steps are taken; rates and curves start cold, as it has none",
        )
    for name, kept in file.groups.items():
        of = groups.get(name)
        if of is None:
            continue
        of.meters.prefill_steps.extend(PrefillStep(*step) for step in kept.prefill_steps)
        for reason in of.pricing.restore(kept.pricing) if kept.pricing is not None else ():
            log.warning("a part of the learnt state not used; it starts cold", group=name, reason=reason)


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
