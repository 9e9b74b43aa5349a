"""How fast one source is: latency, and bandwidth as a function of the bytes in flight.

The latest `SAMPLES_MAX` transfers are kept, nothing else; what is predicted is a function of them:

    latency     where the first byte was timed, the weighted median of that; else where a line through
                the others meets 0 bytes
    bandwidth   weighted median of total / (seconds - latency)

`total` = bytes of the transfer + bytes that were in flight before it: a source serves in order, or shares its
bandwidth, and either way all this has to be through when the transfer ends. A sample's weight halves with
every minute of its age, 16 that are newer, and half octave between its total and the one asked about.

Three transfers in a row that took twice as long (or half) as predicted are a change, and so is one load that
was given up: what was known before is forgotten, as far as they contradict it. Fewer are outliers, which a
median of five or more does not feel.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import msgspec

__all__ = ["BYTES_MAX", "SAMPLES_MAX", "Learner", "Sample", "Speed", "Transfer", "need_bytes"]

SAMPLES_MAX = 48
BYTES_MAX = 1 << 60

_HALF_LIFE_S = 60.0
_HALF_SAMPLES = 16.0
_HALF_OCTAVES = 0.5
# In a row, and by which factor they are off: a change.
_RUN = 3
_SURPRISE = 2.0
# No sample weighs more than the fifth heaviest: two outliers never outvote three that agree, however near in
# size and time they are.
_VOTES = 5
# A run speaks for totals of up to so many times (or a fraction) of its own.
_REACH = 4.0
# Latency and bandwidth are told apart only by totals that differ by so much.
_SPREAD = 1.5
# What a transfer takes beside latency is no less than this part of it: latency varies too.
_MOVING = 1 / 8
_SECONDS_MIN, _SECONDS_MAX = 1e-6, 1e6


@dataclass(frozen=True, slots=True)
class Transfer:
    """One that ended well, or was given up because it lagged: `Transfer.cut_short`.

    Attributes:
        size_bytes: moved by it, at least 1.
        ahead_bytes: in flight at the same source when it began, without its own.
        seconds: from asking to the last byte. Less than a microsecond counts as one.
        first_byte_s: from asking to the first bytes that could be used, at most `seconds`; None = not timed.
            It says nothing with something ahead, and is ignored then.
        first_bytes: how many came with it (a whole block?), at most `size_bytes`.
        given_up: it would have taken so long. If that is a surprise, it counts as a change by itself.
        whole: it brought all that was asked for; else nobody knows what the rest would have taken.

    Raises:
        ValueError: names the field.
    """

    size_bytes: int
    ahead_bytes: int
    seconds: float
    first_byte_s: float | None = None
    first_bytes: int = 1
    given_up: bool = False
    whole: bool = True

    def __post_init__(self) -> None:
        need_bytes("size_bytes", self.size_bytes, 1)
        need_bytes("ahead_bytes", self.ahead_bytes, 0)
        need_bytes("first_bytes", self.first_bytes, 0)
        if not 0.0 <= self.seconds <= _SECONDS_MAX:  # NaN too
            raise ValueError(f"seconds: need 0 to {_SECONDS_MAX:g}, got {self.seconds!r}")
        if self.first_byte_s is not None and not 0.0 <= self.first_byte_s <= self.seconds:
            raise ValueError(f"first_byte_s: need 0 to {self.seconds!r}, got {self.first_byte_s!r}")

    @staticmethod
    def cut_short(
        size_bytes: int, arrived_bytes: int, seconds: float, first_byte_s: float, first_bytes: int = 1
    ) -> Transfer:
        """What a transfer that was given up would have come to at the pace at which it arrived.

        Args:
            size_bytes: that were asked for, with nothing ahead.
            arrived_bytes: of those, at least 1: of a source that gave nothing, nothing is learnt.
            seconds: from asking to the end.
            first_byte_s, first_bytes: from asking to the first bytes, and how many those were.

        Raises:
            ValueError: names the argument.
        """
        need_bytes("arrived_bytes", arrived_bytes, 1)
        if not 0.0 <= first_byte_s <= seconds <= _SECONDS_MAX:
            raise ValueError(f"first_byte_s: need 0 to {seconds!r}, got {first_byte_s!r}")
        if arrived_bytes > first_bytes:
            pace = (seconds - first_byte_s) / (arrived_bytes - first_bytes)
            whole_s = first_byte_s + pace * max(arrived_bytes, size_bytes) - pace * first_bytes
        else:
            whole_s = seconds * max(1.0, size_bytes / arrived_bytes)
        return Transfer(size_bytes, 0, min(whole_s, _SECONDS_MAX), first_byte_s, first_bytes, given_up=True)

    @property
    def latency_s(self) -> float | None:
        """Until the first byte, without the time that the bytes took which came with it; None = not known."""
        if self.first_byte_s is None or self.ahead_bytes or self.first_bytes >= self.size_bytes:
            return None
        pace = (self.seconds - self.first_byte_s) / (self.size_bytes - self.first_bytes)
        return max(0.0, self.first_byte_s - pace * self.first_bytes)

    @property
    def total_bytes(self) -> int:
        """In flight while it ran, its own included."""
        return self.size_bytes + self.ahead_bytes


@dataclass(frozen=True, slots=True)
class Speed:
    """What a source is predicted to do with some bytes in flight.

    Attributes:
        latency_s: until the first byte.
        bytes_per_s: from then on, of all that is in flight together.
        samples: transfers that this rests on; 0 = a guess by the tier.
    """

    latency_s: float
    bytes_per_s: float
    samples: int

    @property
    def known(self) -> bool:
        """Whether anything was measured."""
        return self.samples > 0


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """A transfer as it is kept, and when it ended."""

    at_s: float
    total_bytes: float
    seconds: float
    latency_s: float | None


@dataclass(slots=True)
class _Fit:
    """What samples say: latency, of each log2 of (total, bytes/s, weight), and answers.

    Without samples it answers `guess_bytes_per_s`.
    """

    latency_s: float
    points: list[tuple[float, float, float]]
    guess_bytes_per_s: float
    speeds: dict[int, float] = field(default_factory=dict)

    def bytes_per_s(self, total: float) -> float:
        """With `total` bytes in flight; told apart in halves of an octave."""
        if not self.points:
            return self.guess_bytes_per_s
        step = round(2 * math.log2(max(total, 1.0)))
        found = self.speeds.get(step)
        if found is None:
            near = [(log, weight - abs(at - step / 2) / _HALF_OCTAVES) for at, log, weight in self.points]
            found = self.speeds[step] = 2.0 ** _median(near)
        return found

    def seconds(self, total: float) -> float:
        return self.latency_s + total / self.bytes_per_s(total)


class Learner:
    """Of one source.

    Args:
        guess: latency and bytes/s as long as nothing was measured.
    """

    def __init__(self, guess: tuple[float, float], now_s: float) -> None:
        self.guess = guess
        self.heard_s = now_s
        self.samples: deque[Sample] = deque(maxlen=SAMPLES_MAX)
        self._fit: _Fit | None = None
        self._run = 0  # of surprises: above 0 slow ones, below 0 fast ones

    def observe(self, transfer: Transfer, now_s: float) -> None:
        """Learn from a transfer that ended."""
        self.heard_s = max(self.heard_s, now_s)
        total, seconds = float(transfer.total_bytes), max(transfer.seconds, _SECONDS_MIN)
        if self.samples:
            off = seconds / self.fit().seconds(total)
            side = 1 if off > _SURPRISE else -1 if off < 1 / _SURPRISE else 0
            self._run = self._run + side if side * self._run > 0 else side
        self.samples.append(Sample(self.heard_s, total, seconds, transfer.latency_s))
        self._fit = None
        if transfer.given_up and self._run > 0:
            self._change(1)
        elif abs(self._run) >= _RUN:
            self._change(_RUN)

    def _change(self, count: int) -> None:
        """Forget what the last `count` samples contradict: less in flight is no faster, and more no slower.

        Slow ones whose first byte came soon were slow for lack of bandwidth: that is contradicted everywhere.
        """
        last = list(self.samples)[-count:]
        slow, self._run = self._run > 0, 0
        top, bottom = max(s.total_bytes for s in last) * _REACH, min(s.total_bytes for s in last) / _REACH
        if all(s.latency_s is not None and s.latency_s < s.seconds / 2 for s in last):
            top = math.inf
        before = list(self.samples)[:-count]
        kept = [s for s in before if (s.total_bytes > top if slow else s.total_bytes < bottom)]
        self.samples = deque([*kept, *last], SAMPLES_MAX)

    def fit(self) -> _Fit:
        """What the samples say now. Some 0.1 ms after an `observe`, else nothing."""
        if self._fit is None:
            count = len(self.samples)
            weights = [
                (s.at_s - self.heard_s) / _HALF_LIFE_S - (count - 1 - i) / _HALF_SAMPLES
                for i, s in enumerate(self.samples)
            ]
            latency = self._latency(weights) if count else self.guess[0]
            moved = [
                math.log2(s.total_bytes / max(s.seconds - latency, s.seconds * _MOVING)) for s in self.samples
            ]
            # Most of a small transfer is latency: its bandwidth would be what two measuring errors leave.
            large = sorted(range(count), key=lambda i: self.samples[i].total_bytes)[
                -max(_VOTES, count // 4) :
            ]
            usual = 2.0 ** _median([(moved[i], weights[i]) for i in large]) if count else self.guess[1]
            points = [
                (math.log2(s.total_bytes), log, weight)
                for s, log, weight in zip(self.samples, moved, weights, strict=True)
            ]
            telling = math.log2(1.0 + latency * usual * _MOVING / (1 - _MOVING))
            points = [point for point in points if point[0] >= telling] or points
            self._fit = _Fit(latency, points, self.guess[1])
        return self._fit

    def _latency(self, weights: list[float]) -> float:
        timed = [
            (s.latency_s, weight)
            for s, weight in zip(self.samples, weights, strict=True)
            if s.latency_s is not None
        ]
        if timed:
            return _median(timed)
        found = _intercept(list(self.samples), weights)
        if found is None:  # no telling: as guessed, but it has to fit
            return min(self.guess[0], min(s.seconds for s in self.samples) / 2)
        return found


def _shares(logs: list[float]) -> list[float]:
    """Weights from their logarithms, the greatest 1 and none 0: where all are old, the newest counts."""
    most = max(logs)
    return [2.0 ** max(log - most, -900.0) for log in logs]


def _median(values: list[tuple[float, float]]) -> float:
    """The weighted one of (value, log2 of weight), at least one; none counts more than the fifth heaviest."""
    values = sorted(values)
    most = sorted(weight for _, weight in values)[-min(_VOTES, len(values))]
    weights = _shares([min(weight, most) for _, weight in values])
    half, below = sum(weights) / 2, 0.0
    for i, weight in enumerate(weights):
        below += weight
        if below >= half:
            tied = below == half and i + 1 < len(values)
            return (values[i][0] + values[i + 1][0]) / 2 if tied else values[i][0]
    return values[-1][0]


def _intercept(samples: list[Sample], weights: list[float]) -> float | None:
    """Seconds at 0 bytes of a line whose slope is a median over pairs; None = no two totals differ enough.

    A fit by least errors would follow the few smallest transfers, which pull the longest lever.
    """
    rows = sorted((s.total_bytes, s.seconds, w) for s, w in zip(samples, weights, strict=True))
    half = len(rows) // 2
    slopes = [
        (max(0.0, (y2 - y1) / (x2 - x1)), min(w1, w2))
        for (x1, y1, w1), (x2, y2, w2) in zip(rows, rows[half:], strict=False)
        if x2 >= _SPREAD * x1
    ]
    if not slopes:
        return None
    slope = _median(slopes)
    return _median([(max(0.0, y - slope * x), w) for x, y, w in rows[: max(half, 1)]])


def need_bytes(name: str, value: int, least: int) -> None:
    """Raises ValueError, naming the argument, unless it is a count of bytes from `least` on."""
    if not isinstance(value, int) or not least <= value <= BYTES_MAX:
        raise ValueError(f"{name}: need {least} to {BYTES_MAX} bytes, got {value!r:.80}")
