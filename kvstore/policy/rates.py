"""How fast each source is, learnt from every transfer: kvstore/policy/speeds.py for each of them.

Of a source that nothing is known of, a guess by its tier is given, on the fast side, so that it is tried; the
lag rule bounds what that costs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from kvstore.policy.speeds import BYTES_MAX, SAMPLES_MAX, Learner, Sample, Speed, Transfer, need_bytes
from kvstore.types import Tier

__all__ = ["SOURCES_MAX", "Rates", "Source", "Speed", "Transfer"]

# Peers come and go: of more sources, those unheard of longest are forgotten.
SOURCES_MAX = 256
HOPE_S = 10.0
_FORMAT, _VERSION = "kvstore-rates", 1

# Before anything was measured: [latency_s, bytes_per_s]. HOST: a thread's memcpy on a shared machine. NVME: a
# queue of 4 KiB reads, half a PCIe 4 drive. PEER: two turns of a loop, 10 Gbit/s. REMOTE: an object store.
_GUESS = {
    Tier.GPU: (0.0, 1e11),
    Tier.HOST: (1e-4, 4e9),
    Tier.NVME: (2e-4, 2e9),
    Tier.PEER: (1e-3, 1e9),
    Tier.REMOTE: (3e-2, 1e8),
}


@dataclass(frozen=True, slots=True)
class Source:
    """Where bytes come from: a tier, and which disk, peer or bucket of it ("" where there is one)."""

    tier: Tier
    name: str = ""


class Rates:
    """All sources of one trust group. Seconds are of a monotonic clock; one that goes back stands still."""

    def __init__(self) -> None:
        self._learners: dict[Source, Learner] = {}

    def __len__(self) -> int:
        return len(self._learners)

    def __iter__(self) -> Iterator[Source]:
        """Sources that something was learnt of."""
        return iter(self._learners)

    def observe(self, source: Source, transfer: Transfer, now_s: float) -> None:
        """Learn from a transfer that ended at `now_s`. Some 0.2 ms.

        Raises:
            ValueError: `now_s` is no time.
        """
        _need_time(now_s)
        self._learner(source, now_s).observe(transfer, now_s)

    def speed(self, source: Source, in_flight_bytes: int) -> Speed:
        """Latency and bandwidth with so many bytes in flight, those asked for included. Some µs.

        Raises:
            ValueError: bytes below 0 or beyond all bounds.
        """
        need_bytes("in_flight_bytes", in_flight_bytes, 0)
        learner = self._learners.get(source)
        if learner is None:
            return Speed(*_GUESS[source.tier], 0)
        fit = learner.fit()
        return Speed(fit.latency_s, fit.bytes_per_s(in_flight_bytes), len(learner.samples))

    def hopeful(self, source: Source, in_flight_bytes: int, now_s: float) -> Speed:
        """As `speed`, but nearer to the guess the longer nothing was heard of a source that nobody probes.

        For one that is only heard of when requests use it: else one bad moment would keep them away for ever.
        It doubles every `HOPE_S`, up to the guess; a request that tries it in vain puts it right again.
        """
        speed, learner = self.speed(source, in_flight_bytes), self._learners.get(source)
        if learner is None:
            return speed
        hope = 2.0 ** min(max(0.0, now_s - learner.heard_s) / HOPE_S, 60.0)
        latency_s, bytes_per_s = _GUESS[source.tier]
        return Speed(
            max(min(speed.latency_s, latency_s), speed.latency_s / hope),
            min(max(speed.bytes_per_s, bytes_per_s), speed.bytes_per_s * hope),
            speed.samples,
        )

    def seconds(self, source: Source, size_bytes: int, ahead_bytes: int = 0) -> float:
        """Predicted for one transfer, from asking to the last byte; 0 for 0 bytes.

        Raises:
            ValueError: names the argument.
        """
        need_bytes("size_bytes", size_bytes, 0)
        need_bytes("ahead_bytes", ahead_bytes, 0)
        if not size_bytes:
            return 0.0
        speed = self.speed(source, size_bytes + ahead_bytes)
        return speed.latency_s + (size_bytes + ahead_bytes) / speed.bytes_per_s

    def heard_s(self, source: Source) -> float | None:
        """When a transfer of this source ended last; None = never."""
        learner = self._learners.get(source)
        return None if learner is None else learner.heard_s

    def forget(self, source: Source) -> None:
        """A peer has left; what it becomes when it returns is another story."""
        self._learners.pop(source, None)

    def report(self, now_s: float) -> dict[str, object]:
        """What was learnt, JSON-ready: see `restore`. 2 KiB a source."""
        file = _File(_FORMAT, _VERSION, [])
        for source, learner in self._learners.items():
            rows = [
                Sample(max(0.0, now_s - s.at_s), s.total_bytes, s.seconds, s.latency_s)
                for s in learner.samples
            ]
            file.sources.append(_Kept(source.tier, source.name, rows))
        built: dict[str, object] = msgspec.to_builtins(file)
        return built

    def restore(self, report: object, now_s: float) -> None:
        """Take up a report. A source that was heard of since keeps what it has.

        Raises:
            ValueError: not such a report, or of another version; nothing was changed.
        """
        _need_time(now_s)
        try:
            file = msgspec.convert(report, _File)
        except msgspec.ValidationError as error:
            raise ValueError(f"not a {_FORMAT} report: {error}") from None
        if (file.format, file.version) != (_FORMAT, _VERSION):
            raise ValueError(
                f"need {_FORMAT} version {_VERSION}, got {file.format:.40} version {file.version}"
            )
        for kept in file.sources:
            kept.check()
        for kept in file.sources:
            source = Source(kept.tier, kept.name)
            if kept.samples and source not in self._learners and len(self._learners) < SOURCES_MAX:
                learner = self._learners[source] = Learner(_GUESS[source.tier], now_s)
                for row in sorted(kept.samples, key=_age, reverse=True):
                    learner.samples.append(
                        Sample(now_s - row.at_s, row.total_bytes, row.seconds, row.latency_s)
                    )

    def _learner(self, source: Source, now_s: float) -> Learner:
        found = self._learners.get(source)
        if found is None:
            if len(self._learners) >= SOURCES_MAX:
                del self._learners[min(self._learners, key=lambda s: self._learners[s].heard_s)]
            found = self._learners[source] = Learner(_GUESS[source.tier], now_s)
        return found


class _Kept(msgspec.Struct):
    """One source of a report; `at_s` of its samples is their age."""

    tier: Tier
    name: str
    samples: list[Sample]

    def check(self) -> None:
        if len(self.samples) > SAMPLES_MAX:
            raise ValueError(f"sources.samples: need {SAMPLES_MAX} at most, got {len(self.samples)}")
        for row in self.samples:
            within = 0.0 <= row.at_s < math.inf and 1.0 <= row.total_bytes <= 2.0 * BYTES_MAX
            timed = row.latency_s is None or 0.0 <= row.latency_s <= row.seconds
            if not (within and timed and 0.0 < row.seconds <= 1e6):
                raise ValueError(f"sources.samples: not a transfer: {row!r:.200}")


class _File(msgspec.Struct):
    format: str
    version: int
    sources: list[_Kept]


def _age(row: Sample) -> float:
    return row.at_s


def _need_time(now_s: float) -> None:
    if not math.isfinite(now_s):
        raise ValueError(f"now_s: need seconds of a monotonic clock, got {now_s!r}")
