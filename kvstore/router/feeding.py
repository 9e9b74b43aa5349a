"""What every feed has: its patience, and what it has seen."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.router.sink import Sink

__all__ = ["FeedCounts", "FeedTimes", "Truth"]


@dataclass(frozen=True, slots=True)
class FeedTimes:
    """Patience of a feed.

    Attributes:
        probe_s: after so long without a batch the replay socket is asked whether there is one.
        answer_s: longest wait for the next message of a replay.
        attempts: replays in a row that may bring nothing new.
        retry_s: before the second of them; doubles.
        pause_s: after a truth was thrown away or replays failed; doubles up to `pause_max_s`, and begins
            again after as long without trouble.
    """

    probe_s: float = 5.0
    answer_s: float = 2.0
    attempts: int = 3
    retry_s: float = 0.2
    pause_s: float = 1.0
    pause_max_s: float = 60.0


@dataclass(slots=True)
class FeedCounts:
    """What a feed has seen; all of it only grows.

    Attributes:
        batches: applied.
        duplicates: came again.
        skipped: events of unknown types, or that told no tokens for their blocks.
        bad: batches that could not be read, and messages that were none.
        gaps: holes in the sequence that were noticed.
        replays: asked for.
        resets: truths begun.
        lost: batches that were never heard.
    """

    batches: int = 0
    duplicates: int = 0
    skipped: int = 0
    bad: int = 0
    gaps: int = 0
    replays: int = 0
    resets: int = 0
    lost: int = 0


class Truth:
    """What a sink has been told of the whole: whether it counts, and if not, why.

    Attributes:
        filling: a new one is being told; it does not count yet.
        doubt: why what is known may be wrong, "" = it holds.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self.filling = False
        self.doubt = "nothing was heard yet"

    def begin(self) -> None:
        """What follows is a new one."""
        self.filling = True
        self._sink.reset()

    def hold(self) -> None:
        """What is known is the truth."""
        if self.filling or self.doubt:
            self.filling, self.doubt = False, ""
            self._sink.ready()

    def question(self, reason: str) -> None:
        """It may be wrong from now on."""
        if reason != self.doubt:
            self.doubt = reason
            self._sink.stale(reason)
