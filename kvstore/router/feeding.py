"""What every feed has: its patience, and what it has seen."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["FeedCounts", "FeedTimes"]


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
