"""How long an engine computes: the prefill curve of a namespace, fitted to steps that really ran (LAWS E24).

A step takes  t = c0 + a·P + b·A + d·decodes + e·context  with P = prefill tokens and A = Σ p·(start + p/2)
over its chunks. Two robust fits, as one joint fit is twice as bad: d and e (and an intercept of their own)
from steps that only decode; then c0, a and b from steps of at least half prefill tokens, less d and e.

A prompt [start, stop) is computed in chunks, each a step that shares its time with the decodes of now:

    seconds = drift · (chunks · (c0 + d·decodes + e·context) + a·P + b·P·(start + P/2))

`drift` = what the latest steps took over what was predicted: other work on the machine shows there at once.
Terms that the steps seen cannot tell apart are left out: one length of step has no intercept, one depth no
attention term. Where a prompt reaches beyond all positions seen, the error says so.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvstore.policy.fits import fit, weighted_median

__all__ = ["CURVES_MAX", "STEPS_MAX", "Load", "Prediction", "PrefillCurve", "PrefillCurves", "Step"]

F64 = NDArray[np.float64]
# Kept of either kind: 5 s of an engine at 50 steps a second. A step counts half of one that is 64 steps, or
# ten minutes, younger.
STEPS_MAX = 256
_HALF_STEPS, _HALF_LIFE_S = 64.0, 600.0
# Namespaces come and go with models: of more, those without a step for longest are forgotten.
CURVES_MAX = 64
_FORMAT, _VERSION = "kvstore-prefill", 1

# Fewer usable steps are no curve.
_STEPS_MIN = 2
# A fit is renewed when so much of its steps is new.
_RENEW = 1 / 8
# By which factor a quantity has to vary before its term is told from another.
_SPREAD = 1.25
_DRIFT_STEPS, _DRIFT_MAX = 9, 8.0
# Seen: 3 % median error on held-out steps; 13 % too low at twice the depth that was seen.
_ERROR_MIN, _ERROR_PER_OCTAVE, _ERROR_MAX = 0.03, 0.13, 1.0
_SECONDS_MIN, _SECONDS_MAX, _TOKENS_MAX = 1e-6, 600.0, 1 << 31
_Row = tuple[float, int, float, int, int, float]
"""Of a step: when it ended, then the fields of `Step` in their order."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step of an engine. Leave out those that waited for something else (a load, a first compilation).

    Attributes:
        prefill_tokens: P, tokens of prefill chunks.
        prefill_area: A = Σ p·(start + p/2) over those chunks of p tokens that begin at position `start`.
        decodes: sequences that computed one token.
        decode_context: Σ of their lengths in tokens.
        seconds: of the whole step.

    Raises:
        ValueError: names the field.
    """

    prefill_tokens: int
    prefill_area: float
    decodes: int
    decode_context: int
    seconds: float

    def __post_init__(self) -> None:
        for name in ("prefill_tokens", "decodes"):
            _need(name, getattr(self, name), _TOKENS_MAX)
        _need("decode_context", self.decode_context, _TOKENS_MAX**2)
        _need("prefill_area", self.prefill_area, _TOKENS_MAX**2)
        _need("seconds", self.seconds, _SECONDS_MAX)
        # p·(start + p/2) is at least p/2 for every chunk.
        if self.prefill_area < self.prefill_tokens / 2 or (self.prefill_area and not self.prefill_tokens):
            raise ValueError(f"prefill_area: {self.prefill_area!r} of {self.prefill_tokens} prefill tokens")


@dataclass(frozen=True, slots=True)
class Load:
    """What an engine does beside the prompt that is predicted.

    Attributes:
        decodes: sequences that decode in the same steps.
        decode_context: Σ of their lengths in tokens.
        chunk_tokens: most prompt tokens of one step; 0 = as many as the largest step seen had.

    Raises:
        ValueError: names the field.
    """

    decodes: int = 0
    decode_context: int = 0
    chunk_tokens: int = 0

    def __post_init__(self) -> None:
        for name in ("decodes", "chunk_tokens"):
            _need(name, getattr(self, name), _TOKENS_MAX)
        _need("decode_context", self.decode_context, _TOKENS_MAX**2)


@dataclass(frozen=True, slots=True)
class Prediction:
    """Seconds to compute a part of a prompt, and by which share of them they may well be off."""

    seconds: float
    error: float


@dataclass(frozen=True, slots=True)
class _Terms:
    """One fit: see the top of this file."""

    c0: float
    a: float
    b: float
    d: float
    e: float
    error: float
    reach: float  # deepest position seen
    chunk: int  # tokens of the largest step

    def step_s(self, prefill_tokens: float, area: float, decodes: float, context: float) -> float:
        return self.c0 + self.a * prefill_tokens + self.b * area + self.d * decodes + self.e * context


class PrefillCurve:
    """Of one namespace. Seconds are of a monotonic clock; one that goes back stands still."""

    def __init__(self) -> None:
        self._heard_s = -math.inf
        self._prefills: deque[_Row] = deque(maxlen=STEPS_MAX)
        self._decodes: deque[_Row] = deque(maxlen=STEPS_MAX)
        self._shapes: set[tuple[int, int]] = set()
        self._fresh = 0  # steps since the fit
        self._terms: _Terms | None = None
        self._drifts: deque[float] = deque(maxlen=_DRIFT_STEPS)

    @property
    def steps(self) -> int:
        """Usable prefill steps that it rests on."""
        return len(self._prefills)

    @property
    def drift(self) -> float:
        """What the latest steps took over what was predicted: their median, within bounds."""
        if not self._drifts:
            return 1.0
        return min(max(sorted(self._drifts)[len(self._drifts) // 2], 1 / _DRIFT_MAX), _DRIFT_MAX)

    def observe(self, step: Step, now_s: float) -> bool:
        """Learn from a step that ended at `now_s`. Some µs; a new fit every eighth of the steps kept, 1 ms.

        Returns:
            False: of no use: idle, below a microsecond, mostly decodes but not only, or the first of its
            size (that one compiles, or touches memory for the first time).

        Raises:
            ValueError: `now_s` is no time.
        """
        if not math.isfinite(now_s):
            raise ValueError(f"now_s: need seconds of a monotonic clock, got {now_s!r}")
        prefill = step.prefill_tokens > 0
        if not (prefill or step.decodes) or (prefill and step.prefill_tokens < step.decodes):
            return False
        if step.seconds < _SECONDS_MIN:
            return False
        shape = step.prefill_tokens.bit_length(), step.decodes.bit_length()
        if shape not in self._shapes:
            self._shapes.add(shape)
            return False
        if prefill and self._terms is not None:
            predicted = self._terms.step_s(
                step.prefill_tokens, step.prefill_area, step.decodes, step.decode_context
            )
            if predicted > 0.0:
                self._drifts.append(step.seconds / predicted)
        self._heard_s = max(self._heard_s, now_s)
        (self._prefills if prefill else self._decodes).append(_row(step, self._heard_s))
        self._fresh += 1
        if self._fresh > _RENEW * (len(self._prefills) + len(self._decodes)):
            self._renew()
        return True

    def predict(self, start: int, stop: int, load: Load | None = None) -> Prediction | None:
        """Seconds to compute tokens [start, stop) behind `start` tokens whose KV is there. Some µs.

        Returns:
            None while nothing is known; 0 s for no tokens.

        Raises:
            ValueError: names the argument.
        """
        _need("start", start, _TOKENS_MAX)
        _need("stop", stop, _TOKENS_MAX)
        if stop < start:
            raise ValueError(f"stop: need {start} at least, got {stop}")
        terms = self._terms
        if terms is None:
            return None
        load = load or Load()
        tokens = stop - start
        chunks = -(-tokens // (load.chunk_tokens or terms.chunk))
        each = terms.step_s(0.0, 0.0, load.decodes, load.decode_context)
        seconds = chunks * each + terms.a * tokens + terms.b * tokens * (start + tokens / 2)
        beyond = math.log2(max(1.0, stop / terms.reach))
        error = terms.error + _ERROR_PER_OCTAVE * beyond * (1 if terms.b else 2)
        return Prediction(self.drift * seconds, min(error, _ERROR_MAX) if tokens else 0.0)

    def seconds(self, start: int, stop: int, load: Load | None = None) -> float | None:
        """As `predict`, the seconds alone."""
        prediction = self.predict(start, stop, load)
        return None if prediction is None else prediction.seconds

    def report(self, now_s: float) -> dict[str, object]:
        """What was learnt, JSON-ready: see `restore`. 25 KiB at most."""
        rows = [_at(max(0.0, now_s - row[0]), row) for row in (*self._decodes, *self._prefills)]
        built: dict[str, object] = msgspec.to_builtins(_File(_FORMAT, _VERSION, rows))
        return built

    def restore(self, report: object, now_s: float) -> None:
        """Take up a report, as if its steps had run before all that were seen.

        Raises:
            ValueError: not such a report, or of another version; nothing was changed.
        """
        rows = [_at(now_s - row[0], row) for row in _read(report)]
        for kept, prefill in ((self._prefills, True), (self._decodes, False)):
            seen = [*(row for row in rows if (row[1] > 0) == prefill), *kept]
            kept.clear()
            kept.extend(seen)
        self._heard_s = max((row[0] for row in (*self._decodes, *self._prefills)), default=-math.inf)
        self._renew()

    # ---- inside ------------------------------------------------------------------------------------------

    def _renew(self) -> None:
        self._fresh = 0
        if len(self._prefills) < _STEPS_MIN:
            return
        d, e = self._decode_terms()
        rows = np.array(self._prefills)
        _, tokens, area, decodes, context, seconds = rows.T
        # Decodes that explain a whole step leave nothing: then that step says nothing of prefill.
        left = np.maximum(seconds - d * decodes - e * context, 0.05 * seconds)
        columns = [tokens]
        if _varies(area / tokens):
            columns.append(area)
        if _varies(tokens):
            columns.append(np.ones(len(rows)))
        weights = _recent(rows)
        found = fit(np.stack(columns, axis=1), left, weights)
        b = float(found[1]) if _varies(area / tokens) else 0.0
        c0 = float(found[-1]) if _varies(tokens) else 0.0
        predicted = np.maximum(np.stack(columns, axis=1) @ found + d * decodes + e * context, 1e-12)
        error = 2.0 * weighted_median(np.abs(seconds / predicted - 1.0), weights) + 0.5 / len(rows)
        reach = float((area / tokens + tokens / 2).max())
        self._terms = _Terms(c0, float(found[0]), b, d, e, max(_ERROR_MIN, error), reach, int(tokens.max()))
        self._drifts = deque((seconds / predicted)[-_DRIFT_STEPS:].tolist(), _DRIFT_STEPS)

    def _decode_terms(self) -> tuple[float, float]:
        """d and e, from steps that only decode; both 0 while nothing is known of those."""
        if len(self._decodes) < _STEPS_MIN:
            return 0.0, 0.0
        rows = np.array(self._decodes)
        _, _, _, decodes, context, seconds = rows.T
        # What tells nothing apart is the intercept's, and that is not a decode's.
        columns = [np.ones(len(rows))]
        columns += [column for column in (decodes, context) if _varies(column)]
        found = fit(np.stack(columns, axis=1), seconds, _recent(rows)).tolist()
        d = found[1] if _varies(decodes) else 0.0
        e = found[-1] if _varies(context) else 0.0
        return d, e


class PrefillCurves:
    """Of all namespaces that engines compute, by a name for each (the hex of its digest)."""

    def __init__(self) -> None:
        self._curves: dict[str, PrefillCurve] = {}

    def __len__(self) -> int:
        return len(self._curves)

    def __iter__(self) -> Iterator[str]:
        """Names; that of the latest step last."""
        return iter(self._curves)

    def __getitem__(self, namespace: str) -> PrefillCurve:
        return self._curves[namespace]

    def observe(self, namespace: str, step: Step, now_s: float) -> bool:
        """As `PrefillCurve.observe`."""
        curve = self._curves.pop(namespace, None) or PrefillCurve()
        self._curves[namespace] = curve  # the latest heard last
        while len(self._curves) > CURVES_MAX:
            del self._curves[next(iter(self._curves))]
        return curve.observe(step, now_s)

    def of(self, namespace: str) -> PrefillCurve | None:
        """None: no step of it was ever seen."""
        return self._curves.get(namespace)

    def report(self, now_s: float) -> dict[str, object]:
        """What was learnt, JSON-ready, by namespace."""
        return {name: curve.report(now_s) for name, curve in self._curves.items() if curve.steps}

    def restore(self, report: object, now_s: float) -> None:
        """Take up a report.

        Raises:
            ValueError: not such a report, or a part of it is not; nothing was changed.
        """
        if not isinstance(report, dict) or len(report) > CURVES_MAX:
            raise ValueError(f"need a table of at most {CURVES_MAX} {_FORMAT} reports")
        for one in report.values():
            _read(one)
        for name, one in report.items():
            curve = self._curves.setdefault(str(name), PrefillCurve())
            curve.restore(one, now_s)


class _File(msgspec.Struct):
    """Rows as `_Row`, but the first is the age; oldest first."""

    format: str
    version: int
    steps: list[_Row]


def _row(step: Step, at_s: float) -> _Row:
    return at_s, step.prefill_tokens, step.prefill_area, step.decodes, step.decode_context, step.seconds


def _at(at_s: float, row: _Row) -> _Row:
    return at_s, row[1], row[2], row[3], row[4], row[5]


def _read(report: object) -> list[_Row]:
    try:
        file = msgspec.convert(report, _File)
    except msgspec.ValidationError as error:
        raise ValueError(f"not a {_FORMAT} report: {error}") from None
    if (file.format, file.version) != (_FORMAT, _VERSION):
        raise ValueError(f"need {_FORMAT} version {_VERSION}, got {file.format:.40} version {file.version}")
    if len(file.steps) > 2 * STEPS_MAX:
        raise ValueError(f"steps: need {2 * STEPS_MAX} at most, got {len(file.steps)}")
    for age_s, prefill_tokens, prefill_area, decodes, decode_context, seconds in file.steps:
        step = Step(prefill_tokens, prefill_area, decodes, decode_context, seconds)
        if (
            not 0.0 <= age_s < math.inf
            or step.seconds < _SECONDS_MIN
            or not (step.prefill_tokens or step.decodes)
        ):
            raise ValueError(f"steps: one is idle, took no time or has no age: {step}")
    return file.steps


def _recent(rows: F64) -> F64:
    """Weights of steps, oldest first; the last counts 1, and none 0."""
    count = len(rows)
    logs = (rows[:, 0] - rows[-1, 0]) / _HALF_LIFE_S + (np.arange(count) + 1 - count) / _HALF_STEPS
    result: F64 = np.exp2(np.maximum(logs, -500.0))
    return result


def _varies(values: F64) -> bool:
    return bool(values.max() >= _SPREAD * max(values.min(), 1e-12))


def _need(name: str, value: float, most: float) -> None:
    if not 0 <= value <= most:  # NaN too
        raise ValueError(f"{name}: need 0 to {most:g}, got {value!r:.80}")
