"""For the tests of admission: streams of offers, and what they got."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable

from kvstore.policy.admission import Admission, AdmissionCounts, Offer
from kvstore.policy.history import Hits

__all__ = [
    "BLOCK_BYTES",
    "DAY_BYTES",
    "DAY_S",
    "HOUR_S",
    "REFILL",
    "Stream",
    "agree",
    "let_in",
    "offer",
    "run",
]

DAY_S, HOUR_S = 86_400.0, 3_600.0
DAY_BYTES = 16 << 30
BLOCK_BYTES = 2 << 20
REFILL = DAY_BYTES / DAY_S


def offer(blocks: int = 16, seconds: float | None = 0.1, reused: bool = False) -> Offer:
    return Offer(blocks, blocks * BLOCK_BYTES, seconds, reused)


def agree(counts: AdmissionCounts) -> None:
    """Offered = admitted + refused."""
    for what in ("blocks", "bytes"):
        refused = sum(getattr(tally, what) for tally in counts.refused.values())
        assert getattr(counts.offered, what) == getattr(counts.admitted, what) + refused


class Stream:
    """Offers of one worth, at random moments, at a steady rate.

    Args:
        times: of the refill, that are offered.
        share: of its blocks that are hit again, within a minute.
    """

    def __init__(
        self,
        times: float,
        seconds: float | None,
        *,
        reused: bool = False,
        share: float = 0.5,
        blocks: int = 16,
    ) -> None:
        self.one = offer(blocks, seconds, reused)
        self.every_s = self.one.bytes / (REFILL * times)
        self._chance = random.Random(f"{times} {seconds} {reused} {blocks}")
        self.next_s = 0.0
        self.wait()
        self.share = share
        self.hits = 0.0
        self.got: Counter[bool] = Counter()

    def wait(self) -> None:
        """Until the next one."""
        self.next_s += self._chance.expovariate(1 / self.every_s)


def run(admission: Admission, streams: Iterable[Stream], stop_s: float) -> None:
    """Let the streams make their offers in the order of time, until then."""
    streams = list(streams)
    for stream in streams:
        stream.got.clear()
    while True:
        stream = min(streams, key=lambda s: s.next_s)
        if stream.next_s > stop_s:
            return
        admitted = admission.admits(stream.one, stream.next_s)
        stream.got[admitted] += stream.one.bytes
        stream.wait()
        stream.hits += stream.share * stream.one.blocks
        whole, stream.hits = int(stream.hits), stream.hits % 1
        hits = (whole, whole if admitted else 0)
        admission.hit(Hits(0, 0, *hits) if stream.one.reused else Hits(*hits, 0, 0))


def let_in(stream: Stream) -> float:
    return stream.got[True] / (stream.got[True] + stream.got[False])
