"""A bound on log lines: no client can fill a disk by repeating what we complain about."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

import structlog

from kvstore.clock import Clock

__all__ = ["LogLimit"]

# Of one kind of line: this many at once (a node's engines may all come back together), then this many a
# second: 10 × 300 bytes are 260 MB a day of one kind at the worst.
BURST_LINES = 200
LINES_PER_S = 10.0
# Kinds are constants of our code, so there are far fewer; a bound all the same.
KINDS_MAX = 256


@dataclass(slots=True)
class _Bucket:
    lines: float
    filled_s: float
    suppressed: int = 0


class LogLimit:
    """A structlog processor: drops lines of one kind (event and level) beyond a rate, and counts them.

    The next line of that kind says how many are missing. Debug lines pass: whoever asks for them wants all.
    """

    def __init__(
        self, clock: Clock, burst_lines: int = BURST_LINES, lines_per_s: float = LINES_PER_S
    ) -> None:
        self._clock = clock
        self._burst_lines = float(burst_lines)
        self._lines_per_s = lines_per_s
        self._buckets: dict[tuple[str, str], _Bucket] = {}
        self.suppressed_lines = 0
        """Lines that nobody saw, since start."""

    def __call__(self, _: object, level: str, line: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        if level == "debug":
            return line
        now_s, kind = self._clock.now(), (str(line.get("event", "")), level)
        bucket = self._buckets.get(kind)
        if bucket is None:
            kind = kind if len(self._buckets) < KINDS_MAX else ("", "")
            bucket = self._buckets.setdefault(kind, _Bucket(self._burst_lines, now_s))
        earned = (now_s - bucket.filled_s) * self._lines_per_s
        bucket.lines, bucket.filled_s = min(self._burst_lines, bucket.lines + earned), now_s
        if bucket.lines < 1.0:
            bucket.suppressed += 1
            self.suppressed_lines += 1
            raise structlog.DropEvent
        bucket.lines -= 1.0
        if bucket.suppressed:
            line["suppressed"], bucket.suppressed = bucket.suppressed, 0
        return line
